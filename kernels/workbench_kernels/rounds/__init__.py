"""The bookkeeping of a round on the device, so that nothing is read back inside it.

Legend: B sequences, T places of a verify (drafts + 1), K drafts, D width, L caches. ``counts_B2`` holds
(drafts, base), base 1 where a pending token is fed before the drafts; ``accepted_B3`` is (accepted, bonus, stopped), as
``accept`` gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.checks import check_dense, check_dtype, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.rounds import ref

__all__ = ["assemble_verify", "gather_seed", "ring_commit", "rollback_lengths"]


def assemble_verify(
    drafts_BK: Tensor,
    probs_BK: Tensor,
    pending_B: Tensor,
    *,
    p_min: float = 0.0,
    first: bool = False,
    map_D: Tensor | None = None,
    most_B: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """What a verify is fed: the pending token, and drafts up to the first whose probability is below ``p_min``.

    Args:
        drafts_BK: Drafted ids, int64, of the drafter's vocabulary; one below 0 ends the chain.
        probs_BK: Their probabilities, float32; a NaN ends the chain.
        pending_B: Pending tokens, int64; -1 for none (base 0).
        p_min: Least probability of a draft; default 0 keeps all.
        first: The first draft may be dropped too, where a token is pending; default False.
        map_D: The target's id of every id of a trimmed vocabulary, int64; default None.
        most_B: Tokens that may still be emitted, int32: one fewer draft is fed at most. Default None.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        Fed ids, int64 [B, K + 1], 0 past their end; and drafts and base, int32 [B, 2].

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: seed 002.
    """
    check_dense("assemble_verify", drafts=drafts_BK, probs=probs_BK, pending=pending_B, map=map_D, most=most_B)
    check_shape("assemble_verify", "drafts", drafts_BK, (None, None))
    check_dtype("assemble_verify", "drafts", drafts_BK, torch.int64)
    check_shape("assemble_verify", "probs", probs_BK, drafts_BK.shape)
    check_shape("assemble_verify", "pending", pending_B, drafts_BK.shape[:1])
    if most_B is not None:
        check_shape("assemble_verify", "most", most_B, drafts_BK.shape[:1])
        check_dtype("assemble_verify", "most", most_B, torch.int32)
    if not by_triton("assemble_verify", impl, drafts_BK):
        return ref.assemble_verify(drafts_BK, probs_BK, pending_B, p_min, first, map_D, most_B)
    from workbench_kernels.rounds import kernel

    return kernel.assemble_verify(drafts_BK, probs_BK, pending_B, p_min, first, map_D, most_B)


def gather_seed(
    rows_BTD: Tensor, before_BD: Tensor, accepted_B3: Tensor, counts_B2: Tensor, *, impl: str | None = None
) -> Tensor:
    """The row that the next draft starts from: of the last token that stands, or the one before the verify.

    Args:
        rows_BTD: Rows of the verify.
        before_BD: The row before them.
        accepted_B3: Outcome of the round.
        counts_B2: Drafts and base.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [B, D].

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: seed 002.
    """
    b, t, d = rows_BTD.shape
    check_dense("gather_seed", rows=rows_BTD, before=before_BD, accepted=accepted_B3, counts=counts_B2)
    check_shape("gather_seed", "before", before_BD, (b, d))
    check_dtype("gather_seed", "before", before_BD, rows_BTD.dtype)
    check_shape("gather_seed", "accepted", accepted_B3, (b, 3))
    check_shape("gather_seed", "counts", counts_B2, (b, 2))
    if not by_triton("gather_seed", impl, rows_BTD):
        return ref.gather_seed(rows_BTD, before_BD, accepted_B3, counts_B2)
    from workbench_kernels.rounds import kernel

    return kernel.gather_seed(rows_BTD, before_BD, accepted_B3, counts_B2)


def rollback_lengths(
    lengths_LB: Tensor, saved_B: Tensor, accepted_B3: Tensor, counts_B2: Tensor, *, impl: str | None = None
) -> Tensor:
    """Set every length to the one before the verify plus base plus the accepted drafts, in place.

    Args:
        lengths_LB: Lengths of caches and counters of position, int32, written in place: their addresses stay.
        saved_B: Lengths before the verify, int32.
        accepted_B3: Outcome of the round.
        counts_B2: Drafts and base.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        The lengths.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: seed 002.
    """
    check_dense("rollback_lengths", lengths=lengths_LB, saved=saved_B, accepted=accepted_B3, counts=counts_B2)
    check_shape("rollback_lengths", "lengths", lengths_LB, (None, None))
    check_dtype("rollback_lengths", "lengths", lengths_LB, torch.int32)
    check_shape("rollback_lengths", "saved", saved_B, lengths_LB.shape[1:])
    check_dtype("rollback_lengths", "saved", saved_B, torch.int32)
    check_shape("rollback_lengths", "accepted", accepted_B3, (lengths_LB.shape[1], 3))
    if not by_triton("rollback_lengths", impl, lengths_LB):
        return ref.rollback_lengths(lengths_LB, saved_B, accepted_B3, counts_B2)
    from workbench_kernels.rounds import kernel

    return kernel.rollback_lengths(lengths_LB, saved_B, accepted_B3, counts_B2)


def ring_commit(
    verify_BT: Tensor,
    accepted_B3: Tensor,
    counts_B2: Tensor,
    ring_BR: Tensor,
    pending_B: Tensor,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Append what a round emitted to a device buffer, and make the bonus pending; in place.

    Args:
        verify_BT: What was fed.
        accepted_B3: Outcome of the round; a bonus below 0 is not appended.
        counts_B2: Drafts and base.
        ring_BR: int64; column 0 counts the tokens, which follow it. Tokens past the end are counted and not kept.
        pending_B: Pending tokens, int64.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        The buffer and the pending tokens.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: seed 002.
    """
    b = len(verify_BT)
    check_dense(
        "ring_commit", verify=verify_BT, accepted=accepted_B3, counts=counts_B2, ring=ring_BR, pending=pending_B
    )
    check_shape("ring_commit", "accepted", accepted_B3, (b, 3))
    check_shape("ring_commit", "counts", counts_B2, (b, 2))
    check_shape("ring_commit", "ring", ring_BR, (b, None))
    check_dtype("ring_commit", "ring", ring_BR, torch.int64)
    check_shape("ring_commit", "pending", pending_B, (b,))
    if not by_triton("ring_commit", impl, verify_BT):
        return ref.ring_commit(verify_BT, accepted_B3, counts_B2, ring_BR, pending_B)
    from workbench_kernels.rounds import kernel

    return kernel.ring_commit(verify_BT, accepted_B3, counts_B2, ring_BR, pending_B)
