"""Grouped attention against a cache: few rows of a verify, long prompts, and chains from many starts.

Legend: B sequences, T rows, N key/value heads, G query heads per key/value head, D head width, S rows held, P starts,
J private rows of a chain, Q = N G D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError, check_dense, check_dtype, check_range, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.verify_attention import ref

__all__ = ["prefill_attention", "replay_attention", "verify_attention"]


def verify_attention(
    q_BTNGD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    lengths_B: Tensor,
    *,
    gate_BTQ: Tensor | None = None,
    tree_TT: Tensor | None = None,
    window: int | None = None,
    longest: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of T new rows over the rows a sequence held and those of the new ones that each may see.

    Keys are cut every 64 positions and the parts are merged in order, rows are padded to blocks of 16: so a row's bits
    depend on what it sees, and not on T or on its neighbours.

    Args:
        q_BTNGD: Queries, normed and turned.
        k_BNSD: Keys, those of the new rows at lengths .. lengths + T - 1 included.
        v_BNSD: Values, likewise.
        lengths_B: Rows held before, int32, read on the device.
        gate_BTQ: The result is multiplied by its sigmoid; default None.
        tree_TT: Bool, True where new row t sees new row j, its own included; default None, all up to itself.
        window: Rows that a row sees, its own included; not with a tree. Default None, all.
        longest: Rows that the grid covers, at least lengths + T; default S. A graph is captured for a rung of it.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [B, T, Q] in the type of the values.

    Raises:
        KernelError: A tensor is strided or of another shape or type, or window and tree come together.
    """
    b, t, n, g, d = _checked("verify_attention", q_BTNGD, k_BNSD, v_BNSD, lengths_B, gate_BTQ)
    if tree_TT is not None:
        check_dense("verify_attention", q=q_BTNGD, tree=tree_TT)
        check_shape("verify_attention", "tree", tree_TT, (t, t))
        check_dtype("verify_attention", "tree", tree_TT, torch.bool)
        if window is not None:
            raise KernelError("verify_attention: a window is not defined for a tree: leave one of them out")
    if window is not None:
        check_range("verify_attention", "window", window, 1, 1 << 30)
    held = k_BNSD.shape[2]
    covered = held if longest is None else longest
    check_range("verify_attention", "longest", covered, 0, held)
    if not by_triton("verify_attention", impl, q_BTNGD):
        return ref.attend(q_BTNGD, k_BNSD, v_BNSD, lengths_B, gate_BTQ, tree_TT, window)
    from workbench_kernels.verify_attention import kernel

    return kernel.verify(q_BTNGD, k_BNSD, v_BNSD, lengths_B, gate_BTQ, tree_TT, window, covered)


def prefill_attention(
    q_BTNGD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    lengths_B: Tensor,
    *,
    gate_BTQ: Tensor | None = None,
    window: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """Causal attention of many new rows, for prompts and extraction; equal to ``verify_attention`` up to rounding.

    Args:
        q_BTNGD: Queries, normed and turned.
        k_BNSD: Keys, those of the new rows included.
        v_BNSD: Values, likewise.
        lengths_B: Rows held before, int32.
        gate_BTQ: The result is multiplied by its sigmoid; default None.
        window: Rows that a row sees, its own included; default None, all.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [B, T, Q] in the type of the values.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: online softmax, Dao 2023 (arXiv 2307.08691).
    """
    _checked("prefill_attention", q_BTNGD, k_BNSD, v_BNSD, lengths_B, gate_BTQ)
    if window is not None:
        check_range("prefill_attention", "window", window, 1, 1 << 30)
    if not by_triton("prefill_attention", impl, q_BTNGD):
        return ref.attend(q_BTNGD, k_BNSD, v_BNSD, lengths_B, gate_BTQ, None, window)
    from workbench_kernels.verify_attention import kernel

    return kernel.prefill(q_BTNGD, k_BNSD, v_BNSD, lengths_B, gate_BTQ, window)


def replay_attention(
    q_PNGD: Tensor,
    k_NSD: Tensor,
    v_NSD: Tensor,
    starts_P: Tensor,
    own_k_PJND: Tensor,
    own_v_PJND: Tensor,
    *,
    steps: int,
    gate_PQ: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """One step of many chains: each sees the true rows before its start, and its own private rows.

    Args:
        q_PNGD: Queries, one per start.
        k_NSD: True keys of one sequence.
        v_NSD: True values.
        starts_P: True rows that a start sees, int32, 0 to S.
        own_k_PJND: Private keys of every chain, the newest in place ``steps`` - 1.
        own_v_PJND: Private values.
        steps: Private rows that are there, 1 to J.
        gate_PQ: The result is multiplied by its sigmoid; default None.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [P, Q] in the type of the values.

    Raises:
        KernelError: A tensor is strided or of another shape or type, or ``steps`` is out of range.
    """
    check_shape("replay_attention", "q", q_PNGD, (None, None, None, None))
    p, n, g, d = q_PNGD.shape
    check_dense(
        "replay_attention",
        q=q_PNGD,
        k=k_NSD,
        v=v_NSD,
        starts=starts_P,
        own_k=own_k_PJND,
        own_v=own_v_PJND,
        gate=gate_PQ,
    )
    check_shape("replay_attention", "k", k_NSD, (n, None, d))
    check_shape("replay_attention", "v", v_NSD, k_NSD.shape)
    check_shape("replay_attention", "starts", starts_P, (p,))
    check_dtype("replay_attention", "starts", starts_P, torch.int32)
    check_shape("replay_attention", "own_k", own_k_PJND, (p, None, n, d))
    check_shape("replay_attention", "own_v", own_v_PJND, own_k_PJND.shape)
    check_range("replay_attention", "steps", steps, 1, own_k_PJND.shape[1])
    if gate_PQ is not None:
        check_shape("replay_attention", "gate", gate_PQ, (p, n * g * d))
    if not by_triton("replay_attention", impl, q_PNGD):
        return ref.replay(q_PNGD, k_NSD, v_NSD, starts_P, own_k_PJND, own_v_PJND, steps, gate_PQ)
    from workbench_kernels.verify_attention import kernel

    return kernel.replay(q_PNGD, k_NSD, v_NSD, starts_P, own_k_PJND, own_v_PJND, steps, gate_PQ)


def _checked(
    op: str, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, gate: Tensor | None
) -> tuple[int, int, int, int, int]:
    check_shape(op, "q", q, (None, None, None, None, None))
    b, t, n, g, d = q.shape
    check_dense(op, q=q, k=k, v=v, lengths=lengths, gate=gate)
    check_shape(op, "k", k, (b, n, None, d))
    check_shape(op, "v", v, k.shape)
    check_dtype(op, "v", v, k.dtype)
    check_shape(op, "lengths", lengths, (b,))
    check_dtype(op, "lengths", lengths, torch.int32)
    if gate is not None:
        check_shape(op, "gate", gate, (b, t, n * g * d))
    return b, t, n, g, d
