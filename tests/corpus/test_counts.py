"""How often ids occur: every part of a tape, and the order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.core.errors import UserError
from workbench.core.tape import Corpus, Tape


def tape(name: str, tokens: list[int], prompt_len: int = 0, mask: list[bool] | None = None) -> Tape:
    return Tape(name, np.array(tokens), prompt_len, supervised=None if mask is None else np.array(mask))


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=20), min_size=1, max_size=5))
def test_counts_shares_and_order(texts):
    frame = wb.token_counts([tape(str(i), tokens) for i, tokens in enumerate(texts)])
    expected = Counter(token for tokens in texts for token in tokens)
    rows = sorted(expected.items(), key=lambda pair: (-pair[1], pair[0]))
    assert list(zip(frame["id"], frame["count"])) == rows
    total = sum(expected.values())
    assert frame["share"].to_list() == pytest.approx([n / total for _, n in rows])
    assert frame["cumulative"].to_list() == pytest.approx(np.cumsum([n for _, n in rows]) / total)
    assert frame["cumulative"][-1] == 1.0 and frame.columns == ["id", "count", "share", "cumulative"]


def test_the_parts_of_a_tape():
    tapes = Corpus([tape("a", [1, 1, 1, 2, 3], 3, [False, False, True, True, False]), tape("b", [7], 0)])
    found = {part: dict(wb.token_counts(tapes, part=part).select("id", "count").iter_rows()) for part in
             ("output", "supervised", "all")}  # fmt: skip
    assert found == {"output": {2: 1, 3: 1, 7: 1}, "supervised": {1: 1, 2: 1, 7: 1}, "all": {1: 3, 2: 1, 3: 1, 7: 1}}
    assert wb.token_counts(tapes).equals(wb.token_counts(tapes, part="output"))
    assert wb.token_counts(tapes[1]).rows() == [(7, 1, 1.0, 1.0)]


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(UserError, match=r"tapes=list is not valid: give what corpus\(...\) returns"):
        wb.token_counts([1, 2])
    with pytest.raises(UserError, match="part='prompt' is not valid: choose one of 'output', 'supervised', 'all'"):
        wb.token_counts(tape("a", [1]), part="prompt")
    with pytest.raises(UserError, match="no token of 1 tapes counts as 'output'"):
        wb.token_counts([tape("a", [1, 2], 2)])
