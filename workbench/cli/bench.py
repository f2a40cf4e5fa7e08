"""``workbench bench``: the benchmarks, side by side in one run; rows go to ``--out`` as JSON lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.cli.common import Outcome, add_common
from workbench.cli.parser import Parser, one_of
from workbench.core.errors import UserError

GO_ON = "rows of finished measurements are kept where --out was given; run it again for the rest"


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.bench import NAMES
    from workbench.bench.run import SHAPED

    parser = Parser(
        "bench",
        "Measure this machine; rows of one run were measured side by side and compare.",
        usage="[NAME]",
    )
    parser.add_argument(
        "name", nargs="?", type=one_of(NAMES), metavar="NAME", help=f"one of {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: a trial of the benchmark, no numbers to quote"
    )
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help=f"random weights in a published geometry, such as 4B ({', '.join(SHAPED)} alone)",
    )
    seed, device = "no effect: the benchmarks fix their own", "where a --shape runs (default: cpu)"
    add_common(parser, out="file for the rows, JSON lines", seed=seed, device=device, model=False, threads=False)
    parser.add_argument(
        "--threads", metavar="N,N", help="thread counts to measure (default: 1,2 on the CPU, 1 with --shape)"
    )
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Measure, and return the rows."""
    if args.shape is None and args.device == "cuda":
        raise UserError("--device 'cuda' needs --shape: the demo checkpoint is measured on the CPU")
    if args.shape is not None and args.name is None:
        raise UserError(f"--shape {args.shape} needs the NAME of a benchmark that takes one")
    from workbench.bench import NAMES
    from workbench.bench import run as measure

    out = None if args.out is None else Path(args.out)
    rows: list[dict[str, Any]] = []
    on: dict[str, Any] = {} if args.shape is None else {"shape": args.shape, "device": args.device or "cpu"}
    threads = args.threads or ("1,2" if args.shape is None else "1")
    for name in [args.name] if args.name else NAMES:
        rows += measure(name, out=out, threads=threads, quick=args.quick, progress=not args.quiet, **on)
    return Outcome({"verb": "bench", "rows": rows, "out": args.out}, "\n".join(map(_line, rows)))


def _line(row: dict[str, Any]) -> str:
    """One row as text: what was measured, in which mode and threads, the value and its range."""
    where = "  ".join(str(row[key]) for key in ("benchmark", "name", "mode") if row.get(key))
    spread = "" if row.get("low") is None else f" ({row['low']:,.4g} to {row['high']:,.4g})"
    return f"{where}  {row['threads']} thread(s): {row['value']:,.4g}{spread} {row['unit']}"
