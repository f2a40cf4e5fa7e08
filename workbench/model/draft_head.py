"""The trimmed draft head: rows of the target's head for the ids that the drafter may propose.

Only drafts go through it; the target keeps its whole head, so a trim costs acceptance and never changes a text. It
knows nothing of how drafts are chosen.
Legend: B sequences, T rows, H hidden, V vocabulary, D ids of the trimmed head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.core.errors import CapabilityError
from workbench.model.config import ModelConfig
from workbench.model.draft_vocab import DraftVocab, choose_vocab, special_ids
from workbench.model.ops import Derived

if TYPE_CHECKING:
    from workbench.model.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class DraftHead:
    """A draft head over part of the vocabulary.

    Args:
        weight_DH: The target's head rows of these ids, contiguous, in the model's type and on its device.
        ids_D: Absolute ids of the rows, int64, ascending, on the same device.
        vocab_size: Ids of the target.
        source: How the ids were chosen, in words.
        coverage: Share of the counted tokens that are among the ids; None where nothing was counted.
    """

    weight_DH: Tensor
    ids_D: Tensor
    vocab_size: int
    source: str
    coverage: float | None

    def __len__(self) -> int:
        """Ids of the head."""
        return len(self.ids_D)

    @property
    def digest(self) -> str:
        """Hash of the ids, 16 hex digits: with the model's fingerprint it names the head."""
        return hashlib.sha256(self.ids_D.cpu().numpy().astype("<i8").tobytes()).hexdigest()[:16]

    @property
    def key(self) -> dict[str, Any]:
        """JSON-ready mapping that names the head: how many ids, and their hash."""
        return {"ids": len(self), "digest": self.digest}

    @property
    def facts(self) -> dict[str, Any]:
        """JSON-ready mapping: ``key``, how the ids were chosen, and their coverage."""
        return {**self.key, "source": self.source, "coverage": self.coverage}

    @property
    def line(self) -> str:
        """The head in words."""
        covered = "" if self.coverage is None else f", {100 * self.coverage:.2f} % of the counted tokens"
        return f"{len(self):,} of {self.vocab_size:,} ids ({self.source}{covered})"

    def __repr__(self) -> str:
        return f"DraftHead({self.line})"

    def _repr_html_(self) -> str:
        from workbench.display import card

        covered = "not counted" if self.coverage is None else f"{100 * self.coverage:.2f} % of the counted tokens"
        size = self.weight_DH.numel() * self.weight_DH.dtype.itemsize
        rows = [
            ("ids", f"{len(self):,} of {self.vocab_size:,}"),
            ("chosen", self.source),
            ("coverage", covered),
            ("rows", f"{size / 1e6:,.1f} MB of {size / 1e6 * self.vocab_size / len(self):,.1f} MB"),
            ("digest", self.digest),
        ]
        return card("Draft head", rows)._repr_html_()


