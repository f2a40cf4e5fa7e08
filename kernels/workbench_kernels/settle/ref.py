"""Plain form on Python integers: the specification."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from workbench_kernels.settle import Books


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
    stops = set() if stops_S is None else set(stops_S.tolist())
    for b, (k, _) in enumerate(counts_B2.tolist()):
        length, slots, queued, left, _, alive, at, count = books.ints_XB[:, b].tolist()
        picks, fed = picks_BT[b].tolist(), fed_BT[b].tolist()
        t, allowed = len(fed), max(0, min(len(fed) - 1, left - 1))
        fault = (0, 0)
        if alive:
            sound = sound_BT[b].tolist()
            bad = [i for i in range(k + 1) if math.isnan(sound[i])]
            if k < allowed and math.isnan(float(probs_BK[b, k])):
                fault = (1, length + k)
            elif bad:
                fault = (2, length + bad[0])
        n, bonus, stopped = 0, -1, 0
        if alive and not fault[0]:
            while n < k and fed[n + 1] == picks[n] and not (n and fed[n] in stops):
                n += 1
            stopped = int(n > 0 and fed[n] in stops)
            bonus = -1 if stopped else picks[n]
            stopped = int(stopped or bonus in stops)
        tokens = [*fed[1 : n + 1], *([bonus] if bonus >= 0 else [])]
        if fault[0]:
            books.fault_B2[b, 0], books.fault_B2[b, 1] = fault
        row = [length, allowed, k, n, len(tokens), bonus, stopped, int(alive and not fault[0]), *fed[1:]]
        row += probs_BK[b].float().view(torch.int32).tolist()
        for i, value in enumerate(row):
            books.log_MBX[at % len(books.log_MBX), b, i] = value
        for i, token in enumerate(tokens):
            if count + i < books.text_BR.shape[1]:
                books.text_BR[b, count + i] = token
        kept = len(tokens)
        if alive and not fault[0]:
            slots += queued
            length, left, count, queued = length + kept, 0 if stopped else left - kept, count + kept, kept
            for i in range(t):
                books.queue_BT[b, i] = tokens[i] if i < kept else 0
            books.pending_B[b] = tokens[-1]
        if fault[0]:
            left = 0
        new = (length, slots, queued, left, kept, int(left > 0), at + 1, count)
        for i, value in enumerate(new):
            books.ints_XB[i, b] = value
        for j in range(len(books.slots_KB)):
            books.slots_KB[j, b] = slots + queued + j
        for i in range(t):
            books.places_BT[b, i] = length + 1 + i
        books.seed_B[b] = b * t + queued - 1
