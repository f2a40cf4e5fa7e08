"""Logits against transformers' Qwen3_5ForCausalLM and against an independent float64 evaluation.

Every comparison is shown to have teeth: the same check fails under each of the mistakes listed in ``MISTAKES``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workbench.cache.recurrent import RecurrentPlane
from workbench.model.attention import GatedAttention
from workbench.model.config import FULL
from workbench.model.delta import GatedDeltaNet
from workbench.model.hybrid import Block, HybridModel
from workbench.model.rotary import Rotary
from workbench.model.weights.load import load_model

pytest.importorskip("transformers")

TOLERANCE = 5e-5  # logits reach about 3 in float32
ROWS = 150  # past two key blocks of 64 and two chunks of 64
VARIANTS = [(ratio, tied) for ratio in (1, 2, 3) for tied in (True, False)]
DATA = Path(__file__).resolve().parents[2] / "data"


def ids_of(model: HybridModel, rows: int = ROWS, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, model.config.vocab_size, (batch, rows), generator=generator)


def whole(model: HybridModel, ids_BT: Tensor) -> Tensor:
    """Logits of one forward."""
    logits = model.forward(ids_BT, model.new_cache(batch=len(ids_BT))).logits_BTV
    assert logits is not None
    return logits


def pieces(model: HybridModel, ids_BT: Tensor, sizes: list[int]) -> Tensor:
    """Logits of consecutive forwards of the given sizes, the last one repeated until the text ends."""
    cache, out, at = model.new_cache(batch=len(ids_BT)), [], 0
    while at < ids_BT.shape[1]:
        n = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out.append(model.forward(ids_BT[:, at : at + n], cache).logits_BTV)
        at += n
    return torch.cat(out, 1)


def ragged(model: HybridModel, ids_BT: Tensor, lengths: list[int], steps: list[list[int]]) -> list[Tensor]:
    """Logits of each sequence up to its length, fed by ragged forwards that cycle through ``steps``."""
    cache = model.new_cache(batch=len(ids_BT))
    out: list[list[Tensor]] = [[] for _ in lengths]
    turn = 0
    while list(cache.lengths) != lengths:
        want = steps[turn % len(steps)]
        counts = [min(n, end - at) for n, end, at in zip(want, lengths, cache.lengths)]
        width = max(1, *counts)
        # Padding repeats the last id of the vocabulary: it must change nothing.
        fed = torch.full((len(lengths), width), model.config.vocab_size - 1)
        for b, (n, at) in enumerate(zip(counts, cache.lengths)):
            fed[b, :n] = ids_BT[b, at : at + n]
        logits = model.forward(fed, cache, counts=counts).logits_BTV
        for b, n in enumerate(counts):
            out[b].append(logits[b, :n])
        turn += 1
    return [torch.cat(rows) for rows in out]


def gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


@pytest.mark.parametrize("ratio, tied", VARIANTS)
def test_logits_equal_transformers_whole_chunked_stepwise_and_ragged(hf_tiny, ratio, tied):
    tiny = hf_tiny(ratio=ratio, tied=tied)
    model = load_model(tiny.path)
    ids = ids_of(model)
    three = torch.cat([ids, ids.flip(1), ids.roll(7, 1)])
    with torch.no_grad():
        expected = tiny.hf(three).logits
    assert 2.0 < float(expected.abs().max()) < 6.0, "the tolerance is meant for logits of this size"
    for model.exact in (True, False):
        assert gap(whole(model, ids), expected[:1]) <= TOLERANCE
        assert gap(pieces(model, ids, [64, 37, 1, 17]), expected[:1]) <= TOLERANCE
        assert gap(pieces(model, ids[:, :8], [1]), expected[:1, :8]) <= TOLERANCE
        assert gap(pieces(model, ids[:, :70], [58, *[1] * 9, 3]), expected[:1, :70]) <= TOLERANCE
        for lengths, steps in (([ROWS, 70, 101], [[40, 70, 17]]), ([20, 9, 13], [[3, 0, 2], [1, 4, 3]])):
            for b, logits in enumerate(ragged(model, three, lengths, steps)):
                assert gap(logits, expected[b, : lengths[b]]) <= TOLERANCE, f"sequence {b}"


@pytest.mark.full
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("ratio, tied", VARIANTS)
def test_logits_equal_transformers_step_by_step_to_the_end(hf_tiny, ratio, tied, exact):
    tiny = hf_tiny(ratio=ratio, tied=tied)
    model = load_model(tiny.path, exact=exact)
    three = torch.cat([ids_of(model), ids_of(model).flip(1), ids_of(model).roll(7, 1)])
    with torch.no_grad():
        expected = tiny.hf(three).logits
    for n in (1, 2, 5, 9, 16, 17, 63, 64, 65):
        assert gap(pieces(model, three, [n]), expected) <= TOLERANCE, f"{n} rows at a time"
    lengths = [ROWS, 70, 101]
    for b, logits in enumerate(ragged(model, three, lengths, [[3, 0, 2], [1, 4, 3]])):
        assert gap(logits, expected[b, : lengths[b]]) <= TOLERANCE, f"sequence {b}"


@pytest.mark.parametrize("ratio, tied", VARIANTS)
def test_our_error_against_float64_is_that_of_transformers(hf_tiny, reference64, ratio, tied):
    tiny = hf_tiny(ratio=ratio, tied=tied)
    model = load_model(tiny.path)
    ids = ids_of(model)
    trunk, normed, logits = reference64.evaluate(tiny.tensors, tiny.config, ids[0].tolist())
    with torch.no_grad():
        theirs = gap(tiny.hf(ids).logits[0], logits)
    assert theirs < TOLERANCE
    for model.exact in (True, False):
        rows = model.forward(ids, model.new_cache())
        assert gap(rows.logits_BTV[0], logits) <= max(2 * theirs, 2e-5)
        assert gap(rows.trunk_BTH[0], trunk) < 1e-5
        assert gap(rows.normed_BTH[0], normed) < 3e-5


# ----------------------------------------------------------------------------------------------- mistakes
# Each is (kind of model on which it matters, mode in which it is made), and a function that makes it.


def plain_weight_norm(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    patch.setattr(HybridModel, "final_scale", property(lambda self: self.norm.float()))


def one_plus_gated_norm(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, GatedDeltaNet):
            layer.mixer.norm += 1.0


def plain_head_norms(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, GatedAttention):
            layer.mixer.q_norm -= 1.0


def key_heads_modulo(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    def wrong(x: Tensor, dim: int, index: Tensor) -> Tensor:
        queries, keys = x.chunk(2, dim)
        times = len(index) // x.shape[dim]
        return torch.cat([queries] * times + [keys] * times, dim)

    patch.setattr(Tensor, "index_select", wrong)


def query_groups_modulo(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    project = GatedAttention.project

    def wrong(self: GatedAttention, *args: object) -> tuple[Tensor, ...]:
        q, k, v, gate = project(self, *args)  # type: ignore[arg-type]
        b, t, n, g, d = q.shape
        return q.reshape(b, t, g, n, d).transpose(2, 3).contiguous(), k, v, gate

    patch.setattr(GatedAttention, "project", wrong)


def gates_after_all_queries(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, GatedAttention):
            rows = 2 * layer.mixer.n * layer.mixer.g * layer.mixer.d
            packed = layer.mixer.qkv[:rows].clone().view(2, -1, layer.mixer.d, model.config.hidden_size)
            layer.mixer.qkv[:rows] = packed.transpose(0, 1).reshape(rows, -1)


def convolution_reversed(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, GatedDeltaNet):
            layer.mixer.conv.copy_(layer.mixer.conv.flip(1))


def rotary_in_pairs(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    def wrong(self: Rotary, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.dim // 2
        a, b, c, s = x[..., : self.dim : 2], x[..., 1 : self.dim : 2], cos[..., :half], sin[..., half:]
        c, s = c.unsqueeze(-2), s.unsqueeze(-2)
        return torch.cat([torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2), x[..., self.dim :]], -1)

    patch.setattr(Rotary, "forward", wrong)


def rotary_at_the_end(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    forward = Rotary.forward

    def wrong(self: Rotary, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return forward(self, x.roll(self.dim, -1), cos, sin).roll(-self.dim, -1)

    patch.setattr(Rotary, "forward", wrong)


def positions_shifted_in_later_chunks(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    positions = HybridModel._positions
    patch.setattr(HybridModel, "_positions", lambda self, at, t: positions(self, [n + 1 if n else 0 for n in at], t))


def positions_of_the_first_sequence(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    positions = HybridModel._positions
    patch.setattr(HybridModel, "_positions", lambda self, at, t: positions(self, [at[0]] * len(at), t))


def no_output_gate(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    finish = GatedAttention.finish
    patch.setattr(GatedAttention, "finish", lambda self, out, gate, num: finish(self, out, gate + 20.0, num))


def window_lost_between_chunks(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    put = RecurrentPlane.put
    patch.setattr(RecurrentPlane, "put", lambda self, conv, *rest: put(self, torch.zeros_like(conv), *rest))


def state_lost_between_chunks(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    put = RecurrentPlane.put
    patch.setattr(RecurrentPlane, "put", lambda self, conv, s, x: put(self, conv, torch.zeros_like(s), x))


def padding_feeds_the_state(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    forward = GatedDeltaNet.forward
    patch.setattr(
        GatedDeltaNet, "forward", lambda self, x, p, counts, num: forward(self, x, p, [x.shape[1]] * len(x), num)
    )


def residual_from_the_norm(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    feed = Block.feed
    patch.setattr(Block, "feed", lambda self, x, mixed, num: feed(self, self.normed(x), mixed, num))


def gate_and_up_swapped(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    for layer in model.layers:
        layer.ffn.gate_up.copy_(layer.ffn.gate_up.roll(layer.ffn.width, 0))


def decay_of_another_head(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, GatedDeltaNet):
            layer.mixer.dt_bias.copy_(layer.mixer.dt_bias.roll(1))


def beta_and_decay_swapped(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, GatedDeltaNet):
            tail = 2 * layer.mixer.hv
            layer.mixer.in_proj[-tail:] = layer.mixer.in_proj[-tail:].roll(layer.mixer.hv, 0)


EVERYWHERE = (
    plain_weight_norm,
    one_plus_gated_norm,
    plain_head_norms,
    key_heads_modulo,
    query_groups_modulo,
    gates_after_all_queries,
    convolution_reversed,
    rotary_in_pairs,
    rotary_at_the_end,
    no_output_gate,
    residual_from_the_norm,
    gate_and_up_swapped,
    decay_of_another_head,
    beta_and_decay_swapped,
)
IN_PIECES = (positions_shifted_in_later_chunks, window_lost_between_chunks, state_lost_between_chunks)
IN_BATCHES = (positions_of_the_first_sequence, padding_feeds_the_state)
MISTAKES = [
    *((m, "whole") for m in EVERYWHERE),
    *((m, "pieces") for m in IN_PIECES),
    *((m, "ragged") for m in IN_BATCHES),
]


@pytest.mark.parametrize("mistake, where", MISTAKES, ids=lambda x: getattr(x, "__name__", x))
def test_the_comparison_catches(hf_tiny, monkeypatch, mistake: Callable, where):
    tiny = hf_tiny(ratio=2, tied=True)
    model = load_model(tiny.path, exact=False)
    ids = torch.cat([ids_of(model), ids_of(model).flip(1)])[:, :80]
    with torch.no_grad():
        expected = tiny.hf(ids).logits
    run = {
        "whole": lambda: whole(model, ids),
        "pieces": lambda: pieces(model, ids, [40]),
        "ragged": lambda: torch.stack(ragged(model, ids, [80, 80], [[30, 7], [8, 2], [0, 12]])),
    }[where]
    assert gap(run(), expected) <= TOLERANCE
    with monkeypatch.context() as patch, torch.no_grad():
        mistake(patch, model)
        wrong = gap(run(), expected)
        whole_text = gap(whole(model, ids), expected)
    assert wrong > 20 * TOLERANCE
    assert where == "whole" or whole_text <= TOLERANCE, "a mistake of chunks or batches must not show in one forward"


# --------------------------------------------------------------------------------------------- directories


def test_a_saved_model_loads_in_transformers_with_equal_logits(tiny, tmp_path):
    from transformers import Qwen3_5ForCausalLM

    for ratio, tied in ((1, False), (3, True)):
        model = tiny(ratio=ratio, tied=tied, exact=False)
        path = model.save(tmp_path / f"r{ratio}")
        hf, info = Qwen3_5ForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        ids = ids_of(model)
        with torch.no_grad():
            assert gap(hf.eval()(ids).logits, whole(model, ids)) <= TOLERANCE
        assert hf.config.eos_token_id in (0, [0])


def test_what_transformers_saves_again_loads_here(hf_tiny, tmp_path):
    tiny = hf_tiny(ratio=3, tied=False)
    tiny.hf.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists(), "this test is about shards"
    model = load_model(tmp_path, exact=False)
    assert not model.can_draft
    ids = ids_of(model, 40)
    with torch.no_grad():
        assert gap(whole(model, ids), tiny.hf(ids).logits) <= TOLERANCE


# ------------------------------------------------------------------------------------------ demo checkpoint


def heldout_text(model: HybridModel, source: str, tokens: int) -> Tensor:
    import pyarrow.parquet as pq

    text = pq.read_table(DATA / "heldout" / f"{source}.parquet", columns=["text"])["text"][0].as_py()
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(text[: 8 * tokens])[:tokens]
    assert len(ids) == tokens
    return torch.tensor([ids])


@pytest.mark.skipif(not (DATA / "demo" / "config.json").exists(), reason="the demo checkpoint is not in data/demo")
@pytest.mark.parametrize("source", ["speeches", "pycode"])
def test_demo_logits_on_real_text(reference64, source):
    from safetensors.torch import load_file
    from transformers import Qwen3_5ForCausalLM

    path = DATA / "demo"
    model = load_model(path)
    hf = Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = heldout_text(model, source, 200)
    tensors = {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}
    config = json.loads((path / "config.json").read_text("utf-8"))
    assert FULL in config["layer_types"]
    _, normed, logits = reference64.evaluate(tensors, config, ids[0].tolist())
    with torch.no_grad():
        theirs = gap(hf(ids).logits[0], logits)
    carriers = reference64.mtp(tensors, config, ids[0, 1:].tolist(), normed[:-1])
    for model.exact in (True, False):
        rows = model.forward(ids, model.new_cache())
        assert gap(rows.logits_BTV[0], logits) <= 2 * theirs
        assert gap(pieces(model, ids, [64, 1, 5, 33])[0], logits) <= 2 * theirs
        drafted = model.draft(ids[:, 1:], rows.normed_BTH[:, :-1], model.new_draft_cache())
        ours = gap(model.unembed(drafted)[0], carriers @ reference64.head_of(tensors).T)
        assert ours <= 2 * max(theirs, 1e-5)
