"""``workbench train``: the demo corpus, the demo checkpoint, and the average of two checkpoints."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from workbench.cli.common import Outcome, add_common
from workbench.cli.options import add_options, given
from workbench.cli.parser import Parser
from workbench.core.errors import UserError
from workbench.core.staging import check_new, staged

JOBS = {
    "demo-corpus": "build tokenizer, token streams and held-out samples from downloaded packages",
    "demo": "train a small Qwen3.5 + MTP model from that corpus, on a GPU",
    "average": "average two checkpoints of one training run, parameter by parameter",
}
GO_ON = "nothing was written; run it again"


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments; the first names the job."""
    job = argv[0] if argv else ""
    if job in ("-h", "--help"):
        print("usage: workbench train JOB [options]\n")
        print("\n".join(f"  {name:<12} {about}" for name, about in JOBS.items()))
        print("\n`workbench train JOB --help` lists its options.")
        raise SystemExit(0)
    if job not in JOBS:
        near = get_close_matches(job, JOBS, n=1)
        what = f"unknown job {job!r}" if job else "a job is needed"
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"train: {what}: {hint}choose one of {', '.join(JOBS)}")
    usage = {"demo-corpus": "--sources DIR --out DIR", "demo": "--corpus DIR --out DIR", "average": "A B --out DIR"}[
        job
    ]
    parser = Parser(f"train {job}", JOBS[job][0].upper() + JOBS[job][1:] + ".", usage=usage)
    {"demo-corpus": _corpus_options, "demo": _demo_options, "average": _average_options}[job](parser)
    parser.set_defaults(job=job, command=shlex.join(["workbench", "train", *argv]))
    return parser.read(argv[1:])


def run(args: argparse.Namespace) -> Outcome:
    """Do the job into a new directory."""
    jobs: dict[str, Callable[[argparse.Namespace, Path], Outcome]]
    jobs = {"demo-corpus": _corpus, "demo": _demo, "average": _average}
    check_new(Path(args.out))
    return jobs[args.job](args, Path(args.out))


def _corpus_options(parser: Parser) -> None:
    from workbench.train.demo_corpus import build_demo_corpus

    parser.add_argument("--sources", required=True, metavar="DIR", help="folder of the downloaded packages")
    names = add_options(parser, build_demo_corpus, title="corpus", skip=("seed",))
    add_common(parser, out="new directory for the corpus", required=True, seed="order of the documents (default: 0)",
               model=False, device="no effect: no model is run")  # fmt: skip
    parser.set_defaults(names=names)


def _corpus(args: argparse.Namespace, out: Path) -> Outcome:
    from workbench.train.demo_corpus import build_demo_corpus

    options = given(args, args.names) | ({} if args.seed is None else {"seed": args.seed})
    with staged(out) as stage:
        meta = build_demo_corpus(Path(args.sources), stage, **options)
    tokens = meta["tokens"]
    keep = {key: meta[key] for key in ("tokens", "registers", "sample", "overlap", "sha256")}
    text = f"{tokens['train']:,} tokens to train on and {tokens['heldout']:,} held out, in {out}"
    return Outcome({"verb": "train demo-corpus", "out": str(out), **keep}, text)


def _demo_options(parser: Parser) -> None:
    from workbench.train.demo import DemoRecipe, train_demo

    parser.add_argument(
        "--corpus", required=True, metavar="DIR", help="folder that `workbench train demo-corpus` wrote"
    )
    names = add_options(parser, DemoRecipe, title="recipe", skip=("seed",))
    more = add_options(parser, train_demo, title="run", skip=("recipe", "device", "commit", "command"))
    add_common(
        parser, out="new directory for the checkpoint", required=True, seed="initialisation and batches (default: 0)",
        model=False, device="where to train (default: cuda); cpu is for trials",
    )  # fmt: skip
    parser.set_defaults(names=names, run_names=more)


def _demo(args: argparse.Namespace, out: Path) -> Outcome:
    from workbench.core.manifest import git_state
    from workbench.train.demo import DemoRecipe, train_demo

    recipe = DemoRecipe(**given(args, args.names), **({} if args.seed is None else {"seed": args.seed}))
    state = git_state()
    facts = {"commit": "" if state is None else state["commit"], "command": args.command}
    device = {} if args.device is None else {"device": args.device}
    with staged(out) as stage:
        report = train_demo(args.corpus, stage, recipe=recipe, **given(args, args.run_names), **device, **facts)
    keep = {key: report[key] for key in ("parameters", "tokens_seen", "seconds", "heldout")}
    return Outcome({"verb": "train demo", "out": str(out), **keep}, "\n".join(_losses(keep, out)))


def _losses(report: dict[str, Any], out: Path) -> list[str]:
    """What a training report says, in lines."""
    lines = [f"{report['parameters']:,} parameters, {report['tokens_seen']:,} tokens, {report['seconds']:.0f} s: {out}"]
    for entry in report["heldout"]:
        shares = ", ".join(f"{share:.3f}" for share in entry["agreement"])
        lines.append(f"held out at {entry['context']}: loss {entry['loss']:.3f}; MTP agreement by step {shares}")
    return lines


def _average_options(parser: Parser) -> None:
    from workbench.train.average import average

    parser.add_argument("a", metavar="A", help="first checkpoint, demo or a directory; its tokenizer goes along")
    parser.add_argument("b", metavar="B", help="second checkpoint, of the same shape")
    names = add_options(parser, average, title="average")
    add_common(parser, out="new directory for the average", required=True, seed="no effect: nothing is drawn",
               model=False, device="no effect: weights are averaged on the CPU")  # fmt: skip
    parser.set_defaults(names=names)


def _average(args: argparse.Namespace, out: Path) -> Outcome:
    from workbench.facade import demo_checkpoint
    from workbench.train.average import average

    a, b = (demo_checkpoint() if name == "demo" and not Path(name).is_dir() else name for name in (args.a, args.b))
    with staged(out) as stage:
        model = average(a, b, out=stage, **given(args, args.names))
    count = sum(p.numel() for p in model.parameters())
    data = {"verb": "train average", "a": args.a, "b": args.b, "out": str(out), "parameters": count}
    return Outcome(data | given(args, args.names), f"{count:,} parameters averaged in {out}")
