"""The gated delta rule: a sequential scan (the specification), steps with a tape, and chunks for long inputs.

Legend: B sequences, T rows, N key heads, H value heads (a multiple of N), K and V the widths of a key and a value
head, C = 2 N K + H V channels. State float32 [B, H, K, V].

    S <- decay_t S;  d = beta_t (v_t - S^T k_t);  S <- S + k_t d^T;  o_t = S^T q_t.

Source: Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464), with the conventions of transformers' Qwen3.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError, check_columns, check_dense, check_dtype, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.gated_delta import ref
from workbench_kernels.gated_delta.ref import Step, Tape, carry_eagerly, chunk, scan, scan_states

__all__ = [
    "Step", "Tape", "carry_eagerly", "chunk", "delta_inputs", "gated_delta_chunk", "gated_delta_commit",
    "gated_delta_scan", "gated_delta_step", "scan", "scan_states",
]  # fmt: skip

WRITES = ("in place", "new", "none")


def gated_delta_step(
    mixed_BTC: Tensor,
    gates_BTM: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    state_BHKV: Tensor,
    *,
    key_heads: int,
    write: str = "in place",
    tape: bool | Tape = False,
    columns: bool = False,
    counts_B: Tensor | None = None,
    conv: tuple[Tensor, Tensor] | None = None,
    steady: bool = False,
    impl: str | None = None,
) -> Step:
    """Run T rows through the rule from the convolution's output, norms and gates included.

    Keys and queries are divided by their length (1e-6 inside the root), queries by sqrt(K) too;
    beta = sigmoid(b), decay = exp(-exp(a_log) softplus(a + dt_bias)). A row's bits do not depend on T.

    Args:
        mixed_BTC: Output of the convolution: [queries | keys | values]; or, with ``conv``, its inputs, which may be
            columns of a wider tensor.
        gates_BTM: [b | a] of every row, [B, T, 2 H]; may be columns of a wider tensor.
        a_log_H: Log of the decay rate of a head.
        dt_bias_H: Added to a.
        state_BHKV: State before the first row.
        key_heads: N; value heads j r .. j r + r - 1 use key head j, r = H / N.
        write: Where the state after the valid rows goes: "in place" (default), "new" (a tensor of its own, so that the
            one before stays), or "none" (a verify, to be committed from its tape).
        tape: Return what ``gated_delta_commit`` needs, in new tensors, or in these; default False.
        columns: Return the state after every row; default False.
        counts_B: Valid rows per sequence, int32; outputs past them are undefined. Default None, all.
        conv: Window [B, W, C] and taps [W + 1, C] of ``causal_conv``, to be run first, in the same launch and with its
            bits; default None.
        steady: What was launched before on this stream, and may still run, does not write the state, so that it may
            be read before that ends; default False.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        Outputs, the state (None with "none"), the tape and the columns (None where not asked for).

    Raises:
        KernelError: A tensor is strided or of another shape or type, or ``write`` is unknown.
    """
    b, h, k, v = _state("gated_delta_step", state_BHKV)
    c = 2 * key_heads * k + h * v
    check_dense(
        "gated_delta_step", a_log=a_log_H, dt_bias=dt_bias_H, state=state_BHKV, counts=counts_B,
    )  # fmt: skip
    check_columns("gated_delta_step", "gates", gates_BTM)
    check_columns("gated_delta_step", "mixed", mixed_BTC)
    if conv is not None:
        check_dense("gated_delta_step", window=conv[0], taps=conv[1])
        check_shape("gated_delta_step", "window", conv[0], (b, None, c))
        check_shape("gated_delta_step", "taps", conv[1], (conv[0].shape[1] + 1, c))
    check_shape("gated_delta_step", "mixed", mixed_BTC, (b, None, c))
    check_shape("gated_delta_step", "gates", gates_BTM, (b, mixed_BTC.shape[1], 2 * h))
    check_shape("gated_delta_step", "a_log", a_log_H, (h,))
    check_shape("gated_delta_step", "dt_bias", dt_bias_H, (h,))
    if h % key_heads:
        raise KernelError(f"gated_delta_step: key_heads={key_heads} does not divide {h} value heads")
    if write not in WRITES:
        raise KernelError(f"gated_delta_step: write={write!r} is not valid: choose one of {', '.join(WRITES)}")
    _counts("gated_delta_step", counts_B, b)
    if isinstance(tape, Tape):
        t = mixed_BTC.shape[1]
        check_dense("gated_delta_step", state=state_BHKV, **tape._asdict())
        for name, width in (("k_BTNK", (key_heads, k)), ("v_BTHV", (h, v)), ("beta_BTH", (h,)), ("decay_BTH", (h,))):
            check_shape("gated_delta_step", f"tape.{name}", getattr(tape, name), (b, t, *width))
    args = (mixed_BTC, gates_BTM, a_log_H, dt_bias_H, state_BHKV, key_heads, write, tape, columns, counts_B, conv)
    if not by_triton("gated_delta_step", impl, mixed_BTC):
        return ref.step(*args)
    from workbench_kernels.gated_delta import kernel

    return kernel.step(*args, steady)


def gated_delta_commit(
    tape: Tape, state_BHKV: Tensor, keep_B: Tensor, *, out_BHKV: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """Leave the state that feeding only the first ``keep`` rows of a tape leaves, bit for bit.

    Args:
        tape: From ``gated_delta_step``.
        state_BHKV: State before the tape.
        keep_B: Rows to keep per sequence, or one number for all, int32, 0 to T.
        out_BHKV: Where the state goes; default None, in place.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        The state written.

    Raises:
        KernelError: A tensor is strided or of another shape or type.
    """
    b, h, k, v = _state("gated_delta_commit", state_BHKV)
    check_dense("gated_delta_commit", state=state_BHKV, keep=keep_B, out=out_BHKV, **tape._asdict())
    check_shape("gated_delta_commit", "tape.v", tape.v_BTHV, (b, None, h, v))
    _counts("gated_delta_commit", keep_B, 1 if keep_B.numel() == 1 else b, "keep")
    out = state_BHKV if out_BHKV is None else out_BHKV
    check_shape("gated_delta_commit", "out", out, state_BHKV.shape)
    if not by_triton("gated_delta_commit", impl, state_BHKV):
        return ref.commit(tape, state_BHKV, keep_B, out)
    from workbench_kernels.gated_delta import kernel

    return kernel.commit(tape, state_BHKV, keep_B, out)


def gated_delta_scan(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    decay_BTH: Tensor,
    state_BHKV: Tensor,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Row after row over a long input, with the bits of steps of any size: exact prefill.

    Args:
        q_BTNK: Normalised and scaled queries.
        k_BTNK: Normalised keys.
        v_BTHV: Values.
        beta_BTH: Write strengths in (0, 1).
        decay_BTH: Decays in (0, 1].
        state_BHKV: State before; not written.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        Outputs [B, T, H, V] and the state after the last row.

    Raises:
        KernelError: A tensor is strided or of another shape or type.
    """
    _rows("gated_delta_scan", q_BTNK, k_BTNK, v_BTHV, beta_BTH, decay_BTH, state_BHKV)
    if not by_triton("gated_delta_scan", impl, q_BTNK):
        return ref.scan_heads(q_BTNK, k_BTNK, v_BTHV, beta_BTH, decay_BTH, state_BHKV)
    from workbench_kernels.gated_delta import kernel

    return kernel.scan(q_BTNK, k_BTNK, v_BTHV, beta_BTH, decay_BTH, state_BHKV)


