"""All steps of hygiene in one call: quarantine, exact and near duplicates, overlap with the evaluation, split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.core.errors import check_choice, check_int, check_real
from workbench.core.tape import Corpus, Tape
from workbench.corpus.hygiene import Cleaned, dedup, drop_overlap, near_dedup
from workbench.corpus.hygiene.grams import PARTS, listed
from workbench.corpus.splits import label_splits
from workbench.datasets.options import ExtractOptions
from workbench.datasets.quarantine import quarantine
from workbench.model.hybrid import HybridModel
from workbench.model.weights.text import TextSide


@dataclass(frozen=True)
class CleanOptions:
    """What shapes a clean corpus.

    Args:
        part: Which tokens are compared: "all", "prompt", "output" (what follows the prompt) or "supervised"; default
            "all".
        near: Jaccard similarity of n-grams from which a document is a near duplicate; None leaves that step out;
            default 0.8.
        ngram: Tokens per n-gram of near duplicates; default 5.
        permutations: Length of a MinHash signature; default 128.
        overlap_ngram: Tokens per n-gram shared with the evaluation; default 13.
        least: Places of a document that begin an n-gram of the evaluation, from which it goes; default 1.
        common: Ignore n-grams that more evaluation documents than this hold; None for none; default None.
        gamma: Slots per record that every tape must have room for; default 5.
        heldout: Share of documents labelled "heldout", by a hash of their ids; None leaves labels; default None.
        seed: Seed of signatures and labels; default 0.

    Raises:
        UserError: A value is out of range; the sentence names it, the range and the remedy.
    """

    part: str = "all"
    near: float | None = 0.8
    ngram: int = 5
    permutations: int = 128
    overlap_ngram: int = 13
    least: int = 1
    common: int | None = None
    gamma: int = ExtractOptions.gamma
    heldout: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("part", self.part, PARTS)
        if self.near is not None:
            check_real("near", self.near, low=0.0, high=1.0, open_low=True)
        for name, low in (("ngram", 1), ("permutations", 2), ("overlap_ngram", 1), ("least", 1), ("gamma", 1)):
            check_int(name, getattr(self, name), low=low)
        if self.common is not None:
            check_int("common", self.common, low=1)
        if self.heldout is not None:
            check_real("heldout", self.heldout, low=0.0, high=1.0)
        check_int("seed", self.seed, low=0, high=2**32 - 1)


def clean(
    tapes: Corpus | Sequence[Tape] | Tape,
    *,
    model: HybridModel | TextSide | None = None,
    evaluation: Corpus | Sequence[Tape] | Tape | None = None,
    **options: Any,
) -> Cleaned:
    """Clean a corpus: set unusable tapes aside, drop duplicates and what the evaluation holds, and label a split.

    The cheap steps come first, so that the dear ones see less. What a step drops no later step sees.

    Args:
        tapes: The documents.
        model: The target, or ``load_text_side`` of its checkpoint; None leaves quarantine out.
        evaluation: Documents that training must not see; None leaves overlap out.
        **options: Fields of ``CleanOptions``.

    Returns:
        The outcome of all steps; ``.save(directory)`` writes its tapes, its list of dropped ones and its reports.

    Raises:
        UserError: An option is out of range, or no tape would be left.
        CapabilityError: Near duplicates are asked for and datasketch is not installed.
    """
    chosen = CleanOptions(**options)
    corpus = listed(tapes)
    done: Cleaned | None = None

    def then(later: Cleaned) -> Cleaned:
        return later if done is None else done.then(later)

    if model is not None:
        done = quarantine(corpus, model, gamma=chosen.gamma)
    done = then(dedup(done.tapes if done is not None else corpus, part=chosen.part))
    if chosen.near is not None:
        done = then(
            near_dedup(
                done.tapes,
                threshold=chosen.near,
                n=chosen.ngram,
                permutations=chosen.permutations,
                part=chosen.part,
                seed=chosen.seed,
            )
        )
    if evaluation is not None:
        done = then(
            drop_overlap(
                done.tapes,
                evaluation,
                n=chosen.overlap_ngram,
                least=chosen.least,
                part=chosen.part,
                common=chosen.common,
            )
        )
    if chosen.heldout is not None:
        done = replace(done, tapes=label_splits(done.tapes, heldout=chosen.heldout, seed=chosen.seed))
    return done
