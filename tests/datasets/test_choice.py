"""Which anchors a tape gives, and how records are filled over chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.errors import UserError
from workbench.core.tape import Tape
from workbench.datasets.anchors import anchor_positions, check_anchors, slot_mask
from workbench.datasets.shards import plan_shards
from workbench.datasets.topk import SparseRows
from workbench.datasets.window import Window


def tape(length: int, prompt_len: int = 0, doc_id: str = "d", mask: np.ndarray | None = None) -> Tape:
    return Tape(doc_id, np.arange(length) % 50, prompt_len=prompt_len, supervised=mask)


@given(st.integers(3, 200), st.integers(1, 8), st.integers(1, 12), st.integers(0, 3), st.data())
def test_one_anchor_per_equal_bucket(length, gamma, count, seed, data):
    if length < gamma + 2:
        return
    prompt = data.draw(st.integers(0, length - gamma))
    got = anchor_positions(tape(length, prompt), anchors=count, gamma=gamma, seed=seed)
    first, last = max(prompt - 1, 1), length - gamma - 1
    width = last - first + 1
    assert len(got) == min(count, width) and (np.diff(got) > 0).all()
    take = len(got)
    for i, p in enumerate(got):
        assert first + i * width // take <= p < first + (i + 1) * width // take
    every = anchor_positions(tape(length, prompt), anchors="all", gamma=gamma, seed=seed)
    assert every.tolist() == list(range(first, last + 1))


def test_the_draw_depends_on_seed_and_document_alone():
    def at(doc: str, seed: int) -> list[int]:
        return anchor_positions(tape(5000, doc_id=doc), anchors=4, gamma=5, seed=seed).tolist()

    assert at("a", 20260811) == at("a", 20260811) == [890, 2315, 3715, 4769]
    assert at("a", 1) != at("a", 20260811) != at("b", 20260811)
    drawn = np.array([at(f"d{i}", 0)[0] for i in range(400)])
    assert abs(drawn.mean() - 625) < 5 * 361 / 20, "uniform within its bucket of 1,248 positions"


def test_anchors_are_drawn_where_a_slot_is_supervised():
    mask = np.zeros(100, dtype=bool)
    mask[40:50] = mask[90:92] = True
    chat = tape(100, 40, mask=mask)
    got = anchor_positions(chat, anchors=6, gamma=3, seed=0)
    slots = slot_mask(chat, got, 3)
    assert slots.any(-1).all()
    assert slots.tolist() == [[bool(mask[p + j + 1]) for j in range(3)] for p in got]
    every = anchor_positions(chat, anchors="all", gamma=3, seed=0)
    assert every.tolist() == list(range(39, 97)) and not slot_mask(chat, every, 3).any(-1).all()
    assert slot_mask(tape(9), np.array([1, 2]), 3).all()


def test_lists_and_mappings():
    assert anchor_positions(tape(10), anchors=(1, 4), gamma=5, seed=0).tolist() == [1, 4]
    assert anchor_positions(tape(10), anchors={"d": (2,)}, gamma=5, seed=0).tolist() == [2]
    assert check_anchors(np.array([1, 3])) == (1, 3) and check_anchors({"d": [2]}) == {"d": (2,)}


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "most", [], [0, 1], [2, 2], [3, 1], [1.5], ["1"], {"d": []}, None])
def test_a_choice_that_is_none_is_a_sentence(bad):
    with pytest.raises(UserError, match="not valid"):
        check_anchors(bad)


@pytest.mark.parametrize(
    ("of", "anchors", "says"),
    [
        (tape(6), 4, r"'d' has 6 tokens; gamma=5 needs at least 7.*min_tokens=7"),
        (tape(20, 17), 4, r"3 tokens after its prompt.*min_response=5"),
        (tape(10), (1, 5), r"anchor 5 does not fit.*positions 1 to 4 are valid"),
        (tape(10), {"e": (1,)}, "no positions for document 'd'"),
        (tape(20, 4, mask=np.arange(20) < 4), 4, "no position with a supervised slot"),
    ],
)
def test_a_tape_that_does_not_fit_is_a_sentence(of, anchors, says):
    with pytest.raises(UserError, match=says):
        anchor_positions(of, anchors=anchors, gamma=5, seed=0)


def rows_at(positions: np.ndarray) -> SparseRows:
    """Rows that say where they are from."""
    p = positions.astype(np.float32)
    return SparseRows(positions[:, None].astype(np.int32), p[:, None], p[:, None], p, p, p)


@given(st.integers(3, 60), st.integers(1, 6), st.integers(1, 17), st.data())
def test_records_that_straddle_chunks_are_whole(length, gamma, chunk, data):
    if length < gamma + 2:
        return
    last = length - gamma - 1
    positions = np.array(sorted(data.draw(st.sets(st.integers(1, last), min_size=1))))
    window, filled = Window(positions, gamma), []
    assert window.end <= length - 1, "the last token is predicted, never fed"
    for start in range(0, window.end, chunk):
        end = min(start + chunk, window.end)
        scored, carriers = window.scored_in(start, end), window.carriers_in(start, end)
        assert all(any(p <= q < p + gamma for p in positions) for q in scored), "only what a record needs is scored"
        made = window.add(end, scored, rows_at(scored) if len(scored) else None, carriers[:, None].astype(np.float32))
        filled += [] if made is None else [made]
        assert window.held <= chunk + 2 * gamma
    assert np.array_equal(np.concatenate([f.positions for f in filled]), positions)
    assert np.array_equal(np.concatenate([f.hidden_NH[:, 0] for f in filled]), positions - 1)
    slots = np.concatenate([f.slots.ids[:, 0] for f in filled]).reshape(-1, gamma)
    assert np.array_equal(slots, positions[:, None] + np.arange(gamma))


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 20))
def test_shards_are_ranges_of_whole_documents(rows, shard_rows):
    plan = plan_shards(rows, shard_rows)
    assert [i for a, b in plan for i in range(a, b)] == list(range(len(rows)))
    sizes = [sum(rows[a:b]) for a, b in plan]
    assert all(n >= shard_rows for n in sizes[:-1]) and all(n < shard_rows + 9 for n in sizes)
