"""``workbench generate-corpus``: answers of the target to prompts, as shards that ``--corpus DIR`` reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from time import perf_counter

from workbench.cli.common import Outcome, add_common, counted, load
from workbench.cli.generate import decoding_choices, decoding_kinds
from workbench.cli.options import add_options, given, template_kinds
from workbench.cli.parser import Parser
from workbench.core.manifest import Manifest

GO_ON = "whole shards are kept: run the same command again to go on from there"
SHOWN = 3  # reasons of prompts set aside that are named
UNKEPT = ("logprobs", "anatomy")  # options whose outcome no shard holds


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.corpus import prompts
    from workbench.datasets.answers import generate_corpus
    from workbench.spec.options import GenerateOptions

    parser = Parser(
        "generate-corpus",
        "Answer prompts with the target, speculatively, to train drafters on its own text; a killed run goes on where "
        "it stopped.",
        usage="--out DIR",
    )
    parser.add_argument(
        "--prompts",
        default="demo",
        metavar="SOURCE",
        help="demo, or a file or directory of text, .jsonl or .parquet, or a saved dataset (default: demo)",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out prompts that cannot be used or answered, and say how many and why (default: stop at the first)",
    )
    asked = add_options(
        parser, prompts, title="prompts", skip=("tokenizer", "seed", "quarantine"), kinds=template_kinds()
    )
    names = add_options(
        parser,
        GenerateOptions,
        title="decoding",
        choices=decoding_choices(),
        kinds=decoding_kinds(),
        skip=("seed", "sequence", *UNKEPT),
        defaults={
            "graphs": "yes on a GPU, unless --stream-rounds is given or an option needs the host in every round",
            "stream_rounds": "8 on a GPU where --graphs is not given either, else 1",
            "k": "3, or 0 without an MTP head",
        },
    )
    own = add_options(parser, generate_corpus, title="directory", only=("shard_rows", "turn_ends", "resume"))
    add_common(
        parser,
        out="directory for shards and manifest",
        required=True,
        seed="of every draw under sampling, and of the choice under --limit (default: 0)",
    )
    parser.set_defaults(names=names, prompts_names=asked, own_names=own)
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Answer, and return what was written."""
    from workbench.corpus import prompts
    from workbench.datasets.answers import answers_summary, generate_corpus, load_answers
    from workbench.spec.options import GenerateOptions

    seed = {} if args.seed is None else {"seed": args.seed}
    options = given(args, args.names) | seed
    GenerateOptions(**options)
    asking = given(args, args.prompts_names) | seed
    model = load(args)
    template = {name: asking[name] for name in ("chat_template", "template_options") if name in asking}
    quarantine: list[tuple[str, str]] | None = [] if args.skip_bad else None
    asked = prompts(args.prompts, tokenizer=model.tokenizer, quarantine=quarantine, **asking)
    began, own = perf_counter(), given(args, args.own_names)
    generate_corpus(model, asked, out=args.out, quarantine=quarantine, **options, **template, **own)
    seconds = perf_counter() - began
    manifest, summary = Manifest.read(args.out), answers_summary(load_answers(args.out, check_hashes=False))
    data = {
        "verb": "generate-corpus",
        "out": args.out,
        **summary,
        "corpus": asked.name,
        "quarantined": [{"doc_id": doc_id, "reason": reason} for doc_id, reason in quarantine or ()],
        "shards": len(manifest.shards),
        "bytes": sum(shard["bytes"] for shard in manifest.shards),
        "parameters": manifest.parameters,
        "exact": manifest.model["exact"],
        "seconds": seconds,
    }
    ended = ", ".join(f"{count} by {name.replace('_', ' ')}" for name, count in summary["finish"].items())
    tau = "" if summary["tau"] is None else f"; {summary['tau']:.2f} drafts accepted a round without bonus"
    text = (
        f"{counted(summary['answers'], 'answer')} in {args.out}, {summary['answer_tokens']:,} tokens to prompts of "
        f"{summary['prompt_tokens']:,}: {counted(len(manifest.shards), 'shard')}, {data['bytes']:,} bytes, "
        f"{seconds:.1f} s\n"
        f"ended: {ended}{tau}\n"
        f"use them with workbench extract --corpus {args.out}, or workbench.corpus({args.out!r})"
    )
    return Outcome(data, text, _aside(quarantine))


def _aside(quarantine: list[tuple[str, str]] | None) -> list[str]:
    """Lines that say what was left out."""
    if not quarantine:
        return []
    count, more = len(quarantine), len(quarantine) - SHOWN
    named = [f"  {why}" for _, why in quarantine[:SHOWN]]
    return [
        f"{counted(count, 'prompt')} left out:",
        *named,
        *([f"  and {more:,} more, listed by --json"] if more > 0 else []),
    ]
