"""Anchor records against an independent float64 computation from transformers' logits and rows.

The reference never sees the library's softmax, order or windows: it takes transformers' float32 logits of the whole
tape, and forms every column with NumPy in float64. Each rule has a negative control that must fail the same check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.core.tape import Corpus, Tape
from workbench.datasets import extract, load_anchors, to_arrays
from workbench.model.hybrid import HybridModel
from workbench.model.weights.load import load_model

GAMMA, TOP_K, TEMPERATURE = 5, 64, 0.7
GAP, RELATIVE, ROWS, LOGITS = 1e-4, 2e-4, 5e-5, 5e-5
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Setting:
    """A model, tapes, its records, and transformers' logits and trunk rows by document."""

    model: HybridModel
    tapes: Corpus
    records: Arrays
    logits: dict[str, np.ndarray]
    trunk: dict[str, np.ndarray]


def tape_list(vocab: int) -> Corpus:
    generator = np.random.default_rng(11)
    shapes = [(150, 0), (64, 30), (7, 1), (40, 35)]
    tapes = [Tape(f"doc-{i}", generator.integers(0, vocab, n), prompt_len=p) for i, (n, p) in enumerate(shapes)]
    return Corpus(tapes, name="random ids")


@pytest.fixture(scope="module", params=[(2, True), (3, False)], ids=["tied", "untied"])
def setting(request: pytest.FixtureRequest, hf_tiny, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    ratio, tied = request.param
    published = hf_tiny(ratio=ratio, tied=tied)
    tapes, logits, trunk = tape_list(83), {}, {}
    for tape in tapes:
        seen: list[torch.Tensor] = []
        hook = published.hf.model.norm.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        with torch.no_grad():
            out = published.hf(torch.from_numpy(tape.tokens.astype(np.int64))[None], use_cache=False)
        hook.remove()
        logits[tape.doc_id], trunk[tape.doc_id] = out.logits[0].numpy(), seen[0][0].numpy()
    model = load_model(published.path)
    out = tmp_path_factory.mktemp("anchors") / "records"
    extract(model, tapes, out=out, gamma=GAMMA, top_k=TOP_K, temperature=TEMPERATURE, chunk=48, hidden_dtype="float32")
    return Setting(model, tapes, to_arrays(load_anchors(out)), logits, trunk)


def check(a: Arrays, s: Setting) -> None:
    """Compare records with the reference, column by column; an assertion names the column that differs."""
    by_id = {tape.doc_id: tape for tape in s.tapes}
    for n, (doc_id, p) in enumerate(zip(a["doc_id"], a["position"].tolist(), strict=True)):
        tape = by_id[doc_id]
        assert p >= 1 and p + GAMMA < len(tape), "position"
        assert np.array_equal(a["tokens"][n], tape.tokens[p : p + GAMMA + 1]), "tokens"
        assert np.abs(a["hidden"][n] - s.trunk[doc_id][p - 1]).max() <= ROWS, "hidden"
        for j in range(GAMMA):
            row = s.logits[doc_id][p + j].astype(np.float64)
            order = sorted(range(len(row)), key=lambda i: (-row[i], i))
            ids, kept = a["top_ids"][n, j].tolist(), a["top_probs"][n, j].astype(np.float64)
            assert len(set(ids)) == TOP_K, "ids"
            for rank in range(TOP_K):
                near = [row[order[r]] for r in (rank - 1, rank, rank + 1) if 0 <= r < len(row)]
                if all(abs(x - row[order[rank]]) > GAP for x in near if x != row[order[rank]]):
                    assert ids[rank] == order[rank], "ids"
            assert np.abs(a["top_logits"][n, j] - row[ids]).max() <= LOGITS, "logits"
            weight = np.exp((row - row.max()) / TEMPERATURE)
            probs = weight / weight.sum()
            assert (np.abs(kept - probs[ids]) <= RELATIVE * probs[ids]).all(), "probs"
            outside = np.delete(probs, ids).sum()
            assert abs(a["tail_probs"][n, j] - outside) <= RELATIVE * outside, "tail"
            assert abs(kept.sum() + float(a["tail_probs"][n, j]) - 1) <= 2e-5, "mass"
            assert abs(a["logsumexp"][n, j] - np.log(np.exp(row).sum())) <= 2 * LOGITS, "logsumexp"
            hot = np.log(np.exp(row / TEMPERATURE).sum())
            assert abs(a["logsumexp_t"][n, j] - hot) <= 2 * LOGITS / TEMPERATURE, "logsumexp_t"


def test_records_equal_the_independent_computation(setting: Setting):
    a = setting.records
    counts = [int((a["doc_id"] == tape.doc_id).sum()) for tape in setting.tapes]
    assert counts == [4, 4, 1, 1], "four buckets, or as many as there are positions"
    assert np.ptp(a["top_logits"]) > 1, "rows differ enough for the comparison to mean something"
    check(a, setting)


def wrong_hidden(a: Arrays, s: Setting) -> None:
    a["hidden"] = np.stack([s.trunk[d][p] for d, p in zip(a["doc_id"], a["position"], strict=True)])


def renormalised(a: Arrays, s: Setting) -> None:
    a["top_probs"] = a["top_probs"] / a["top_probs"].sum(-1, keepdims=True)


def without_temperature(a: Arrays, s: Setting) -> None:
    a["top_probs"] = np.exp(a["top_logits"] - a["logsumexp"][..., None])


def tail_of_a_renormalised_row(a: Arrays, s: Setting) -> None:
    """1 - sum hides a wrong softmax: the mass is one, and the tail is not what lies outside."""
    renormalised(a, s)
    a["tail_probs"] = (1 - a["top_probs"].astype(np.float64).sum(-1)).astype(np.float32)


def tail_is_the_rest_of_a_damaged_row(a: Arrays, s: Setting) -> None:
    a["top_probs"] = a["top_probs"].copy()
    a["top_probs"][..., -1] = 0
    a["tail_probs"] = (1 - a["top_probs"].astype(np.float64).sum(-1)).astype(np.float32)


def shifted_slots(a: Arrays, s: Setting) -> None:
    for name in ("top_ids", "top_logits", "top_probs", "tail_probs", "logsumexp", "logsumexp_t"):
        a[name] = np.roll(a[name], 1, axis=1)


def shifted_tokens(a: Arrays, s: Setting) -> None:
    a["tokens"] = np.roll(a["tokens"], 1, axis=1)


def lost_mass(a: Arrays, s: Setting) -> None:
    a["tail_probs"] = a["tail_probs"] * 0.99


CONTROLS: dict[str, tuple[Callable[[Arrays, Setting], None], str]] = {
    "hidden is h_p": (wrong_hidden, "hidden"),
    "probabilities renormalised over the kept ids": (renormalised, "probs"),
    "probabilities at T = 1": (without_temperature, "probs"),
    "tail as 1 - sum of renormalised probabilities": (tail_of_a_renormalised_row, "probs|tail"),
    "tail as 1 - sum of a damaged row": (tail_is_the_rest_of_a_damaged_row, "probs|tail"),
    "slots shifted by one": (shifted_slots, "ids|logits"),
    "tokens shifted by one": (shifted_tokens, "tokens"),
    "a hundredth of the tail lost": (lost_mass, "tail"),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_the_check_can_fail(setting: Setting, name: str):
    damage, column = CONTROLS[name]
    broken = dict(setting.records)
    damage(broken, setting)
    with pytest.raises(AssertionError, match=f"^({column})"):
        check(broken, setting)


def test_the_tail_alone_tells_an_independent_sum_from_the_rest(setting: Setting):
    """With true probabilities, a tail made as 1 - sum still passes: the rule shows where a kept entry is wrong."""
    a = dict(setting.records)
    a["top_probs"] = a["top_probs"].copy()
    a["top_probs"][0, 0, 0] *= 1.1
    rest = 1 - a["top_probs"].astype(np.float64).sum(-1)
    assert abs(a["top_probs"][0, 0].astype(np.float64).sum() + a["tail_probs"][0, 0] - 1) > 2e-5, (
        "the mass check sees it"
    )
    assert abs(a["top_probs"][0, 0].astype(np.float64).sum() + rest[0, 0] - 1) < 1e-12, "with the rest it never could"


def test_a_later_token_changes_nothing(setting: Setting, tmp_path: Path):
    model, base = setting.model, setting.tapes[0]
    p, later = 60, 120
    options = dict(gamma=GAMMA, top_k=TOP_K, chunk=48, anchors=[p, later], hidden_dtype="float32")
    assert model.exact, "bits are promised in exact mode"
    before = to_arrays(extract(model, [base], out=tmp_path / "base", **options))
    for at in (p + GAMMA + 1, p + GAMMA + 2, 100, len(base) - 1):
        tokens = base.tokens.copy()
        tokens[at] = (tokens[at] + 17) % 83
        after = to_arrays(extract(model, [Tape(base.doc_id, tokens)], out=tmp_path / str(at), **options))
        for name in set(before) - {"doc_id", "split", "source"}:
            assert before[name][0].tobytes() == after[name][0].tobytes(), name
        if at <= later:
            assert not np.array_equal(before["top_logits"][1], after["top_logits"][1]), (
                "it does reach what comes after it"
            )
    tokens = base.tokens.copy()
    tokens[p + GAMMA] = (tokens[p + GAMMA] + 17) % 83
    after = to_arrays(extract(model, [Tape(base.doc_id, tokens)], out=tmp_path / "last", **options))
    assert np.array_equal(before["top_logits"][0], after["top_logits"][0]), "the last token is predicted, not read"
    assert (before["tokens"][0] != after["tokens"][0]).tolist() == [False] * GAMMA + [True]


def test_ties_go_to_the_lower_id(tiny, tmp_path: Path):
    model = tiny(tied=False)
    model.head.data[1::2] = 0.0  # 41 logits of exactly zero
    a = to_arrays(extract(model, tape_list(83), out=tmp_path / "x", gamma=GAMMA, top_k=TOP_K))
    for ids, logits in zip(a["top_ids"].reshape(-1, TOP_K), a["top_logits"].reshape(-1, TOP_K), strict=True):
        zeros = ids[logits == 0]
        assert (logits[:-1] >= logits[1:]).all() and np.array_equal(zeros, np.arange(1, 83, 2)[: len(zeros)])
    assert (a["top_logits"][..., -1] == 0).any(), "some rows are cut inside the tie"
