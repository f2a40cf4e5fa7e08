"""``workbench clean``: a corpus without unusable, repeated and contaminated documents, and what went and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.common import Outcome, add_common, add_corpus, read_corpus
from workbench.cli.options import add_options, given
from workbench.cli.page import png_of
from workbench.cli.parser import Parser
from workbench.core.staging import staged

if TYPE_CHECKING:
    from workbench.corpus import Cleaned


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.corpus.hygiene.grams import PARTS
    from workbench.datasets import CleanOptions

    about = (
        "Set aside the documents that records cannot be made of, drop exact and near duplicates and what the\n"
        "evaluation holds, and write the tapes that are left beside a list of the others with their reasons."
    )
    parser = Parser("clean", about, usage="--out DIR")
    names = add_options(parser, CleanOptions, title="hygiene", skip=("seed",), choices={"part": PARTS})
    parser.add_argument(
        "--evaluation",
        metavar="SOURCE",
        help="documents that training must not see, named as --corpus is (default: none, and nothing is compared)",
    )
    add_corpus(parser)
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave documents of --corpus that cannot be read as tapes out, and list them in unread.jsonl",
    )
    parser.add_argument(
        "--model",
        default="demo",
        metavar="SOURCE",
        help="demo, a directory or a hub id; its tokenizer and config alone are read (default: demo)",
    )
    add_common(
        parser,
        out="directory for the tapes, the list of dropped ones, reports and figures",
        required=True,
        seed="seed of signatures, of --heldout and of documents under --limit (default: 0)",
        model=False,
        threads=False,
        device="no effect: no model runs",
    )
    parser.set_defaults(names=names)
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Clean, write, and return the counts."""
    from workbench.corpus import corpus
    from workbench.datasets import CleanOptions, clean
    from workbench.facade import demo_checkpoint
    from workbench.model.weights.text import load_text_side

    options = given(args, args.names) | ({} if args.seed is None else {"seed": args.seed})
    chosen = CleanOptions(**options)
    demo = args.model == "demo" and not Path(args.model).is_dir()
    side = load_text_side(demo_checkpoint() if demo else args.model)
    with staged(Path(args.out)) as stage:
        unread: list[tuple[str, str]] = []
        tapes = read_corpus(args, side, quarantine=unread if args.skip_bad else None)
        evaluation = None
        if args.evaluation is not None:
            column = given(args, ("text_column",))
            evaluation = corpus(args.evaluation, tokenizer=side.tokenizer, **column)
        outcome = clean(tapes, model=side, evaluation=evaluation, **options)
        outcome.save(stage, unread=unread)
        figures = _figures(outcome, stage, chosen.near)
    data = {
        "verb": "clean",
        "out": args.out,
        "corpus": tapes.name,
        "evaluation": None if evaluation is None else evaluation.name,
        "documents": {"given": outcome.given, "kept": len(outcome.tapes), "dropped": len(outcome.dropped)},
        "unread": [{"doc_id": doc_id, "reason": reason} for doc_id, reason in unread],
        "tokens": {"given": outcome.given_tokens, "kept": outcome.tapes.n_tokens},
        "splits": _splits(outcome),
        "steps": outcome.summary.to_dicts(),
        "parameters": {name: dict(values) for name, values in outcome.steps.items()},
        "figures": figures,
    }
    return Outcome(data, _text(args.out, outcome, len(unread)))


def _splits(outcome: Cleaned) -> dict[str, int]:
    names = sorted({tape.split for tape in outcome.tapes})
    return {name: sum(tape.split == name for tape in outcome.tapes) for name in names}


def _figures(outcome: Cleaned, out: Path, threshold: float | None) -> list[str]:
    """Write the figures of the steps that have one."""
    from workbench.core.manifest import write_atomic
    from workbench.plot import contamination, duplicates

    made = []
    if "pairs" in outcome.reports:
        write_atomic(out / "duplicates.png", png_of(duplicates(outcome.reports["pairs"], threshold=threshold)))
        made.append("duplicates.png")
    if "overlap" in outcome.reports:
        label = "n-grams of a training document that the evaluation holds (%)"
        ax = contamination(outcome.reports["overlap"], title="Overlap of training and evaluation", label=label)
        write_atomic(out / "overlap.png", png_of(ax))
        made.append("overlap.png")
    return made


def _text(out: str, outcome: Cleaned, unread: int) -> str:
    lines = [
        f"{row['step']:<11}{row['documents_dropped']:>9,} of {row['documents_in']:>9,} documents dropped, "
        f"{row['tokens_dropped']:>12,} tokens"
        for row in outcome.summary.iter_rows(named=True)
    ]
    kept = (
        f"{outcome.given:,} documents = {len(outcome.tapes):,} kept + {len(outcome.dropped):,} dropped; "
        f"{outcome.tapes.n_tokens:,} tokens kept, in {out}"
    )
    aside = [f"{unread:,} more could not be read as tapes; reasons are in {out}/unread.jsonl"] if unread else []
    where = f"{out}/tapes.jsonl"
    return "\n".join([*lines, kept, *aside, f"go on with --corpus {where}; reasons are in {out}/dropped.jsonl"])
