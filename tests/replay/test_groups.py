"""The optional columns of a draft table against a plain loop over positions, in float64 and by direct calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

from workbench.core.errors import UserError
from workbench.core.tape import Corpus, Tape
from workbench.datasets import heads
from workbench.model.hybrid import HybridModel
from workbench.replay import DraftTable, ReplayOptions, expected_rounds, load_table, replay, walk
from workbench.replay import groups as group_module
from workbench.replay.groups import Ranks, rank_of, shadow, two_best
from workbench.sampling.pick import picks

chains_module = sys.modules["workbench.replay.chains"]

K, WIDTH, HEATS = 4, 3, (0.6, 1.0)
ALL: dict[str, Any] = dict(shadow=WIDTH, target=True, ranks=True, overlap=HEATS, forced=True)
DRAWN: dict[str, Any] = dict(temperature=0.8, seed=3)
NEW = {
    "shadow": ("shadow_ids", "shadow_probs"),
    "target": ("target_top2", "target_top2_probs", "target_entropy"),
    "ranks": ("draft_rank", "draft_target_logp", "draft_logp"),
    "overlap": ("overlap",),
    "forced": ("target_p", "forced_q", "forced_top", "forced_ids"),
}


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=1, tied=False, vocab_size=11, seed=1)


@pytest.fixture(scope="module")
def tapes() -> Corpus:
    rng = np.random.default_rng(4)
    shapes = [(23, 0), (14, 5), (3, 0), (2, 0), (9, 9)]
    return Corpus([Tape(f"d{i}", rng.integers(0, 11, n), prompt_len=p) for i, (n, p) in enumerate(shapes)], name="c")


Reference = dict[tuple[str, int], dict[str, Any]]


@torch.inference_mode()
def loop(model: HybridModel, tape: Tape, frame: pl.DataFrame) -> Reference:
    """Columns of every row of one tape from direct calls of the model, one chain at a time.

    The drafted ids are taken from the table: they are not what is under test, and drawn ones hold noise.
    """
    n, out = len(tape), {}
    x = torch.from_numpy(tape.tokens.astype(np.int64))[None]
    run = model.forward(x, model.new_cache(capacity=n))
    target = run.logits_BTV[0].double().log_softmax(-1)
    for row in frame.filter(pl.col("doc_id") == tape.doc_id).iter_rows(named=True):
        p = row["position"]
        best = sorted(range(11), key=lambda i: (-float(target[p, i]), i))[:2]
        one: dict[str, Any] = {
            "target_top2": best,
            "target_top2_probs": [float(target[p, i].exp()) for i in best],
            "target_entropy": -sum(float(t.exp() * t) for t in target[p]),
        }
        slots = min(K, n - 1 - p) if p >= max(tape.prompt_len, 1) else 0
        for name in (name for names in NEW.values() for name in names):
            one.setdefault(name, [None] * {"shadow": K * WIDTH, "overlap": len(HEATS)}.get(name.split("_")[0], K))
        one["target_p"] = float(target[p, tape.tokens[p + 1]].exp())
        for kind in ("draft", "forced") if slots else ():
            cache = model.new_draft_cache(capacity=n + K)
            hidden = model.draft(x[:, 1 : p + 1], run.normed_BTH[:, :p], cache)[:, -1:]
            for j in range(slots):
                logits = model.unembed(hidden)[0, 0].double()
                nats, order = logits.log_softmax(0), sorted(range(11), key=lambda i: (-float(logits[i]), i))
                told = int(tape.tokens[p + 1 + j])
                if kind == "draft":
                    fed = row["draft_ids"][j]
                    at = slice(j * WIDTH, (j + 1) * WIDTH)
                    one["shadow_ids"][at] = order[:WIDTH]
                    one["shadow_probs"][at] = [float(nats[i].exp()) for i in order[:WIDTH]]
                    there = target[p + j]
                    one["draft_rank"][j] = 1 + sorted(range(11), key=lambda i: (-float(there[i]), i)).index(fed)
                    one["draft_target_logp"][j], one["draft_logp"][j] = float(there[fed]), float(nats[fed])
                    if j == 0:
                        laws = [(target[p] / t).softmax(0) - (logits / t).softmax(0) for t in HEATS]
                        one["overlap"] = [1 - 0.5 * float(gap.abs().sum()) for gap in laws]
                else:
                    fed = told
                    one["forced_ids"][j], one["forced_top"][j] = order[0], float(nats.exp().max())
                    one["forced_q"][j] = float(nats[told].exp())
                hidden = model.draft(torch.tensor([[fed]]), hidden, cache)
        out[tape.doc_id, p] = one
    return out


def problems(frame: pl.DataFrame, reference: Reference, skip: tuple[str, ...] = ()) -> set[str]:
    """Columns in which a table differs from the loop."""
    found = set()
    for row in frame.iter_rows(named=True):
        for name, expected in reference[row["doc_id"], row["position"]].items():
            if name in skip:
                continue
            several = isinstance(expected, list)
            a, b = (list(v) if several else [v] for v in (row[name], expected))
            same = len(a) == len(b) and all(
                x is None and y is None
                if x is None or y is None
                else (x == y if isinstance(y, int) else x == pytest.approx(y, abs=3e-6))
                for x, y in zip(a, b, strict=True)
            )
            if not same:
                found.add(name)
    return found


def make(model: HybridModel, tapes: Corpus, out: Path, **options: Any) -> DraftTable:
    return replay(model, tapes, out=out, **{"k_max": K, "chunk": 7, **options})


def shards(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(path.glob("*.arrow"))]


@pytest.fixture(scope="module")
def plain(model, tapes, tmp_path_factory) -> DraftTable:
    return make(model, tapes, tmp_path_factory.mktemp("plain") / "x", **ALL)


@pytest.fixture(scope="module")
def drawn(model, tapes, tmp_path_factory) -> DraftTable:
    return make(model, tapes, tmp_path_factory.mktemp("drawn") / "x", **ALL, **DRAWN)


def reference_of(model: HybridModel, tapes: Corpus, frame: pl.DataFrame) -> Reference:
    return {key: one for tape in tapes for key, one in loop(model, tape, frame).items()}


@pytest.fixture(scope="module")
def plain_reference(model, tapes, plain) -> Reference:
    return reference_of(model, tapes, plain.frame)


# ---------------------------------------------------------------- every column, every position


def test_every_column_of_a_plain_table(plain, plain_reference):
    assert len(plain.frame) == len(plain_reference) and plain.k_shadow == WIDTH
    assert not problems(plain.frame, plain_reference)
    frame = plain.frame
    for j in range(K):
        assert frame["shadow_ids"].arr.get(j * WIDTH).equals(frame["draft_ids"].arr.get(j))
        assert frame["shadow_probs"].arr.get(j * WIDTH).equals(frame["draft_top1"].arr.get(j)), "to the last bit"
    assert frame["target_top2"].arr.get(0).equals(frame["target_id"])


def test_every_column_of_a_table_of_draws(model, tapes, drawn):
    shaped = ("target_p", "forced_q", "forced_ids")
    assert not problems(drawn.frame, reference_of(model, tapes, drawn.frame), skip=shaped)
    frame = drawn.frame
    for j in range(K):
        assert frame["shadow_probs"].arr.get(j * WIDTH).equals(frame["draft_top"].arr.get(j))
    ranks = frame["draft_rank"].explode().drop_nulls()
    assert ranks.max() > WIDTH and ranks.min() >= 1, "draws are not always the best token"
    heads = frame.filter(pl.col("draft_ids").arr.get(0).is_not_null())
    assert heads["forced_ids"].arr.get(0).equals(heads["draft_ids"].arr.get(0)), "the first slot has been fed no token"
    assert (heads["forced_ids"].arr.get(1) != heads["draft_ids"].arr.get(1)).any()


def test_forced_drafts_of_a_table_of_draws_are_draws_after_the_tapes_tokens(model, tapes, drawn):
    """Where a chain's drafts were the tape's tokens, the forced chain drafts the same in the next slot."""
    seen = 0
    for row in drawn.frame.iter_rows(named=True):
        text = next(t for t in tapes if t.doc_id == row["doc_id"]).tokens[row["position"] + 1 :].tolist()
        for j, token in enumerate(row["draft_ids"]):
            if token is None or row["draft_ids"][:j] != text[:j]:
                break
            assert row["forced_ids"][j] == token
            seen += j > 0
    assert seen > 0


# ---------------------------------------------------------------- independence of how it was made


@pytest.mark.parametrize("options", [{}, DRAWN], ids=["plain", "drawn"])
def test_bytes_do_not_depend_on_the_chunk(model, tapes, plain, drawn, tmp_path, options):
    whole = shards((drawn if options else plain).path)
    for chunk in (512, 3, 2):
        make(model, tapes, tmp_path / str(chunk), **{**ALL, **options, "chunk": chunk})
        assert shards(tmp_path / str(chunk)) == whole, chunk


def test_bytes_do_not_depend_on_slices_and_blocks(model, tapes, plain, monkeypatch, tmp_path):
    for module, name, value in ((heads, "HEAD_VALUES", 1), (group_module, "WIDE_VALUES", 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, value)
            make(model, tapes, tmp_path / name, chunk=40, **ALL)
        assert shards(tmp_path / name) == shards(plain.path), name


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, dict(temperature=0.7, top_p=0.9)], ids=["plain", "drawn"])
def test_bytes_do_not_depend_on_the_chunk_on_demo_texts(demo, heldout, tmp_path, options):
    texts = Corpus([Tape(t.doc_id, t.tokens[:150]) for t in (*heldout("novels"), *heldout("sqlite"))])
    for chunk in (512, 100, 64, 7, 2):
        replay(demo, texts, out=tmp_path / str(chunk), chunk=chunk, **{**ALL, "shadow": 8}, **options)
        assert shards(tmp_path / str(chunk)) == shards(tmp_path / "512"), chunk


@pytest.mark.parametrize("options", [{}, DRAWN], ids=["plain", "drawn"])
def test_a_group_is_the_same_alone_and_leaves_the_rest_as_it_is(model, tapes, plain, drawn, tmp_path, options):
    every = (drawn if options else plain).frame
    none = make(model, tapes, tmp_path / "none", **options).frame
    added = [name for names in NEW.values() for name in names]
    assert every.drop(added).equals(none) and not set(added) & set(none.columns)
    for group, names in NEW.items():
        alone = make(model, tapes, tmp_path / group, **{group: ALL[group]}, **options).frame
        assert alone.equals(every.select(none.columns + list(names))), group


def test_a_thinned_table_holds_rows_of_the_whole(model, tapes, plain, tmp_path):
    thin = make(model, tapes, tmp_path / "x", stride=3, **ALL).frame
    starts = thin["draft_ids"].arr.get(0).is_not_null()
    assert 0 < starts.sum() < len(thin) and thin.filter(starts).equals(plain.frame.filter(starts))
    assert thin.filter(~starts)["overlap"].explode().null_count() == 2 * (~starts).sum()
    assert thin.filter(~starts)["draft_rank"].explode().null_count() == K * (~starts).sum()


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(model, tapes, plain, monkeypatch, tmp_path):
    calls, forward = [0], HybridModel.forward

    def killed(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] > 5:
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(HybridModel, "forward", killed)
        with pytest.raises(KeyboardInterrupt):
            make(model, tapes, tmp_path / "x", shard_rows=20, **ALL)
    again = make(model, tapes, tmp_path / "x", shard_rows=20, **ALL)
    assert again.frame.equals(plain.frame) and len(shards(tmp_path / "x")) == 2
    with pytest.raises(UserError, match=r"parameters\.shadow is 3 there and 2 now"):
        make(model, tapes, tmp_path / "x", shard_rows=20, **{**ALL, "shadow": 2})


# ---------------------------------------------------------------- the comparison can fail


def shifted_ranks(patch: pytest.MonkeyPatch) -> None:
    judge = Ranks.judge
    patch.setattr(Ranks, "judge", lambda self, logits, first: judge(self, logits.roll(1, 0), first))


def ranks_of_the_slot_before(patch: pytest.MonkeyPatch) -> None:
    judge = Ranks.judge

    def wrong(self: Ranks, logits: torch.Tensor, first: int) -> None:
        ids, self.ids = self.ids, np.roll(self.ids, 1, 1)
        judge(self, logits, first)
        self.ids = ids

    patch.setattr(Ranks, "judge", wrong)


def rows_held_too_short(patch: pytest.MonkeyPatch) -> None:
    judge = Ranks.judge

    def wrong(self: Ranks, logits: torch.Tensor, first: int) -> None:
        self.ids[: max(first - 2, 0)] = -1
        judge(self, logits, first)

    patch.setattr(Ranks, "judge", wrong)


def slots_turned(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    side_by_side = chains_module._side_by_side

    def wrong(slots: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        turned = [dict(slot) for slot in slots]
        for i, slot in enumerate(turned):
            if name in slot:
                slot[name] = slots[i - 1][name]
        return side_by_side(turned)

    return lambda patch: patch.setattr(chains_module, "_side_by_side", wrong)


def rolled(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    right = getattr(chains_module, name)
    return lambda patch: patch.setattr(chains_module, name, lambda rows, *rest: right(rows.roll(1, 0), *rest))


def forced_by_the_token_before(patch: pytest.MonkeyPatch) -> None:
    forced = chains_module.forced_chains

    def wrong(job: Any, tokens: list[np.ndarray]) -> Any:
        return forced(job, [np.roll(one, 1) for one in tokens])

    patch.setattr(sys.modules["workbench.replay.run"], "forced_chains", wrong)


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = {
    "ranks in the row before": (shifted_ranks, {"draft_rank", "draft_target_logp"}),
    "ranks of the slot before": (ranks_of_the_slot_before, {"draft_rank", "draft_target_logp"}),
    "starts forgotten at a chunk's end": (rows_held_too_short, {"draft_rank", "draft_target_logp"}),
    "candidates of the slot before": (slots_turned("shadow_ids"), {"shadow_ids"}),
    "candidates of the row before": (rolled("shadow"), {"shadow_ids", "shadow_probs"}),
    "overlap with the row before": (rolled("overlaps"), {"overlap"}),
    "the target's row before": (rolled("two_best"), {"target_top2", "target_top2_probs", "target_entropy"}),
    "the drafter's log-probability of the slot before": (slots_turned("draft_logp"), {"draft_logp"}),
    "the forced chain fed a token late": (forced_by_the_token_before, {"forced_q", "forced_ids", "forced_top"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(model, tapes, plain_reference, monkeypatch, tmp_path, name):
    mistake, columns = MISTAKES[name]
    mistake(monkeypatch)
    assert problems(make(model, tapes, tmp_path / "x", **ALL).frame, plain_reference) == columns


# ---------------------------------------------------------------- rows by hand


def test_ties_go_to_the_lower_id():
    rows = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    ids, probs = shadow(rows, picks(rows).top1, 3)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [4, 3, 2]]
    assert torch.equal(probs[:, 0].float(), picks(rows).top1) and probs[1].tolist() == pytest.approx([0.2] * 3)
    assert [rank_of(rows, torch.full((3,), i)).tolist() for i in range(5)] == [
        [4, 1, 5], [1, 2, 4], [2, 3, 3], [5, 4, 2], [3, 5, 1]
    ]  # fmt: skip
    best, probs, entropy = two_best(rows)
    assert best.tolist() == [[1, 2], [0, 1], [4, 3]] and float(entropy[1]) == pytest.approx(np.log(5))
    assert float(probs[2, 0]) == pytest.approx(np.exp(4) / np.exp(np.arange(5)).sum())


# ---------------------------------------------------------------- size


@pytest.mark.parametrize("options", [{}, ALL, DRAWN, {**ALL, **DRAWN, "k_max": 8, "shadow": 8, "overlap": 0.5}])
def test_the_stated_size_is_what_arrow_stores(model, tapes, tmp_path, options):
    predicted = ReplayOptions(**{"k_max": K, **options}).bytes_per_row
    table = make(model, tapes, tmp_path / "x", **options)
    assert table.bytes_per_row == predicted == load_table(table.path).bytes_per_row
    stored: dict[str, int] = {}
    rows = 0
    for file in table.path.glob("*.arrow"):
        for batch in pa.ipc.open_stream(file.read_bytes()):
            rows += batch.num_rows
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if not pa.types.is_string(column.type) and not pa.types.is_boolean(column.type):
                    stored[name] = stored.get(name, 0) + column.buffers()[-1].size
    assert rows == len(table.frame)
    for group, size in predicted.items():
        columns = [c for c in ReplayOptions(**{"k_max": K, **options}).columns() if c.group == group]
        rest = sum(c.bytes for c in columns if c.name not in stored)
        assert sum(stored[c.name] for c in columns if c.name in stored) == rows * (size - rest), group
    assert f"{sum(predicted.values()):,.0f}" in table._repr_html_()
    asked = ["forced", "shadow", "target", "ranks", "overlap"] if "shadow" in options else []
    assert list(predicted) == ["base", *(["drawn"] if "temperature" in options else []), *asked]


def test_sizes_by_hand():
    assert ReplayOptions(k_max=8, shadow=4).bytes_per_row == {"base": 16 + 36 + 1 / 8 + 96 + 4, "shadow": 256.0}
    assert ReplayOptions(k_max=8, overlap=(0.5, 1), ranks=True).bytes_per_row["overlap"] == 8


# ---------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(shadow=9), "shadow=9 is not valid: it must be an integer from 0 to 8; 0 records none"),
        (dict(shadow=True), "shadow=True"),
        (dict(target=1), "target=1 is not valid: it must be True or False"),
        (dict(ranks="yes"), "ranks='yes'"),
        (dict(overlap=0), "overlap=0 is not valid: it must be a number above 0"),
        (dict(overlap=(1.0, 1.0)), "give at most 8 temperatures, each of them once"),
        (dict(overlap="1"), "overlap='1' is not valid: give temperatures above 0"),
        (dict(overlap=None), "overlap=None is not valid"),
        (dict(overlap=range(1, 10)), "at most 8 temperatures"),
    ],
)
def test_a_bad_request_is_a_sentence_and_nothing_is_made(model, tapes, tmp_path, given, says):
    with pytest.raises(UserError, match=says):
        make(model, tapes, tmp_path / "x", **given)
    assert not list(tmp_path.iterdir())


def test_more_candidates_than_ids(tiny, tmp_path):
    with pytest.raises(UserError, match="shadow=6 is not valid: the draft head has 5 ids; record fewer"):
        make(tiny(vocab_size=5), Corpus([Tape("d", [1, 2, 3])]), tmp_path / "x", shadow=6)


def test_a_plain_table_with_forced_chains_is_no_table_of_draws(plain):
    for run in (lambda: walk(plain, k=2, estimator="ratio"), lambda: expected_rounds(plain, k=2)):
        with pytest.raises(UserError, match="needs a table of draws, and this one holds the most likely tokens"):
            run()
    assert len(walk(plain, k=2, estimator="forced"))


def test_forced_probabilities_at_temperature_0_with_penalties_are_of_the_bare_rows(model, tapes, plain, tmp_path):
    frame = make(model, tapes, tmp_path / "x", forced=True, frequency_penalty=0.2).frame
    for name in ("target_p", "forced_q", "forced_top"):
        assert frame[name].equals(plain.frame[name])