class TrimmedDrafts(nn.Module):
    """What a model with a head offers for trimming its drafts.

    The ids belong to the model, the rows are derived from its head: they are gathered once, when first asked for, and
    anew after the head's weights have moved, changed type or been written to. So a trim follows the model everywhere,
    and nothing of it is a parameter.
    """

    config: ModelConfig
    embed: nn.Parameter
    head: nn.Parameter | None
    tokenizer: Tokenizer | None
    _trim: tuple[DraftVocab, Derived[DraftHead]] | None = None

    if TYPE_CHECKING:

        @property
        def can_draft(self) -> bool: ...

        def unembed(self, normed_BTH: Tensor) -> Tensor: ...

        def _logits(self, normed_BTH: Tensor, first: int, weight: Tensor | None = None) -> Tensor: ...

    @property
    def draft_head(self) -> DraftHead | None:
        """The trimmed draft head; None when drafts are over the whole vocabulary."""
        if self._trim is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            return self._trim[1](self.embed if self.head is None else self.head)

    def trim_draft_vocab(
        self,
        ids: Sequence[int] | str | Path | None = None,
        *,
        top_n: int | None = None,
        counts: Any = None,
        note: str = "",
    ) -> DraftHead:
        """Let the drafter propose part of the vocabulary only; the target's rows, and so every text, stay as they are.

        Args:
            ids: Exactly these ids, or a file that ``save_draft_vocab`` wrote; None for the most frequent.
            top_n: How many of the most frequent ids of ``counts``, by (count descending, id ascending), lowest ids
                first where none occurred. Special tokens and stop ids come on top.
            counts: How often ids occur: what ``wb.token_counts`` returns, any frame with the columns ``id`` and
                ``count``, a mapping, or one count per id. With ``ids`` it only measures coverage.
            note: What was counted, in words, for cards and manifests.

        Returns:
            The head, which ``draft_head`` gives from now on.

        Raises:
            CapabilityError: The checkpoint has no MTP head.
            UserError: The ids or the counts are not valid.
            CheckpointError: The file is not one of this model's head.
        """
        if not self.can_draft:
            raise CapabilityError("this checkpoint has no mtp.* weights, so it has no drafts to trim: use k=0 as it is")
        size = self.config.vocab_size
        if isinstance(ids, (str, Path)):
            from workbench.model.weights.draft_file import read_draft_vocab

            chosen = read_draft_vocab(Path(ids), self.embed if self.head is None else self.head)
        else:
            special = special_ids(self.tokenizer, self.config.eos_token_id, size)
            chosen = choose_vocab(ids, top_n, counts, vocab_size=size, special=special, note=note)
        self._trim = (chosen, Derived(partial(_gathered, chosen)))
        head = self.draft_head
        assert head is not None
        return head

    def untrim_draft_vocab(self) -> None:
        """Draft over the whole vocabulary again."""
        self._trim = None

    def save_draft_vocab(self, path: str | Path) -> Path:
        """Write the trimmed head's ids beside a checkpoint; ``load`` finds them there.

        The file holds ids, how they were chosen, and a fingerprint of the head they were cut from: its rows are
        gathered from the checkpoint's own head when it is loaded.

        Args:
            path: The checkpoint's directory, or a file to give to ``trim_draft_vocab``.

        Returns:
            The file.

        Raises:
            CapabilityError: The head is not trimmed.
        """
        from workbench.model.weights.draft_file import write_draft_vocab

        if self._trim is None:
            raise CapabilityError(
                "the draft head is not trimmed, so there is no map to save: trim_draft_vocab makes one"
            )
        return write_draft_vocab(Path(path), self._trim[0], self.embed if self.head is None else self.head)

    def unembed_by(self, normed_BTH: Tensor, weight_DH: Tensor) -> Tensor:
        """Logits [B, T, D] in float32 of rows that carry the final norm, by other rows of a head than the target's."""
        return self._logits(normed_BTH, normed_BTH.shape[1], weight_DH)

    def unembed_draft(self, normed_BTH: Tensor) -> Tensor:
        """Draft logits [B, T, V] in float32 of rows that ``draft`` gave; -inf for ids that the trimmed head lacks."""
        head = self.draft_head
        if head is None:
            return self.unembed(normed_BTH)
        rows_BTD = self.unembed_by(normed_BTH, head.weight_DH)
        out_BTV = rows_BTD.new_full((*rows_BTD.shape[:2], head.vocab_size), float("-inf"))
        return out_BTV.index_copy_(2, head.ids_D, rows_BTD)


def _gathered(chosen: DraftVocab, weight_VH: Tensor) -> DraftHead:
    ids_D = torch.from_numpy(chosen.ids).to(weight_VH.device)
    rows_DH = weight_VH.detach().index_select(0, ids_D)
    return DraftHead(rows_DH, ids_D, weight_VH.shape[0], chosen.source, chosen.coverage)
