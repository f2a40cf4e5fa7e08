"""``workbench export``: a dataset in the form that another project's trainer reads, checked once it is written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

from workbench.cli.common import Outcome, add_common, load
from workbench.cli.options import Kind, add_options, given
from workbench.cli.parser import Parser, spoken
from workbench.core.errors import CheckpointError, UserError

GO_ON = "nothing was written; run it again"
MANY = 20  # problems shown


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments; the options of a format are known once ``--to`` is."""
    from workbench.datasets.export import REGISTRY, ExportOptions, exporter
    from workbench.datasets.export.registry import HIDDEN_DTYPES

    width = max(map(len, REGISTRY))
    parser = Parser(
        "export",
        "Write a dataset in the form that another project's trainer reads, and check it; or check one with --check.\n\n"
        + "\n".join(f"  {name:<{width}}  {REGISTRY[name].about}" for name in sorted(REGISTRY)),
        usage="--to NAME --data DIR --out DIR",
    )
    parser.add_argument("--to", required=True, metavar="NAME", help=f"the format: {', '.join(sorted(REGISTRY))}")
    parser.add_argument("--data", metavar="DIR", help="the dataset to export")
    parser.add_argument("--check", metavar="DIR", help="write nothing: check the export in this directory")
    to = _named(argv)
    try:
        kind = ExportOptions if to is None else exporter(to).options
    except UserError as error:
        raise UserError(spoken(str(error), ["to"])) from None
    names = add_options(
        parser,
        kind,
        title="options of the format",
        choices={"hidden_dtype": HIDDEN_DTYPES},
        kinds={"layers": Kind(layers, "I,I,...|none")},
    )
    add_common(
        parser,
        out="directory to make",
        seed="has no effect here",
    )
    parser.set_defaults(names=names)
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Export and check, or check alone; problems end the command with their sentences."""
    from workbench.datasets.export import export, exporter

    chosen = exporter(args.to)
    if args.check is not None:
        if args.data is not None or args.out is not None:
            raise UserError("--check excludes --data and --out: it checks a directory and writes nothing")
        _refuse(chosen.validate(args.check), args.check)
        return Outcome({"verb": "export", "to": args.to, "checked": args.check}, f"{args.check} is sound")
    if args.data is None or args.out is None:
        raise UserError("--data and --out are needed: the dataset to export and the directory to make; or --check DIR")
    began = perf_counter()
    report = export(args.data, to=args.to, model=load(args), out=args.out, **given(args, args.names))
    seconds = perf_counter() - began
    _refuse(chosen.validate(args.out), args.out)
    data = {"verb": "export", **asdict(report), "bytes_per_token": report.bytes_per_token, "seconds": seconds}
    text = (
        f"{report.documents:,} documents ({report.tokens:,} tokens) in {report.out} for {report.format}, checked: "
        f"{report.bytes:,} bytes, {report.bytes_per_token:,.0f} per token beside the model's parts, {seconds:.1f} s"
    )
    text += "".join(f"\n{note}" for note in report.notes)
    notes = [f"left out {doc_id!r}: {why}" for doc_id, why in list(report.left_out.items())[:MANY]]
    if (more := len(report.left_out) - MANY) > 0:
        notes.append(f"and {more} more, listed in export.json")
    return Outcome(data, text, notes)


def _refuse(problems: Sequence[str], where: str) -> None:
    if problems:
        shown = "; ".join(problems[:MANY])
        more = f"; and {len(problems) - MANY} more" if len(problems) > MANY else ""
        raise CheckpointError(f"{where} is not sound: {shown}{more}. Delete it, and export again")


def _named(argv: Sequence[str]) -> str | None:
    """The value of ``--to``, before anything else is parsed."""
    for here, after in zip(argv, [*argv[1:], ""]):
        if here == "--to" and not after.startswith("-"):
            return after or None
        if here.startswith("--to="):
            return here.removeprefix("--to=")
    return None


def layers(text: str) -> Any:
    """Layers separated by commas, or none for all that are stored; ``ExportOptions`` checks them."""
    if text.lower() == "none":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: write layers as 1,5,8, or none for all") from None
