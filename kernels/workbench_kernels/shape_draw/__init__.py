"""From rows of logits to drawn tokens: penalties, filters by threshold search, Gumbel draws, and residual draws.

Every filter keeps the ids whose logit is at least some cut, ties included; the cut is searched for among the few ids
that can hold it, never by sorting a row. Weights, sums and the scores that decide are float64, and noise is Philox of
(id / 4, position, purpose, round start), as in ``workbench.sampling``: the tokens are the same.
Legend: B sequences, T rows of a verify, R rows, V vocabulary, L tokens held, U biased ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError, check_dense, check_dtype, check_range, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.shape_draw import ref
from workbench_kernels.shape_draw.ref import Draws

__all__ = ["Draws", "ORDERS", "edit_logits", "residual_draw", "shape_draw"]

ORDERS = ("chain", "joint", "temperature_last")
TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)


def edit_logits(
    logits_RV: Tensor,
    *,
    tokens_L: Tensor | None = None,
    length_1: Tensor | None = None,
    last_n: int | None = None,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    bias_ids_U: Tensor | None = None,
    bias_U: Tensor | None = None,
    mask_RV: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Penalties over the text before each row, then bias, then the mask; in place.

    Row r follows the first ``length + r`` tokens. Each distinct id of its window is penalised once: repetition
    (v / r above zero, v * r below), then minus count times frequency, then minus presence, each rounded to float32.

    Args:
        logits_RV: Float32 rows, written in place.
        tokens_L: Committed text, then the drafted tokens, int64; ids outside the vocabulary are ignored. None for none.
        length_1: Committed tokens, int32 [1], read on the device; length + R - 1 is at most L.
        last_n: Tokens in a window; default None, all.
        repetition: Above 0; default 1, off.
        frequency: Per occurrence; default 0.
        presence: Once; default 0.
        bias_ids_U: Distinct ids to bias, int64; default None.
        bias_U: Float32 biases.
        mask_RV: Bool, False forbids an id; default None.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        The rows.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: Keskar et al. 2019 (CTRL) for the repetition penalty; the order is that of seed 002.
    """
    check_dense(
        "edit_logits",
        logits=logits_RV,
        tokens=tokens_L,
        length=length_1,
        bias_ids=bias_ids_U,
        bias=bias_U,
        mask=mask_RV,
    )
    check_shape("edit_logits", "logits", logits_RV, (None, None))
    if tokens_L is not None:
        if length_1 is None:
            raise KernelError("edit_logits: tokens were given without their length: give length_1, int32 [1]")
        check_dtype("edit_logits", "tokens", tokens_L, torch.int64)
        check_shape("edit_logits", "length", length_1, (1,))
        check_dtype("edit_logits", "length", length_1, torch.int32)
    if bias_ids_U is not None:
        check_dtype("edit_logits", "bias_ids", bias_ids_U, torch.int64)
        if bias_U is None:
            raise KernelError("edit_logits: ids to bias were given without their biases: give bias_U")
        check_shape("edit_logits", "bias", bias_U, bias_ids_U.shape)
    if mask_RV is not None:
        check_shape("edit_logits", "mask", mask_RV, logits_RV.shape)
        check_dtype("edit_logits", "mask", mask_RV, torch.bool)
    if repetition == 1 and frequency == 0 and presence == 0:
        tokens_L = None
    args = (logits_RV, tokens_L, length_1, last_n, repetition, frequency, presence, bias_ids_U, bias_U, mask_RV)
    if not by_triton("edit_logits", impl, logits_RV):
        return ref.edit(*args)
    from workbench_kernels.shape_draw import kernel

    return kernel.edit(*args)


