"""From a stacked projection to queries, gates and stored keys and values, in one pass.

Legend: B sequences, T rows, H query heads, N key/value heads, D head width, R turned dimensions, S slots, P bytes of a
packed row, W = 2 H D + 2 N D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError, check_dense, check_dtype, check_range, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.rope_store import ref

__all__ = ["FORMATS", "rope_store", "row_bytes"]

FORMATS = ("dense", "q8_0", "q5_1")


def row_bytes(kind: str, dim: int) -> int:
    """Bytes of a packed row of one head: 34 per 32 values for q8_0, 24 for q5_1."""
    return dim // 32 * {"q8_0": 34, "q5_1": 24}[kind]


def rope_store(
    packed_BTW: Tensor,
    k_BNSX: Tensor,
    v_BNSX: Tensor,
    lengths_B: Tensor,
    cos_LR: Tensor,
    sin_LR: Tensor,
    q_scale_D: Tensor,
    k_scale_D: Tensor,
    *,
    heads: int,
    k_format: str = "dense",
    v_format: str = "dense",
    ring: bool = False,
    counts_B: Tensor | None = None,
    eps: float = 1e-6,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm and turn queries and keys, and write keys and values where they are kept.

    Args:
        packed_BTW: Rows of the projection: per query head [query | gate], then the keys, then the values.
        k_BNSX: Kept keys, written in place: [B, N, S, D] of the rows' type, or bytes [B, N, S, P].
        v_BNSX: Kept values, likewise.
        lengths_B: Rows each sequence holds, int32: position and place of its first new row.
        cos_LR: Cosines by position, float32, both halves the same.
        sin_LR: Sines by position, the first half negated.
        q_scale_D: Float32 scale of the queries' norm (1 + weight).
        k_scale_D: Of the keys'.
        heads: H.
        k_format: "dense" (default), "q8_0" or "q5_1", byte for byte those of ggml.
        v_format: Likewise.
        ring: Position p lies in slot p mod S; default False, in slot p.
        counts_B: Valid rows per sequence, int32; later ones are not kept. Default None, all.
        eps: Of the norms; default 1e-6.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        Queries [B, T, H, D], gates [B, T, H D], and the two stores. Norms and turns are each rounded to the rows' type.

    Raises:
        KernelError: A tensor is strided or of another shape or type, or a format is unknown or does not fit D.

    Source: Su et al. 2021 (arXiv 2104.09864), halves convention; packing as ggml's reference quantisers.
    """
    b, t, w = packed_BTW.shape
    n, s, d = k_BNSX.shape[1], k_BNSX.shape[2], q_scale_D.shape[0]
    check_dense(
        "rope_store", packed=packed_BTW, k=k_BNSX, v=v_BNSX, lengths=lengths_B, cos=cos_LR, sin=sin_LR,
        q_scale=q_scale_D, k_scale=k_scale_D, counts=counts_B,
    )  # fmt: skip
    check_shape("rope_store", "packed", packed_BTW, (b, t, 2 * heads * d + 2 * n * d))
    for name, kind, x in (("k", k_format, k_BNSX), ("v", v_format, v_BNSX)):
        if kind not in FORMATS:
            raise KernelError(f"rope_store: {name}_format={kind!r} is not valid: choose one of {', '.join(FORMATS)}")
        if kind != "dense" and d % 32:
            raise KernelError(f"rope_store: {name}_format={kind!r} packs blocks of 32, so heads {d} wide do not fit")
        check_shape("rope_store", name, x, (b, n, s, d if kind == "dense" else row_bytes(kind, d)))
        check_dtype("rope_store", name, x, packed_BTW.dtype if kind == "dense" else torch.uint8)
    check_shape("rope_store", "lengths", lengths_B, (b,))
    check_dtype("rope_store", "lengths", lengths_B, torch.int32)
    check_shape("rope_store", "sin", sin_LR, cos_LR.shape)
    check_range("rope_store", "turned dimensions", cos_LR.shape[1], 0, d)
    check_shape("rope_store", "k_scale", k_scale_D, (d,))
    if counts_B is not None:
        check_shape("rope_store", "counts", counts_B, (b,))
        check_dtype("rope_store", "counts", counts_B, torch.int32)
    args = (
        packed_BTW, k_BNSX, v_BNSX, lengths_B, cos_LR, sin_LR, q_scale_D, k_scale_D, heads, k_format, v_format, ring,
        counts_B, eps,
    )  # fmt: skip
    if not by_triton("rope_store", impl, packed_BTW):
        return ref.rope_store(*args)
    from workbench_kernels.rope_store import kernel

    return kernel.rope_store(*args)