def gated_delta_chunk(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor,
    *,
    counts_B: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule in chunks of 64 rows by its WY form: equal to the scan up to rounding, for long inputs.

    With bfloat16 queries, keys and values the kernel rounds every operand of a product to bfloat16 (relative errors
    near 4e-3); with float32 its products take three passes (errors near 1e-6). Sums, decays and the state carried from
    chunk to chunk are float32 in both.

    Args:
        q_BTNK: Normalised and scaled queries, float32 or bfloat16; keys and values have the same type.
        k_BTNK: Normalised keys.
        v_BTHV: Values.
        beta_BTH: Write strengths in (0, 1).
        log_decay_BTH: Log decays, at most 0.
        state_BHKV: State before; not written.
        counts_B: Valid rows per sequence, int32, 0 to T; rows past them change nothing and their outputs are
            undefined. Default None, all.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        Outputs [B, T, H, V] in the type of the values, and the state after the last valid row.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: Yang et al. 2024 (arXiv 2412.06464), section 3.3.
    """
    _rows("gated_delta_chunk", q_BTNK, k_BTNK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV)
    check_dtype("gated_delta_chunk", "q", q_BTNK, torch.float32, torch.bfloat16, torch.float64)
    check_dtype("gated_delta_chunk", "k", k_BTNK, q_BTNK.dtype)
    check_dtype("gated_delta_chunk", "v", v_BTHV, q_BTNK.dtype)
    check_dense("gated_delta_chunk", q=q_BTNK, counts=counts_B)
    _counts("gated_delta_chunk", counts_B, len(q_BTNK))
    args = (q_BTNK, k_BTNK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV, counts_B)
    if not by_triton("gated_delta_chunk", impl, q_BTNK):
        return ref.chunk_heads(*args)
    from workbench_kernels.gated_delta.chunks import kernel

    return kernel.chunk(*args)


def delta_inputs(
    mixed_BTC: Tensor,
    gates_BTM: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    *,
    key_heads: int,
    key_width: int,
    dtype: torch.dtype = torch.float32,
    impl: str | None = None,
) -> tuple[Tensor, ...]:
    """What scans and chunks read, from the convolution's output: the norms and gates of ``gated_delta_step``.

    Args:
        mixed_BTC: [queries | keys | values].
        gates_BTM: [b | a], [B, T, 2 H].
        a_log_H: Log of the decay rate of a head.
        dt_bias_H: Added to a.
        key_heads: N.
        key_width: K.
        dtype: Of queries, keys and values: float32 (default), or bfloat16, their float32 values rounded to nearest
            even, for ``gated_delta_chunk``.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        Queries, keys [B, T, N, K], values [B, T, H, V]; beta, decay and log decay [B, T, H], float32.

    Raises:
        KernelError: A tensor is strided or of another shape, or the type is not one of the two.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise KernelError(f"delta_inputs: dtype={dtype} is not valid: choose torch.float32 or torch.bfloat16")
    check_dense("delta_inputs", mixed=mixed_BTC, gates=gates_BTM, a_log=a_log_H, dt_bias=dt_bias_H)
    b, t, c = mixed_BTC.shape
    h = a_log_H.shape[0]
    check_shape("delta_inputs", "gates", gates_BTM, (b, t, 2 * h))
    values = c - 2 * key_heads * key_width
    if values <= 0 or values % h:
        raise KernelError(f"delta_inputs: {c} channels do not hold {key_heads} x 2 x {key_width} and {h} value heads")
    args = (mixed_BTC, gates_BTM, a_log_H, dt_bias_H, key_heads, key_width, dtype)
    if not by_triton("delta_inputs", impl, mixed_BTC):
        return ref.inputs(*args)
    from workbench_kernels.gated_delta.chunks import kernel

    return kernel.inputs(*args)


def _state(op: str, state_BHKV: Tensor) -> tuple[int, int, int, int]:
    check_shape(op, "state", state_BHKV, (None, None, None, None))
    check_dtype(op, "state", state_BHKV, torch.float32, torch.float64)
    b, h, k, v = state_BHKV.shape
    return b, h, k, v


def _counts(op: str, counts_B: Tensor | None, b: int, name: str = "counts") -> None:
    if counts_B is not None:
        check_shape(op, name, counts_B, (b,))
        check_dtype(op, name, counts_B, torch.int32)


def _rows(op: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> None:
    b, h, dk, dv = _state(op, state)
    check_dense(op, q=q, k=k, v=v, beta=beta, decay=decay, state=state)
    check_shape(op, "q", q, (b, None, None, dk))
    check_shape(op, "k", k, q.shape)
    check_shape(op, "v", v, (b, q.shape[1], h, dv))
    check_shape(op, "beta", beta, (b, q.shape[1], h))
    check_shape(op, "decay", decay, beta.shape)
    if h % max(1, q.shape[2]):
        raise KernelError(f"{op}: {q.shape[2]} key heads do not divide {h} value heads")