def shape_draw(
    logits_RV: Tensor,
    positions_R: Tensor,
    starts_R: Tensor,
    *,
    key: tuple[int, int] | Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    order: str = "chain",
    purpose: int = TARGET,
    impl: str | None = None,
) -> Draws:
    """Draw one token of each row, and leave what gives any id's probability.

    Args:
        logits_RV: Float32 rows, penalised, biased and masked already.
        positions_R: Absolute position of the token drawn, int64.
        starts_R: Position at which the round began, int64; a TARGET draw does not depend on it.
        key: Two words of the Philox key, or int64 [2] that holds them, read on the device: a captured launch then draws
            by whatever key lies there when it is replayed.
        temperature: At least 0; 0 is the largest logit, the lowest id on ties, filters ignored. Default 1.
        top_k: Keep the k largest; 0, the default, keeps all.
        top_p: Keep an id while the mass of strictly larger ones is below this; default 1, all.
        min_p: Keep ids at least this fraction as probable as the best; default 0, all.
        order: "chain" (default), "joint" or "temperature_last", as in ``workbench.sampling.options``.
        purpose: 0 TARGET (default), 1 DRAFT.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        Tokens, int64, -1 for a row that holds NaN or plus infinity or nothing finite; the least and the largest logit
        kept of each row, float32, and the mass of exp((x - peak) / T) over the ids kept, float64.

    Raises:
        KernelError: A tensor is strided or of another shape or type, or an option is out of range.

    Source: Gumbel-max, Maddison et al. 2014.
    """
    key_2 = key if isinstance(key, Tensor) else None
    check_dense("shape_draw", logits=logits_RV, positions=positions_R, starts=starts_R, key=key_2)
    check_shape("shape_draw", "logits", logits_RV, (None, None))
    check_dtype("shape_draw", "logits", logits_RV, torch.float32, torch.float64)
    for name, x in (("positions", positions_R), ("starts", starts_R)):
        check_shape("shape_draw", name, x, (len(logits_RV),))
        check_dtype("shape_draw", name, x, torch.int64)
    if key_2 is not None:
        check_shape("shape_draw", "key", key_2, (2,))
        check_dtype("shape_draw", "key", key_2, torch.int64)
    check_range("shape_draw", "top_k", top_k, 0, 1 << 31)
    check_range("shape_draw", "purpose", purpose, 0, 3)
    if order not in ORDERS:
        raise KernelError(f"shape_draw: order={order!r} is not valid: choose one of {', '.join(ORDERS)}")
    if not (temperature >= 0 and 0 < top_p <= 1 and 0 <= min_p < 1):
        raise KernelError(
            f"shape_draw: temperature={temperature!r}, top_p={top_p!r}, min_p={min_p!r} is not valid: give a "
            "temperature of at least 0, top_p in (0, 1] and min_p in [0, 1)"
        )
    args = (logits_RV, positions_R, starts_R, key, temperature, top_k, top_p, min_p, order, purpose)
    if not by_triton("shape_draw", impl, logits_RV):
        return ref.shape_draw(*args)
    from workbench_kernels.shape_draw import kernel

    return kernel.shape_draw(*args)


def residual_draw(
    p_logits_BTV: Tensor,
    p_BT: Draws,
    q_logits_BTV: Tensor | None,
    q_BT: Draws | None,
    drafts_BT: Tensor,
    accepted_B3: Tensor,
    counts_B: Tensor,
    starts_B: Tensor,
    *,
    key: tuple[int, int],
    temperature: float = 1.0,
    impl: str | None = None,
) -> Tensor:
    """The token that ends a round under the ratio rule: what replaces the first rejected draft, or the bonus.

    The replacement is drawn by inverse distribution from max(p - q, 0), or from p where less than 1e-12 of that is
    left, with the RESIDUAL uniform of its position; the bonus is the target's own draw of the last row.

    Args:
        p_logits_BTV: Target rows, row i for draft i, and one more.
        p_BT: Their draws, rows in the order of the logits.
        q_logits_BTV: Drafter rows of the drafts, [B, T - 1, V]; None when drafts were arg-max, point masses.
        q_BT: Their draws; None likewise.
        drafts_BT: Drafts of every sequence, int64 [B, T - 1].
        accepted_B3: From ``accept_ratio``; column 1, the bonus, is written in place (-1 after a stop).
        counts_B: Drafts of every sequence, int32.
        starts_B: Position of the pending token, int64.
        key: Two words of the Philox key.
        temperature: Above 0; default 1.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        ``accepted_B3``.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
    """
    b, t, v = p_logits_BTV.shape
    check_dense(
        "residual_draw", p_logits=p_logits_BTV, q_logits=q_logits_BTV, drafts=drafts_BT, accepted=accepted_B3,
        counts=counts_B, starts=starts_B,
    )  # fmt: skip
    if q_logits_BTV is not None:
        check_shape("residual_draw", "q_logits", q_logits_BTV, (b, t - 1, v))
    check_shape("residual_draw", "drafts", drafts_BT, (b, t - 1))
    check_shape("residual_draw", "accepted", accepted_B3, (b, 3))
    check_dtype("residual_draw", "accepted", accepted_B3, torch.int64)
    check_shape("residual_draw", "counts", counts_B, (b,))
    if not temperature > 0:
        raise KernelError(f"residual_draw: temperature={temperature!r} is not valid: give a number above 0")
    args = (
        p_logits_BTV, p_BT, q_logits_BTV, q_BT, drafts_BT, accepted_B3, counts_B, starts_B, key, temperature
    )  # fmt: skip
    if not by_triton("residual_draw", impl, p_logits_BTV):
        return ref.residual_draw(*args)
    from workbench_kernels.shape_draw.residual import kernel

    return kernel.residual_draw(*args)
