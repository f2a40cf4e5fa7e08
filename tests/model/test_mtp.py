"""The MTP head against an independent float64 evaluation without a cache, and its own K/V rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.core.errors import CapabilityError, UserError
from workbench.model.hybrid import HybridModel
from workbench.model.mtp import MTPHead
from workbench.model.weights.save import published_tensors

ROWS = 90
TOLERANCE = 2e-5


def setting(tiny, reference64, ratio: int, tied: bool) -> tuple[HybridModel, Tensor, Tensor, dict, dict, Tensor]:
    """A model, ids [1, T], carriers h_0..h_{T-2} in float64, published tensors, config, expected next carriers."""
    model = tiny(ratio=ratio, tied=tied, seed=ratio)
    tensors, config = published_tensors(model), model.config.to_dict()
    ids = torch.randint(0, model.config.vocab_size, (1, ROWS), generator=torch.Generator().manual_seed(2))
    _, normed, _ = reference64.evaluate(tensors, config, ids[0].tolist())
    carriers = normed[:-1].float()
    expected = reference64.mtp(tensors, config, ids[0, 1:].tolist(), carriers)
    return model, ids, carriers, tensors, config, expected


def gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


@pytest.mark.parametrize("ratio, tied", [(1, True), (2, False), (3, True)])
def test_drafting_equals_float64_whole_chunked_stepwise_and_ragged(tiny, reference64, ratio, tied):
    model, ids, carriers, tensors, _, expected = setting(tiny, reference64, ratio, tied)
    tokens, fed = ids[:, 1:], carriers.unsqueeze(0)
    head = reference64.head_of(tensors)
    for model.exact in (True, False):
        whole = model.draft(tokens, fed, model.new_draft_cache())
        assert gap(whole[0], expected) <= TOLERANCE
        assert gap(model.unembed(whole)[0], expected @ head.T) <= 5 * TOLERANCE
        cache = model.new_draft_cache()
        parts = [model.draft(tokens[:, a:b], fed[:, a:b], cache) for a, b in [(0, 30), (30, 31), (31, 32), (32, 89)]]
        assert gap(torch.cat(parts, 1)[0], expected) <= TOLERANCE
        cache = model.new_draft_cache(batch=2)
        two, carried = torch.cat([tokens, tokens.flip(1)]), torch.cat([fed, fed.flip(1)])
        out = model.draft(two[:, :20], carried[:, :20], cache, counts=[20, 3])
        assert gap(out[0, :20], expected[:20]) <= TOLERANCE
        out = model.draft(two[:, 20:30], carried[:, 20:30], cache, counts=[10, 0])
        assert cache.lengths == [30, 3]
        assert gap(out[0], expected[20:30]) <= TOLERANCE


def test_a_chain_recycles_its_own_carriers(tiny, reference64):
    model, ids, carriers, tensors, config, _ = setting(tiny, reference64, 2, True)
    p, steps = 40, 4
    model.exact = True
    cache = model.new_draft_cache()
    carrier = model.draft(ids[:, 1 : p + 1], carriers[:p].unsqueeze(0), cache)[:, -1:]
    known, own = ids[0, 1 : p + 1].tolist(), carriers[:p].double()
    head = reference64.head_of(tensors)
    for _ in range(steps):
        expected = reference64.mtp(tensors, config, known, own)[-1]
        assert gap(carrier[0, 0], expected) <= TOLERANCE
        token = int(model.unembed(carrier)[0, 0].argmax())
        assert token == int((head @ expected).argmax())
        known, own = [*known, token], torch.cat([own, expected[None]])
        carrier = model.draft(torch.tensor([[token]]), carrier, cache)


def swapped_concat(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    h = model.config.hidden_size
    model.mtp.fc.copy_(model.mtp.fc.roll(h, 1))


def no_final_norm(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    model.mtp.norm.fill_(0.0)


def plain_weight_norm(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    model.mtp.embedding_norm -= 1.0


def no_residual_through_attention(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    after = MTPHead.after
    patch.setattr(MTPHead, "after", lambda self, x, mixed, num: after(self, torch.zeros_like(x), mixed, num))


def every_pair_at_position_zero(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    positions = HybridModel._positions
    patch.setattr(HybridModel, "_positions", lambda self, at, t: tuple(x[:, :1] for x in positions(self, at, t)))


@pytest.mark.parametrize(
    "mistake",
    [swapped_concat, no_final_norm, plain_weight_norm, no_residual_through_attention, every_pair_at_position_zero],
)
def test_the_comparison_catches(tiny, reference64, monkeypatch, mistake):
    model, ids, carriers, _, _, expected = setting(tiny, reference64, 2, True)
    with torch.no_grad():
        mistake(monkeypatch, model)
    wrong = model.draft(ids[:, 1:], carriers.unsqueeze(0), model.new_draft_cache())
    assert gap(wrong[0], expected) > 50 * TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_pairing_is_another_input(tiny, reference64, shift):
    model, ids, carriers, _, _, expected = setting(tiny, reference64, 2, True)
    wrong = model.draft(ids[:, 1:], carriers.roll(shift, 0).unsqueeze(0), model.new_draft_cache())
    assert gap(wrong[0], expected) > 50 * TOLERANCE


def test_a_constant_shift_of_all_positions_changes_nothing(tiny, reference64, monkeypatch):
    """Rotary positions are relative and the head sees only its own rows, so slots may be counted from any start."""
    model, ids, carriers, _, _, expected = setting(tiny, reference64, 2, True)
    positions = HybridModel._positions
    monkeypatch.setattr(HybridModel, "_positions", lambda self, at, t: positions(self, [n + 1 for n in at], t))
    moved = model.draft(ids[:, 1:], carriers.unsqueeze(0), model.new_draft_cache())
    assert gap(moved[0], expected) <= TOLERANCE


def test_the_carrier_kinds(tiny):
    model = tiny()
    ids = torch.arange(5).unsqueeze(0)
    rows = model.forward(ids, model.new_cache(), logits="none")
    assert model.carrier(rows) is rows.normed_BTH
    assert model.carrier(rows, "normed") is rows.normed_BTH
    assert model.carrier(rows, "pre_norm") is rows.trunk_BTH
    with pytest.raises(UserError, match=r"carrier='post' is not valid.*'normed', 'pre_norm'"):
        model.carrier(rows, "post")


def test_without_a_head_drafting_is_refused_in_a_sentence(tiny):
    model = tiny(mtp=False)
    assert not model.can_draft
    for ask in (model.new_draft_cache, lambda: model.draft(torch.zeros(1, 1, dtype=torch.long), None, None)):
        with pytest.raises(CapabilityError, match=r"tiny has no mtp\.\* weights, so it cannot draft: use k=0"):
            ask()


def test_carriers_of_another_shape_are_refused_and_nothing_changes(tiny):
    model = tiny()
    cache = model.new_draft_cache()
    with pytest.raises(UserError, match=r"carriers of shape \(1, 3, 30\) were given for 1 × 2 tokens.*width 30"):
        model.draft(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 3, 30), cache)
    assert cache.lengths == [0]
    model.draft(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, 30), cache)
