"""Checks that every op of the registry must pass, interpreted on a CPU or natively on a GPU.

Run as a program it checks the ops named, or all, under Triton's interpreter, and prints one line per failure and a
last line with what it did; the interpreter must be chosen before Triton is imported, so tests start it as a process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError
from workbench_kernels.dispatch import recorded
from workbench_kernels.registry import Case, Op, copied, misses, ops, outputs


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nothing wrote is NaN, or the least integer."""
    kept = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.fill_(float("nan"))
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).min)

    torch.empty = lambda *a, **k: fill(kept[0](*a, **k))
    torch.empty_like = lambda *a, **k: fill(kept[1](*a, **k))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = kept


def against_reference(op: Op, case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Iterator[str]:
    """The kernel against the specification in float64, from poisoned outputs; and that the kernel is what ran."""
    given = op.inputs(case, dtype=dtype, device=device, seed=seed)
    with poisoned(), recorded() as ran:
        made = outputs(op.call(**copied(given), **case.options, impl="triton"))
    if (op.name, "triton") not in ran:
        yield f"{op.name}: the record says {ran}"
    for line in misses(op, made, op.reference(given, case.options), dtype):
        yield f"{case.name} {str(dtype)[6:]}: {line}"


def strided_refused(op: Op, case: Case, dtype: torch.dtype, device: str) -> Iterator[str]:
    """Every tensor input with a gap in its memory is refused."""
    given = op.inputs(case, dtype=dtype, device=device)
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dim() == 0 or x.numel() < 2:
            continue
        gaps = torch.stack([x, x], -1)[..., 0]
        try:
            op.call(**{**given, name: gaps}, **case.options, impl="triton")
        except KernelError as error:
            if "stride" not in str(error):
                yield f"{op.name}: a strided {name} is refused with {error}"
        else:
            yield f"{op.name}: a strided {name} is taken"


def rows_alone(op: Op, case: Case, dtype: torch.dtype, device: str) -> Iterator[str]:
    """A row gives the same bits alone, with others, and in another place."""
    given = op.inputs(case, dtype=dtype, device=device)
    names = op.rows.split()
    whole = outputs(op.call(**copied(given), **case.options, impl="triton"))
    rows = len(given[names[0]])
    turned = {**given, **{n: given[n].roll(1, 0) for n in names}}
    for i, (x, y) in enumerate(zip(whole, outputs(op.call(**copied(turned), **case.options, impl="triton")))):
        if not same(x.roll(1, 0), y):
            yield f"{op.name} {case.name}: output {i} changes when rows change places"
    for r in sorted({0, rows // 2, rows - 1}):
        one = {**given, **{n: given[n][r : r + 1].clone() for n in names}}
        for i, (x, y) in enumerate(zip(whole, outputs(op.call(**copied(one), **case.options, impl="triton")))):
            if not same(x[r : r + 1], y):
                yield f"{op.name} {case.name}: output {i} of row {r} changes when the row stands alone"


def delta_laws(device: str, **sizes: int) -> list[str]:
    """Steps of any size, commits, columns and the scan of the delta rule give the same bits."""
    from workbench_kernels import gated_delta as g

    given = ops()["gated_delta_step"].inputs(Case(sizes), dtype=torch.float32, device=device)
    state, t, b = given.pop("state_BHKV"), sizes["t"], sizes["b"]
    mixed, gates = given.pop("mixed_BTC"), given.pop("gates_BTM")
    whole = g.gated_delta_step(
        mixed, gates, state_BHKV=state, **given, write="none", tape=True, columns=True, impl="triton"
    )
    found, at = [], state.clone()
    for i in range(t):
        row = slice(i, i + 1)
        one = g.gated_delta_step(
            mixed[:, row].contiguous(), gates[:, row].contiguous(), state_BHKV=at, **given, impl="triton"
        )
        if not same(one.out_BTHV, whole.out_BTHV[:, row]):
            found.append(f"row {i} of a step of {t} differs from a step of 1")
        keep = torch.full((b,), i + 1, dtype=torch.int32, device=device)
        kept = g.gated_delta_commit(whole.tape, state.clone(), keep, impl="triton")
        if not same(kept, at) or not same(whole.states_BTHKV[:, i], at):
            found.append(f"the state after {i + 1} rows differs between commit, column and steps")
        wrong = g.gated_delta_commit(whole.tape, state.clone(), keep - 1, impl="triton")
        if same(wrong, at):
            found.append(f"a commit of {i} rows passes for one of {i + 1}")
    from workbench_kernels.causal_conv import causal_conv

    wide, taps = torch.cat([mixed, mixed[..., :3]], -1), torch.randn(4, mixed.shape[2], device=device)
    window = torch.randn(b, 3, mixed.shape[2], device=device)
    apart = causal_conv(wide, window, taps, impl="triton")[0]
    for rows, conv in ((wide[..., : mixed.shape[2]], (window, taps)), (wide[..., 1:-2], (window, taps))):
        one = g.gated_delta_step(rows, gates, state_BHKV=state, **given, write="none", conv=conv, impl="triton")
        two = g.gated_delta_step(apart, gates, state_BHKV=state, **given, write="none", impl="triton")
        if same(one.out_BTHV, two.out_BTHV) != (rows.storage_offset() == 0):
            found.append("a step that convolves first differs from convolution and step")
    one = torch.full((1,), t - 1, dtype=torch.int32, device=device)
    for every in (one, one - 1):
        kept = g.gated_delta_commit(whole.tape, state.clone(), every, impl="triton")
        if same(kept, whole.states_BTHKV[:, t - 2]) != (every is one):
            found.append("one number of rows for all sequences keeps other rows")
    ragged = torch.arange(b, dtype=torch.int32, device=device) % (t + 1)
    kept = g.gated_delta_commit(whole.tape, state.clone(), ragged, impl="triton")
    for i, n in enumerate(ragged.tolist()):
        if not same(kept[i], whole.states_BTHKV[i, n - 1] if n else state[i]):
            found.append(f"a ragged commit of {n} rows differs")
    heads = {k: given[k] for k in ("a_log_H", "dt_bias_H", "key_heads")}
    q, k, v, beta, decay, _ = g.delta_inputs(mixed, gates, **heads, key_width=sizes["k"], impl="triton")
    _, after = g.gated_delta_scan(q, *whole.tape, state, impl="triton")
    if not same(after, at):
        found.append("the scan's state differs from the steps'")
    return found


def embed_laws(device: str) -> list[str]:
    """An id outside the table gives NaN, and reads nothing there; the others are the table's rows."""
    from workbench_kernels.rmsnorm import embed_rmsnorm

    given = ops()["embed_rmsnorm"].inputs(Case(dict(rows=4, width=30, vocab=9)), dtype=torch.float32, device=device)
    given["ids_R"] = torch.tensor([-1, 0, 8, 9], device=device)
    rows, normed = embed_rmsnorm(**given, impl="triton")
    lost = [bool(x.isnan().all()) for x in (rows[0], rows[3], normed[0], normed[3])]
    found = [] if all(lost) else ["an id outside the table gives numbers"]
    if not torch.equal(rows[1:3], given["table_VD"][[0, 8]]) or bool(normed[1:3].isnan().any()):
        found.append("ids of the table do not give its rows")
    return found


def chunk_laws(device: str, *, t: int = 66, h: int = 2, k: int = 10, v: int = 18) -> list[str]:
    """Chunks of a ragged batch are, bit for bit, those of each sequence alone, and read no row past its count; narrow
    inputs are the wide ones rounded."""
    from workbench_kernels import gated_delta as g

    found, counts = [], [0, 1, t]
    sizes = dict(b=len(counts), t=t, n=1, h=h, k=k, v=v)
    given = ops()["delta_inputs"].inputs(Case(sizes), dtype=torch.bfloat16, device=device)
    state = torch.randn(len(counts), h, k, v, generator=torch.Generator().manual_seed(3)).to(device)
    wide = g.delta_inputs(**given, impl="triton")
    for dtype in (torch.float32, torch.bfloat16):
        made = g.delta_inputs(**{**given, "dtype": dtype}, impl="triton")
        for i, (x, y) in enumerate(zip(made, wide)):
            if not torch.equal(x, y.to(dtype) if i < 3 else y):
                found.append(f"output {i} of delta_inputs in {dtype} is not the float32 one rounded")
        rows = [x.clone() for x in (*made[:4], made[5])]
        for x in rows:
            for b, n in enumerate(counts):
                x[b, n:] = float("nan")
        held = torch.tensor(counts, dtype=torch.int32, device=device)
        out, after = g.gated_delta_chunk(*rows, state, counts_B=held, impl="triton")
        for b, n in enumerate(counts):
            one = slice(b, b + 1)
            alone = [x[one, :n].contiguous() for x in rows]
            y, last = g.gated_delta_chunk(*alone, state[one], counts_B=held[one], impl="triton")
            if not same(out[one, :n], y) or not same(after[one], last):
                found.append(f"{n} rows of a ragged batch in {dtype} differ from the same rows alone")
            if n and not torch.isfinite(y).all():
                found.append(f"{n} rows in {dtype} read rows past them")
        _, short = g.gated_delta_chunk(*rows, state, counts_B=(held - 1).clamp(min=0), impl="triton")
        if any(same(short[b], after[b]) for b, n in enumerate(counts) if n):
            found.append(f"a count of one row less passes for the count in {dtype}")
    return found


def packed_stores(device: str) -> list[str]:
    """Rows packed by the kernel are, byte for byte, what the cache's formats make of the rows it stores dense."""
    from workbench.cache.formats import FORMATS
    from workbench_kernels.registry import Maker
    from workbench_kernels.rope_store import rope_store
    from workbench_kernels.rope_store.cases import _make

    found = []
    sizes = dict(b=2, t=5, h=2, n=2, d=64, r=16, s=20, held=9)
    for kinds in (("q8_0", "q5_1"), ("q5_1", "q8_0"), ("q8_0", "dense")):
        packed = _make(Maker(3, torch.float32, device), **sizes, k=kinds[0], v=kinds[1])
        dense = _make(Maker(3, torch.float32, device), **sizes)
        shared = {k: v for k, v in packed.items() if k[:2] not in ("k_", "v_") or k == "k_scale_D"}
        made = rope_store(**copied(packed), impl="triton")[2:]
        plain = rope_store(**{**dense, **shared}, impl="triton")[2:]
        for kind, x, y in zip(kinds, made, plain):
            for b, at in enumerate(packed["lengths_B"].tolist()):
                rows = slice(at, at + sizes["t"])
                want = y[b, :, rows].cpu() if kind == "dense" else FORMATS[kind].encode(y[b, :, rows].cpu())
                if not torch.equal(x[b, :, rows].cpu(), want):
                    found.append(f"rows packed as {kind} are not the cache's")
    return found


def sampling_laws(device: str, vocab: int, seeds: int = 12) -> list[str]:
    """Edits, draws, acceptance and residuals are those of workbench.sampling, draw for draw."""
    from workbench.sampling.draw import draw
    from workbench.sampling.options import ORDERS, Shaping
    from workbench.sampling.philox import DRAFT, TARGET, Noise
    from workbench.sampling.shaping import laws
    from workbench.spec.choose import Chooser
    from workbench_kernels.accept import accept_ratio
    from workbench_kernels.shape_draw import edit_logits, residual_draw, shape_draw

    noise, found, rows = Noise(5, 1), [], 3
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    history, drafted = [4, 5, 6, 5, 80, 4], [7, 4]
    start = len(history) - 1
    tokens = torch.tensor([*history, *drafted], device=device)
    length = torch.tensor([len(history)], dtype=torch.int32, device=device)
    at = torch.arange(rows, device=device) + len(history)
    settings: list[dict[str, Any]] = [
        dict(temperature=0.0), dict(temperature=0.8), dict(temperature=0.7, top_k=20, top_p=0.9),
        dict(temperature=1.3, top_p=0.6, min_p=0.02),
        dict(temperature=0.9, top_k=5, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.4,
             penalty_last_n=5, logit_bias={3: 2.5, 5: -1.0}),
    ]  # fmt: skip
    for order in ORDERS:
        for fields in settings if order == "chain" else settings[2:4]:
            s = Shaping(order=order, **fields)
            ids = torch.tensor([i for i, _ in s.bias], dtype=torch.int64, device=device)
            edited = edit_logits(
                x.clone().to(device), tokens_L=tokens, length_1=length, last_n=s.penalty_last_n,
                repetition=s.repetition_penalty, frequency=s.frequency_penalty, presence=s.presence_penalty,
                bias_ids_U=ids, bias_U=torch.tensor([v for _, v in s.bias], device=device), impl="triton",
            )  # fmt: skip
            theirs = laws(x, s, history=history, drafted=drafted)
            options = dict(key=noise.key, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)
            for purpose in (TARGET, DRAFT) if fields is settings[2] else (TARGET,):
                made = shape_draw(
                    edited, at, torch.full_like(at, start), **options, order=order, purpose=purpose, impl="triton"
                )
                want = [draw(p, noise, len(history) + r, purpose, start) for r, p in enumerate(theirs)]
                if made.tokens_R.tolist() != want:
                    found.append(f"{order} {fields} purpose {purpose}: {made.tokens_R.tolist()} for {want}")
    chooser = Chooser(Shaping(temperature=0.8, top_p=0.9), noise, "ratio")
    options = dict(key=noise.key, temperature=0.8)
    seen = set()
    for seed in range(seeds):
        near = torch.Generator().manual_seed(seed)
        p = torch.randn(rows, vocab, generator=near) * 2
        q = p[: rows - 1] + torch.randn(rows - 1, vocab, generator=near) * (0.02 if seed % 2 else 2.0)
        ps, qs = laws(p, chooser.shaping), laws(q, chooser.shaping)
        drafts = [draw(law, noise, start + 1 + i, DRAFT, start) for i, law in enumerate(qs)]
        n = 0
        while n < len(drafts) and chooser.accepts(ps[n], qs[n], drafts[n], start + 1 + n, start):
            n += 1
        last = (
            draw(ps[n], noise, start + 1 + n, TARGET)
            if n == len(drafts)
            else chooser.redraw(ps[n], qs[n], start + 1 + n, start)
        )
        place = torch.arange(rows, device=device) + start + 1
        begun = torch.full_like(place, start)
        p, q = p.to(device), q.to(device)
        mine = shape_draw(p, place, begun, **options, top_p=0.9, impl="triton")
        other = shape_draw(
            q, place[:-1].clone(), begun[:-1].clone(), **options, top_p=0.9, purpose=DRAFT, impl="triton"
        )
        if other.tokens_R.tolist() != drafts:
            found.append(f"drafts {other.tokens_R.tolist()} for {drafts}")
        args = (p[None], mine, q[None], other, other.tokens_R[None])
        counts, starts = torch.tensor([rows - 1], dtype=torch.int32, device=device), begun[:1].clone()
        outcome = accept_ratio(*args, counts, starts, **options, impl="triton")
        residual_draw(*args, outcome, counts, starts, **options, impl="triton")
        if outcome.tolist() != [[n, last, 0]]:
            found.append(f"ratio, seed {seed}: {outcome.tolist()} for {[n, last]}")
        seen.add(n == len(drafts))
    if len(seen) < 2:
        found.append("the seeds hold no rejection, or nothing else")
    return found


def nucleus_laws(device: str, vocab: int) -> list[str]:
    """A nucleus does not depend on how its edge is searched for; and another nucleus is told from it."""
    from workbench_kernels.shape_draw.cut import kernel

    x = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2)) * torch.tensor([[3.0], [1.0], [0.1]])
    x = x.to(device)
    plan, found = kernel.PLAN, []

    def edges(**changed: Any) -> Tensor:
        top_p = changed.pop("top_p", 0.9)
        kernel.PLAN = plan._replace(**changed)
        try:
            cuts = kernel.cut(x, 0.8, 0, top_p, 0.0, chain=True, greedy=False).cut_R
        finally:
            kernel.PLAN = plan
        return torch.where(x >= cuts[:, None], x, torch.inf).amin(1)  # a cut may lie anywhere between two logits

    usual = edges()
    for changed in (dict(slots=1), dict(levels=1), dict(levels=3, steps=4), dict(groups=8, slots=16)):
        if not same(edges(**changed), usual):
            found.append(f"the edge of a nucleus changes with {changed}")
    if same(edges(top_p=0.895), usual):
        found.append("a smaller nucleus passes for another")
    return found


def margin_laws(device: str, vocab: int, rows: int = 4) -> list[str]:
    """A token does not depend on how many ids are judged in float64, nor on where its key lies; it does on the key."""
    from workbench_kernels.shape_draw import kernel, shape_draw

    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(4)).to(device)
    at = torch.arange(rows, device=device) + 7

    def tokens(margin: float, key: tuple[int, int] | Tensor = (11, 12)) -> Tensor:
        usual, kernel.MARGIN = kernel.MARGIN, margin
        try:
            return shape_draw(x, at, at, key=key, temperature=0.9, impl="triton").tokens_R
        finally:
            kernel.MARGIN = usual

    usual = tokens(kernel.MARGIN)
    found = [] if same(tokens(2.0), usual) else ["a token changes when more ids are judged in float64"]
    found += ["another key gives the same tokens"] if same(tokens(kernel.MARGIN, (11, 13)), usual) else []
    for words in ((11, 12), (0xFFFFFFFE, 0x80000001)):
        there = torch.tensor((11, 13), device=device)
        other = tokens(kernel.MARGIN, there)
        there.copy_(torch.tensor(words))
        if same(tokens(kernel.MARGIN, there), other):
            found.append(f"a key that was replaced by {words} on the device still draws")
        if not same(tokens(kernel.MARGIN, there), tokens(kernel.MARGIN, words)):
            found.append(f"the key {words} draws other tokens from the device")
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, but for NaN's."""
    if a.is_floating_point():
        return torch.equal(a.nan_to_num(nan=1234.5), b.nan_to_num(nan=1234.5))
    return torch.equal(a, b)


