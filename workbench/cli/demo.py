"""``workbench demo``: the main job, whole, on the shipped checkpoint and its held-out texts.

It decodes speculatively and plainly, extracts anchor records, replays a draft table, walks policies over it, and writes
figures and one summary page. One thread is the default: the demo's model is small, and a second thread that has to
wait for a core costs more than it brings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from time import perf_counter

from workbench.cli.common import Outcome, add_common, load
from workbench.cli.options import add_options, given
from workbench.cli.parser import Parser
from workbench.core.errors import UserError
from workbench.core.staging import check_new, staged

GO_ON = "nothing was kept; run it again, with --quick for a small trial"


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.cli.demo_run import DemoOptions

    about = "The whole job on the shipped checkpoint: decode, extract, replay, sweep, figures and a summary page."
    parser = Parser("demo", about)
    parser.add_argument("--quick", action="store_true", help="a small trial: fewer and shorter texts")
    names = add_options(parser, DemoOptions, title="sizes", skip=("seed",))
    add_common(
        parser,
        out="new directory (default: data/runs/demo-TIME in this checkout)",
        seed="choice of prompts, documents and anchors (default: 0)",
    )
    parser.set_defaults(names=names, threads=1)
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Run the job into a new directory, and return its headline numbers."""
    from workbench.cli.demo_page import write_figures, write_page
    from workbench.cli.demo_run import QUICK, Demo, DemoOptions

    began = perf_counter()
    options = replace(QUICK if args.quick else DemoOptions(), **given(args, args.names))
    options = options if args.seed is None else replace(options, seed=args.seed)
    out = check_new(Path(args.out)) if args.out is not None else _runs() / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    steps = _Steps(6, quiet=args.quiet)
    steps("load the checkpoint")
    model = load(args)
    if model.tokenizer is None:
        raise UserError(f"checkpoint {args.model!r} has no tokenizer, which the demo needs: add its tokenizer.json")
    with staged(out) as stage:
        job = Demo(model, options, stage)
        steps("decode the prompts: plainly, and speculatively")
        job.decode()
        steps("extract anchor records of held-out documents")
        job.extract()
        steps("replay them, and the texts just generated, into draft tables")
        job.replay()
        steps("walk policies over the table")
        job.sweep()
        steps("draw the figures and write the summary page")
        figures = write_figures(job, stage / "figures")
        job.finish()
        write_page(job, figures, stage / "index.html", seconds=perf_counter() - began)
    seconds = perf_counter() - began
    shown = _shown(out)
    lines = [*job.lines(), f"{seconds:.0f} s; everything is in {shown}", f"open {shown / 'index.html'}"]
    data = {"verb": "demo", "out": str(out), "page": str(out / "index.html"), "seconds": seconds, **job.facts()}
    return Outcome(data, "\n".join(lines))


class _Steps:
    """Numbered lines on stderr, one per step."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self.total, self.quiet, self.at = total, quiet, 0

    def __call__(self, what: str) -> None:
        self.at += 1
        if not self.quiet:
            print(f"[{self.at}/{self.total}] {what}", file=sys.stderr, flush=True)


def _runs() -> Path:
    """Where runs go when no directory was named: ``data/runs`` beside the demo checkpoint."""
    from workbench.facade import demo_checkpoint

    return demo_checkpoint().parent / "runs"


def _shown(path: Path) -> Path:
    """A path relative to the working directory, when it lies inside."""
    here = Path.cwd()
    return path.resolve().relative_to(here) if path.resolve().is_relative_to(here) else path
