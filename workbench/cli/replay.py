"""``workbench replay``: the draft table and the NLL of a corpus, on its own text or on the target's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from workbench.cli.common import Outcome, add_common, add_corpus, load, read_corpus
from workbench.cli.options import Kind, add_options, biases, given, reals
from workbench.cli.parser import Parser
from workbench.core.errors import UserError

if TYPE_CHECKING:
    import polars as pl

    from workbench.replay import DraftTable

GO_ON = "finished shards are kept: run the same command again to go on from there"
SCORES = ("chunk", "shard_rows")  # the options that scoring alone has too
SCORED = ("hidden", "k_format", "v_format", "window")  # those that a draft table does not have
SHAPING = (
    *("temperature", "top_k", "top_p", "min_p", "filter_order", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "penalty_last_n", "logit_bias", "seed"),
)  # the options that own text has too


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.cache.formats import FORMATS
    from workbench.datasets.engine import ENGINES, EngineOptions
    from workbench.model.hybrid import CARRIERS
    from workbench.replay import ReplayOptions, own_tapes, replay, score
    from workbench.sampling.options import ORDERS

    about = "Write the draft table of a corpus: the chain the drafter proposes at every position, and the NLL."
    parser = Parser("replay", about, usage="--out DIR")
    words = {"carrier": CARRIERS, "filter_order": ORDERS}
    kinds = {"logit_bias": Kind(biases, "ID:BIAS,..."), "overlap": Kind(reals, "T,...")}
    names = add_options(parser, ReplayOptions, title="table", choices=words, kinds=kinds, skip=("seed",))
    resume = add_options(parser, replay, title="directory", only=("resume",))
    engine = add_options(parser, EngineOptions, title="where it is done", choices={"engine": ENGINES})
    own = parser.add_argument_group("the target's own text")
    own.add_argument(
        "--own", action="store_true", help="continue each document with the table's shaping, and replay that text"
    )
    own_names = add_options(parser, own_tapes, title="own text, with --own", only=("prompt_tokens", "max_new_tokens"))
    scores = parser.add_argument_group("likelihoods alone")
    scores.add_argument("--score-only", action="store_true", help="score the text; no chains, so no MTP head is needed")
    kept = {"k_format": tuple(FORMATS), "v_format": tuple(FORMATS)}
    scored = add_options(parser, score, title="hidden rows and the cache, with --score-only", only=SCORED, choices=kept)
    add_corpus(parser)
    add_common(parser, out="directory for shards and manifest", required=True,
               seed="of the choice of documents under --limit and of every draw (default: 0)")  # fmt: skip
    parser.set_defaults(names=names, resume_names=resume, engine_names=engine, own_names=own_names, scored_names=scored)
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Replay or score, and return acceptance and NLL."""
    from workbench.datasets.engine import EngineOptions
    from workbench.replay import ReplayOptions, own_tapes, replay, score
    from workbench.replay.table import sizes_text

    options, resume = given(args, args.names), given(args, args.resume_names)
    if args.seed is not None and not args.score_only:
        options["seed"] = args.seed
    own, scored = given(args, args.own_names), given(args, args.scored_names)
    ReplayOptions(**options)
    place = given(args, args.engine_names)
    EngineOptions(**place)
    _check_together(args, own, scored, options)
    model = load(args)
    tapes = read_corpus(args, model)
    began = perf_counter()
    if args.own:
        shaping = {name: value for name, value in options.items() if name in SHAPING}
        tapes = own_tapes(model, tapes, **own, **shaping)
    data: dict[str, Any] = {"verb": "replay", "out": args.out, "corpus": tapes.name}
    data |= {"documents": len(tapes), "tokens": tapes.n_tokens, "exact": model.exact}
    if args.score_only:
        frame = score(model, tapes, out=args.out, **scored, **resume, **options)
        lines = []
    else:
        table = replay(model, tapes, out=args.out, **resume, **place, **options)
        frame = table.nll
        data["bytes_per_row"] = table.bytes_per_row
        data["acceptance"] = accepted = _acceptance(table)
        lines = [_accepted(one) for one in accepted]
    data |= {"nll": likelihoods(frame), "seconds": perf_counter() - began}
    lines += [_likelihood(one) for one in data["nll"]]
    lines.append(f"{len(tapes):,} tapes, {tapes.n_tokens:,} tokens in {args.out}, {data['seconds']:.1f} s")
    if not args.score_only:
        lines.append(f"bytes per row: {sizes_text(table.bytes_per_row)}")
        lines.append(f"open it with workbench.load_table({args.out!r})")
    return Outcome(data, "\n".join(lines))


