"""What k costs: how much of the target's law k kept ids miss, and by how much figures made from them can be wrong.

From records alone the kept mass and the tail are known for every k up to theirs; what a drafter makes of it needs full
laws, which ``topk_rows`` computes beside the records.

Legend: R rows (a position of a slot), K kept ids, N number of ks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import bootstrap_by
from workbench.core.errors import UserError
from workbench.core.frames import require
from workbench.core.manifest import Manifest
from workbench.datasets.arrays import to_arrays
from workbench.datasets.extract import KIND as ANCHORS
from workbench.datasets.extract import load_anchors
from workbench.datasets.law_rows import COLUMNS, KS, OF_DRAFTER, check_ks
from workbench.datasets.sequence_rows import sequences
from workbench.datasets.sequence_store import KIND as SEQUENCE
from workbench.datasets.sequence_store import load_sequences

if TYPE_CHECKING:
    import datasets
    import polars as pl

BLOCK_RECORDS = 1024
HIGH = 0.95  # quantile of the tail that is reported beside its mean and its maximum
ERRORS = ("error_bucket", "error_kept", "error_middle", "error_renorm")


def topk_cost(
    source: datasets.Dataset | pl.DataFrame | str | Path, *, ks: Sequence[int] | None = None, seed: int = 0
) -> pl.DataFrame:
    """Sum up what keeping k ids of the target's law costs, for several k.

    Args:
        source: Anchor records, a sequence store with kept ids, the directory of either, or what ``topk_rows`` returned.
            Of records, supervised slots count.
        ks: Numbers of kept ids; None for all in a frame of rows, and for powers of two up to the records' own.
        seed: Seed of the bootstrap.

    Returns:
        A row per k, means over positions:
        positions, documents; ``mass`` kept; ``tail`` with its 95 % interval by document, 95th percentile and maximum;
        ``tv``, by which a drafter that learnt the renormalised kept law to perfection differs from the target, which is
        also the acceptance it loses; ``tv_spread``, the same for the law that spreads the tail evenly over the other
        ids (null from records). From full laws of target and drafter also ``kl`` and ``kl_bucket`` (kept ids and one
        bucket), ``accept``, and what acceptance judged through the kept ids misses, each with ``_most``, its largest
        magnitude at a position: ``error_bucket`` (tails as one more id; never too low), ``error_kept`` (kept ids alone;
        never too high), both within ``bound``; ``error_middle`` (the mean of the two), within half of it; and
        ``error_renorm`` (kept law renormalised), within ``tail``.

    Raises:
        UserError: The source holds no kept ids, or a k is not valid.
    """
    import polars as pl

    rows = _rows(source, ks)
    if not len(rows):
        raise UserError("there is no position to report on: no slot of these records is supervised")
    accept, kept, bucket = (pl.col(name) for name in ("accept", "accept_kept", "accept_bucket"))
    judged = {"bucket": bucket, "kept": kept, "middle": (kept + bucket) / 2, "renorm": pl.col("accept_renorm")}
    rows = rows.with_columns((found - accept).alias(f"error_{name}") for name, found in judged.items())
    return _summary(rows, seed)


def _rows(source: Any, ks: Sequence[int] | None) -> pl.DataFrame:
    """A row per position and k, with the columns of ``topk_rows`` that the source knows."""
    import polars as pl

    if isinstance(source, pl.DataFrame):
        require(source, ("doc_id", "k", *COLUMNS), "a frame of topk_rows")
        known = sorted(set(source["k"].to_list()))
        if ks is None:
            return source
        strange = sorted(set(check_ks(ks, max(known))) - set(known))
        if strange:
            raise UserError(f"ks={strange} is not in the frame: choose among {', '.join(map(str, known))}")
        return source.filter(source["k"].is_in(list(ks)))
    if isinstance(source, (str, Path)):
        source = _opened(source)
    names = getattr(source, "column_names", None)
    if not isinstance(names, list) or "top_probs" not in names:
        raise UserError(
            "the source holds no kept ids: give anchor records, a sequence store made with top_k, or what "
            "topk_rows(...) returned"
        )
    blocks = _anchor_blocks(source) if "slot_mask" in names else _sequence_blocks(source)
    frames, chosen = [], list[int]()
    for doc_ids, probs_RK, tail_R in blocks:
        most = probs_RK.shape[-1]
        chosen = chosen or check_ks([k for k in (*KS, most) if k <= most] if ks is None else ks, most)
        frames.append(_block_frame(doc_ids, probs_RK, tail_R, chosen))
    return pl.concat(frames)


def _opened(path: str | Path) -> datasets.Dataset:
    kind = Manifest.read(path).kind
    if kind not in (ANCHORS, SEQUENCE):
        raise UserError(f"{path} holds {kind!r}: give a directory of anchor records or of a sequence store")
    return load_anchors(path) if kind == ANCHORS else load_sequences(path)


def _anchor_blocks(records: datasets.Dataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Document, kept probabilities [R, K] and tails [R] of supervised slots."""
    for lo in range(0, len(records), BLOCK_RECORDS):
        part = records.select(range(lo, min(lo + BLOCK_RECORDS, len(records))))
        a = to_arrays(part, ["doc_id", "slot_mask", "top_probs", "tail_probs"])
        mask, gamma = a["slot_mask"], a["slot_mask"].shape[1]
        yield np.repeat(a["doc_id"], gamma)[mask.reshape(-1)], a["top_probs"][mask], a["tail_probs"][mask]


