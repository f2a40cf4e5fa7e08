"""``workbench extract``: anchor records of a corpus, as Arrow shards that ``datasets.load_from_disk`` opens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from workbench.cli.common import Outcome, add_common, add_corpus, load, read_corpus
from workbench.cli.options import Kind, add_options, given
from workbench.cli.parser import Parser
from workbench.core.manifest import Manifest

GO_ON = "finished shards are kept: run the same command again to go on from there"


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.core.schemas import HIDDEN_DTYPES
    from workbench.datasets import ExtractOptions, extract
    from workbench.datasets.engine import ENGINES, EngineOptions

    parser = Parser(
        "extract", "Write anchor records of a corpus; a killed run goes on where it stopped.", usage="--out DIR"
    )
    names = add_options(
        parser,
        ExtractOptions,
        title="records",
        skip=("seed",),
        choices={"hidden_dtype": HIDDEN_DTYPES},
        kinds={"anchors": Kind(anchors, "N|all|P,P,...")},
    )
    resume = add_options(parser, extract, title="directory", only=("resume",))
    engine = add_options(parser, EngineOptions, title="where it is done", choices={"engine": ENGINES})
    add_corpus(parser)
    add_common(
        parser,
        out="directory for shards and manifest",
        required=True,
        seed="seed of the choice of anchors (default: 20260811) and of documents under --limit (default: 0)",
    )
    parser.set_defaults(names=names, resume_names=resume, engine_names=engine)
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Extract, and return what was written."""
    from workbench.datasets import ExtractOptions, extract
    from workbench.datasets.engine import EngineOptions

    options = given(args, args.names) | ({} if args.seed is None else {"seed": args.seed})
    place = given(args, args.engine_names)
    ExtractOptions(**options)
    EngineOptions(**place)
    model = load(args)
    tapes = read_corpus(args, model)
    began = perf_counter()
    records = extract(model, tapes, out=args.out, **options, **given(args, args.resume_names), **place)
    seconds = perf_counter() - began
    manifest = Manifest.read(args.out)
    data = {
        "verb": "extract",
        "out": args.out,
        "records": len(records),
        "documents": len(tapes),
        "tokens": tapes.n_tokens,
        "corpus": tapes.name,
        "shards": len(manifest.shards),
        "bytes": sum(shard["bytes"] for shard in manifest.shards),
        "columns": records.column_names,
        "parameters": manifest.parameters,
        "exact": manifest.model["exact"],
        "seconds": seconds,
    }
    text = (
        f"{len(records):,} records of {len(tapes):,} tapes ({tapes.n_tokens:,} tokens) in {args.out}: "
        f"{len(manifest.shards)} shards, {data['bytes']:,} bytes, {seconds:.1f} s\n"
        f"open them with workbench.load_anchors({args.out!r}) or datasets.load_from_disk({args.out!r})"
    )
    return Outcome(data, text)


def anchors(text: str) -> Any:
    """A count per document, "all", or positions separated by commas; ``ExtractOptions`` checks it."""
    if text == "all":
        return text
    parts = text.split(",")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        message = f"{text!r} is not valid: give a count per document, all, or positions separated by commas"
        raise argparse.ArgumentTypeError(message) from None
    return numbers if len(numbers) > 1 else numbers[0]
