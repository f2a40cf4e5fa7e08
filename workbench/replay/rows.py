"""What compiled walks read of a draft table: its documents, and flat arrays of one shard at a time.

Legend: R rows of a shard, K slots, G documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.core.tape import first_pending
from workbench.replay.ratio import chances, chances_of
from workbench.replay.shards import shard_tables
from workbench.replay.tracks import COLUMNS, OPTIONAL, tracks_of
from workbench.replay.walk import check_own, rounding
from workbench.sampling.philox import ACCEPT, TAG, Noise, philox, uniform

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.replay.table import DraftTable


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a table, in order.

    Args:
        ids: Document ids [G].
        sources: Their registers [G].
        longest: Tokens of the longest.
        rows: Rows of every shard.
    """

    ids: tuple[str, ...]
    sources: tuple[str, ...]
    longest: int
    rows: tuple[int, ...]

    @classmethod
    def of(cls, table: DraftTable) -> Documents:
        """Read them from a table."""
        ids: list[str] = []
        sources: list[str] = []
        longest, rows = 0, []
        for shard in shard_tables(table, ("doc_id", "source", "position", "length")):
            begins = np.flatnonzero(shard["position"].to_numpy() == 0)
            ids += shard["doc_id"].take(begins).to_pylist()
            sources += shard["source"].take(begins).to_pylist()
            longest = max(longest, int(shard["length"].to_numpy().max()))
            rows.append(len(shard))
        return cls(tuple(ids), tuple(sources), longest, tuple(rows))


@dataclass(frozen=True, eq=False)
class Rows:
    """What a compiled walk reads of a shard.

    Args:
        match_R: Drafts in a row that stand, and whether the next one is the target's pick off the text, uint8.
        prob_RK: What a policy that reads "drawn" or "top" sees of every slot, by that name, float64.
        begin_G: Row of every document's position 0.
        first_G: Position of its first pending token.
        end_G: Position of its last token.
    """

    match_R: np.ndarray
    prob_RK: dict[str, np.ndarray]
    begin_G: np.ndarray
    first_G: np.ndarray
    end_G: np.ndarray


def shard_rows(table: DraftTable, picked: str, seed: int) -> Iterator[Rows]:
    """The arrays of every shard in turn.

    Args:
        table: The draft table.
        picked: The estimator.
        seed: Of the acceptances that "ratio" draws.

    Yields:
        One set of arrays per shard.

    Raises:
        UserError: A text is not what the estimator needs.
    """
    needed = OPTIONAL if picked == "ratio" else OPTIONAL[:1]
    more = [name for name in needed if name in table.dataset.column_names]
    shift, edge = 0, rounding(table)
    for shard in shard_tables(table, (*COLUMNS, "position", *more)):
        position_R = shard["position"].to_numpy()
        begin_G = np.flatnonzero(position_R == 0)
        prompts = shard["prompt_len"].to_numpy()[begin_G].tolist()
        first_G = np.array([first_pending(one) for one in prompts], np.int64)
        end_G = shard["length"].to_numpy()[begin_G].astype(np.int64) - 1
        if picked == "own":
            _check_texts(shard, position_R - np.repeat(first_G, end_G), edge, not table.plain)
        if picked == "ratio":
            yield _ratio_rows(shard, position_R, begin_G, first_G, end_G, seed, shift)
        else:
            yield _match_rows(shard, begin_G, first_G, end_G, picked == "forced")
        shift += len(begin_G)


def _check_texts(shard: pa.Table, after_R: np.ndarray, edge: float, drawn: bool) -> None:
    """Refuse a shard that holds a text the target would not have generated, in the words of ``check_own``."""
    wrong_R = shard["target_id"].to_numpy() != shard["next_token"].to_numpy()
    if (wrong_R & (shard["target_margin"].to_numpy() >= edge) & (after_R >= -1)).any():
        for track in tracks_of(shard):
            check_own(track, edge, drawn=drawn)


def _slots(shard: pa.Table, name: str, kind: type, empty: float) -> np.ndarray:
    """A column of slots as an array [R, K] of its own, ``empty`` where a slot holds nothing."""
    import pyarrow.compute as pc

    (column,) = shard[name].chunks
    flat = pc.fill_null(column.flatten(), empty).to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), -1).astype(kind)


def _match_rows(shard: pa.Table, begin_G: np.ndarray, first_G: np.ndarray, end_G: np.ndarray, forced: bool) -> Rows:
    from workbench.replay.kernel import match_rows

    match_R = np.zeros(len(shard), np.uint8)
    drafts_RK = _slots(shard, "draft_ids", np.int32, -1)
    text_R, pick_R = (shard[name].to_numpy().astype(np.int32) for name in ("next_token", "target_id"))
    row = match_rows(drafts_RK, text_R, pick_R, begin_G, first_G, end_G, forced, match_R)
    assert row < 0, f"a slot of {shard['doc_id'][row]} {shard['position'][row]} has no draft recorded"
    drawn_RK = _slots(shard, "draft_top1", np.float64, np.nan)
    top_RK = _slots(shard, "draft_top", np.float64, np.nan) if "draft_top" in shard.column_names else drawn_RK
    return Rows(match_R, {"drawn": drawn_RK, "top": top_RK}, begin_G, first_G, end_G)


def _ratio_rows(
    shard: pa.Table,
    position_R: np.ndarray,
    begin_G: np.ndarray,
    first_G: np.ndarray,
    end_G: np.ndarray,
    seed: int,
    shift: int,
) -> Rows:
    """Acceptances drawn as ``ratio_rounds`` draws them: a draw belongs to a slot's position and to a round's start, so
    each start has its own number of drafts that stand, whatever the policy."""
    target_R = shard["target_p"].to_numpy()
    end_R = np.repeat(begin_G + end_G, end_G)
    if ((target_R <= 0) & (position_R - np.repeat(first_G, end_G) >= -1)).any():
        for track in tracks_of(shard):
            chances(track)
    stands_RK = chances_of(_slots(shard, "forced_q", np.float64, np.nan), target_R, end_R)
    keys_2G = np.array([Noise(seed, shift + g).key for g in range(len(begin_G))], np.int64).T
    keys_2R = np.repeat(keys_2G, end_G, axis=1)
    match_R = np.zeros(len(shard), np.uint8)
    alive = np.arange(len(shard))
    for slot in range(stands_RK.shape[1]):
        at = position_R[alive].astype(np.int64)
        words = philox((TAG, at + 1 + slot, ACCEPT, at), tuple(keys_2R[:, alive]))  # type: ignore[arg-type]
        alive = alive[uniform(words[0]) < stands_RK[alive, slot]]
        match_R[alive] += 1
    top_RK = _slots(shard, "forced_top", np.float64, np.nan)
    return Rows(match_R, {"drawn": top_RK, "top": top_RK}, begin_G, first_G, end_G)
