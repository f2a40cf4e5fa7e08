"""Sessions whose rows are packed, or kept in a ring: restored, rewound, forked and promoted, they equal fresh ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.cache.hybrid import same_bits
from workbench.core.errors import UserError
from workbench.model.config import FULL, LINEAR
from workbench.spec.compare import compare_sessions
from workbench.spec.prefix import PrefixEntry, capture, restore
from workbench.spec.session import Session
from workbench.spec.store import PrefixStore, entry_bytes, load_entry

CHUNK, WINDOW = 9, 8
TEXT = [(37 * i + i * i // 3 + 5) % 211 for i in range(70)]
KINDS: dict[str, dict[str, Any]] = {
    "q8_0/q5_1": dict(k_format="q8_0", v_format="q5_1"),
    "fp8": dict(k_format="fp8", v_format="fp8"),
    "dense/q8_0": dict(v_format="q8_0"),
    "window": dict(window=WINDOW),
    "window, q8_0/q5_1": dict(window=WINDOW, k_format="q8_0", v_format="q5_1"),
    "window, fp8": dict(window=WINDOW, k_format="fp8", v_format="fp8"),
}
RINGS = [name for name in KINDS if name.startswith("window")]


@pytest.fixture(scope="module")
def setting(tiny, parts) -> Any:
    model = tiny(ratio=2, layer_types=(LINEAR, FULL, LINEAR, FULL), head_dim=32, tied=False, vocab_size=211, seed=2)
    return parts.setting(model, TEXT[:20], [])


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of window - 1 + CHUNK slots, which a text of this file laps several times."""
    monkeypatch.setattr("workbench.spec.turns.VERIFY", 4)


def fed(setting: Any, text: list[int], boundaries: Any = (), **options: Any) -> Session:
    session = setting.begin(chunk=CHUNK, **options)
    session.feed(text, boundaries=boundaries)
    return session


def fresh(setting: Any, session: Session, **options: Any) -> Session:
    twin = setting.begin(chunk=4, **options)
    twin.feed(session.tokens[:-1], force=session.tokens[-1])
    return twin


def same(setting: Any, session: Session, **options: Any) -> None:
    found = compare_sessions(session, fresh(setting, session, **options))
    assert not found, str(found)


def equal(a: PrefixEntry, b: PrefixEntry) -> bool:
    same_tensors = a.tensors.keys() == b.tensors.keys() and all(
        same_bits(x, b.tensors[n]) for n, x in a.tensors.items()
    )
    return same_tensors and (a.terms, a.tokens, a.drafter) == (b.terms, b.tokens, b.drafter)


@pytest.mark.parametrize("name", KINDS)
def test_captured_and_restored_by_memory_and_by_disk(setting, tmp_path: Path, name: str) -> None:
    options = KINDS[name]
    lengths = (1, WINDOW - 1, WINDOW, 17, 40, len(TEXT))
    whole = fed(setting, TEXT, lengths, **options)
    same(setting, whole, **options)
    entries = whole.captured
    assert [len(entry) for entry in entries] == list(lengths)
    whole.burst(12)
    for entry in entries:
        assert equal(entry, capture(fed(setting, TEXT[: len(entry)], **options)))
        (tmp_path / "entry").write_bytes(entry_bytes(entry))
        loaded = load_entry(tmp_path / "entry")
        assert equal(loaded, entry)
        session = setting.begin(chunk=CHUNK, **options)
        restore(session, loaded, TEXT)
        session.burst(12)
        assert session.tokens == whole.tokens and not compare_sessions(session, whole)
        assert equal(capture(session), capture(whole))


@pytest.mark.parametrize("name", KINDS)
def test_from_a_store_and_refused_by_other_formats(setting, name: str) -> None:
    options = dict(ignore_eos=True, chunk=CHUNK)
    store = PrefixStore(1 << 24)
    for other in KINDS:
        if other != name:
            store.put(capture(fed(setting, TEXT[:50], **KINDS[other])))
    store.put(capture(fed(setting, TEXT[:30], **KINDS[name])))
    own = wb.GenerateOptions(**options, k=3, **KINDS[name])
    session = wb.Session.from_prefix(setting.model, TEXT, store, options=own)
    assert session.reuse is not None and (session.reuse.reused, session.reuse.recomputed) == (30, 40)
    assert len(session.reuse.refused) == len(KINDS) - 1
    assert all("of another cache layout" in why for why in session.reuse.refused)
    same(setting, session, **KINDS[name])


