"""Contamination: which n-grams of the evaluation's documents stand in the training documents, and where.

N-grams are numbered exactly, so that a hit is the same tokens and never a collision of hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import check_choice, check_int
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.corpus.hygiene.grams import PARTS, counted, gram_ids, listed
from workbench.corpus.hygiene.outcome import Cleaned, Drop, cleaned

if TYPE_CHECKING:
    import polars as pl

STEP = "overlap"


@dataclass(frozen=True, eq=False)
class Contamination:
    """What the training documents hold of the evaluation's.

    Args:
        documents: One row per evaluation document, in order: doc_id, source, split, n_tokens (that count), grams,
            ignored (n-grams too common to tell), seen, share (seen of those not ignored; null where a document has
            none), covered (share of its tokens inside a seen n-gram), longest (tokens of its longest span), train_id
            (document of that span, or null).
        spans: One row per run of n-grams found one after the other: doc_id, start, stop, train_id, train_start, tokens;
            positions count the tokens of the part. Each n-gram is placed where the training documents hold it first.
        parameters: n, part, common.
    """

    documents: pl.DataFrame
    spans: pl.DataFrame
    parameters: dict[str, Any]

    @property
    def summary(self) -> dict[str, Any]:
        """Counts over all documents: documents, judged (with an n-gram to judge by), touched, whole, grams, seen."""
        judged = self.documents.drop_nulls("share")
        return {
            "documents": len(self.documents),
            "judged": len(judged),
            "touched": int((judged["seen"] > 0).sum()),
            "whole": int((judged["share"] == 1.0).sum()),
            "grams": int(self.documents["grams"].sum()),
            "ignored": int(self.documents["ignored"].sum()),
            "seen": int(self.documents["seen"].sum()),
        }

    def __repr__(self) -> str:
        found = self.summary
        return (
            f"Contamination({found['touched']:,} of {found['judged']:,} documents share an n-gram of "
            f"{self.parameters['n']} tokens with the training documents; "
            f"{found['seen']:,} of {found['grams']:,} n-grams)"
        )


def contamination(
    tapes: Corpus | Sequence[Tape] | Tape,
    training: Corpus | Sequence[Tape] | Tape,
    *,
    n: int = 13,
    part: str = "all",
    common: int | None = None,
) -> Contamination:
    """Say how much of every evaluation document the training documents hold, and where.

    Args:
        tapes: The evaluation's documents.
        training: The training documents.
        n: Tokens per n-gram; default 13.
        part: Which tokens count, on both sides: "all" (default), "prompt", "output" or "supervised".
        common: Ignore n-grams that more training documents than this hold, such as licences and templates; None, the
            default, ignores none.

    Returns:
        The report.

    Raises:
        UserError: These are no tapes, or an option is out of range.

    Source: Brown et al. 2020, appendix C (overlap of 13-grams), over tokens in place of words.
    """
    evaluation, train = listed(tapes), listed(training, name="training")
    check_int("n", n, low=1)
    check_choice("part", part, PARTS)
    if common is not None:
        check_int("common", common, low=1)
    texts = [tape.tokens[counted(tape, part)] for tape in (*evaluation, *train)]
    with progress(len(evaluation), desc="overlap", unit="doc") as bar:
        grams = gram_ids(texts, n)
        index = _Index(grams[len(evaluation) :], common)
        rows, spans = [], []
        for tape, text, ids in zip(evaluation, texts, grams):
            places, ignored = index.places(ids)
            found = _spans(places, index.document, n)
            named = [train[index.document[at]].doc_id for _, _, at in found]
            spans += [(tape.doc_id, lo, hi, name, int(index.start[at])) for (lo, hi, at), name in zip(found, named)]
            rows.append(_row(tape, len(text), places, ignored, found, named))
            bar.update()
    return Contamination(_documents(rows), _span_frame(spans), {"n": n, "part": part, "common": common})


def drop_overlap(
    tapes: Corpus | Sequence[Tape] | Tape,
    evaluation: Corpus | Sequence[Tape] | Tape,
    *,
    n: int = 13,
    least: int = 1,
    part: str = "all",
    common: int | None = None,
) -> Cleaned:
    """Take documents out of a training corpus that hold n-grams of the evaluation.

    Args:
        tapes: The training documents.
        evaluation: The evaluation's documents.
        n: Tokens per n-gram; default 13.
        least: Places of a document at which such an n-gram begins, from which it goes; default 1.
        part: Which tokens count, on both sides: "all" (default), "prompt", "output" or "supervised".
        common: Ignore n-grams that more evaluation documents than this hold; None, the default, ignores none.

    Returns:
        The outcome, with the report "overlap": a row per training document, as ``Contamination.documents``, where
        train_id is the evaluation's document.

    Raises:
        UserError: These are no tapes, an option is out of range, or no document would be left.
    """
    corpus = listed(tapes)
    check_int("least", least, low=1)
    found = contamination(corpus, listed(evaluation, name="evaluation"), n=n, part=part, common=common)
    drops = {}
    for i, row in enumerate(found.documents.iter_rows(named=True)):
        if row["seen"] >= least:
            reason = (
                f"{row['seen']} of its {row['grams']} {n}-grams stand in the evaluation; the longest run is "
                f"{row['longest']} tokens of {row['train_id']!r}"
            )
            drops[i] = Drop(corpus[i], STEP, reason, row["train_id"], row["share"])
    parameters = {**found.parameters, "least": least, "evaluation": listed(evaluation).name}
    return cleaned(corpus, drops, step=STEP, parameters=parameters, reports={"overlap": found.documents})


class _Index:
    """Where the training documents hold each n-gram first.

    Args:
        grams: Numbers of the n-grams of every training document.
        common: Ignore those that more documents hold; None for none.
    """

    def __init__(self, grams: Sequence[np.ndarray], common: int | None) -> None:
        sizes = [len(ids) for ids in grams]
        flat = np.concatenate([np.zeros(0, np.int64), *grams])
        self.document = np.repeat(np.arange(len(grams)), sizes)
        self.start = np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)])
        self._ids, self._first = np.unique(flat, return_index=True)
        held = np.concatenate([np.zeros(0, np.int64), *(np.unique(ids) for ids in grams)])
        among = np.unique(held, return_counts=True)[1]
        self._common = among > common if common is not None else np.zeros(len(self._ids), bool)

    def places(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Place of every n-gram among those of the training documents, -1 for none and -2 for one that is ignored.

        Args:
            ids: Numbers of the n-grams of one document.

        Returns:
            Places, and how many are ignored.
        """
        if not len(self._ids):
            return np.full(len(ids), -1), 0
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        known, common = self._ids[at] == ids, self._common[at]
        return np.where(known, np.where(common, -2, self._first[at]), -1), int((known & common).sum())


