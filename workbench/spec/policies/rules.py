"""What every built-in policy does, as plain functions over two arrays of float64.

``params`` is what a policy was made with, ``state`` what one sequence has taught it, zeros at first. The same functions
drive live rounds, plain walks and, compiled, fast walks: they use arithmetic, ``math``, ``int``, ``min``, ``max``,
``abs``, ``range`` and indexing, call no function of ours, and allocate nothing.

``next_k`` and ``drops`` write into ``state[SCRATCH:]`` alone, which each round writes before it reads; so a round that
was aborted leaves nothing behind. ``observe`` writes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

Array = Any  # float64[PARAMS] or float64[STATE]; not numpy's type, which this module does not need

PARAMS = 96
STATE = 192
SCRATCH = 176

# the parameters that all families have, and where the seconds t(0), t(1), .. of a round lie
K, P_MIN, PMIN0, CURVE = 0, 1, 2, 16


# --- what families share ---------------------------------------------------------------------------------------------


def next_k_fixed(params: Array, state: Array, committed: int) -> int:
    """The draft length."""
    return int(params[K])


def drops_below(params: Array, state: Array, slot: int, prob: float, base: int) -> bool:
    """Whether the probability is below p_min; slot 0 is tested with pmin0 only, and not when it was fed alone."""
    if slot == 0 and (params[PMIN0] == 0 or base == 0):
        return False
    return prob < params[P_MIN]  # type: ignore[no-any-return]


def trim_none(params: Array, state: Array, drafted: int) -> int:
    """The whole chain stays."""
    return drafted


def observe_nothing(
    params: Array, state: Array, drafted: int, accepted: int, steps: int, committed: int, seconds: float
) -> None:
    """Nothing to learn."""


# --- adaptive floor: params 3 floor, 4 committed length past which it is 1; state 0 seen, 1 accepted -----------------


def next_k_floor(params: Array, state: Array, committed: int) -> int:
    """clamp(accepted + 1, min(floor, cap), cap), or the cap before the first round."""
    cap = int(params[K])
    if state[0] == 0:
        return cap
    floor = int(params[3])
    if committed > params[4]:
        floor = 1
    return max(min(floor, cap), min(int(state[1]) + 1, cap))


def observe_floor(
    params: Array, state: Array, drafted: int, accepted: int, steps: int, committed: int, seconds: float
) -> None:
    """Remember how much was accepted."""
    state[0] = 1
    state[1] = accepted


# --- confidence of a whole chain: params 3 threshold; scratch: the smallest probability, or the product so far --------


def drops_never(params: Array, state: Array, slot: int, prob: float, base: int) -> bool:
    """No token ends the chain; the smallest probability is noted."""
    if slot == 0 or prob < state[SCRATCH]:
        state[SCRATCH] = prob
    return False


def trim_weakest(params: Array, state: Array, drafted: int) -> int:
    """Nothing of the chain when its smallest probability is below the threshold."""
    if drafted > 0 and state[SCRATCH] < params[3]:
        return 0
    return drafted


def drops_product(params: Array, state: Array, slot: int, prob: float, base: int) -> bool:
    """Whether the product of the chain's probabilities, this one included, is below the threshold."""
    if slot == 0:
        state[SCRATCH] = 1.0
    state[SCRATCH] *= prob
    return state[SCRATCH] < params[3]  # type: ignore[no-any-return]


# --- exponential mean: params 3 alpha, 4 margin, 5 low; state 0 seen, 1 mean -----------------------------------------


def next_k_ema(params: Array, state: Array, committed: int) -> int:
    """clamp(ceil(mean + margin), low, k), or k before the first round."""
    k = int(params[K])
    if state[0] == 0:
        return k
    return max(int(params[5]), min(math.ceil(state[1] + params[4]), k))


