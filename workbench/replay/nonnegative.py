"""Least squares without negative unknowns: a handful of them, by the active-set method.

Legend: M equations, N unknowns.
"""

from __future__ import annotations

import numpy as np

NEAR = 1e-10  # of the right side: what a further unknown must take off to be let go of zero


def nonnegative(a_MN: np.ndarray, b_M: np.ndarray) -> np.ndarray:
    """The x of at least 0 for which a x is nearest to b.

    Args:
        a_MN: Coefficients; an unknown whose coefficients are all 0 stays 0.
        b_M: Right side.

    Returns:
        The unknowns, [N].

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    size_N = np.linalg.norm(a_MN, axis=0)
    size_N = np.where(size_N > 0, size_N, 1.0)
    unit_MN, x_N = a_MN / size_N, np.zeros(a_MN.shape[1])
    free_N = np.zeros(len(x_N), bool)
    for _ in range(10 * len(x_N)):  # in exact arithmetic it ends by itself
        pull_N = np.where(free_N, 0.0, unit_MN.T @ (b_M - unit_MN @ x_N))
        if pull_N.max() <= NEAR * np.linalg.norm(b_M):
            break
        free_N[pull_N.argmax()] = True
        while True:
            wish_N = np.zeros(len(x_N))
            wish_N[free_N] = np.linalg.lstsq(unit_MN[:, free_N], b_M, rcond=None)[0]
            low_N = np.flatnonzero(free_N & (wish_N <= 0))
            if not len(low_N):
                break
            way_N = np.maximum(x_N[low_N] - wish_N[low_N], np.finfo(float).tiny)
            first = int((x_N[low_N] / way_N).argmin())  # the first to reach zero on the way there
            x_N += x_N[low_N[first]] / way_N[first] * (wish_N - x_N)
            x_N[low_N[first]], free_N[low_N[first]] = 0.0, False
        x_N = wish_N
    return x_N / size_N
