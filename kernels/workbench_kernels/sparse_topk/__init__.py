"""What a record keeps of rows of logits: the largest k, their probabilities, the tail and the normalisers.

Legend: R rows, V vocabulary, k kept ids, K inputs of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError, check_dense, check_dtype, check_range, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.sparse_topk import ref
from workbench_kernels.sparse_topk.ref import Sparse

__all__ = ["Sparse", "head_topk", "sparse_topk", "MOST"]

MOST = 64  # largest k


def sparse_topk(logits_RV: Tensor, *, k: int, temperature: float = 1.0, impl: str | None = None) -> Sparse:
    """The k largest logits of every row by (logit descending, id ascending), in one reading of the row.

    The first pass keeps the largest logit and the sums of exponentials of every 64 neighbouring ids. The k largest ids
    lie in the k groups whose largest come first, so the second reads only those.

    Args:
        logits_RV: Rows, float32 or bfloat16.
        k: 1 to 64, at most V.
        temperature: Of probabilities and tail, above 0; default 1.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        Ids int32 and logits [R, k], float32 probabilities over the whole row [R, k], tail, logsumexp at T = 1 and at
        the temperature [R]. The tail is a sum of its own over the ids not kept. A row with NaN has NaN normalisers,
        and ids below V.

    Raises:
        KernelError: The rows are strided, or k or the temperature is out of range.
    """
    check_dense("sparse_topk", logits=logits_RV)
    check_shape("sparse_topk", "logits", logits_RV, (None, None))
    _check("sparse_topk", k, logits_RV.shape[1], temperature)
    if not by_triton("sparse_topk", impl, logits_RV):
        return ref.sparse_topk(logits_RV, k, temperature)
    from workbench_kernels.sparse_topk import kernel

    return kernel.sparse_topk(logits_RV, k, temperature)


def head_topk(
    x_RK: Tensor, w_VK: Tensor, *, k: int, temperature: float = 1.0, settle: bool = True, impl: str | None = None
) -> Sparse:
    """``sparse_topk`` of ``x @ w.T`` without the logits ever being written.

    Every tile of 128 ids gives its 4 largest logits and a bound on the rest. A row with more than 4 of its k largest
    in one tile is found out by that bound; such rows, and no others, are computed again through their whole logits, for
    which the call reads one flag back from the device.

    Args:
        x_RK: Rows, in the type of the head.
        w_VK: The head's weight.
        k: 1 to 64, at most V.
        temperature: Above 0; default 1.
        settle: Compute such rows again; default True. False reads nothing back, as a graph needs, and gives such
            rows a tail of NaN.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        As ``sparse_topk``, of logits summed and kept in float32.

    Raises:
        KernelError: A tensor is strided, of another shape or type, or k or the temperature is out of range.
    """
    check_dense("head_topk", x=x_RK, w=w_VK)
    check_shape("head_topk", "x", x_RK, (None, None))
    check_shape("head_topk", "w", w_VK, (None, x_RK.shape[1]))
    check_dtype("head_topk", "w", w_VK, x_RK.dtype)
    _check("head_topk", k, w_VK.shape[0], temperature)
    if not by_triton("head_topk", impl, x_RK):
        return ref.sparse_topk(ref.wide(x_RK) @ ref.wide(w_VK).t(), k, temperature)
    from workbench_kernels.sparse_topk import kernel

    made, doubtful_R = kernel.head_topk(x_RK, w_VK, k, temperature)
    if not settle:
        made.tail_R.masked_fill_(doubtful_R > 0, float("nan"))
        return made
    again = doubtful_R.nonzero()[:, 0]
    if len(again):
        x = x_RK[again].float()
        logits = torch.cat([x @ part.float().t() for part in w_VK.split(32768)], 1)
        for whole, part in zip(made, kernel.sparse_topk(logits, k, temperature)):
            whole[again] = part
    return made


def _check(op: str, k: int, vocab: int, temperature: float) -> None:
    check_range(op, "k", k, 1, min(MOST, vocab))
    if not temperature > 0:
        raise KernelError(f"{op}: temperature={temperature!r} is not valid: give a number above 0")
