"""checkpoint, commit(keep), rollback: after a commit every plane is, bit for bit, as if only the kept rows were fed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.cache.hybrid import STRATEGIES, HybridCache
from workbench.cache.kv import KVPlane
from workbench.cache.recurrent import DeltaInputs, RecurrentPlane
from workbench.core.errors import UserError
from workbench.model.attention import GatedAttention
from workbench.model.config import FULL, LINEAR
from workbench.model.delta import GatedDeltaNet
from workbench.model.hybrid import HybridModel

LAYERS = (LINEAR, FULL, LINEAR)
WIDTHS = range(1, 10)
ROUNDING = 5e-5  # of state and rows of size 1 in fast mode; the mistakes below are a thousand times larger
PAIRS = [(t, keep) for t in WIDTHS for keep in range(t + 1)]


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=3, layer_types=LAYERS)


def draw(model: HybridModel, rows: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, rows), generator=torch.Generator().manual_seed(seed))


class Target:
    """Feeds the target; ``rows`` are compared after the commit too, so that a stale plane shows in what follows."""

    def __init__(self, model: HybridModel, strategy: str = "tape", batch: int = 1, **cache: int) -> None:
        self.model = model
        self.cache = model.new_cache(strategy=strategy, batch=batch, **cache)

    def feed(self, cache: HybridCache, ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        logits = self.model.forward(ids, cache, counts=counts).logits_BTV
        assert logits is not None
        return logits


class Drafter(Target):
    """Feeds the MTP head with carriers that are a function of the token."""

    def __init__(self, model: HybridModel, strategy: str = "tape", batch: int = 1, **cache: int) -> None:
        self.model, self.cache = model, model.new_draft_cache(batch=batch, **cache)
        table = (model.config.vocab_size, model.config.hidden_size)
        self.carriers = torch.randn(table, generator=torch.Generator().manual_seed(1))

    def feed(self, cache: HybridCache, ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        return self.model.draft(ids, self.carriers[ids], cache, counts=counts)


def gap(a: HybridCache, b: HybridCache) -> float:
    """Largest difference between the contents of two caches of equal lengths."""
    assert a.lengths == b.lengths
    worst = 0.0
    for x, y in zip(a.planes, b.planes):
        if isinstance(x, RecurrentPlane):
            pairs = [(x.conv_BWC, y.conv_BWC), (x.state_BHKV, y.state_BHKV)]
        else:
            pairs = [p for i, n in enumerate(a.lengths) for p in zip(x.rows(i, n), y.rows(i, n))]
        worst = max([worst, *(float((p - q).abs().max()) for p, q in pairs if p.numel())])
    return worst


def committed(run: Target, prefix: int, t: int, keep: int, pieces: Sequence[int] = ()) -> str | None:
    """What differs between verify-and-commit and feeding only the kept rows, or None; in fast mode up to rounding."""
    exact = run.model.exact
    ids = draw(run.model, prefix + t + 2, seed=prefix)
    cache = run.cache.fork()
    if prefix:
        run.feed(cache, ids[:, :prefix])
    expected = cache.fork()
    ckpt = cache.checkpoint()
    at = prefix
    for n in pieces or (t,):
        run.feed(cache, ids[:, at : at + n])
        at += n
    cache.commit(ckpt, keep=keep)
    if keep:
        run.feed(expected, ids[:, prefix : prefix + keep])
    found = cache.first_difference(expected)
    if found and (exact or gap(cache, expected) > ROUNDING):
        return found
    a, b = run.feed(cache, ids[:, -2:]), run.feed(expected, ids[:, -2:])
    if not (torch.equal(a, b) if exact else torch.allclose(a, b, atol=ROUNDING)):
        return "rows after the commit"
    return cache.first_difference(expected) if exact else None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_keep_of_every_width(model, strategy):
    run = Target(model, strategy)
    for t, keep in PAIRS:
        assert committed(run, 5, t, keep) is None, (t, keep)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_the_window_is_right_when_it_reaches_back_before_the_verify(model, strategy, prefix):
    run = Target(model, strategy)
    for t, keep in [(1, 0), (1, 1), (2, 1), (4, 1), (4, 2), (5, 3), (9, 2)]:
        assert committed(run, prefix, t, keep) is None, (t, keep)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_verify_fed_in_pieces_under_one_checkpoint(model, strategy):
    run = Target(model, strategy)
    for pieces in ([1] * 5, [2, 3], [4, 1]):
        for keep in range(6):
            assert committed(run, 3, 5, keep, pieces) is None, (pieces, keep)


def test_the_draft_plane_commits_alike(model):
    run = Drafter(model)
    for t, keep in PAIRS:
        assert committed(run, 5, t, keep) is None, (t, keep)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fast_mode_is_equal_up_to_rounding(tiny, strategy):
    run = Target(tiny(ratio=2, layer_types=LAYERS, exact=False), strategy)
    for t, keep in [(1, 0), (3, 1), (5, 5), (9, 4), (16, 7), (17, 3), (40, 21)]:
        assert committed(run, 5, t, keep) is None, (t, keep)


@pytest.mark.full
@pytest.mark.parametrize("prefix", [0, 1, 2, 3, 62, 100])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("kind", [*STRATEGIES, "drafter"])
def test_the_full_cross(tiny, kind, ratio, exact, prefix):
    model = tiny(ratio=ratio, exact=exact)
    run = Drafter(model) if kind == "drafter" else Target(model, kind)
    for t, keep in PAIRS:
        assert committed(run, prefix, t, keep) is None, (t, keep)
        if prefix == 3:
            assert committed(run, prefix, t, keep, [1] * t) is None, (t, keep, "row by row")


# --------------------------------------------------------------------------------------------------- batches


def fed(run: Target, cache: HybridCache, ids: Tensor, steps: Sequence[Sequence[int]]) -> None:
    """Feed ragged forwards: steps[i][b] further tokens of sequence b, padding in between."""
    at = [0] * len(ids)
    for counts in steps:
        width = max(1, *counts)
        tokens = torch.full((len(ids), width), run.model.config.vocab_size - 1)
        for b, n in enumerate(counts):
            tokens[b, :n] = ids[b, at[b] : at[b] + n]
            at[b] += n
        run.feed(cache, tokens, counts)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "steps",
    [[[5, 5, 5]], [[5, 2, 0]], [[2, 3, 1], [3, 1, 4]], [[1, 0, 2], [1, 3, 0], [2, 1, 1]]],
    ids=["even", "ragged", "two ragged forwards", "three ragged forwards"],
)
def test_each_sequence_keeps_its_own_number(model, strategy, steps):
    run = Target(model, strategy, batch=3)
    ids = draw(model, 9, batch=3)
    prefix = [[4, 1, 2]]
    rest = torch.stack([ids[b, n : n + 5] for b, n in enumerate(prefix[0])])
    total = [sum(counts) for counts in zip(*steps)]
    for keep in ([0, 0, 0], [1, 0, 2], [2, 2, 0], [0, 1, 1], total, 1 if min(total) else 0):
        wanted = [keep] * 3 if isinstance(keep, int) else keep
        wanted = [min(n, most) for n, most in zip(wanted, total)]
        cache = run.cache.fork()
        fed(run, cache, ids, prefix)
        expected = cache.fork()
        ckpt = cache.checkpoint()
        fed(run, cache, rest, steps)
        cache.commit(ckpt, keep=wanted)
        if any(wanted):
            fed(run, expected, rest, [wanted])
        assert cache.first_difference(expected) is None, wanted
        for b in range(3):  # and each is what it would be alone
            alone = model.new_cache()
            n = prefix[0][b] + wanted[b]
            model.forward(torch.cat([ids[b, : prefix[0][b]], rest[b, : wanted[b]]])[None], alone, logits="none")
            assert alone.lengths == [n]
            for x, y in zip(cache.planes, alone.planes):
                if isinstance(x, RecurrentPlane):
                    assert torch.equal(x.conv_BWC[b], y.conv_BWC[0]) and torch.equal(x.state_BHKV[b], y.state_BHKV[0])
                else:
                    assert all(torch.equal(p, q) for p, q in zip(x.rows(b, n), y.rows(0, n)))


def test_padding_counted_as_rows_would_be_caught(model, monkeypatch):
    monkeypatch.setattr(DeltaInputs, "ragged", False)
    with pytest.raises(AssertionError, match="layer 0: conv_BWC differs"):
        test_each_sequence_keeps_its_own_number(model, "tape", [[2, 3, 1], [3, 1, 4]])


def test_keep_takes_any_integers(model):
    for keep in (2, np.int64(2), [2], (2,), np.array([2]), torch.tensor([2])):
        run = Target(model)
        ckpt = run.cache.checkpoint()
        run.feed(run.cache, draw(model, 4))
        run.cache.commit(ckpt, keep=keep)
        assert run.cache.lengths == [2]


# ---------------------------------------------------------------------------------------- rollback and aborts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rollback_leaves_the_state_before(model, strategy):
    run = Target(model, strategy)
    run.feed(run.cache, draw(model, 6))
    before = run.cache.fork()
    for t in (1, 4, 9, 70):
        ckpt = run.cache.checkpoint()
        run.feed(run.cache, draw(model, t, seed=t))
        run.cache.rollback(ckpt)
        assert run.cache.first_difference(before) is None
    a, b = run.feed(run.cache, draw(model, 3)), run.feed(before, draw(model, 3))
    assert torch.equal(a, b)


class Interrupt(BaseException):
    """Stands for Ctrl-C: nothing of ours may catch it."""


def break_at(patch: pytest.MonkeyPatch, kind: type, calls: int) -> None:
    """Let the ``calls``-th mixer of this kind raise after it has done its work."""
    forward, count = kind.forward, iter(range(1000))

    def wrong(self: torch.nn.Module, *args: object) -> Tensor:
        out = forward(self, *args)
        if next(count) == calls:
            raise Interrupt
        return out

    patch.setattr(kind, "forward", wrong)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "kind, calls", [(GatedDeltaNet, 0), (GatedAttention, 0), (GatedDeltaNet, 1), (GatedDeltaNet, 3)]
)
def test_an_abort_anywhere_in_a_verify_leaves_the_state_before(model, monkeypatch, strategy, kind, calls):
    run = Target(model, strategy)
    run.feed(run.cache, draw(model, 62))
    before = run.cache.fork()
    ckpt = run.cache.checkpoint()
    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        break_at(patch, kind, calls)
        run.feed(run.cache, draw(model, 2))
        run.feed(run.cache, draw(model, 3))
    with pytest.raises(UserError, match="interrupted, so its layers disagree: roll back the open checkpoint, or"):
        run.feed(run.cache, draw(model, 1))
    with pytest.raises(UserError, match="interrupted, so its layers disagree: roll back instead of committing"):
        run.cache.commit(ckpt, keep=0)
    run.cache.rollback(ckpt)
    assert run.cache.first_difference(before) is None
    assert torch.equal(run.feed(run.cache, draw(model, 3)), run.feed(before, draw(model, 3)))
    assert run.cache.first_difference(before) is None


def test_an_abort_in_the_drafter_leaves_its_rows(model, monkeypatch):
    run = Drafter(model)
    run.feed(run.cache, draw(model, 62))
    before = run.cache.fork()
    ckpt = run.cache.checkpoint()
    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        break_at(patch, GatedAttention, 2)
        for n in (1, 1, 2):
            run.feed(run.cache, draw(model, n))
    run.cache.rollback(ckpt)
    assert run.cache.first_difference(before) is None
    assert torch.equal(run.feed(run.cache, draw(model, 3)), run.feed(before, draw(model, 3)))


def test_an_abort_in_the_middle_of_a_commit_can_still_be_rolled_back(model, monkeypatch):
    run = Target(model)
    run.feed(run.cache, draw(model, 6))
    before = run.cache.fork()
    ckpt = run.cache.checkpoint()
    run.feed(run.cache, draw(model, 5))
    cut, count = RecurrentPlane.cut, iter(range(9))

    def wrong(self: RecurrentPlane, *args: object) -> None:
        cut(self, *args)
        if next(count) == 0:
            raise Interrupt

    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        patch.setattr(RecurrentPlane, "cut", wrong)
        run.cache.commit(ckpt, keep=2)
    run.cache.rollback(ckpt)
    assert run.cache.first_difference(before) is None


def test_an_abort_outside_a_transaction_is_not_forgotten(model, monkeypatch):
    run = Target(model)
    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        break_at(patch, GatedDeltaNet, 1)
        run.feed(run.cache, draw(model, 3))
    for ask in (lambda: run.feed(run.cache, draw(model, 1)), run.cache.checkpoint, run.cache.fork):
        with pytest.raises(UserError, match="interrupted"):
            ask()


# ------------------------------------------------------------------------------------------- growth and edges


@pytest.mark.parametrize("make", [Target, Drafter])
def test_rows_across_the_edges_of_blocks(model, make):
    run = make(model)
    for prefix in (62, 63, 64, 126, 128):
        for t, keep in [(1, 1), (3, 1), (3, 2), (5, 0), (5, 4)]:
            assert committed(run, prefix, t, keep) is None, (prefix, t, keep)


def test_storage_grows_in_blocks_and_forks_are_independent(model):
    run = Target(model)
    plane = next(p for p in run.cache.planes if isinstance(p, KVPlane))
    sizes = []
    for n in (1, 63, 1, 64, 1):
        run.feed(run.cache, draw(model, n))
        sizes.append(plane.k_BNSD.shape[2])
    assert sizes == [64, 64, 128, 256, 256]
    bytes_before = run.cache.nbytes
    twin = run.cache.fork()
    assert twin.nbytes == bytes_before
    run.feed(run.cache, draw(model, 40))
    untouched = run.cache.fork()
    run.feed(twin, draw(model, 40, seed=8))
    assert run.cache.first_difference(untouched) is None
    assert run.cache.first_difference(twin) is not None


def test_the_capacity_is_used_to_the_last_row_and_not_passed(model):
    run = Target(model, capacity=70)
    run.feed(run.cache, draw(model, 66))
    ckpt = run.cache.checkpoint()
    run.feed(run.cache, draw(model, 4))
    before = run.cache.room()
    with pytest.raises(UserError, match=r"sequence 0 holds 70 rows and 1 more were given.*room for 70.*larger or feed"):
        run.feed(run.cache, draw(model, 1))
    assert before == run.cache.room() == 0
    run.cache.commit(ckpt, keep=3)
    assert run.cache.lengths == [69] and run.cache.room() == 1
    run.feed(run.cache, draw(model, 1))


def test_an_overflow_changes_nothing(model):
    run = Target(model, batch=2, capacity=10)
    run.feed(run.cache, draw(model, 8, batch=2), [8, 3])
    before = run.cache.fork()
    with pytest.raises(UserError, match=r"sequence 0 holds 8 rows and 3 more"):
        run.feed(run.cache, draw(model, 3, batch=2), [3, 3])
    assert run.cache.first_difference(before) is None
    run.feed(run.cache, draw(model, 3, batch=2), [2, 3])


def test_misuse_is_a_sentence_and_changes_nothing(model):
    run = Target(model)
    run.feed(run.cache, draw(model, 3))
    first = run.cache.checkpoint()
    run.feed(run.cache, draw(model, 4))
    after = list(run.cache.lengths)
    states = [plane.state_BHKV for plane in run.cache.recurrent]
    refused: list[tuple[Callable[[], object], str]] = [
        (run.cache.checkpoint, "still open: commit it or roll it back first"),
        (run.cache.fork, "open checkpoint cannot be forked: commit it or roll it back"),
        (
            lambda: run.cache.commit(first, keep=5),
            r"keep=5 is not valid: rows fed since the checkpoint are \[4\]; keep 0",
        ),
        (lambda: run.cache.commit(first, keep=-1), r"keep=-1 is not valid"),
        (lambda: run.cache.commit(first, keep=[1, 1]), r"keep=\[1, 1\] is not valid"),
    ]
    for ask, sentence in refused:
        with pytest.raises(UserError, match=sentence):
            ask()
    assert run.cache.lengths == after
    assert all(plane.state_BHKV is s for plane, s in zip(run.cache.recurrent, states))
    run.cache.commit(first, keep=2)
    kept = run.cache.fork()
    for ask in (lambda: run.cache.commit(first, keep=0), lambda: run.cache.rollback(first)):
        with pytest.raises(UserError, match=r"not the open one of this cache: take a new one with checkpoint\(\)"):
            ask()
    second = run.cache.checkpoint()
    run.feed(run.cache, draw(model, 2))
    with pytest.raises(UserError, match="not the open one"):
        run.cache.commit(first, keep=1)
    run.cache.rollback(second)
    assert run.cache.first_difference(kept) is None
    with pytest.raises(UserError, match=r"strategy='copy' is not valid.*'tape', 'columns', 'snapshot'"):
        model.new_cache(strategy="copy")


def test_a_commit_of_everything_and_of_nothing(model):
    run = Target(model)
    for keep in (0, 4):
        ckpt = run.cache.checkpoint()
        run.feed(run.cache, draw(model, 4))
        run.cache.commit(ckpt, keep=keep)
    empty = run.cache.checkpoint()
    run.cache.commit(empty, keep=0)
    assert run.cache.lengths == [4]
    assert all(plane.tape is None for plane in run.cache.recurrent)


def test_a_snapshot_keeps_the_tokens_it_was_fed(model):
    run = Target(model, "snapshot")
    tokens = draw(model, 4)
    expected = run.cache.fork()
    run.feed(expected, tokens[:, :2])
    ckpt = run.cache.checkpoint()
    run.feed(run.cache, tokens)
    tokens.zero_()
    run.cache.commit(ckpt, keep=2)
    assert run.cache.first_difference(expected) is None


def test_nothing_of_a_verify_stays_behind(model):
    run = Target(model, "columns")
    run.feed(run.cache, draw(model, 3))
    for keep in (0, 3, 9):
        ckpt = run.cache.checkpoint()
        run.feed(run.cache, draw(model, 9))
        recorded = [item for plane in run.cache.recurrent for item in plane.tape]
        watched = [weakref.ref(x) for item in recorded for x in (item.k_BTHK, item.conv_BTC)]
        watched += [weakref.ref(s) for item in recorded for i, s in enumerate(item.states, 1) if i != keep]
        del recorded
        run.cache.commit(ckpt, keep=keep)
        assert sum(x() is not None for x in watched) == 0, keep


# ------------------------------------------------------------------------------------------------- differences


def test_first_difference_names_the_place(model):
    run = Target(model, batch=2)
    run.feed(run.cache, draw(model, 5, batch=2))
    twin = run.cache.fork()
    assert run.cache.first_difference(twin) is None
    twin.recurrent[1].state_BHKV[0, 0, 0, 0] += 1
    assert run.cache.first_difference(twin) == "layer 2: state_BHKV differs"
    twin = run.cache.fork()
    twin.planes[1].v_BNSD[1, 0, 3, 2] += 1
    assert run.cache.first_difference(twin) == "layer 1: v of sequence 1 differs first in row 3"
    twin = run.cache.fork()
    twin.recurrent[0].conv_BWC.neg_().neg_()
    assert run.cache.first_difference(twin) is None
    twin.recurrent[0].conv_BWC[twin.recurrent[0].conv_BWC == 0] = -0.0
    twin.lengths = [4, 5]
    assert run.cache.first_difference(twin) == "lengths differ: [5, 5] and [4, 5]"


# ---------------------------------------------------------------------------------------------------- controls


def window_lost(patch: pytest.MonkeyPatch) -> None:
    cut = RecurrentPlane.cut

    def wrong(self: RecurrentPlane, conv: Tensor, *rest: object) -> None:
        after = self.conv_BWC
        cut(self, conv, *rest)
        self.conv_BWC = after

    patch.setattr(RecurrentPlane, "cut", wrong)


def state_not_restored(patch: pytest.MonkeyPatch) -> None:
    cut = RecurrentPlane.cut

    def wrong(self: RecurrentPlane, *args: object) -> None:
        after = self.state_BHKV
        cut(self, *args)
        self.state_BHKV = after

    patch.setattr(RecurrentPlane, "cut", wrong)


def one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    cut = RecurrentPlane.cut
    patch.setattr(RecurrentPlane, "cut", lambda self, conv, state, keep: cut(self, conv, state, [n + 1 for n in keep]))


def written_in_place(patch: pytest.MonkeyPatch) -> None:
    put = RecurrentPlane.put

    def wrong(self: RecurrentPlane, conv: Tensor, state: Tensor, inputs: object) -> None:
        self.conv_BWC.copy_(conv)
        self.state_BHKV.copy_(state)
        put(self, self.conv_BWC, self.state_BHKV, inputs)

    patch.setattr(RecurrentPlane, "put", wrong)


def rows_overwritten_from_the_start(patch: pytest.MonkeyPatch) -> None:
    append = KVPlane.append
    patch.setattr(KVPlane, "append", lambda self, k, v, at, n: append(self, k, v, [max(0, x - 1) for x in at], n))


def refeed_one_short(patch: pytest.MonkeyPatch) -> None:
    refeed = HybridCache._refeed
    patch.setattr(HybridCache, "_refeed", lambda self, ckpt, wanted: refeed(self, ckpt, [n - 1 for n in wanted]))


@pytest.mark.parametrize(
    "mistake, strategy",
    [
        (window_lost, "tape"),
        (window_lost, "columns"),
        (state_not_restored, "tape"),
        (one_row_too_many, "tape"),
        (one_row_too_many, "columns"),
        (written_in_place, "tape"),
        (written_in_place, "columns"),
        (written_in_place, "snapshot"),
        (rows_overwritten_from_the_start, "tape"),
        (refeed_one_short, "snapshot"),
    ],
)
def test_the_comparison_catches(model, monkeypatch, mistake, strategy):
    run = Target(model, strategy)
    assert committed(run, 5, 6, 2) is None
    mistake(monkeypatch)
    assert committed(run, 5, 6, 2) is not None