def observe_ema(
    params: Array, state: Array, drafted: int, accepted: int, steps: int, committed: int, seconds: float
) -> None:
    """Take a round that drafted into the mean, which the first one starts."""
    if steps == 0:
        return
    if state[0] == 0:
        state[0] = 1
        state[1] = accepted
    else:
        state[1] += params[3] * (accepted - state[1])


# --- suspension: params 3 window, 4 floor, 5 serial tokens; state 0 suspended, 1 rounds in the window, 2 next place in
# it, 3 accepted in it, 4 serial tokens so far, 16.. the window; scratch: committed at the round's start ---------------


def next_k_suspend(params: Array, state: Array, committed: int) -> int:
    """0 while suspended, else k."""
    state[SCRATCH] = committed
    if state[0] == 1:
        return 0
    return int(params[K])


def observe_suspend(
    params: Array, state: Array, drafted: int, accepted: int, steps: int, committed: int, seconds: float
) -> None:
    """Suspend when the mean of a full window falls below the floor; try again after enough serial tokens."""
    if state[0] == 1:
        state[4] += committed - state[SCRATCH]
        if state[4] >= params[5]:
            state[0] = 0
            state[4] = 0
        return
    if steps == 0:
        return
    at = int(state[2])
    if state[1] < params[3]:
        state[1] += 1
    else:
        state[3] -= state[16 + at]
    state[16 + at] = accepted
    state[3] += accepted
    state[2] = at + 1 if at + 1 < params[3] else 0
    if state[1] == params[3] and state[3] < params[4] * params[3]:
        state[0] = 1
        state[1] = 0
        state[2] = 0
        state[3] = 0


# --- goodput: params 3 alpha, 4 hysteresis, 5 reprobe, 6 warm-up, CURVE.. t(K); state 0 rounds, 1 length to ask for,
# 2 rounds since k was asked for, 3 length settled on, 16.. joint acceptance per slot, 80.. its observations -----------


def next_k_goodput(params: Array, state: Array, committed: int) -> int:
    """What the last round decided, or k before the first."""
    if state[0] == 0:
        return int(params[K])
    return int(state[1])


def observe_goodput(
    params: Array, state: Array, drafted: int, accepted: int, steps: int, committed: int, seconds: float
) -> None:
    """Update joint acceptance, settle on the best length if it is better by the hysteresis, and see if a probe is due.

    A slot is observed when it was drafted, or when an earlier token of its chain was dropped; both say nothing of the
    slots past the length asked for.
    """
    k = int(params[K])
    asked = k
    if state[0] == 0:
        state[3] = k
    else:
        asked = int(state[1])
    seen = asked if steps > drafted else drafted
    for j in range(seen):
        state[80 + j] += 1
        weight = max(params[3], 1.0 / state[80 + j])
        hit = 1.0 if j < accepted else 0.0
        state[16 + j] += weight * (hit - state[16 + j])
    state[0] += 1
    state[2] = 0 if asked == k else state[2] + 1
    if state[0] < params[6]:
        state[1] = k
        return
    home = int(state[3])
    joint = 1.0
    total = 1.0
    best = 0
    best_rate = 1.0 / params[CURVE]
    home_rate = best_rate
    for length in range(1, k + 1):
        joint = min(joint, state[16 + length - 1])
        total += joint
        rate = total / params[CURVE + length]
        if rate > best_rate:
            best = length
            best_rate = rate
        if length == home:
            home_rate = rate
    if best_rate > (1.0 + params[4]) * home_rate:
        home = best
    state[3] = home
    state[1] = k if state[2] + 1 >= params[5] else home


# --- gate: params 3 window, 4 alpha, 5 margin, 6 deviations, 7 confirm, 8 reprobe, 9 refresh, 10 shortest regime; state
# 0 mode (0 drafts, 1 does not), 1 probing the other, 2 rounds, 3 tokens and 4 seconds of the window, 5 tokens since the
# other was measured, 6 + mode tokens per second, 8 + mode deviation, 10 + mode (0 never measured, 1 measured, 2 stale),
# 12 windows in which the other was better, 13 committed length of the regime; scratch: committed at the start


