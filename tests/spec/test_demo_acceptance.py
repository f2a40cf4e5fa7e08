"""The demo head drafts well, which exact output cannot show: a wrong head costs acceptance and nothing else."""

from __future__ import annotations

import math
import random
from itertools import cycle

import pytest
import torch

import workbench as wb
from workbench.core.metrics import Telemetry, repeated_ngrams
from workbench.model.hybrid import HybridModel
from workbench.model.mtp import MTPHead
from workbench.model.ops import linear, rms_norm
from workbench.spec.generate import generate

REGISTERS = ("novels", "pycode", "pydocs", "speeches", "sqlite")
PER_REGISTER, NEW = 2, 64


@pytest.fixture(scope="module")
def prompts(demo: HybridModel) -> list[list[int]]:
    """Held-out prompts of 32 to 64 tokens, as many of every register."""
    rng, out = random.Random(5), []
    with wb.quiet():
        for register in REGISTERS:
            tapes = wb.corpus(f"demo/{register}", split="heldout", tokenizer=demo.tokenizer, min_tokens=80)
            for tape, _ in zip(cycle(tapes), range(PER_REGISTER)):
                size = rng.randint(32, 64)
                at = rng.randrange(len(tape) - size + 1)
                out.append(tape.tokens[at : at + size].tolist())
    return out


def first_slot(demo: HybridModel, prompts: list[list[int]], **options) -> list[tuple[tuple[int, ...], Telemetry]]:
    """Texts and counters of K = 1."""
    out = []
    for ids in prompts:
        done = generate(demo, ids, k=1, max_new_tokens=NEW, ignore_eos=True, **options)
        out.append((done.tokens, Telemetry.of(done.records)))
    return out


def pooled(runs: list[tuple[tuple[int, ...], Telemetry]]) -> float:
    """Share of K = 1 rounds whose draft is the target's pick, pooled over the runs; NaN without any."""
    drafted = sum(counters.pos_drafted[0] for _, counters in runs)
    return sum(counters.accepted for _, counters in runs) / drafted if drafted else math.nan


def swapped(self: MTPHead, embedding_BTH, carrier_BTH, num):
    """The concatenation with the carrier first."""
    b, t, h = embedding_BTH.shape
    left = rms_norm(embedding_BTH, 1.0 + self.embedding_norm.float(), self.eps)
    right = rms_norm(carrier_BTH, 1.0 + self.hidden_norm.float(), self.eps)
    return linear(torch.cat([right, left], -1).reshape(b * t, 2 * h), self.fc, num).view(b, t, h)


def test_first_drafts_are_mostly_right_and_a_wrong_head_costs_twenty_points_and_no_token(
    demo, prompts, monkeypatch, record_property
):
    right = first_slot(demo, prompts)
    shifted = first_slot(demo, prompts, shift=1)
    monkeypatch.setattr(MTPHead, "join", swapped)
    crossed = first_slot(demo, prompts)
    loops = [repeated_ngrams(text, 8) for text, _ in right]
    figures = {
        "position_1_acceptance": pooled(right),
        "of them, texts that do not loop": pooled([run for run, loop in zip(right, loops) if loop < 0.05]),
        "swapped concat order": pooled(crossed),
        "shifted pairing": pooled(shifted),
        "repeated_8grams": sum(loops) / len(loops),
    }
    for name, value in figures.items():
        record_property(name, round(value, 3))
    print({name: round(value, 3) for name, value in figures.items()})
    assert pooled(right) > 0.5
    for wrong in (shifted, crossed):
        assert [text for text, _ in wrong] == [text for text, _ in right]
        assert pooled(wrong) <= pooled(right) - 0.2


def test_drafts_vary_with_what_they_follow(demo, prompts):
    """A head that always drafts the same token is not hidden by a text that repeats it."""
    drafts = {
        token
        for ids in prompts[::3]
        for r in generate(demo, ids, k=2, max_new_tokens=12).records
        for token in r.draft_ids
    }
    assert len(drafts) > 10
