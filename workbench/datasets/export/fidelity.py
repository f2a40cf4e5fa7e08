"""How far logits rebuilt from exported rows lie from the model's own, measured while an export is written.

A row may be rounded twice on its way, by the store and by the format. What that costs is no figure of a format: it
depends on the model, so a few documents are run through it again, and its own rows after the norm compared with those
about to be written, by the laws that they give with its head in float32.

Legend: S tokens, H hidden, V vocabulary, D draft ids, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.core.manifest import Manifest
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import HIDDEN_DTYPES
from workbench.datasets.export.rule import logits_of
from workbench.datasets.extract import numerical_class

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

BOUND = 1e-3  # mean total variation that rebuilt logits are to stay below
DOCUMENTS, ROWS = 8, 96  # documents that are run again, and leading rows of each
TIE = 0.05  # margin of the model's two largest logits below which a pick may turn by rounding
BLOCK = 16  # rows compared at a time
BITS = {"fp8": 4, "bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}  # of a significand


@dataclass(frozen=True)
class Rounding:
    """What happened to rows on their way, and what a sample of them says of it.

    Args:
        path: Types that the rows had, from the model to the export, in words.
        roundings: How many times they were rounded.
        rows: Rows that were compared; 0 when none was.
        total_variation: Mean over them, at T = 1, of the law by exported rows from the model's; None without rows.
        largest: Largest one of them.
        same_pick: Share of equal picks among rows whose two largest logits are no tie; None where all are.
        sentence: The same in words, with the remedy when the bound is missed; "" without rows.
    """

    path: str
    roundings: int
    rows: int = 0
    total_variation: float | None = None
    largest: float | None = None
    same_pick: float | None = None
    sentence: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready mapping for a manifest."""
        return asdict(self)


