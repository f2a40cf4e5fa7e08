"""On texts the target generated itself, a walk over the table is the live run, round for round and bit for bit."""

from __future__ import annotations

from itertools import product

import pytest

from workbench.core.tape import Corpus, Own, Tape
from workbench.model.fingerprint import fingerprint
from workbench.replay import own_tapes, replay
from workbench.spec.policies import AdaptiveFloor, FixedK

REGISTERS = ("novels", "pycode", "pydocs", "speeches", "sqlite")
PROMPTS = (40, 58, 61, 100, 122)  # so that texts pass the ends of key blocks at 64 and 128
LIVELY = [dict(ratio=1, vocab_size=5, seed=1), dict(ratio=2, vocab_size=12, seed=1), dict(ratio=3, vocab_size=5)]


@pytest.mark.parametrize("i", range(5), ids=REGISTERS)
def test_a_walk_is_the_live_run(demo, heldout, policies, against_live, differences, tmp_path, i):
    own = own_tapes(demo, heldout(REGISTERS[i]), prompt_tokens=PROMPTS[i], max_new_tokens=26)
    table = replay(demo, own, out=tmp_path / "table")
    accepted = set()
    for j, (name, live) in enumerate([("fixed", {}), ("p_min", dict(chunk=7)), ("adaptive", dict(strategy="tape"))]):
        k = (3 * i + j) % 8 + 1
        name = list(policies)[(i + j) % 5] if j else name
        walked, lived = against_live(demo, own, table=table, k=k, live=live, **policies[name])
        assert not (found := differences(walked, lived)), (k, name, found)
        assert walked["estimator"].unique().to_list() == ["own"] and walked["emitted"].sum() == 25
        accepted |= set(walked["accepted"])
    assert len(accepted) > 2


def test_the_small_design_takes_every_k_and_every_policy(policies):
    cells = [((3 * i + j) % 8 + 1, list(policies)[(i + j) % 5] if j else "fixed") for i in range(5) for j in range(3)]
    assert {k for k, _ in cells} == set(range(1, 9)) and {name for _, name in cells} == set(policies)


@pytest.mark.full
@pytest.mark.parametrize("i", range(5), ids=REGISTERS)
def test_every_k_under_every_policy(demo, heldout, policies, against_live, differences, tmp_path, i):
    own = own_tapes(demo, heldout(REGISTERS[i], 2), prompt_tokens=PROMPTS[i], max_new_tokens=32)
    table = replay(demo, own, out=tmp_path / "table")
    by_k: dict[int, set[int]] = {}
    for k, name in product(range(1, 9), policies):
        walked, lived = against_live(demo, own, table=table, k=k, **policies[name])
        assert not (found := differences(walked, lived)), (k, name, found)
        for drafted, accepted in walked.select("drafted", "accepted").iter_rows():
            by_k.setdefault(drafted, set()).add(accepted)
    assert len(set().union(*by_k.values())) > 3, by_k


@pytest.mark.full
def test_with_two_threads(demo, heldout, against_live, differences, threads):
    with threads(2):
        own = own_tapes(demo, heldout("pycode"), prompt_tokens=50, max_new_tokens=60)
        for k in (2, 7):
            walked, lived = against_live(demo, own, k=k)
            assert not (found := differences(walked, lived)), (k, found)


@pytest.mark.parametrize("shape", LIVELY, ids=lambda shape: f"ratio {shape['ratio']}")
def test_random_models_over_the_ends_of_key_blocks(tiny, policies, against_live, differences, tmp_path, shape):
    model = tiny(tied=False, **shape)
    prompts = [Tape(f"p{n}", [i % shape["vocab_size"] for i in range(n)], prompt_len=n) for n in (1, 55, 120)]
    own = own_tapes(model, prompts, max_new_tokens=14, ignore_eos=True)
    table = replay(model, own, out=tmp_path / "table", chunk=50)
    for k, name in ((8, "floor"), (3, "pmin0")):
        walked, lived = against_live(model, own, table=table, k=k, live=dict(ignore_eos=True), **policies[name])
        assert not (found := differences(walked, lived)), (k, name, found)
    for policy in (FixedK(k=2, p_min=0.4), AdaptiveFloor(k=8, cap=5)):
        walked = table.rounds(policy=policy)
        by_name = dict(k=2, p_min=0.4) if isinstance(policy, FixedK) else dict(k=8, cap=5, adaptive=True)
        assert walked.equals(table.rounds(**by_name)) and walked["k"].max() == policy.k_max


def test_the_other_carrier(demo, heldout, against_live, differences, tmp_path):
    own = own_tapes(demo, heldout("speeches"), prompt_tokens=60, max_new_tokens=20)
    table = replay(demo, own, out=tmp_path / "pre", carrier="pre_norm", k_max=4)
    walked, lived = against_live(demo, own, table=table, k=4, live=dict(carrier="pre_norm"))
    assert not differences(walked, lived)
    _, normed = against_live(demo, own, table=table, k=4)
    assert differences(walked, normed), "the two carriers draft differently"


def test_a_text_that_a_stop_token_ended(tiny, policies, against_live, differences, tmp_path):
    """The stop token is the last of the tape, so it is the bonus of a round and never one of its drafts."""
    model = tiny(ratio=1, tied=False, vocab_size=5, seed=1, eos_token_id=(4,))
    own = own_tapes(model, [Tape(f"p{n}", [1] * n, prompt_len=n) for n in range(1, 9)], max_new_tokens=60)
    ended = [tape for tape in own if tape.tokens[-1] == 4 and len(tape) - tape.prompt_len < 60]
    assert len(ended) > 3
    table = replay(model, own, out=tmp_path / "table")
    for name in ("fixed", "pmin0", "adaptive"):
        walked, lived = against_live(model, own, table=table, k=5, **policies[name])
        assert not (found := differences(walked, lived)), (name, found)


def test_own_texts_do_not_depend_on_how_they_were_decoded(demo, heldout):
    a, b = (own_tapes(demo, heldout("sqlite"), prompt_tokens=20, max_new_tokens=18, k=k) for k in (0, 4))
    tape = a[0]
    assert tape.tokens.tolist() == b[0].tokens.tolist() and len(tape) == 38 and tape.prompt_len == 20
    assert tape.own == b[0].own == Own("greedy", fingerprint(demo)) and tape.source == "sqlite"
    assert tape.tokens[:20].tolist() == heldout("sqlite")[0].tokens[:20].tolist()


def test_a_table_of_own_texts_walks_as_own_and_a_mixture_as_forced(tiny, tmp_path):
    model = tiny(ratio=1, tied=False, vocab_size=5, seed=1)
    own = own_tapes(model, [Tape("p", [1, 2, 3], prompt_len=3)], max_new_tokens=20, ignore_eos=True)
    other = Tape("q", own[0].tokens, prompt_len=3)
    for tapes, name in ((own, "own"), (Corpus([own[0], other]), "forced")):
        walked = replay(model, tapes, out=tmp_path / name).rounds(k=3)
        assert walked["estimator"].unique().to_list() == [name]
