"""The gated delta rule: a sequential scan (the specification) and the chunked form used for long inputs.

Shapes: B sequences, T rows, H value heads, K and V the widths of a key and a value head.
"""

from workbench_kernels.gated_delta.ref import carry_eagerly, chunk, scan, scan_states

__all__ = ["carry_eagerly", "chunk", "scan", "scan_states"]
