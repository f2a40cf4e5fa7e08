"""State of one delta layer: the convolution window and the delta state, with what a commit needs to cut a verify short.

Legend: B sequences, T rows, W window rows (taps - 1), C channels, H value heads, K key width, V value width.
Tensors are replaced, never written in place, so a checkpoint is a pair of references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench_kernels.dispatch import chosen
from workbench_kernels.gated_delta import Tape, gated_delta_commit, scan_states


@dataclass(frozen=True)
class DeltaInputs:
    """What one forward fed to a layer's recurrence, row by row.

    Args:
        conv_BTC: Inputs of the convolution.
        k_BTHK: Normalised keys, per value head, or per key head where the kernels recorded them.
        v_BTHV: Values.
        beta_BTH: Write strengths.
        decay_BTH: Decays exp(g).
        states: State after each row; empty unless per-row states are kept.
        counts: Valid rows per sequence; the rows past them are padding.
    """

    conv_BTC: Tensor
    k_BTHK: Tensor
    v_BTHV: Tensor
    beta_BTH: Tensor
    decay_BTH: Tensor
    states: Sequence[Tensor] = ()
    counts: Sequence[int] = ()

    @property
    def ragged(self) -> bool:
        """True when some rows are padding."""
        return any(n != self.conv_BTC.shape[1] for n in self.counts)


def _state_after(k_BTNK: Tensor, v_BTHV: Tensor, beta_BTH: Tensor, decay_BTH: Tensor, state_BHKV: Tensor) -> Tensor:
    """The state after recorded rows, by what recorded them: keys per key head come from the kernels."""
    if state_BHKV.device.type == "cpu" and k_BTNK.shape[2] == v_BTHV.shape[2] and chosen() is None:
        return scan_states(k_BTNK, v_BTHV, beta_BTH, decay_BTH, state_BHKV)[-1]
    b, t = k_BTNK.shape[:2]
    tape = Tape(*(x.contiguous() for x in (k_BTNK, v_BTHV, beta_BTH, decay_BTH)))
    keep = torch.full((b,), t, dtype=torch.int32, device=state_BHKV.device)
    return gated_delta_commit(tape, state_BHKV, keep, out_BHKV=torch.empty_like(state_BHKV))


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

    def put(self, conv_BWC: Tensor, state_BHKV: Tensor, inputs: DeltaInputs | None) -> None:
        """Take the window and state after a forward; record its inputs, needed when a verify is open."""
        self.conv_BWC, self.state_BHKV = conv_BWC, state_BHKV
        if self.tape is not None:
            assert inputs is not None
            self.tape.append(inputs)

    def cut(self, conv_BWC: Tensor, state_BHKV: Tensor, keep: Sequence[int]) -> None:
        """Set window and state to what feeding only the first ``keep[b]`` recorded rows would have left.

        Args:
            conv_BWC: Window before the recorded rows.
            state_BHKV: State before the recorded rows.
            keep: Rows to keep per sequence.
        """
        assert self.tape is not None
        conv, ragged = self._recorded("conv_BTC"), any(item.ragged for item in self.tape)
        columns = [state for item in self.tape for state in item.states]
        parts = () if self.keep_columns else ("k_BTHK", "v_BTHV", "beta_BTH", "decay_BTH")
        inputs = [self._recorded(name) for name in parts]
        window = conv_BWC.shape[1]
        if len(keep) == 1 and keep[0] and self.keep_columns and not ragged:
            n = keep[0]
            # copied, since a view would hold every recorded row
            self.conv_BWC = torch.cat([conv_BWC[:, n:], conv[:, max(n - window, 0) : n]], 1)
            self.state_BHKV = columns[n - 1]
            return
        convs, states = [], []
        for b, n in enumerate(keep):
            rows = self._valid_rows(b)[:n] if ragged else slice(n)
            convs.append(torch.cat([conv_BWC[b], conv[b, rows]])[n : n + window])
            start = state_BHKV[b : b + 1]
            if n == 0:
                states.append(start)
            elif self.keep_columns:
                states.append(columns[rows[-1] if isinstance(rows, list) else n - 1][b : b + 1])
            else:
                k, v, beta, decay = (x[b : b + 1, rows] for x in inputs)
                states.append(_state_after(k, v, beta, decay, start))
        self.conv_BWC = torch.stack(convs)
        self.state_BHKV = states[0] if len(states) == 1 else torch.cat(states)

    def _recorded(self, name: str) -> Tensor:
        """One recorded input over all forwards of the open verify."""
        assert self.tape is not None
        pieces = [getattr(item, name) for item in self.tape]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _valid_rows(self, b: int) -> list[int]:
        """Places of sequence ``b``'s rows among the recorded ones, padding left out."""
        assert self.tape is not None
        places: list[int] = []
        at = 0
        for item in self.tape:
            t = item.conv_BTC.shape[1]
            places += range(at, at + (item.counts[b] if item.counts else t))
            at += t
        return places

    def clear(self) -> None:
        """Hold nothing, as when new; window and state are replaced, since checkpoints may refer to them."""
        self.conv_BWC, self.state_BHKV = torch.zeros_like(self.conv_BWC), torch.zeros_like(self.state_BHKV)
        self.tape, self.keep_columns = None, False

    @property
    def layout(self) -> str:
        """Shape and format of window and state, in words."""
        conv, state = self.conv_BWC, self.state_BHKV
        sizes = ["x".join(map(str, x.shape[1:])) for x in (conv, state)]
        return f"window {sizes[0]} {str(conv.dtype).removeprefix('torch.')}, state {sizes[1]}"

    def shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what ``export`` gives, whatever the length."""
        return {"conv": tuple(self.conv_BWC.shape[1:]), "state": tuple(self.state_BHKV.shape[1:])}

    def export(self, length: int) -> dict[str, Tensor]:
        """Copies of the window and the state of a cache of one sequence."""
        kind = torch.contiguous_format
        return {
            "conv": self.conv_BWC[0].clone(memory_format=kind),
            "state": self.state_BHKV[0].clone(memory_format=kind),
        }

    def adopt(self, state: Mapping[str, Tensor], length: int) -> None:
        """Hold an exported window and state, in a cache of one sequence."""
        self.conv_BWC = state["conv"].to(self.conv_BWC.device, copy=True).unsqueeze(0)
        self.state_BHKV = state["state"].to(self.state_BHKV.device, copy=True).unsqueeze(0)

    def parts(self, b: int, length: int) -> dict[str, Tensor]:
        """Contents of sequence ``b`` by name: "conv" [W, C] and "state" [H, K, V], whatever the length."""
        return {"conv": self.conv_BWC[b], "state": self.state_BHKV[b]}

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