@pytest.mark.parametrize("name", ["q8_0/q5_1", "window, q8_0/q5_1"])
def test_a_flipped_bit_or_a_row_short_does_not_pass(setting, name: str) -> None:
    whole = fed(setting, TEXT, (40,), **KINDS[name])
    (entry,) = whole.captured
    for part in ("layer.1.k", "layer.3.v", "drafter.0.k"):
        flipped = {**entry.tensors, part: entry.tensors[part].clone()}
        flipped[part].view(-1)[-1] ^= 1
        session = setting.begin(chunk=CHUNK, **KINDS[name])
        restore(session, PrefixEntry(entry.terms, entry.tokens, flipped, entry.drafter), TEXT[:41])
        assert compare_sessions(session, fed(setting, TEXT[:41], **KINDS[name])), part
        cut = {**entry.tensors, part: entry.tensors[part][:, 1:]}
        with pytest.raises(UserError, match="truncated or of another shape"):
            restore(
                setting.begin(chunk=CHUNK, **KINDS[name]), PrefixEntry(entry.terms, entry.tokens, cut, entry.drafter)
            )


@pytest.mark.parametrize("name", KINDS)
def test_rewinds_forks_growth_and_demotion(setting, name: str) -> None:
    options = KINDS[name]
    session = fed(setting, TEXT[:30], capacity=90, **options)
    session.burst(5)
    session.feed(TEXT[30:50], stable=17)
    session.burst(4)
    told = session.tokens
    session.rewind(capacity=150)
    same(setting, session, **options)
    assert equal(capture(session), capture(fed(setting, session.tokens[:-1], **options)))
    session.feed(TEXT[47:50])
    session.burst(4)
    assert session.tokens == told
    twin = session.fork()
    twin.demote()
    twin.generate(TEXT[:30], max_new_tokens=5)
    twin.promote()
    same(setting, twin, **options)
    twin.rewind()
    same(setting, twin, **options)
    same(setting, session, **options)


def test_negative_control_a_promotion_through_dense_rows_is_seen(setting, monkeypatch) -> None:
    dense = lambda model, options, capacity: model.new_cache(capacity=capacity)  # noqa: E731
    for name in KINDS:
        session = fed(setting, TEXT[:40], **KINDS[name])
        session.demote()
        with monkeypatch.context() as patch:
            patch.setattr("workbench.spec.turns.new_cache", dense)
            session.promote()
        with pytest.raises(AssertionError, match="drafter"):
            same(setting, session, **KINDS[name])


@pytest.mark.parametrize("name", RINGS)
def test_a_lapped_place_is_refused_and_nothing_changes(setting, name: str) -> None:
    options = KINDS[name]
    session = fed(setting, TEXT[:40], **options)
    place = session.checkpoint()
    session.burst(5)
    session.rewind()  # within reach
    same(setting, session, **options)
    session.burst(24)
    told, capacity = session.tokens, session.capacity
    for ask in (dict(), dict(to=place), dict(capacity=capacity)):
        with pytest.raises(UserError, match="cannot go back to 40 rows: with window=8 that needs the rows from 33 on"):
            session.rewind(**ask)
    assert session.tokens == told and session.capacity == capacity
    same(setting, session, **options)
    late = session.checkpoint()
    text = session.generate(TEXT[:6], max_new_tokens=2).tokens
    session.rewind(to=late)
    assert session.tokens == told and session.generate(TEXT[:6], max_new_tokens=2).tokens == text
    same(setting, session, **options)


@pytest.mark.parametrize("name", ["q8_0/q5_1", "window, fp8"])
def test_formats_belong_to_the_session_and_not_to_a_burst(setting, name: str) -> None:
    session = fed(setting, TEXT[:20], **KINDS[name])
    for option, value in (("k_format", "dense"), ("v_format", "q8_0"), ("window", 30)):
        with pytest.raises(UserError, match=f"{option}=.*cannot change within a session"):
            session.generate(max_new_tokens=2, **{option: value})
    assert len(session.generate(max_new_tokens=2, **KINDS[name]).tokens) == 2


def test_an_entry_holds_a_window_s_rows_alone(setting) -> None:
    sizes = {}
    for name in ("window", "window, q8_0/q5_1"):
        short, long = (capture(fed(setting, TEXT[:n], k=0, **KINDS[name])) for n in (30, 60))
        assert long.nbytes - short.nbytes == 8 * 30  # the tokens
        assert long.tensors["layer.1.k"].shape[1] == WINDOW - 1
        sizes[name] = long.nbytes
    assert sizes["window, q8_0/q5_1"] < sizes["window"]
    assert torch.uint8 == long.tensors["layer.1.k"].dtype