class Fidelity:
    """Compares what is written of a few documents, spread evenly over the data, with the model.

    Args:
        model: The model that made the data; None compares nothing.
        manifest: Of the data.
        documents: How many documents there are.
        stored: Type of the data's last rows: "bfloat16", "float32" or "fp8".
        written: Type of exported rows.
        side: Where they lie: "pre" or "post" of the final norm, or "law" for probabilities in their place.
        dtypes: Types that the format holds.
        also: Another remedy that the format offers, as the end of a sentence; "" for none.
    """

    def __init__(
        self,
        model: HybridModel | None,
        manifest: Manifest,
        *,
        documents: int,
        stored: str,
        written: str,
        side: str,
        dtypes: Sequence[str] = HIDDEN_DTYPES,
        also: str = "",
    ) -> None:
        self.model, self.made, self.exact = model, str(manifest.model["dtype"]), bool(manifest.model["exact"])
        self.stored, self.written, self.side, self.dtypes, self.also = stored, written, side, dtypes, also
        self._wanted = {i * documents // DOCUMENTS for i in range(DOCUMENTS)}
        self._seen = 0
        self._apart: list[Tensor] = []
        self._same: list[Tensor] = []

    def see(self, tokens_S: Tensor, rows_SH: Tensor, parts: ModelParts) -> None:
        """Compare the next document's exported rows, if it is one of the few.

        Args:
            tokens_S: Its ids.
            rows_SH: Its rows, as they are written.
            parts: Norm and head, as they are written.
        """

        def rebuilt(first: int, last: int) -> Tensor:
            rows_NH = rows_SH[first:last]
            if self.side == "pre":  # whoever applies the norm rounds its result to the type of the head, as the model
                rows_NH = parts.normed(rows_NH).to(parts.head_VH.dtype)
            return logits_of(rows_NH, parts).double().softmax(-1)

        self._compare(tokens_S, rebuilt, parts, ids=None, lead=0)

    def see_law(self, tokens_S: Tensor, probs_SD: Tensor, parts: ModelParts) -> None:
        """Compare the next document's exported law over the draft ids, if it is one of the few.

        Args:
            tokens_S: Its ids.
            probs_SD: Probabilities as they are written; row t is the model's of token t + 1.
            parts: Knows the draft ids.
        """

        def law(first: int, last: int) -> Tensor:
            return probs_SD[first - 1 : last - 1].double()

        self._compare(tokens_S, law, parts, ids=parts.draft_ids_D, lead=1)

    @torch.inference_mode()
    def _compare(
        self,
        tokens_S: Tensor,
        found: Callable[[int, int], Tensor],
        parts: ModelParts,
        *,
        ids: Tensor | None,
        lead: int,
    ) -> None:
        n = min(len(tokens_S), ROWS)
        self._seen += 1
        if self.model is None or self._seen - 1 not in self._wanted or n <= lead:
            return
        with numerical_class(self.model, self.exact):
            cache = self.model.new_cache(capacity=n)
            rows = self.model.forward(tokens_S[None, :n].to(self.model.device), cache, logits="none")
        normed_SH = rows.normed_BTH[0].cpu()
        for first in range(lead, n, BLOCK):
            last = min(first + BLOCK, n)
            due_NV = logits_of(normed_SH[first:last], parts)
            due_NV = due_NV if ids is None else due_NV[:, ids]
            law_NV, top = found(first, last), due_NV.topk(2, -1)
            clear_N = top.values[:, 0] - top.values[:, 1] > TIE
            self._apart.append((due_NV.double().softmax(-1) - law_NV).abs().sum(-1) / 2)
            self._same.append((law_NV.argmax(-1) == top.indices[:, 0])[clear_N])

    def result(self) -> Rounding:
        """What was found so far."""
        path, at_store, at_export = self._path()
        known = Rounding(path, at_store + at_export)
        if not self._apart:
            return known
        apart_N, same_N = torch.cat(self._apart), torch.cat(self._same).double()
        mean, largest = _short(float(apart_N.mean())), _short(float(apart_N.max()))
        what = "probabilities" if self.side == "law" else "logits rebuilt from these rows"
        sentence = (
            f"{what} differ from the model's by a total variation of {mean:.2e} on average and {largest:.2e} at most "
            f"over {len(apart_N)} rows ({path})"
        )
        if not mean < BOUND:
            sentence += f"; that is not below {BOUND:g}: {self._remedy(at_store, at_export)}"
        return Rounding(
            path,
            known.roundings,
            len(apart_N),
            mean,
            largest,
            _short(float(same_N.mean())) if len(same_N) else None,
            sentence,
        )

    def _path(self) -> tuple[str, bool, bool]:
        """The types on the way in words, and whether the store and the export rounded."""
        at_store = BITS[self.stored] < BITS[self.made]
        if self.side == "pre":
            held = "float32" if self.stored == "fp8" else min(self.made, self.stored, key=BITS.__getitem__)
        else:
            held = "float32" if self.side == "law" else self.made
        at_export = BITS[self.written] < BITS[held]
        holds = {"pre": "rows before the norm", "post": "rows after the norm", "law": "probabilities"}[self.side]
        path = (
            f"{self.made} in the model, {'rounded to ' * at_store}{self.stored} in the store, "
            f"{'rounded to ' * at_export}{self.written} in the export, which holds {holds}"
        )
        return path, at_store, at_export

    def _remedy(self, at_store: bool, at_export: bool) -> str:
        wide = "float32" in self.dtypes
        finer = "bfloat16" if self.made == "bfloat16" else "float32"
        store, write = f"extract with hidden_dtype={finer!r}", "export with hidden_dtype='float32'"
        if at_store and at_export:
            said = f"{store} or {write} to round once, or both to round never" if wide else f"{store} to round once"
        elif at_store and self.side == "pre" and BITS[self.written] < BITS[finer]:
            said = f"{store}, and {write} as well" if wide else f"the format holds {self.written} alone"
        elif at_store:
            said = store
        elif at_export:
            said = write if wide else f"the format holds {self.written} alone"
        else:
            said = f"the model rounds its own rows after the norm to {self.made}, and these are not"
            if self.side == "post" and self.made in self.dtypes:
                said += f"; export with hidden_dtype={self.made!r}"
        return said + (f"; or {self.also}" if self.also else "")


def _short(value: float) -> float:
    """Three digits, which do not depend on the order of sums."""
    return float(f"{value:.3g}")