def _sequence_blocks(records: datasets.Dataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The same of tokens that the next token's mask supervises."""
    for row in sequences(records):
        assert row.kept is not None
        mask = row.loss_mask_S[1:]
        yield np.full(mask.sum(), row.doc_id, object), row.kept.probs[:-1][mask], row.kept.tail[:-1][mask]


def _block_frame(doc_ids: np.ndarray, probs_RK: np.ndarray, tail_R: np.ndarray, ks: list[int]) -> pl.DataFrame:
    """Kept mass and tail for every k: the tail is what the records' own tail and the ids after the k-th sum to."""
    import polars as pl

    p, at = probs_RK.astype(np.float64), [k - 1 for k in ks]
    later = np.cumsum(p[:, ::-1], -1)[:, ::-1]
    outside = np.concatenate([later[:, 1:], np.zeros((len(p), 1))], -1) + tail_R.astype(np.float64)[:, None]
    mass, tail = np.cumsum(p, -1)[:, at].reshape(-1), outside[:, at].reshape(-1)
    n = len(ks)
    columns = {
        "doc_id": pl.Series(np.repeat(doc_ids, n).tolist(), dtype=pl.String),
        "k": pl.Series(np.tile(np.asarray(ks, np.int32), len(p)), dtype=pl.Int32),
        **{name: pl.Series(x, dtype=pl.Float64) for name, x in (("mass", mass), ("tail", tail), ("tv", tail))},
    }
    unknown = [pl.lit(None, pl.Float64).alias(name) for name in ("tv_spread", *OF_DRAFTER)]
    return pl.DataFrame(columns).with_columns(unknown)


def _summary(rows: pl.DataFrame, seed: int) -> pl.DataFrame:
    import polars as pl

    means = [pl.col(name).mean() for name in (*COLUMNS, *ERRORS)]
    most = [pl.col(name).abs().max().alias(f"{name}_most") for name in ERRORS]
    tail = pl.col("tail")
    spread = [tail.quantile(HIGH).alias("tail_p95"), tail.max().alias("tail_max")]
    counts = [pl.len().alias("positions"), pl.col("doc_id").n_unique().alias("documents")]
    frame = rows.group_by("k").agg(*counts, *means, *most, *spread).sort("k")
    bounds = []
    for k in frame["k"].to_list():
        part = rows.filter(pl.col("k") == k)
        found = bootstrap_by(part["doc_id"].to_numpy(), part["tail"].to_numpy(), seed=seed)[0]
        bounds.append((found.low, found.high))
    low, high = zip(*bounds)
    ends = (pl.Series("tail_low", low, pl.Float64), pl.Series("tail_high", high, pl.Float64))
    return frame.with_columns(*ends).drop("accept_kept", "accept_bucket", "accept_renorm")
