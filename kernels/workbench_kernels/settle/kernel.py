"""Triton form: one program per sequence, one lane per place of a verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import begin, launch, power

if TYPE_CHECKING:
    from workbench_kernels.settle import Books


@triton.jit(do_not_specialize=["T", "K"])
def settle_kernel(
    int_ptr, slot_ptr, place_ptr, seed_ptr, pending_ptr, queue_ptr, text_ptr, log_ptr, fault_ptr, pick_ptr, sound_ptr,
    fed_ptr, count_ptr, prob_ptr, stop_ptr, B, T, K, R, M, S, BT: tl.constexpr, SP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BT)
    length = tl.load(int_ptr + b)
    slots = tl.load(int_ptr + B + b)
    queued = tl.load(int_ptr + 2 * B + b)
    left = tl.load(int_ptr + 3 * B + b)
    alive = tl.load(int_ptr + 5 * B + b)
    at = tl.load(int_ptr + 6 * B + b)
    count = tl.load(int_ptr + 7 * B + b)
    k = tl.load(count_ptr + b * 2)
    sound = tl.load(sound_ptr + b * T + j, mask=j <= k, other=0.0)
    draft = tl.load(fed_ptr + b * T + 1 + j, mask=j < T - 1, other=-7)  # lane j: the draft in place j + 1
    pick = tl.load(pick_ptr + b * T + j, mask=j < T, other=-5).to(tl.int64)
    allowed = tl.maximum(tl.minimum(T - 1, left - 1), 0)
    bad = tl.min(tl.where((sound != sound) & (j <= k), j, BT), 0)
    prob = tl.load(prob_ptr + b * (T - 1) + k, mask=k < T - 1, other=0.0)
    lost = (k < allowed) & (prob != prob)
    fault = tl.where(lost, 1, tl.where(bad < BT, 2, 0)) * alive
    goes = (alive > 0) & (fault == 0)

    s = tl.arange(0, SP)
    stop = tl.load(stop_ptr + s, mask=s < S, other=-9)
    ends = tl.sum(((draft[:, None] == stop[None, :]) & (s < S)[None, :]).to(tl.int32), 1) > 0
    stands = (draft == pick) & (j < k)
    n = tl.minimum(tl.min(tl.where(stands, BT, j), 0), k)
    first = tl.min(tl.where(ends & (j < n), j, BT), 0)
    cut = first < n
    n = tl.where(cut, first + 1, n)
    n = tl.where(goes, n, 0)
    own = tl.sum(tl.where(j == n, pick, 0), 0)
    bonus = tl.where(goes & (cut == 0), own, -1)
    closes = tl.sum(((bonus == stop) & (s < S)).to(tl.int32), 0) > 0
    stopped = (goes & (cut | closes)).to(tl.int32)
    kept = n + (bonus >= 0).to(tl.int32)
    token = tl.where(j == n, bonus, draft)

    row = log_ptr + ((at % M) * B + b) * (8 + 2 * (T - 1))
    tl.store(row + 8 + j, draft, mask=j < T - 1)
    said = tl.load(prob_ptr + b * (T - 1) + j, mask=j < T - 1, other=0.0)
    tl.store(row + 8 + T - 1 + j, said.to(tl.int32, bitcast=True).to(tl.int64), mask=j < T - 1)
    tl.store(row, length.to(tl.int64))
    tl.store(row + 1, allowed.to(tl.int64))
    tl.store(row + 2, k.to(tl.int64))
    tl.store(row + 3, n.to(tl.int64))
    tl.store(row + 4, kept.to(tl.int64))
    tl.store(row + 5, bonus.to(tl.int64))
    tl.store(row + 6, stopped.to(tl.int64))
    tl.store(row + 7, goes.to(tl.int64))
    tl.store(text_ptr + b * R + count + j, token, mask=(j < kept) & (count + j < R))
    if fault > 0:
        tl.store(fault_ptr + b * 2, fault.to(tl.int64))
        tl.store(fault_ptr + b * 2 + 1, (length + tl.where(fault == 1, k, bad)).to(tl.int64))
    if goes:
        tl.store(queue_ptr + b * T + j, tl.where(j < kept, token, 0), mask=j < T)
        tl.store(pending_ptr + b, tl.sum(tl.where(j == kept - 1, token, 0), 0))
    slots = tl.where(goes, slots + queued, slots)
    queued = tl.where(goes, kept, queued)
    length = tl.where(goes, length + kept, length)
    count = tl.where(goes, count + kept, count)
    left = tl.where(goes, tl.where(stopped > 0, 0, left - kept), tl.where(fault > 0, 0, left))
    tl.store(int_ptr + b, length)
    tl.store(int_ptr + B + b, slots)
    tl.store(int_ptr + 2 * B + b, queued)
    tl.store(int_ptr + 3 * B + b, left)
    tl.store(int_ptr + 4 * B + b, kept)
    tl.store(int_ptr + 5 * B + b, (left > 0).to(tl.int32))
    tl.store(int_ptr + 6 * B + b, at + 1)
    tl.store(int_ptr + 7 * B + b, count)
    tl.store(slot_ptr + j * B + b, slots + queued + j, mask=j < K)
    tl.store(place_ptr + b * T + j, (length + 1 + j).to(tl.int64), mask=j < T)
    tl.store(seed_ptr + b, b * T + queued - 1)


def settle(
    books: Books,
    picks_BT: Tensor,
    sound_BT: Tensor,
    fed_BT: Tensor,
    counts_B2: Tensor,
    probs_BK: Tensor,
    stops_S: Tensor | None,
) -> None:
    """See ``workbench_kernels.settle.settle_round``."""
    b, t = fed_BT.shape
    k, stops = len(books.slots_KB), 0 if stops_S is None else len(stops_S)
    launch(
        settle_kernel, (b,), books.ints_XB, books.slots_KB, books.places_BT, books.seed_B, books.pending_B,
        books.queue_BT, books.text_BR, books.log_MBX, books.fault_B2, picks_BT, sound_BT, fed_BT, counts_B2, probs_BK,
        picks_BT if stops_S is None else stops_S, b, t, k, books.text_BR.shape[1], len(books.log_MBX), stops,
        BT=power(max(t, k), 2), SP=power(max(1, stops)), num_warps=1, early=True,
    )  # fmt: skip
