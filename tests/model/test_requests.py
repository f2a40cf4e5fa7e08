"""What a forward takes and gives back, and that a malformed request is a sentence which changes nothing."""

from __future__ import annotations

import pytest
import torch

from workbench.core.errors import NonFiniteError, UserError
from workbench.model.checks import check_finite
from workbench.model.hybrid import HybridModel


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=2)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor([values])


def test_rows_have_the_stated_shapes(model):
    rows = model.forward(torch.zeros(2, 7, dtype=torch.long), model.new_cache(batch=2), taps=(0, 4))
    h, v = model.config.hidden_size, model.config.vocab_size
    assert rows.trunk_BTH.shape == rows.normed_BTH.shape == (2, 7, h)
    assert rows.logits_BTV.shape == (2, 7, v) and rows.logits_BTV.dtype == torch.float32
    assert sorted(rows.taps) == [0, 4] and torch.equal(rows.taps[4], rows.trunk_BTH)
    assert not torch.equal(rows.taps[0], rows.trunk_BTH)
    assert not rows.logits_BTV.requires_grad


def test_the_trunk_row_is_before_the_norm(model):
    rows = model.forward(ids(1, 2, 3), model.new_cache())
    y = rows.trunk_BTH.double()
    y = y / (y.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * (1 + model.norm.double())
    torch.testing.assert_close(rows.normed_BTH.double(), y, rtol=1e-5, atol=1e-6)


def test_a_later_token_changes_nothing_before_it(model):
    text = torch.arange(20)[None]
    other = text.clone()
    other[0, 12] = 60
    a, b = (model.forward(x, model.new_cache()).logits_BTV for x in (text, other))
    assert torch.equal(a[:, :12], b[:, :12])
    assert not torch.equal(a[:, 12:13], b[:, 12:13])


@pytest.mark.parametrize(
    "bad, sentence",
    [
        (dict(tokens=ids(3, 83)), r"token id 83 is out of range: this model's ids are 0 to 82"),
        (dict(tokens=ids(-1)), r"token id -1 is out of range: this model's ids are 0 to 82"),
        (
            dict(tokens=torch.zeros(1, 0, dtype=torch.long)),
            r"counts=\[0\] is not valid for 0 tokens.* at least one token",
        ),
        (
            dict(tokens=torch.zeros(2, 3, dtype=torch.long)),
            "tokens of 2 sequences and 2 counts were given to a cache of 1",
        ),
        (dict(counts=[1, 2]), "tokens of 1 sequences and 2 counts were given to a cache of 1: give one row"),
        (dict(counts=[4]), r"counts=\[4\] is not valid for 3 tokens per sequence: give 0 to 3"),
        (dict(counts=[-1]), r"counts=\[-1\] is not valid for 3 tokens"),
        (dict(logits="first"), "logits='first' is not valid: choose one of 'all', 'last', 'none'; or give row indices"),
        (dict(logits=[0, 3]), r"logits=\[0, 3\] is not valid: this forward has rows 0 to 2"),
        (dict(taps=(5,)), r"taps=\[5\] is not valid: this model's layers are 0 to 4"),
        (dict(taps=(-1,)), r"taps=\[-1\] is not valid"),
        (dict(tokens=torch.zeros(1, 11, dtype=torch.long)), r"holds 2 rows and 11 more .*room for 12"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_a_malformed_request_is_a_sentence_and_changes_nothing(model, bad, sentence):
    cache = model.new_cache(capacity=12)
    model.forward(ids(5, 6), cache)
    before = cache.fork()
    tokens = bad.pop("tokens", ids(1, 2, 3))
    with pytest.raises(UserError, match=sentence):
        model.forward(tokens, cache, **bad)
    assert cache.first_difference(before) is None
    model.forward(ids(1, 2, 3), cache)


def test_caches_are_bounded_by_the_context(model):
    assert model.new_cache().capacity == model.config.max_position_embeddings == 512
    for make in (model.new_cache, model.new_draft_cache):
        for capacity in (0, 513, -1, 2.5, True):
            with pytest.raises(
                UserError, match=rf"capacity={capacity} is not valid: it must be an integer from 1 to 512"
            ):
                make(capacity=capacity)
        with pytest.raises(UserError, match="batch=0 is not valid: it must be an integer of at least 1"):
            make(batch=0)
        assert make(capacity=512, batch=2).lengths == [0, 0]


def test_a_row_that_is_not_finite_names_its_position():
    logits = torch.zeros(4, 9)
    check_finite(logits, 100)
    check_finite(torch.full((2, 9), 3e38), 0)  # finite rows whose sum is not
    for value, word in ((float("nan"), "NaN"), (float("inf"), "infinity"), (float("-inf"), "infinity")):
        bad = logits.clone()
        bad[2, 5] = value
        with pytest.raises(
            NonFiniteError, match=f"logits of position 102 hold {word}; every logit must be finite"
        ) as caught:
            check_finite(bad, 100)
        assert caught.value.position == 102


def test_a_long_forward_leaves_no_rows_behind_in_the_window(model):
    cache = model.new_cache()
    for exact in (True, False):
        model.exact = exact
        model.forward(torch.zeros(1, 100, dtype=torch.long), cache, logits="none")
        for plane in cache.recurrent:
            held = plane.conv_BWC.untyped_storage().nbytes() + plane.state_BHKV.untyped_storage().nbytes()
            assert held == plane.nbytes
    model.exact = True


def test_training_rows_are_those_of_the_cached_forward(model):
    text = torch.arange(70)[None]
    cached = model.forward(text, model.new_cache()).normed_BTH
    torch.testing.assert_close(model.forward_train(text), cached, rtol=0, atol=3e-5)