def likelihoods(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """NLL, perplexity and bits per byte per source and over everything, from a per-document frame."""
    import polars as pl

    nats = pl.col("nll") * pl.col("n_tokens")
    totals = (nats.sum() / pl.col("n_tokens").sum(), pl.col("n_tokens").sum(), pl.len().alias("documents"))
    bits = pl.when(pl.col("n_bytes").null_count() == 0).then(nats.sum() / pl.lit(2.0).log() / pl.col("n_bytes").sum())
    columns = (*totals, bits.alias("bits_per_byte"))
    parts = frame.group_by("source").agg(*columns).sort("source")
    whole = frame.select(pl.lit("all").alias("source"), *columns)
    both = pl.concat([parts, whole], how="vertical_relaxed") if len(parts) > 1 else parts
    return both.with_columns(pl.col("nll").exp().alias("perplexity")).to_dicts()


def _check_together(
    args: argparse.Namespace, own: dict[str, Any], scored: dict[str, Any], options: dict[str, Any]
) -> None:
    """Refuse options that another one makes meaningless."""
    if own and not args.own:
        name = next(iter(own)).replace("_", "-")
        raise UserError(f"--{name} needs --own: it says how the target's own text is made")
    if scored and "hidden" not in scored and not args.score_only:
        name = next(iter(scored)).replace("_", "-")
        raise UserError(f"--{name} needs --score-only: draft tables are made over dense rows, all of them kept")
    if scored and not args.score_only:
        raise UserError(
            "--hidden needs --score-only: a draft table holds no hidden rows; `workbench extract` writes some"
        )
    strange = sorted(set(options) - set(SCORES)) if args.score_only else []
    if strange:
        raise UserError(f"--{strange[0].replace('_', '-')} and --score-only exclude each other: scoring drafts nothing")
    if args.score_only and getattr(args, "engine", "local") != "local":
        raise UserError("--engine ray and --score-only exclude each other: likelihoods alone are made in this process")
    if Path(args.out).is_file():
        raise UserError(f"--out {args.out!r} is a file: give a directory")


def _acceptance(table: DraftTable) -> list[dict[str, Any]]:
    """Acceptance at every draft length that the table holds, without p_min; empty where nothing can be walked."""
    from workbench.core.metrics import acceptance

    if table.manifest.parameters["stride"] != 1:
        return []
    out = []
    for k in range(1, table.k_max + 1):
        rounds = table.rounds(k=k)
        if not len(rounds):
            return []
        row = acceptance(rounds)
        keep = ("aggregation", "rounds", "drafted", "accepted", "tau", "accepted_length", "efficiency", "joint")
        out.append({"k": k, "estimator": rounds["estimator"][0], **{name: getattr(row, name) for name in keep}})
    return out


def _accepted(row: dict[str, Any]) -> str:
    """One draft length as a line."""
    tau, share = row["tau"], row["efficiency"]
    return (
        f"k={row['k']}: {row['accepted']:,} of {row['drafted']:,} drafts accepted ({100 * (share or 0):.0f} %), "
        f"{tau or 0:.2f} a round without bonus ({row['estimator']} walk, pooled)"
    )


def _likelihood(row: dict[str, Any]) -> str:
    """One source's likelihood as a line."""
    bits = "" if row["bits_per_byte"] is None else f", {row['bits_per_byte']:.3f} bits per byte"
    name = row["source"] or "no source"
    return f"{name}: {row['nll']:.3f} nats per token, perplexity {row['perplexity']:.2f}{bits}"
