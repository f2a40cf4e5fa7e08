"""``workbench extract``: anchor records or a sequence store of a corpus, as Arrow shards that ``datasets`` opens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from time import perf_counter
from typing import Any

from workbench.cli.common import Outcome, add_common, add_corpus, counted, load, read_corpus
from workbench.cli.options import Kind, add_options, given
from workbench.cli.parser import Parser, one_of
from workbench.core.errors import UserError
from workbench.core.manifest import Manifest

GO_ON = "finished shards are kept: run the same command again to go on from there"
KINDS = {"anchors": "load_anchors", "sequence": "load_sequences"}


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.core.schemas import SEQUENCE_DTYPES
    from workbench.datasets import ExtractOptions, SequenceOptions, extract
    from workbench.datasets.engine import ENGINES, EngineOptions
    from workbench.datasets.left_out import ON_BAD

    parser = Parser(
        "extract",
        "Write anchor records or a sequence store of a corpus; a killed run goes on where it stopped.",
        usage="--out DIR",
    )
    parser.add_argument(
        "--kind",
        type=one_of(tuple(KINDS)),
        default="anchors",
        metavar="{" + ",".join(KINDS) + "}",
        help="anchors: a record per anchor; sequence: every token's row, a record per document (default: anchors)",
    )
    names = add_options(
        parser,
        ExtractOptions,
        title="records",
        skip=("seed",),
        choices={"hidden_dtype": SEQUENCE_DTYPES, "on_bad": ON_BAD},
        kinds={"anchors": Kind(anchors, "N|all|P,P,...")},
        defaults={"top_k": "64; of a sequence store none"},
    )
    store = add_options(
        parser,
        SequenceOptions,
        title="sequence store, beside --hidden-dtype (fp8 as well), --top-k, --temperature, --chunk, --batch, --on-bad",
        skip=names,
        kinds={"taps": Kind(layers, "L,L,...")},
        defaults={"taps": "none"},
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
    parser.set_defaults(names=[*names, *store], resume_names=resume, engine_names=engine)
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Extract, and return what was written."""
    from workbench.datasets import ExtractOptions, SequenceOptions, extract, extract_sequences, load_quarantine
    from workbench.datasets.engine import EngineOptions
    from workbench.datasets.left_out import QUARANTINE_FILE

    options = given(args, args.names)
    kind: Any = SequenceOptions if args.kind == "sequence" else ExtractOptions
    if strange := sorted(options.keys() - {field.name for field in fields(kind)}):
        other = next(name for name in KINDS if name != args.kind)
        raise UserError(
            f"--{strange[0].replace('_', '-')} shapes --kind {other}, and --kind {args.kind} was asked for: leave it "
            f"out, or give --kind {other}"
        )
    if args.seed is not None and kind is ExtractOptions:
        options["seed"] = args.seed
    kind(**options)
    place = given(args, args.engine_names)
    EngineOptions(**place)
    model = load(args)
    tapes = read_corpus(args, model)
    write: Any = extract_sequences if kind is SequenceOptions else extract
    began = perf_counter()
    records = write(model, tapes, out=args.out, **options, **place, **given(args, args.resume_names))
    seconds = perf_counter() - began
    manifest, aside = Manifest.read(args.out), load_quarantine(args.out)
    documents, tokens = (manifest.counts[name] for name in ("documents", "tokens"))
    data = {
        "verb": "extract",
        "kind": args.kind,
        "out": args.out,
        "records": len(records),
        "documents": documents,
        "tokens": tokens,
        "quarantined": aside.select("doc_id", "reason").to_dicts(),
        "corpus": tapes.name,
        "shards": len(manifest.shards),
        "bytes": sum(shard["bytes"] for shard in manifest.shards),
        "columns": records.column_names,
        "parameters": manifest.parameters,
        "exact": manifest.model["exact"],
        "seconds": seconds,
    }
    left_out = ""
    if len(aside):
        left_out = f"{counted(len(tapes), 'tape')} = {documents:,} stored + {len(aside):,} left out; reasons are in "
        left_out += f"{args.out}/{QUARANTINE_FILE}\n"
    text = (
        f"{counted(len(records), 'record')} of {counted(documents, 'tape')} ({tokens:,} tokens) in {args.out}: "
        f"{counted(len(manifest.shards), 'shard')}, {data['bytes']:,} bytes, {seconds:.1f} s\n{left_out}"
        f"open them with workbench.{KINDS[args.kind]}({args.out!r}) or datasets.load_from_disk({args.out!r})"
    )
    return Outcome(data, text)


def anchors(text: str) -> Any:
    """A count per document, "all", or positions separated by commas; ``ExtractOptions`` checks it."""
    if text == "all":
        return text
    numbers = _integers(text, "give a count per document, all, or positions separated by commas")
    return numbers if len(numbers) > 1 else numbers[0]


def layers(text: str) -> tuple[int, ...]:
    """Layers separated by commas; ``SequenceOptions`` checks them."""
    return tuple(_integers(text, "give layers separated by commas, counted from 0"))


def _integers(text: str, hint: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: {hint}") from None
