"""Triton attention: parts of 64 keys merged in order; a walk over keys with an online softmax for many rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import as_operand, begin, dot, launch, narrow, power

ROWS = 16


class Split(NamedTuple):
    """Shape of the work of a verify: keys of a part and warps; parts and columns merged at a time, and warps."""

    keys: int
    warps: int
    merged: int
    width: int
    merge_warps: int


# constants: the parts of a row's keys and their order are a function of positions alone
# H200, 4 rows on 1,024 and 8,192 held: 9.0 and 20.5 us; keys 128: 11.7 and 24.4; keys 32: 10.0 and 30.0
SPLIT = Split(keys=64, warps=4, merged=32, width=32, merge_warps=1)


@triton.jit
def part_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, tree_ptr, out_ptr, peak_ptr, sum_ptr, T, N, G, S, PARTS, scale, window,
    D: tl.constexpr, BD: tl.constexpr, KEYS: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    part = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b = head // N
    n = head % N
    length = tl.load(length_ptr + b)
    if part * KEYS >= length + T:
        return
    r = tl.program_id(2) * 16 + tl.arange(0, 16)
    t = r // G
    live = t < T
    d = tl.arange(0, BD)
    TYPE: tl.constexpr = v_ptr.dtype.element_ty
    at_q = ((b * T + t) * N + n)[:, None] * (G * D) + (r % G)[:, None] * D + d[None, :]
    q = as_operand(tl.load(q_ptr + at_q, mask=live[:, None] & (d < D)[None, :], other=0.0).to(tl.float32), TYPE)
    key = part * KEYS + tl.arange(0, KEYS)
    held = key < length + T
    at_k = (head * S + key)[:, None] * D + d[None, :]
    mask = held[:, None] & (d < D)[None, :]
    k = as_operand(tl.load(k_ptr + at_k, mask=mask, other=0.0).to(tl.float32), TYPE)
    v = as_operand(tl.load(v_ptr + at_k, mask=mask, other=0.0).to(tl.float32), TYPE)
    score = dot(q, tl.trans(k), tl.zeros((16, KEYS), tl.float32), PRECISION) * scale
    sees = (key[None, :] <= length + t[:, None]) & live[:, None]
    if WINDOW:
        sees = sees & (key[None, :] > length + t[:, None] - window)
    if TREE:
        j = key - length
        new = live[:, None] & ((j >= 0) & (j < T))[None, :]
        kin = tl.load(tree_ptr + t[:, None] * T + j[None, :], mask=new, other=0).to(tl.int32)
        sees = live[:, None] & tl.where((j < 0)[None, :], True, kin != 0) & held[None, :]
    score = tl.where(sees, score, -float("inf"))
    peak = tl.max(score, 1)
    weight = tl.exp(score - tl.where(peak == -float("inf"), 0.0, peak)[:, None])
    out = dot(as_operand(weight, TYPE), v, tl.zeros((16, BD), tl.float32), PRECISION)
    at = (head * PARTS + part) * (T * G) + r
    tl.store(peak_ptr + at, peak, mask=live)
    tl.store(sum_ptr + at, tl.sum(weight, 1), mask=live)
    tl.store(out_ptr + at[:, None] * D + d[None, :], out, mask=live[:, None] & (d < D)[None, :])


@triton.jit
def merge_kernel(
    part_ptr, peak_ptr, sum_ptr, length_ptr, gate_ptr, out_ptr, T, N, G, PARTS, D: tl.constexpr, BD: tl.constexpr,
    KEYS: tl.constexpr, MERGED: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    r = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b = head // N
    n = head % N
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    parts = tl.cdiv(tl.load(length_ptr + b) + T, KEYS)
    rows = T * G
    peak = -float("inf")
    for first in range(0, parts, 512):
        p = first + tl.arange(0, 512)
        m = tl.load(peak_ptr + (head * PARTS + p) * rows + r, mask=p < parts, other=-float("inf"))
        peak = tl.maximum(peak, tl.max(m, 0))
    acc = tl.zeros((BD,), tl.float32)
    total = 0.0
    for first in range(0, parts, MERGED):
        p = first + tl.arange(0, MERGED)
        at = (head * PARTS + p) * rows + r
        m = tl.load(peak_ptr + at, mask=p < parts, other=-float("inf"))
        share = tl.exp(m - peak)
        total += tl.sum(share * tl.load(sum_ptr + at, mask=p < parts, other=0.0), 0)
        mask = (p < parts)[:, None] & (d < D)[None, :]
        part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=mask, other=0.0)
        acc += tl.sum(share[:, None] * part, 0)
    out = acc / total
    at = ((b * T + r // G) * N + n) * (G * D) + (r % G) * D + d
    if GATE:
        out *= tl.sigmoid(tl.load(gate_ptr + at, mask=d < D, other=0.0).to(tl.float32))
    tl.store(out_ptr + at, narrow(out, out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _block(q, k_ptr, v_ptr, base, key, held, d, D, sees, acc, peak, total, scale, TYPE: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    """One block of keys of an online softmax."""
    at = base + key.to(tl.int64)[:, None] * D + d[None, :]
    mask = held[:, None] & (d < D)[None, :]
    k = as_operand(tl.load(k_ptr + at, mask=mask, other=0.0).to(tl.float32), TYPE)
    score = dot(q, tl.trans(k), tl.zeros((q.shape[0], key.shape[0]), tl.float32), PRECISION) * scale
    score = tl.where(sees, score, -float("inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    shrink = tl.exp(peak - safe)
    weight = tl.exp(score - safe[:, None])
    v = as_operand(tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32), TYPE)
    acc = dot(as_operand(weight, TYPE), v, acc * shrink[:, None], PRECISION)
    return acc, higher, total * shrink + tl.sum(weight, 1)


@triton.jit
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, gate_ptr, out_ptr, T, N, G, S, scale, window, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # the rows that read most keys start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b = head // (N * G)
    n = head // G % N
    length = tl.load(length_ptr + b)
    t = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    TYPE: tl.constexpr = v_ptr.dtype.element_ty
    live = (t < T)[:, None] & (d < D)[None, :]
    at = (b * T + t)[:, None] * (N * G * D) + (head % (N * G)) * D + d[None, :]
    q = as_operand(tl.load(q_ptr + at, mask=live, other=0.0).to(tl.float32), TYPE)
    acc = tl.zeros((BM, BD), tl.float32)
    peak = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    first = 0
    if WINDOW:
        first = tl.maximum(length + tile * BM - window + 1, 0) // KEYS * KEYS
    end = length + tl.minimum(tile * BM + BM, T)
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        sees = key[None, :] <= length + t[:, None]
        if WINDOW:
            sees = sees & (key[None, :] > length + t[:, None] - window)
        acc, peak, total = _block(
            q, k_ptr, v_ptr, (b * N + n) * S * D, key, key < end, d, D, sees, acc, peak, total, scale, TYPE, PRECISION
        )
    out = acc / total[:, None]
    if GATE:
        out *= tl.sigmoid(tl.load(gate_ptr + at, mask=live, other=0.0).to(tl.float32))
    tl.store(out_ptr + at, narrow(out, out_ptr.dtype.element_ty), mask=live)


@triton.jit
def replay_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, own_k_ptr, own_v_ptr, gate_ptr, out_ptr, P, N, S, J, steps, scale,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, STARTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, ROWS)
    p = (tl.program_id(0) * STARTS + r // G).to(tl.int64)
    live = (r < STARTS * G) & (p < P)
    d = tl.arange(0, BD)
    TYPE: tl.constexpr = v_ptr.dtype.element_ty
    cell = live[:, None] & (d < D)[None, :]
    at = ((p * N + n) * G + r % G)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=cell, other=0.0).to(tl.float32)
    start = tl.load(start_ptr + p, mask=live, other=0)
    acc = tl.zeros((ROWS, BD), tl.float32)
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    far = tl.max(start, 0)
    operand = as_operand(q, TYPE)
    for first in range(0, far, KEYS):
        key = first + tl.arange(0, KEYS)
        sees = key[None, :] < start[:, None]
        acc, peak, total = _block(
            operand, k_ptr, v_ptr, n * S * D, key, key < far, d, D, sees, acc, peak, total, scale, TYPE, PRECISION
        )
    for j in range(0, steps):
        own = ((p * J + j) * N + n)[:, None] * D + d[None, :]
        k = tl.load(own_k_ptr + own, mask=cell, other=0.0).to(tl.float32)
        v = tl.load(own_v_ptr + own, mask=cell, other=0.0).to(tl.float32)
        score = tl.sum(q * k, 1) * scale
        higher = tl.maximum(peak, score)
        shrink = tl.exp(peak - higher)
        weight = tl.exp(score - higher)
        acc = acc * shrink[:, None] + weight[:, None] * v
        total = total * shrink + weight
        peak = higher
    out = acc / total[:, None]
    if GATE:
        out *= tl.sigmoid(tl.load(gate_ptr + at, mask=cell, other=0.0).to(tl.float32))
    tl.store(out_ptr + at, narrow(out, out_ptr.dtype.element_ty), mask=cell)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def verify(
    q_BTNGD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    lengths_B: Tensor,
    gate_BTQ: Tensor | None,
    tree_TT: Tensor | None,
    window: int | None,
    covered: int,
) -> Tensor:
    """See ``workbench_kernels.verify_attention.verify_attention``."""
    b, t, n, g, d = q_BTNGD.shape
    s = k_BNSD.shape[2]
    parts = -(-covered // SPLIT.keys)
    wide = dict(dtype=torch.float32, device=q_BTNGD.device)
    held = torch.empty(b * n, parts, t * g, d, **wide)
    peak, total = torch.empty(b * n, parts, t * g, **wide), torch.empty(b * n, parts, t * g, **wide)
    out = torch.empty(b, t, n * g * d, dtype=v_BNSD.dtype, device=q_BTNGD.device)
    bd, width = power(d, 16), min(power(d, 16), SPLIT.width)
    launch(
        part_kernel, (parts, b * n, -(-t * g // ROWS)), q_BTNGD, k_BNSD, v_BNSD, lengths_B,
        q_BTNGD if tree_TT is None else tree_TT.view(torch.uint8), held, peak, total, t, n, g, s, parts, d**-0.5,
        window or 0, D=d, BD=bd, KEYS=SPLIT.keys, TREE=tree_TT is not None, WINDOW=window is not None,
        PRECISION=_precision(v_BNSD), num_warps=SPLIT.warps, num_stages=1, early=True,
    )  # fmt: skip
    launch(
        merge_kernel, (t * g, b * n, -(-d // width)), held, peak, total, lengths_B,
        out if gate_BTQ is None else gate_BTQ, out, t, n, g, parts,
        D=d, BD=width, KEYS=SPLIT.keys, MERGED=SPLIT.merged, GATE=gate_BTQ is not None, num_warps=SPLIT.merge_warps,
        early=True,
    )  # fmt: skip
    return out


def prefill(
    q_BTNGD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, lengths_B: Tensor, gate_BTQ: Tensor | None, window: int | None
) -> Tensor:
    """See ``workbench_kernels.verify_attention.prefill_attention``."""
    b, t, n, g, d = q_BTNGD.shape
    out = torch.empty(b, t, n * g * d, dtype=v_BNSD.dtype, device=q_BTNGD.device)
    narrow_type = v_BNSD.dtype != torch.float32
    bm, keys = (128, 64) if narrow_type else (32, 32)
    launch(
        prefill_kernel, (-(-t // bm), b * n * g), q_BTNGD, k_BNSD, v_BNSD, lengths_B,
        out if gate_BTQ is None else gate_BTQ, out, t, n, g, k_BNSD.shape[2], d**-0.5, window or 0,
        D=d, BD=power(d, 16), BM=bm, KEYS=keys, GATE=gate_BTQ is not None, WINDOW=window is not None,
        PRECISION=_precision(v_BNSD), num_warps=8 if narrow_type else 4, num_stages=2 if narrow_type else 1,
    )  # fmt: skip
    return out


def replay(
    q_PNGD: Tensor,
    k_NSD: Tensor,
    v_NSD: Tensor,
    starts_P: Tensor,
    own_k_PJND: Tensor,
    own_v_PJND: Tensor,
    steps: int,
    gate_PQ: Tensor | None,
) -> Tensor:
    """See ``workbench_kernels.verify_attention.replay_attention``."""
    p, n, g, d = q_PNGD.shape
    out = torch.empty(p, n * g * d, dtype=v_NSD.dtype, device=q_PNGD.device)
    narrow_type = v_NSD.dtype != torch.float32
    starts = max(1, (64 if narrow_type else 16) // g)
    launch(
        replay_kernel, (-(-p // starts), n), q_PNGD, k_NSD, v_NSD, starts_P, own_k_PJND, own_v_PJND,
        out if gate_PQ is None else gate_PQ, out, p, n, k_NSD.shape[1], own_k_PJND.shape[1], steps, d**-0.5,
        G=g, D=d, BD=power(d, 16), STARTS=starts, ROWS=power(starts * g, 16), KEYS=64 if narrow_type else 32,
        GATE=gate_PQ is not None, PRECISION=_precision(v_NSD), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
