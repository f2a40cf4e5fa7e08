"""``workbench bench``: the benchmarks, side by side in one run; rows go to ``--out`` as JSON lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.cli.common import DTYPES, Outcome, add_common
from workbench.cli.options import reals
from workbench.cli.parser import Parser, one_of, whole
from workbench.core.errors import UserError

GO_ON = "rows of finished measurements are kept where --out was given; run it again for the rest"
OF_SHAPES = ("synthetic_acceptance", "context", "trim", "only", "dtype", "exact")  # options that go with --shape alone
OF_OTHERS = {"extract": ("dtype",), "replay": ("dtype", "trim")}  # those of them that other benchmarks take than decode


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.bench import NAMES

    parser = Parser(
        "bench",
        "Measure this machine; rows of one run were measured side by side and compare.\n\n"
        "With --shape, decode, extract and replay measure a published geometry with random weights, where no\n"
        "checkpoint is needed. decode: bandwidth, plain and speculative decode at a given acceptance, phases of a\n"
        "round and their anatomy, long forwards, and transformers on the same weights. extract and replay: their\n"
        "speed beside that of forwards over the same rows, in the fast class.",
        usage="[NAME]",
    )
    parser.add_argument(
        "name",
        nargs="?",
        type=one_of(NAMES),
        metavar="NAME",
        help=f"one of {', '.join(NAMES)} (default: all; decode with --shape)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: a trial of the benchmark, no numbers to quote"
    )
    _add_shapes(parser)
    seed = "with --shape, of weights, prompt and acceptance (default: 0); else no effect: benchmarks fix their own"
    device = "with --shape, where to run (default: cpu); the other benchmarks measure the CPU"
    add_common(parser, out="file for the rows, JSON lines", seed=seed, device=device, model=False, threads=False)
    parser.add_argument(
        "--threads",
        metavar="N,N",
        help="thread counts to measure (default: 1,2); with --shape, one number (default: torch's own choice)",
    )
    return parser.read(argv)


def _add_shapes(parser: Parser) -> None:
    from workbench.bench.shape import ACCEPTANCE, PIECES
    from workbench.model.shapes import SHAPES

    group = parser.add_argument_group("random weights in a published geometry, with decode, extract or replay")
    group.add_argument("--shape", type=one_of(SHAPES), metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    group.add_argument(
        "--synthetic-acceptance",
        type=reals,
        metavar="P,P",
        help="decode: share of rounds whose draft slots 1..j all stand, for each j, never rising; the MTP head runs in "
        f"full, only its pick is replaced (default: {','.join(map(str, ACCEPTANCE))}, an example)",
    )
    told = "decode: tokens of the random prompt (default: 1024)"
    group.add_argument("--context", type=whole, metavar="N", help=told)
    told = "decode, replay: also measure a draft head of N ids (default: none)"
    group.add_argument("--trim", type=whole, metavar="N", help=told)
    told = f"decode: pieces to measure, of {', '.join(PIECES)} (default: all)"
    group.add_argument("--only", type=pieces, metavar="NAME,NAME", help=told)
    kinds = "{" + ",".join(DTYPES) + "}"
    told = "type of the weights (default: float32 on a CPU, bfloat16 on a GPU)"
    group.add_argument("--dtype", type=one_of(DTYPES), metavar=kinds, help=told)
    mode = group.add_mutually_exclusive_group()
    for flag, value, where in (("--exact", True, "CPU"), ("--fast", False, "GPU")):
        text = f"decode: {flag[2:]} numerics (default on a {where})"
        mode.add_argument(flag, dest="exact", action="store_const", const=value, help=text)


def pieces(text: str) -> tuple[str, ...]:
    """Names of pieces, read from text such as plain,verify."""
    from workbench.bench.shape import PIECES

    return tuple(one_of(tuple(PIECES))(name.strip()) for name in text.split(","))


def run(args: argparse.Namespace) -> Outcome:
    """Measure, and return the rows."""
    rows = _shape_rows(args) if args.shape is not None else _rows(args)
    return Outcome({"verb": "bench", "rows": rows, "out": args.out}, "\n".join(map(_line, rows)))


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    if given := [name for name in OF_SHAPES if getattr(args, name) is not None]:
        raise UserError(f"--{given[0].replace('_', '-')} goes with --shape: give a shape, or leave it out")
    if args.device == "cuda":
        raise UserError("--device 'cuda' is not valid here: without --shape the benchmarks measure the CPU")
    from workbench.bench import NAMES
    from workbench.bench import run as measure

    rows: list[dict[str, Any]] = []
    for name in [args.name] if args.name else NAMES:
        rows += measure(name, threads=args.threads or "1,2", **_how(args))
    return rows


def _how(args: argparse.Namespace) -> dict[str, Any]:
    out = None if args.out is None else Path(args.out)
    return {"out": out, "quick": args.quick, "progress": not args.quiet}


def _shape_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    name = args.name or "decode"
    if name != "decode" and name not in OF_OTHERS:
        raise UserError(f"--shape goes with decode, extract and replay, not with {name!r}: leave it out, or name those")
    given = {key: getattr(args, key) for key in (*OF_SHAPES, "seed", "device") if getattr(args, key) is not None}
    taken = (*OF_OTHERS.get(name, OF_SHAPES), "seed", "device")
    if strange := [key for key in given if key not in taken]:
        flag = "fast" if args.exact is False and strange[0] == "exact" else strange[0].replace("_", "-")
        raise UserError(f"--{flag} goes with `bench decode --shape`, not with {name!r}: leave it out")
    import torch

    before = torch.get_num_threads()
    threads = before if args.threads is None else _one_number(args.threads)
    if name != "decode":
        from workbench.bench import run as measure

        return measure(name, threads=(threads,), shape=args.shape, **_how(args), **given)
    from workbench.bench.shape import run_shape

    out = {} if args.out is None else {"out": args.out}
    torch.set_num_threads(threads)
    try:
        return run_shape(args.shape, quick=args.quick, **given, **out)
    finally:
        torch.set_num_threads(before)


def _one_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--threads {text!r} is not valid with --shape: give one number of threads")
    return int(text)


def _line(row: dict[str, Any]) -> str:
    """One row as text: what was measured, in which mode and threads, the value and its range."""
    where = "  ".join(str(row[key]) for key in ("benchmark", "shape", "name", "mode") if row.get(key))
    spread = "" if row.get("low") is None else f" ({row['low']:,.4g} to {row['high']:,.4g})"
    if row.get("p20") is not None:
        spread = f" (p20 {row['p20']:,.4g}, p80 {row['p80']:,.4g})"
    return f"{where}  {row['threads']} thread(s): {row['value']:,.4g}{spread} {row['unit']}{_beside(row)}"


def _beside(row: dict[str, Any]) -> str:
    """What a row of a shape, or of records, is held against."""
    said = []
    if row.get("of_floor") is not None:
        said.append(f"{row['of_floor']:.0%} of the copy bandwidth")
    if row.get("of_product") is not None:
        said.append(f"{row['tflop_s']:,.4g} TFLOP/s, {row['of_product']:.0%} of the large product")
    if row.get("by_bytes") is not None:
        said.append(f"by bytes {row['by_bytes']:.3g}")
    said += [f"by {kind} phases {value:.3g}" for kind, value in (row.get("by_phases") or {}).items()]
    if row.get("of_predicted") is not None:
        said.append(f"{row['per_anchor']:,.4g} bytes per anchor")
        said.append(f"{row['over_records']:.3g} times the anchor records")
        said.append(f"{row['of_predicted']:.3f} of what was predicted")
    if row.get("same_text") is False:
        said.append("its text is not plain decode's")
    return f"; {', '.join(said)}" if said else ""
