"""Which drafts stand, decided on the device: by equality, by the ratio of two laws, or by shared noise.

Legend: B sequences, T places of a verify, V vocabulary, S stop ids. ``verify_BT`` holds [pending, drafts] with base 1
and [drafts] with base 0; ``counts_B2`` holds (drafts, base). The outcome of a sequence is (accepted, bonus, stopped): a
stop id among the accepted drafts ends the round there, and the bonus is then -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.accept import ref
from workbench_kernels.checks import KernelError, check_dense, check_dtype, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.shape_draw.ref import Draws

__all__ = ["accept_coupled", "accept_greedy", "accept_ratio"]


def accept_greedy(
    picks_BT: Tensor,
    verify_BT: Tensor,
    counts_B2: Tensor,
    *,
    last_B: Tensor | None = None,
    stops_S: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Accept the longest prefix of the drafts that the target picks itself; its next pick is the bonus.

    Args:
        picks_BT: The target's pick after every fed row, int64; -1 after a row that is not finite.
        verify_BT: What was fed, int64.
        counts_B2: Drafts and base, int32.
        last_B: The pick before the fed rows, int64; needed where base is 0. Default None.
        stops_S: Tokens that end the text, int64; default None.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        int64 [B, 3]: accepted, bonus, stopped.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: the greedy case of Leviathan et al. 2023 (arXiv 2211.17192).
    """
    _check("accept_greedy", verify_BT, counts_B2, stops_S)
    check_dense("accept_greedy", picks=picks_BT, verify=verify_BT, last=last_B)
    check_shape("accept_greedy", "picks", picks_BT, verify_BT.shape)
    check_dtype("accept_greedy", "picks", picks_BT, torch.int64)
    if last_B is not None:
        check_shape("accept_greedy", "last", last_B, verify_BT.shape[:1])
        check_dtype("accept_greedy", "last", last_B, torch.int64)
    if not by_triton("accept_greedy", impl, picks_BT):
        return ref.greedy(picks_BT, verify_BT, counts_B2, last_B, stops_S)
    from workbench_kernels.accept import kernel

    return kernel.greedy(picks_BT, verify_BT, counts_B2, last_B, stops_S)


def accept_coupled(
    draws_BT: Tensor,
    verify_BT: Tensor,
    counts_B2: Tensor,
    *,
    last_B: Tensor | None = None,
    stops_S: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Accept drafts that are the target's own draws, made with the noise of their positions.

    Args:
        draws_BT: TARGET draws of every fed row, from ``shape_draw``, int64.
        verify_BT: What was fed.
        counts_B2: Drafts and base.
        last_B: The draw before the fed rows; needed where base is 0.
        stops_S: Tokens that end the text.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        As ``accept_greedy``, whose comparison this is.

    Raises:
        KernelError: As ``accept_greedy``.

    Source: Daliri et al. 2024 (arXiv 2408.07978).
    """
    by_triton("accept_coupled", impl, draws_BT)
    return accept_greedy(draws_BT, verify_BT, counts_B2, last_B=last_B, stops_S=stops_S, impl=impl)


def accept_ratio(
    p_logits_BTV: Tensor,
    p_BT: Draws,
    q_logits_BTV: Tensor | None,
    q_BT: Draws | None,
    drafts_BT: Tensor,
    counts_B: Tensor,
    starts_B: Tensor,
    *,
    key: tuple[int, int],
    temperature: float = 1.0,
    stops_S: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Accept drafts while u q(draft) < p(draft), strictly, in float64, u the ACCEPT uniform of the position.

    Args:
        p_logits_BTV: Target rows, row i for draft i, and one more.
        p_BT: Their draws, rows in the order of the logits.
        q_logits_BTV: Drafter rows [B, T - 1, V]; None when drafts were arg-max, point masses.
        q_BT: Their draws; None likewise.
        drafts_BT: Drafts, int64 [B, T - 1].
        counts_B: Drafts of every sequence, int32.
        starts_B: Position of the pending token, int64.
        key: Two words of the Philox key.
        temperature: Above 0; default 1.
        stops_S: Tokens that end the text, int64; default None.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        int64 [B, 3]: accepted, -1 for the bonus that ``residual_draw`` writes, stopped.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
    """
    b, t, v = p_logits_BTV.shape
    check_dense(
        "accept_ratio", p_logits=p_logits_BTV, q_logits=q_logits_BTV, drafts=drafts_BT, counts=counts_B,
        starts=starts_B, stops=stops_S,
    )  # fmt: skip
    check_shape("accept_ratio", "drafts", drafts_BT, (b, t - 1))
    check_dtype("accept_ratio", "drafts", drafts_BT, torch.int64)
    check_shape("accept_ratio", "counts", counts_B, (b,))
    check_dtype("accept_ratio", "counts", counts_B, torch.int32)
    check_shape("accept_ratio", "starts", starts_B, (b,))
    if q_logits_BTV is not None:
        check_shape("accept_ratio", "q_logits", q_logits_BTV, (b, t - 1, v))
    if not temperature > 0:
        raise KernelError(f"accept_ratio: temperature={temperature!r} is not valid: give a number above 0")
    args = (p_logits_BTV, p_BT, q_logits_BTV, q_BT, drafts_BT, counts_B, starts_B, key, temperature, stops_S)
    if not by_triton("accept_ratio", impl, p_logits_BTV):
        return ref.ratio(*args)
    from workbench_kernels.accept import kernel

    return kernel.ratio(*args)


def _check(op: str, verify_BT: Tensor, counts_B2: Tensor, stops_S: Tensor | None) -> None:
    check_dense(op, verify=verify_BT, counts=counts_B2, stops=stops_S)
    check_shape(op, "verify", verify_BT, (None, None))
    check_dtype(op, "verify", verify_BT, torch.int64)
    check_shape(op, "counts", counts_B2, (len(verify_BT), 2))
    check_dtype(op, "counts", counts_B2, torch.int32)
    if stops_S is not None:
        check_dtype(op, "stops", stops_S, torch.int64)
