"""Triton forms of edits and draws.

A draw finds the cut of each row, then the scores of the ids above it, chunk by chunk, then the best of the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import bits, launch, philox4, power, real, uniform_of, word_of
from workbench_kernels.shape_draw.cut.kernel import GROUP, cut
from workbench_kernels.shape_draw.ref import Draws

CHUNK, SCORE_WARPS = 2048, 4
MARGIN = 1e-3  # float32 scores this close to the best are judged in float64


# ------------------------------------------------------------------------------------------------------------- edits


@triton.jit
def penalise_kernel(
    x_ptr, token_ptr, length_ptr, V, last_n, repetition, frequency, presence, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    end = tl.load(length_ptr) + row
    first = 0
    if WINDOW:
        first = tl.maximum(end - last_n, 0)
    at = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if first + tl.program_id(0) * BLOCK < end:
        ids = tl.load(token_ptr + at, mask=at < end, other=-1)
        count = tl.zeros((BLOCK,), tl.int32)
        before = tl.zeros((BLOCK,), tl.int32)
        for start in range(first, end, TILE):
            other_at = start + tl.arange(0, TILE)
            other = tl.load(token_ptr + other_at, mask=other_at < end, other=-2)
            equal = (ids[:, None] == other[None, :]).to(tl.int32)
            count += tl.sum(equal, 1)
            before += tl.sum(equal * (other_at[None, :] < at[:, None]).to(tl.int32), 1)
        does = (before == 0) & (at < end) & (ids >= 0) & (ids < V)
        cell = x_ptr + row.to(tl.int64) * V + ids
        v = tl.load(cell, mask=does, other=0.0)
        if REPEAT:
            v = tl.where(v > 0, tl.div_rn(v, tl.full((BLOCK,), 1.0, tl.float32) * repetition), v * repetition)
        v = v - count.to(tl.float32) * frequency
        tl.store(cell, v - presence, mask=does)


@triton.jit
def bias_kernel(x_ptr, id_ptr, bias_ptr, V, U, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(id_ptr + at, mask=at < U, other=-1)
    does = (ids >= 0) & (ids < V)
    cell = x_ptr + tl.program_id(1).to(tl.int64) * V + ids
    tl.store(cell, tl.load(cell, mask=does, other=0.0) + tl.load(bias_ptr + at, mask=at < U, other=0.0), mask=does)


@triton.jit
def mask_kernel(x_ptr, mask_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    allowed = tl.load(mask_ptr + at, mask=at < N, other=1)
    tl.store(x_ptr + at, tl.full((BLOCK,), -float("inf"), tl.float32), mask=(at < N) & (allowed == 0))


def edit(
    logits_RV: Tensor,
    tokens_L: Tensor | None,
    length_1: Tensor | None,
    last_n: int | None,
    repetition: float,
    frequency: float,
    presence: float,
    bias_ids_U: Tensor | None,
    bias_U: Tensor | None,
    mask_RV: Tensor | None,
) -> Tensor:
    """See ``workbench_kernels.shape_draw.edit_logits``."""
    rows, vocab = logits_RV.shape
    if tokens_L is not None and length_1 is not None:
        longest = len(tokens_L) if last_n is None else min(len(tokens_L), last_n)
        launch(
            penalise_kernel, (-(-longest // 128), rows), logits_RV, tokens_L, length_1, vocab, last_n or 0,
            float(repetition), float(frequency), float(presence), WINDOW=last_n is not None, REPEAT=repetition != 1,
            BLOCK=128, TILE=64, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if bias_ids_U is not None and bias_U is not None:
        u = len(bias_ids_U)
        launch(bias_kernel, (-(-u // 256), rows), logits_RV, bias_ids_U, bias_U, vocab, u, BLOCK=256)
    if mask_RV is not None:
        n = logits_RV.numel()
        launch(mask_kernel, (-(-n // 2048),), logits_RV, mask_RV.view(torch.uint8), n, BLOCK=2048)
    return logits_RV


# ------------------------------------------------------------------------------------------------------------- draws


@triton.jit
def _words(first, k0, k1, position, purpose, start, CHUNK: tl.constexpr):
    """Philox words of CHUNK ids from a multiple of four on, a block of four at a time."""
    block = (first // 4 + tl.arange(0, CHUNK // 4)).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = philox4(
        k0.to(tl.uint32) + zero, k1.to(tl.uint32) + zero, block, position.to(tl.uint32) + zero,
        purpose.to(tl.uint32) + zero, start.to(tl.uint32) + zero,
    )  # fmt: skip
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (CHUNK,))


@triton.jit
def _rough_noise(word):
    """Gumbel noise of words in float32, within 5e-5 of the float64 one."""
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386962890625e-10  # 1 - u, exact where it is small
    series = rest * (1.0 + rest * (0.5 + rest * (0.333333333 + rest * (0.25 + rest * 0.2))))
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386962890625e-10
    return -tl.log(tl.where(rest < 0.0625, series, -tl.log(tl.maximum(u, 1e-10))))


@triton.jit(do_not_specialize=["k0", "k1", "purpose", "temperature"])
def score_kernel(
    x_ptr, max_ptr, cut_ptr, peak_ptr, position_ptr, start_ptr, key_ptr, score_ptr, id_ptr, mass_ptr, least_ptr, V, G,
    CHUNKS, k0, k1, purpose, temperature, GREEDY: tl.constexpr, KEYED: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr, MARGIN: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    cut = tl.load(cut_ptr + row)
    PER: tl.constexpr = CHUNK // WIDE
    g = chunk * PER + tl.arange(0, PER)
    top = tl.max(tl.load(max_ptr + row * G + g, mask=g < G, other=-float("inf")), 0)
    at = row * CHUNKS + chunk
    if top >= cut:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * V + ids, mask=ids < V, other=-float("inf"))
        kept = (x >= cut) & (ids < V)
        peak = tl.load(peak_ptr + row).to(tl.float64)
        if GREEDY:
            weight = tl.where(kept, 1.0, 0.0).to(tl.float64)
            best = tl.max(tl.where(kept, 0.0, -float("inf")).to(tl.float64), 0)
            token = tl.min(tl.where(kept, ids, 0x7FFFFFFF), 0)
        else:
            level = (x.to(tl.float64) - peak) / real(temperature)
            weight = tl.where(kept, tl.exp(level), 0.0)
            start = tl.load(start_ptr + row) * (purpose != 0).to(tl.int64)
            position = tl.load(position_ptr + row)
            if KEYED:  # the key lies on the device
                w0 = tl.load(key_ptr)
                w1 = tl.load(key_ptr + 1)
            else:
                w0 = k0
                w1 = k1
            # float32 scores leave one id, seldom two; those are judged in float64. A row's winner lies within 27 of
            # its peak, where the float32 score is off by less than a tenth of the margin
            rough = level.to(tl.float32) + _rough_noise(_words(chunk * CHUNK, w0, w1, position, purpose, start, CHUNK))
            rough = tl.where(kept, rough, -float("inf"))
            near = kept & (rough >= tl.max(rough, 0) - MARGIN)
            left = tl.sum(near.to(tl.int32), 0)
            best = peak * 0.0 - float("inf")
            token = tl.full((), 0x7FFFFFFF, tl.int32)
            judged = tl.full((), -1, tl.int32)
            while left > 0:
                judged = tl.min(tl.where(near & (ids > judged), ids, 0x7FFFFFFF), 0)
                u = uniform_of(word_of(judged, w0, w1, position, purpose, start))
                value = tl.load(x_ptr + row * V + judged).to(tl.float64)
                score = (value - peak) / real(temperature) - tl.log(-tl.log(u))
                if score > best:
                    best = score
                    token = judged
                left -= 1
        tl.store(score_ptr + at, best)
        tl.store(id_ptr + at, token)
        tl.store(mass_ptr + at, tl.sum(weight, 0))
        tl.store(least_ptr + at, tl.min(tl.where(kept, x, float("inf")), 0))
    else:
        tl.store(score_ptr + at, -float("inf"))
        tl.store(id_ptr + at, 0x7FFFFFFF)
        tl.store(mass_ptr + at, 0.0)
        tl.store(least_ptr + at, float("inf"))


@triton.jit
def pick_kernel(score_ptr, id_ptr, part_ptr, least_ptr, cut_ptr, token_ptr, mass_ptr, CHUNKS, CP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CP)
    live = c < CHUNKS
    score = tl.load(score_ptr + row * CHUNKS + c, mask=live, other=-float("inf"))
    ids = tl.load(id_ptr + row * CHUNKS + c, mask=live, other=0x7FFFFFFF)
    best = tl.max(score, 0)
    token = tl.min(tl.where(score == best, ids, 0x7FFFFFFF), 0)
    total = tl.sum(tl.load(part_ptr + row * CHUNKS + c, mask=live, other=0.0), 0)
    cut = tl.load(cut_ptr + row)
    bad = (cut != cut) | (token == 0x7FFFFFFF)
    tl.store(token_ptr + row, tl.where(bad, -1, token).to(tl.int64))
    tl.store(mass_ptr + row, tl.where(bad, float("nan"), total))
    least = tl.min(tl.load(least_ptr + row * CHUNKS + c, mask=live, other=float("inf")), 0)
    tl.store(cut_ptr + row, tl.where(bad, float("nan"), least))


def shape_draw(
    logits_RV: Tensor,
    positions_R: Tensor,
    starts_R: Tensor,
    key: tuple[int, int] | Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    order: str,
    purpose: int,
) -> Draws:
    """See ``workbench_kernels.shape_draw.shape_draw``."""
    rows, vocab = logits_RV.shape
    groups, chunks = -(-vocab // GROUP), -(-vocab // CHUNK)
    device = logits_RV.device
    greedy = temperature == 0
    key_2 = key if isinstance(key, Tensor) else None
    words = (0, 0) if isinstance(key, Tensor) else key
    heat = 1.0 if order == "temperature_last" or greedy else temperature
    best, cut_R, peak_R = cut(
        logits_RV, heat, top_k if top_k < vocab else 0, top_p, min_p, chain=order == "chain", greedy=greedy
    )
    wide, double = dict(dtype=torch.float32, device=device), dict(dtype=torch.float64, device=device)
    scores, parts = torch.empty(rows, chunks, **double), torch.empty(rows, chunks, **double)
    ids, least = torch.empty(rows, chunks, dtype=torch.int32, device=device), torch.empty(rows, chunks, **wide)
    tokens, total = torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, **double)
    launch(
        score_kernel, (chunks, rows), logits_RV, best, cut_R, peak_R, positions_R, starts_R,
        positions_R if key_2 is None else key_2, scores, ids, parts, least, vocab, groups, chunks, *words, purpose,
        bits(temperature or 1.0), GREEDY=greedy, KEYED=key_2 is not None, CHUNK=CHUNK, WIDE=GROUP, MARGIN=MARGIN,
        num_warps=SCORE_WARPS,
    )  # fmt: skip
    launch(pick_kernel, (rows,), scores, ids, parts, least, cut_R, tokens, total, chunks, CP=power(chunks), num_warps=4)
    return Draws(tokens, cut_R, peak_R, total)
