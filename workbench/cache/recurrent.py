"""State of one delta layer: the convolution window and the delta state, with what a commit needs to cut a verify short.

Legend: B sequences, T rows, W window rows (taps - 1), C channels, H value heads, K key width, V value width.
Tensors are replaced, never written in place, so a checkpoint is a pair of references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from workbench_kernels.gated_delta import scan_states


@dataclass(frozen=True)
class DeltaInputs:
    """What one forward fed to a layer's recurrence, row by row.

    Args:
        conv_BTC: Inputs of the convolution.
        k_BTHK: Normalised keys.
        v_BTHV: Values.
        beta_BTH: Write strengths.
        decay_BTH: Decays exp(g).
        states: State after each row; empty unless per-row states are kept.
    """

    conv_BTC: Tensor
    k_BTHK: Tensor
    v_BTHV: Tensor
    beta_BTH: Tensor
    decay_BTH: Tensor
    states: Sequence[Tensor] = ()


class RecurrentPlane:
    """Convolution window and delta state of one layer, and the tape of an open verify."""

    def __init__(
        self,
        batch: int,
        *,
        window: int,
        channels: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.conv_BWC = torch.zeros(batch, window, channels, dtype=dtype, device=device)
        self.state_BHKV = torch.zeros(batch, heads, key_dim, value_dim, dtype=torch.float32, device=device)
        self.tape: list[DeltaInputs] | None = None
        self.keep_columns = False

    def put(self, conv_BWC: Tensor, state_BHKV: Tensor, inputs: DeltaInputs) -> None:
        """Take the window and state after a forward; record its inputs when a verify is open."""
        self.conv_BWC, self.state_BHKV = conv_BWC, state_BHKV
        if self.tape is not None:
            self.tape.append(inputs)

    def cut(self, conv_BWC: Tensor, state_BHKV: Tensor, keep: Sequence[int]) -> None:
        """Set window and state to what feeding only the first ``keep[b]`` recorded rows would have left.

        Args:
            conv_BWC: Window before the recorded rows.
            state_BHKV: State before the recorded rows.
            keep: Rows to keep per sequence.
        """
        assert self.tape is not None
        fed = torch.cat([conv_BWC, *(item.conv_BTC for item in self.tape)], dim=1)
        window = conv_BWC.shape[1]
        self.conv_BWC = torch.stack([fed[b, n : n + window] for b, n in enumerate(keep)])
        if self.keep_columns:
            columns = [state for item in self.tape for state in item.states]
            picked = [(columns[n - 1] if n else state_BHKV)[b] for b, n in enumerate(keep)]
            self.state_BHKV = picked[0].unsqueeze(0) if len(picked) == 1 else torch.stack(picked)
            return
        parts = ("k_BTHK", "v_BTHV", "beta_BTH", "decay_BTH")
        inputs = [torch.cat([getattr(item, name) for item in self.tape], dim=1) for name in parts]
        picked = []
        for b, n in enumerate(keep):
            start = state_BHKV[b : b + 1]
            picked.append(scan_states(*(x[b : b + 1, :n] for x in inputs), start)[-1] if n else start)
        self.state_BHKV = torch.cat(picked)

    def fork(self) -> RecurrentPlane:
        """An independent copy, without the tape."""
        twin = object.__new__(RecurrentPlane)
        twin.conv_BWC, twin.state_BHKV = self.conv_BWC.clone(), self.state_BHKV.clone()
        twin.tape, twin.keep_columns = None, False
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of window and state."""
        return sum(x.numel() * x.element_size() for x in (self.conv_BWC, self.state_BHKV))
