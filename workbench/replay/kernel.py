"""The compiled walk: one kernel per policy family, made of the very functions that drive live rounds.

Only ``fast`` imports this module, and only when a walk begins, since it needs numba. A compiled kernel is kept beside
this file; what it was compiled from is part of its key, because numba itself looks at this file alone.
Legend: P policies, R rows of a shard, K slots, G documents of a shard, C buckets of committed length, L lengths, S
steps, D drafts, N numbers a policy is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from workbench.spec.policies import rules

STATE = rules.STATE
OFF = 0x80  # in a row's matches: the draft that ends them is the target's pick, but not the text


@cache
def sources() -> int:
    """A number that changes with the code that kernels are compiled from; makes that code callable from them."""
    digest = sha256()
    for family in rules.FAMILIES.values():
        for module in {function.__module__ for function in family if callable(function)}:
            _register(module)
    for name in sorted({*_registered, __name__}):
        digest.update(Path(str(sys.modules[name].__file__)).read_bytes())
    return int.from_bytes(digest.digest()[:6], "little")


_registered: set[str] = set()


def _register(name: str) -> None:
    """Let compiled code call the functions of a module."""
    if name in _registered:
        return
    _registered.add(name)
    for value in list(vars(sys.modules[name]).values()):
        if isinstance(value, FunctionType) and value.__module__ == name:
            register_jitable(value)


@cache
def walk_kernel(family: str) -> Callable[..., None]:
    """The walk of a family; "" for policies whose draft lengths are planned for every row."""
    version = sources()
    made = rules.FAMILIES[family or "fixed"]
    return _walk(made.next_k, made.drops, made.trim, made.observe, family == "", version)


def _walk(next_k: Any, drops: Any, trim: Any, observe: Any, planned: bool, version: int) -> Callable[..., None]:
    @njit(nogil=True, cache=True)
    def walk(
        params_PN, k_P, base_P, plan, by_round, match_R, prob_RK, begin_G, first_G, end_G, shift,
        edges_C, seconds_LSD, timed, counts,
    ):  # fmt: skip
        """Count the rounds of some policies over the documents of a shard, before which ``shift`` documents came."""
        if version < 0:  # names what this was compiled from
            return
        state = np.zeros(STATE)
        buckets = len(edges_C)
        for p in range(len(k_P)):
            params = params_PN[p]
            pairs = (k_P[p] + 1) * (k_P[p] + 2) // 2
            for g in range(len(begin_G)):
                state[:] = 0.0
                place = base_P[p] + (shift + g) * (2 + buckets) * pairs
                row, at, end = begin_G[g], first_G[g], end_G[g]
                c, index = 0, 0
                while at < end:
                    committed = at + 1
                    while c + 1 < buckets and committed >= edges_C[c + 1]:
                        c += 1
                    if planned:
                        wish = plan[min(index, len(plan) - 1)] if by_round else plan[row + at]
                        index += 1
                    else:
                        wish = next_k(params, state, committed)
                    k = max(0, min(wish, end - at - 1))
                    drafted, steps = k, k
                    for slot in range(k):
                        if drops(params, state, slot, prob_RK[row + at, slot], 1):
                            drafted, steps = slot, slot + 1
                            break
                    drafted = trim(params, state, drafted)
                    found = match_R[row + at]
                    on_text = found & 0x7F
                    whole = k >= wish
                    emitted = min(on_text, drafted) + 1
                    accepted = emitted - 1
                    if on_text < drafted and found & OFF:
                        accepted += 1
                        whole = True
                    pair = drafted * (drafted + 1) // 2
                    counts[place + pair + accepted] += 1
                    if whole:
                        counts[place + pairs + pair + accepted] += 1
                    counts[place + (2 + c) * pairs + steps * (steps + 1) // 2 + drafted] += 1
                    seconds = seconds_LSD[committed, steps, drafted] if timed else 0.0
                    at += emitted
                    observe(params, state, drafted, accepted, steps, at + 1, seconds)

    return walk


@njit(nogil=True, cache=True)
def match_rows(draft_RK, text_R, pick_R, begin_G, first_G, end_G, forced, match_R):
    """Per row, how many drafts in a row are the text (and, when forced, the target's picks); OFF where the next is the
    pick alone.

    Returns the first row that lacks a draft some walk may read, or -1.
    """
    slots = draft_RK.shape[1]
    for g in range(len(begin_G)):
        last = begin_G[g] + end_G[g]
        for row in range(begin_G[g] + first_G[g], last):
            for slot in range(min(slots, last - row - 1)):
                if draft_RK[row, slot] < 0:
                    return row
            n = 0
            room = min(slots, last - row)
            while (
                n < room and draft_RK[row, n] == text_R[row + n] and (not forced or pick_R[row + n] == text_R[row + n])
            ):
                n += 1
            off = forced and n < room and draft_RK[row, n] == pick_R[row + n] and pick_R[row + n] != text_R[row + n]
            match_R[row] = n | OFF if off else n
    return -1


@njit(nogil=True, cache=True)
def plan_rows(match_R, begin_G, first_G, end_G, seconds_K, counted, plan_R):
    """An oracle's draft length at every row, as ``oracle.best_lengths`` finds it: the shortest of the best.

    ``counted``: rounds come first, then drafts, whatever ``seconds_K`` says.
    """
    for g in range(len(begin_G)):
        begin, end = begin_G[g], end_G[g]
        rest_T = np.zeros(end + 1)
        for at in range(end - 1, first_G[g] - 1, -1):
            hits = match_R[begin + at] & 0x7F
            least, length = np.inf, 0
            for k in range(min(len(seconds_K), end - at)):
                own = float(end * (len(seconds_K) - 1) + 1 + k) if counted else seconds_K[k]
                total = own + rest_T[at + min(hits, k) + 1]
                if total < least:
                    least, length = total, k
            rest_T[at] = least
            plan_R[begin + at] = length