def _spans(places: np.ndarray, documents: np.ndarray, n: int) -> list[tuple[int, int, int]]:
    """Runs of n-grams at consecutive places of one document: first token, last + 1, and the first place."""
    hits = np.flatnonzero(places >= 0)
    if not len(hits):
        return []
    at = places[hits]
    broken = (np.diff(hits) != 1) | (np.diff(at) != 1) | (np.diff(documents[at]) != 0)
    breaks = np.flatnonzero(broken) + 1
    return [(int(run[0]), int(run[-1]) + n, int(places[run[0]])) for run in np.split(hits, breaks)]


def _row(
    tape: Tape,
    n_tokens: int,
    places: np.ndarray,
    ignored: int,
    spans: Sequence[tuple[int, int, int]],
    train_ids: Sequence[str],
) -> tuple[Any, ...]:
    seen, judged = int((places >= 0).sum()), len(places) - ignored
    inside = np.zeros(n_tokens + 1, np.int64)
    for lo, hi, _ in spans:
        inside[lo] += 1
        inside[hi] -= 1
    covered = float((inside.cumsum()[:-1] > 0).mean()) if n_tokens else 0.0
    longest = max(range(len(spans)), key=lambda i: (spans[i][1] - spans[i][0], -i), default=None)
    return (
        tape.doc_id,
        tape.source,
        tape.split,
        n_tokens,
        len(places),
        ignored,
        seen,
        seen / judged if judged else None,
        covered,
        0 if longest is None else spans[longest][1] - spans[longest][0],
        None if longest is None else train_ids[longest],
    )


def _documents(rows: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
    import polars as pl

    schema = {
        **dict.fromkeys("doc_id source split".split(), pl.String()),
        **dict.fromkeys("n_tokens grams ignored seen".split(), pl.Int64()),
        **dict.fromkeys("share covered".split(), pl.Float64()),
        "longest": pl.Int64(),
        "train_id": pl.String(),
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _span_frame(spans: Sequence[tuple[str, int, int, str, int]]) -> pl.DataFrame:
    import polars as pl

    schema = {
        "doc_id": pl.String(),
        "start": pl.Int64(),
        "stop": pl.Int64(),
        "train_id": pl.String(),
        "train_start": pl.Int64(),
    }
    frame = pl.DataFrame(spans, schema=schema, orient="row")
    return frame.with_columns((pl.col("stop") - pl.col("start")).alias("tokens"))
