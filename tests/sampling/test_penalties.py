"""Penalties against a slow loop and against transformers; rows of a verify equal calls one by one."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch

from workbench.core.errors import UserError
from workbench.sampling.options import Shaping
from workbench.sampling.penalties import penalise, penalise_rows


def slowly(logits: torch.Tensor, history: list[int], shaping: Shaping) -> torch.Tensor:
    """Id by id in numpy scalars of the row's dtype, each step rounded."""
    row, f = logits.numpy().copy(), logits.numpy().dtype.type
    window = history if shaping.penalty_last_n is None else history[-shaping.penalty_last_n :]
    for i in set(window) if shaping.penalised else ():
        if 0 <= i < len(row):
            r = f(shaping.repetition_penalty)
            row[i] = row[i] / r if row[i] > 0 else row[i] * r
            row[i] = row[i] - f(window.count(i)) * f(shaping.frequency_penalty)
            row[i] = row[i] - f(shaping.presence_penalty)
    for i, bias in shaping.bias:
        row[i] += f(bias)
    return torch.from_numpy(row)


def case(seed: int) -> tuple[torch.Tensor, list[int], list[int], Shaping]:
    draw = np.random.default_rng(seed)
    vocab = int(draw.integers(5, 40))
    logits = torch.from_numpy(draw.normal(0, 4, (6, vocab)).astype(np.float32))
    logits[draw.random((6, vocab)) < 0.1] = 0.0
    logits[:, 0] = -inf
    history = draw.integers(-2, vocab + 3, int(draw.integers(0, 60))).tolist()
    drafted = draw.integers(0, vocab, 5).tolist()
    shaping = Shaping(
        repetition_penalty=float(draw.choice([1.0, 1.3, 0.7])),
        frequency_penalty=float(draw.choice([0.0, 0.4, -1.1])),
        presence_penalty=float(draw.choice([0.0, 0.9, -2.0])),
        penalty_last_n=[None, 1, 3, 10, 64][int(draw.integers(5))],
        logit_bias={} if draw.random() < 0.5 else {1: 1.7, 2: -inf},
    )
    return logits, history, drafted, shaping


@pytest.mark.parametrize("seed", range(60))
def test_rows_equal_calls_one_by_one_and_a_slow_loop(seed):
    logits, history, drafted, shaping = case(seed)
    before = logits.clone()
    rows = penalise_rows(logits, history, drafted, shaping)
    for r in range(len(logits)):
        text = history + drafted[:r]
        assert torch.equal(rows[r], penalise(logits[r], text, shaping))
        assert torch.equal(rows[r], slowly(logits[r], text, shaping))
        assert torch.equal(rows[r], penalise(logits[r], np.array(text, dtype=np.int32), shaping))
    assert torch.equal(logits, before)


def test_the_repetition_penalty_is_that_of_transformers():
    theirs = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor
    draw = torch.Generator().manual_seed(0)
    for penalty in (1.2, 0.8, 3.0):
        row = torch.randn(97, generator=draw) * 3
        history = torch.randint(0, 97, (50,), generator=draw)
        expected = theirs(penalty)(history[None], row[None].clone())[0]
        assert torch.equal(penalise(row, history.tolist(), Shaping(repetition_penalty=penalty)), expected)


def test_numbers_by_hand():
    row, history = torch.tensor([2.0, -2.0, 1.0, 0.5]), [0, 1, 1, 9, -4, 0, 0]
    shaping = Shaping(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={3: 1.5})
    assert penalise(row, history, shaping).tolist() == [1.0 - 1.5 - 0.25, -4.0 - 1.0 - 0.25, 1.0, 2.0]


def test_a_row_to_which_nothing_applies_is_returned_as_it_is():
    row = torch.randn(7)
    assert penalise(row, [1, 2], Shaping()).data_ptr() == row.data_ptr()
    for history in ([], [-1, 7]):
        assert penalise(row, history, Shaping(presence_penalty=1.0)).data_ptr() == row.data_ptr()


def test_a_bias_of_an_id_that_the_vocabulary_lacks_is_a_sentence():
    with pytest.raises(UserError, match="logit_bias names id 7, but the vocabulary has 7 ids"):
        penalise(torch.zeros(7), [], Shaping(logit_bias={7: 1.0}))
