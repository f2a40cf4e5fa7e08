"""Published geometries have the published sizes, and random models in them stay finite and say more than one thing."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.core.errors import UserError
from workbench.model import shapes
from workbench.model.shapes import SHAPES, parameter_count, published_config, random_model
from workbench.model.traffic import (
    draft_bytes,
    expected_emitted,
    forward_bytes,
    forward_products,
    state_bytes,
    weight_parts,
)

BILLIONS = {"0.8B": 0.752, "2B": 1.882, "4B": 4.206, "9B": 8.954, "27B": 26.90}
READ = {"0.8B": 0.752, "2B": 1.88, "4B": 4.21, "9B": 7.94, "27B": 25.6}
DRAFT = {"0.8B": 0.365, "2B": 0.303, "4B": 0.180, "9B": 0.159, "27B": 0.066}
TRIMMED = {"0.8B": 0.072, "2B": 0.068, "4B": 0.049, "9B": 0.048, "27B": 0.023}
STATE = {"0.8B": (18, 1.27), "2B": (18, 1.27), "4B": (48, 2.25), "9B": (48, 2.25), "27B": (144, 5.62)}


@pytest.mark.parametrize("name", SHAPES)
def test_totals_are_the_published_ones(name):
    config = published_config(name)
    digits = 2 if name == "27B" else 3
    assert round(parameter_count(config) / 1e9, digits) == BILLIONS[name]
    parts = weight_parts(config)
    read = parts["body"] + parts["head"]
    assert f"{read / 1e9:.3g}" == f"{READ[name]:.3g}"
    assert f"{(parts['mtp'] + parts['head']) / read:.3f}" == f"{DRAFT[name]:.3f}"
    assert f"{(parts['mtp'] + 32_768 * config.hidden_size) / read:.3f}" == f"{TRIMMED[name]:.3f}"
    states, windows = STATE[name]
    without = state_bytes(config, itemsize=0)
    assert without == states << 20
    assert (state_bytes(config, itemsize=4) - without) / 2**20 == pytest.approx(windows, abs=0.006)


def test_heads_have_the_published_number_of_parameters():
    assert weight_parts(published_config("27B"))["mtp"] == 424_699_392
    assert f"{weight_parts(published_config('4B'))['mtp'] / 1e6:.1f}" == "120.6"


def test_a_geometry_that_is_off_by_one_head_is_noticed(monkeypatch):
    h, i, layers, heads, kv, value, tied = shapes._PUBLISHED["4B"]
    monkeypatch.setitem(shapes._PUBLISHED, "4B", (h, i, layers, heads, kv + 1, value, tied))
    monkeypatch.setitem(shapes._PUBLISHED, "0.8B", (1024, 3584, 24, 12, 3, 16, True))
    for name in ("0.8B", "4B"):
        with pytest.raises((AssertionError, UserError)):
            test_totals_are_the_published_ones(name)


def test_other_names_are_refused():
    with pytest.raises(UserError, match=r"shape='7B' is not valid: choose one of '0.8B'"):
        random_model("7B")
    with pytest.raises(UserError, match="seed=-1"):
        random_model("tiny", seed=-1)


def test_counts_agree_with_a_model_and_its_cache():
    model = random_model("tiny")
    config = model.config
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config, mtp=True)
    cache = model.new_cache(capacity=64)
    with torch.inference_mode():
        model.forward(torch.arange(1, 33)[None], cache, logits="none")
    assert state_bytes(config, itemsize=4) == sum(plane.nbytes for plane in cache.recurrent)
    one, four = (forward_bytes(config, rows=n, context=100, itemsize=4) for n in (1, 4))
    kv_row = 2 * config.num_key_value_heads * config.head_dim * 4
    assert four - one == 3 * (config.layer_types.count("full_attention") * kv_row + 4 * config.hidden_size)
    whole, trimmed = draft_bytes(config, itemsize=4), draft_bytes(config, itemsize=4, vocab=10)
    assert whole - trimmed == 4 * (config.vocab_size - 10) * config.hidden_size


def test_products_are_counted_as_torch_counts_them():
    from torch.utils.flop_counter import FlopCounterMode

    model, t = random_model("tiny", exact=False), 24
    config, cache = model.config, model.new_cache(capacity=64)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.forward(torch.arange(1, t + 1)[None], cache, logits="last")
    by_weights = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    full, delta = config.layer_types.count("full_attention"), config.layer_types.count("linear_attention")
    attention = 4 * full * config.num_attention_heads * config.head_dim * t * (t + 1) // 2
    rule = 6 * delta * config.value_dim * config.linear_key_head_dim * t
    convolution = 2 * delta * config.conv_dim * config.linear_conv_kernel_dim * t
    padded = 2 * config.vocab_size * config.hidden_size  # a CPU takes one row of logits as two
    assert forward_products(config, rows=t) == by_weights - padded + attention + rule + convolution


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_models_are_finite_and_their_text_is_not_constant(dtype):
    model = random_model("tiny", dtype=dtype)
    again, other = random_model("tiny", dtype=dtype), random_model("tiny", dtype=dtype, seed=1)
    for (name, a), b, c in zip(model.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        assert name.endswith("dt_bias") or not torch.equal(a, c), name
    text = _greedy(model, 48)
    assert len(set(text)) > 12
    cache, draft = model.new_cache(), model.new_draft_cache()
    ids = torch.arange(1, 65)[None]
    with torch.inference_mode():
        rows = model.forward(ids, cache)
        drafted = model.unembed(model.draft(ids, rows.normed_BTH, draft))
    for logits in (rows.logits_BTV, drafted):
        assert bool(torch.isfinite(logits).all()) and 0.5 < float(logits.std()) < 2
        assert len(set(logits.argmax(-1)[0].tolist())) > 12


def test_a_tied_model_of_large_embeddings_repeats_itself():
    model = random_model("tiny")
    model.embed.mul_(20)
    assert len(set(_greedy(model, 48))) < 4


def _greedy(model, n):
    cache, feed, out = model.new_cache(), [5, 6, 7], []
    with torch.inference_mode():
        for _ in range(n):
            logits = model.forward(torch.tensor([feed]), cache, logits="last").logits_BTV
            out.append(int(logits[0, -1].argmax()))
            feed = [out[-1]]
    return out


def test_expected_length_of_a_round():
    assert expected_emitted(()) == 1
    assert math.isclose(expected_emitted((0.87, 0.69, 0.53)), 3.09)