def check(names: list[str]) -> dict[str, Any]:
    """All checks of these ops under the interpreter."""
    failures, done, seconds = [], 0, {}
    for name, op in ops().items():
        if names and name not in names:
            continue
        began = time.perf_counter()
        for case in op.odd:
            for dtype in op.dtypes if case is op.odd[-1] else op.dtypes[:1]:
                failures += against_reference(op, case, dtype, "cpu")
                done += 1
        full = [c for c in op.odd if all(v != 0 for v in c.sizes.values())]
        failures += strided_refused(op, full[-1], op.dtypes[0], "cpu")
        if op.rows:
            for case in full[-1:]:
                failures += rows_alone(op, case, op.dtypes[0], "cpu")
        seconds[name] = round(time.perf_counter() - began, 2)
    if not names:
        began = time.perf_counter()
        failures += delta_laws("cpu", b=2, t=5, n=2, h=6, k=10, v=18)
        failures += embed_laws("cpu")
        seconds["delta_laws"] = round(time.perf_counter() - began, 2)
        began = time.perf_counter()
        failures += chunk_laws("cpu")
        seconds["chunk_laws"] = round(time.perf_counter() - began, 2)
        began = time.perf_counter()
        failures += sampling_laws("cpu", 301, seeds=3)
        seconds["sampling_laws"] = round(time.perf_counter() - began, 2)
        began = time.perf_counter()
        failures += nucleus_laws("cpu", 1301) + margin_laws("cpu", 701)
        seconds["nucleus_laws"] = round(time.perf_counter() - began, 2)
        began = time.perf_counter()
        failures += packed_stores("cpu")
        seconds["packed_stores"] = round(time.perf_counter() - began, 2)
    return {"failures": failures, "cases": done, "seconds": seconds}


if __name__ == "__main__":
    found = check(sys.argv[1:])
    print(json.dumps(found))