def next_k_gate(params: Array, state: Array, committed: int) -> int:
    """k or 0, by the mode that is running."""
    state[SCRATCH] = committed
    if state[0] != state[1]:
        return 0
    return int(params[K])


def observe_gate(
    params: Array, state: Array, drafted: int, accepted: int, steps: int, committed: int, seconds: float
) -> None:
    """Measure windows of rounds; change mode when the other was better in enough of them; see if a probe is due."""
    emitted = committed - state[SCRATCH]
    running = 1 if state[0] != state[1] else 0
    if state[13] == 0:
        state[13] = max(float(committed), params[10])
    state[2] += 1
    state[3] += emitted
    state[4] += seconds
    if state[1] == 0:
        state[5] += emitted
    if state[2] < params[3] or state[4] <= 0:
        return
    speed = state[3] / state[4]
    if state[10 + running] == 1 and state[1] == 0:
        state[8 + running] += params[4] * (abs(speed - state[6 + running]) - state[8 + running])
        state[6 + running] += params[4] * (speed - state[6 + running])
    else:
        state[6 + running] = speed
        state[8 + running] *= 0.5
        state[10 + running] = 1
    state[2] = 0
    state[3] = 0
    state[4] = 0
    if state[1] == 1:
        state[1] = 0
        state[5] = 0
    mode = int(state[0])
    other = 1 - mode
    if state[10] == 1 and state[11] == 1:
        gap = max(params[5] * state[6 + mode], params[6] * (state[8] + state[9]))
        if state[6 + other] > state[6 + mode] + gap:
            state[12] += 1
        else:
            state[12] = 0
        if state[12] >= params[7]:
            state[12] = 0
            state[5] = 0
            mode = other
            state[0] = mode
    due = state[5] >= params[8 + (1 - mode)]
    if committed >= 2 * state[13]:
        state[13] = committed
        due = True
        for each in range(2):
            if state[10 + each] == 1:
                state[10 + each] = 2
    if due:
        state[1] = 1


class Rules(NamedTuple):
    """The functions of a family.

    Args:
        next_k: ``next_k(params, state, committed)``: draft length wanted.
        drops: ``drops(params, state, slot, prob, base)``: whether the token just drafted is dropped, which ends the
            chain.
        trim: ``trim(params, state, drafted)``: how many of a finished chain's tokens stay.
        observe: ``observe(params, state, drafted, accepted, steps, committed, seconds)``.
        cause: What ``chain_stop`` says of a chain that ``drops`` ended; one that ``trim`` cut was stopped by "policy".
    """

    next_k: Callable[[Array, Array, int], int]
    drops: Callable[[Array, Array, int, float, int], bool]
    trim: Callable[[Array, Array, int], int]
    observe: Callable[[Array, Array, int, int, int, int, float], None]
    cause: str


FAMILIES: dict[str, Rules] = {
    "fixed": Rules(next_k_fixed, drops_below, trim_none, observe_nothing, "p_min"),
    "floor": Rules(next_k_floor, drops_below, trim_none, observe_floor, "p_min"),
    "min_confidence": Rules(next_k_fixed, drops_never, trim_weakest, observe_nothing, "policy"),
    "cumulative": Rules(next_k_fixed, drops_product, trim_none, observe_nothing, "policy"),
    "ema": Rules(next_k_ema, drops_below, trim_none, observe_ema, "p_min"),
    "ladder": Rules(next_k_fixed, drops_below, trim_none, observe_nothing, "p_min"),
    "suspend": Rules(next_k_suspend, drops_below, trim_none, observe_suspend, "p_min"),
    "goodput": Rules(next_k_goodput, drops_below, trim_none, observe_goodput, "p_min"),
    "gate": Rules(next_k_gate, drops_below, trim_none, observe_gate, "p_min"),
}
