"""Draws and probabilities of many rows of one tape, each what the live engine makes of that row alone.

Without filters and penalties all rows are drawn together: the id of the largest logit / T + Gumbel noise. A row whose
two best scores lie closer than rounding could matter is drawn again by the engine's own law. With filters or penalties
every row has a law of its own. The noise belongs to positions, so the rows of all slots share what is made once per
position, as long as it fits.
Legend: R rows, V vocabulary, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from workbench.replay.groups import exps, totals
from workbench.replay.options import ReplayOptions
from workbench.sampling.draw import draw
from workbench.sampling.law import Law
from workbench.sampling.penalties import penalise_rows
from workbench.sampling.philox import TARGET, Noise
from workbench.sampling.pick import margins, picks
from workbench.sampling.shaping import law

NOISE_VALUES = 1 << 24  # numbers of noise kept at a time
NARROW = 8192  # vocabularies of which noise for every id costs less than noise for each support in turn
WIDE_VALUES = 1 << 22  # scores held at a time
CLOSE = 1e-9  # scores this close are compared by the engine's own route


@dataclass(frozen=True, eq=False)
class Drafted:
    """Drafts of many rows.

    Args:
        ids: int64 [R].
        p: The drafter's probability of each, softmax at T = 1, unfiltered, float64 [R].
        top: Largest such probability of the row, float32 [R].
        margin: How far the draw is from another, in logits, float64 [R].
        logsumexp: Natural log of the row's normaliser at T = 1, float32 [R].
    """

    ids: Tensor
    p: Tensor
    top: Tensor
    margin: Tensor
    logsumexp: Tensor


class TapeDraws:
    """How rows become tokens along one tape.

    Args:
        tokens: The tape, int [length].
        options: Shaping and seed.
        sequence: The tape's random stream under that seed.
    """

    def __init__(self, tokens: np.ndarray, options: ReplayOptions, sequence: int) -> None:
        self.tokens = tokens
        self.shaping, self.noise = options.shaping(), Noise(options.seed, sequence)
        off = dict(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, penalty_last_n=None)
        self.bare = replace(self.shaping, logit_bias=(), **off)  # type: ignore[arg-type]
        self.whole = self.shaping.top_k == 0 and self.shaping.top_p == 1 and self.shaping.min_p == 0
        self.first, self.held_RV = 0, torch.empty(0, 0, dtype=torch.float64)

    def prepare(self, first: int, count: int, vocab: int, device: torch.device) -> None:
        """Make the noise of ``count`` positions from ``first`` on, where rows will share it."""
        small = count * vocab <= NOISE_VALUES and (self.whole or vocab <= NARROW)
        self.first, self.held_RV = first, torch.empty(0, 0, dtype=torch.float64)
        if small and not self.shaping.greedy:
            self.held_RV = self.noise.gumbel_rows(torch.arange(vocab, device=device), range(first, first + count))

    def picks(
        self, logits_RV: Tensor, positions: Sequence[int], drafted_RK: np.ndarray | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens drawn with the target's noise, and how far each draw is from another.

        Args:
            logits_RV: Rows.
            positions: Absolute position of the token that each row gives.
            drafted_RK: Last tokens of each row's history that are not the tape's; None for none.

        Returns:
            Ids int64 [R]; margins float64 [R], in logits: the temperature times the lead of the best score, or the
            lead of the best logit at temperature 0; infinite where a filter leaves one id.
        """
        x_RV = self._penalised(logits_RV, positions, drafted_RK)
        if self.shaping.greedy:
            return x_RV.argmax(-1), margins(x_RV).double()
        if self.whole:
            return self._pick_whole(x_RV, positions)
        ids, gaps = [], []
        for x_V, position in zip(x_RV, positions, strict=True):
            found = law(x_V, self.bare)
            if len(found) == 1:
                ids.append(found.ids[0])
                gaps.append(found.probs.new_full((), float("inf")))
                continue
            scores_S = found.probs.log() + self._gumbel(found, position)
            best = scores_S.topk(2).values
            ids.append(found.ids[scores_S.argmax()])
            gaps.append(best[0] - best[1])
        return torch.stack(ids), torch.stack(gaps) * self.shaping.temperature

    def draft(self, logits_RV: Tensor, positions: Sequence[int], drafted_RK: np.ndarray) -> Drafted:
        """The drafter's tokens, drawn with the target's noise; arguments as of ``picks``."""
        found = picks(logits_RV)
        ids, margin = self.picks(logits_RV, positions, drafted_RK)
        nats = logits_RV.gather(-1, ids[:, None])[:, 0].double() - found.logsumexp.double()
        # one by one on a CPU: within a vector, the bits of exp may depend on the place
        p = torch.stack([x.exp() for x in nats]) if nats.device.type == "cpu" else nats.exp()
        return Drafted(ids, p, found.top1, margin, found.logsumexp)

    def probs(self, logits_RV: Tensor, positions: Sequence[int], tokens_R: Tensor) -> Tensor:
        """Shaped probability of one token per row after the tape's own tokens, float64 [R]."""
        x_RV = self._penalised(logits_RV, positions, None)
        if not self.whole:
            pairs = zip(x_RV, tokens_R.tolist(), strict=True)
            found = [law(x_V, self.bare).prob(token) for x_V, token in pairs]
            return torch.tensor(found, dtype=torch.float64)
        parts = []
        for part, nats_RV in self._scaled(x_RV):
            weights_RV = exps(nats_RV)
            parts.append(weights_RV.gather(-1, tokens_R[part, None])[:, 0] / totals(weights_RV))
        return torch.cat(parts).cpu()

    def _penalised(self, logits_RV: Tensor, positions: Sequence[int], drafted_RK: np.ndarray | None) -> Tensor:
        """Rows after penalties and bias, in the type that laws are made of."""
        x_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
        if not self.shaping.penalised:
            return penalise_rows(x_RV, (), (), self.shaping) if self.shaping.bias else x_RV
        rows = []
        for i, position in enumerate(positions):
            history = self.tokens[:position]
            if drafted_RK is not None and (own := drafted_RK.shape[1]):
                history = np.concatenate([self.tokens[: position - own], drafted_RK[i]])
            rows.append(penalise_rows(x_RV[i : i + 1], history, (), self.shaping))
        return torch.cat(rows)

    def _pick_whole(self, x_RV: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        ids, gaps = [], []
        for part, nats_RV in self._scaled(x_RV):
            best = nats_RV.add_(self._gumbel_rows(positions[part], x_RV)).topk(2, -1)
            ids.append(best.indices[:, 0])
            gaps.append(best.values[:, 0] - best.values[:, 1])
        ids_R, gap_R = torch.cat(ids), torch.cat(gaps)
        for i in (gap_R < CLOSE).nonzero()[:, 0].tolist():
            ids_R[i] = draw(law(x_RV[i], self.bare), self.noise, positions[i], TARGET)
        return ids_R, gap_R * self.shaping.temperature

    def _scaled(self, x_RV: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(x - peak) / T in float64, in slices that bound memory."""
        step = max(1, WIDE_VALUES // x_RV.shape[1])
        for lo in range(0, len(x_RV), step):
            part = slice(lo, min(lo + step, len(x_RV)))
            wide = x_RV[part].double()
            yield part, (wide - wide.amax(-1, keepdim=True)).div_(self.shaping.temperature)

    def _gumbel_rows(self, positions: Sequence[int], x_RV: Tensor) -> Tensor:
        """Noise of every id at each position, [R, V]."""
        if len(self.held_RV):
            return self.held_RV[[position - self.first for position in positions]]
        return self.noise.gumbel_rows(torch.arange(x_RV.shape[1], device=x_RV.device), positions)

    def _gumbel(self, found: Law, position: int) -> Tensor:
        """Noise of a support at one position."""
        if len(self.held_RV):
            return self.held_RV[position - self.first, found.ids]
        return self.noise.gumbel(found.ids, position)
