"""What a step of hygiene leaves: the tapes kept, a list of those dropped with reasons, and counts that add up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.errors import UserError
from workbench.core.manifest import library_versions, sha256_file, write_atomic, write_json
from workbench.core.tape import Corpus, Tape
from workbench.corpus.fingerprint import corpus_fingerprint
from workbench.corpus.save import save_tapes

if TYPE_CHECKING:
    import polars as pl

TAPES, DROPPED, UNREAD, REPORT = "tapes.jsonl", "dropped.jsonl", "unread.jsonl", "report.json"
LIBRARIES = ("specdec-workbench", "numpy", "datasketch")


@dataclass(frozen=True)
class Drop:
    """Why one tape goes.

    Args:
        tape: The tape.
        step: The step that dropped it, such as "exact".
        reason: A sentence.
        of: Id of the document it repeats; None when it repeats none.
        similarity: Measure of the step, from 0 to 1; None when it has none.
    """

    tape: Tape
    step: str
    reason: str
    of: str | None = None
    similarity: float | None = None


def drop_schema() -> dict[str, Any]:
    """Columns and types of a frame of dropped tapes."""
    import polars as pl

    words = dict.fromkeys("doc_id source split step reason of".split(), pl.String())
    return {**words, "n_tokens": pl.Int64(), "similarity": pl.Float64()}


def drop_frame(drops: Iterable[Drop]) -> pl.DataFrame:
    """One row per dropped tape, in the order given, with the columns of ``drop_schema``."""
    import polars as pl

    rows = [
        {
            "doc_id": drop.tape.doc_id,
            "source": drop.tape.source,
            "split": drop.tape.split,
            "step": drop.step,
            "reason": drop.reason,
            "of": drop.of,
            "n_tokens": len(drop.tape),
            "similarity": drop.similarity,
        }
        for drop in drops
    ]
    return pl.DataFrame(rows, schema=drop_schema())


@dataclass(frozen=True, eq=False)
class Cleaned:
    """Tapes after one or more steps of hygiene; every tape given is either kept or in the list of dropped ones.

    Args:
        tapes: The tapes kept, in their order.
        dropped: One row per dropped tape: doc_id, source, split, step, reason (a sentence), of (id of the document it
            repeats, or null), n_tokens, similarity.
        given: Tapes that came in.
        given_tokens: Their tokens.
        steps: Parameters of each step, by its name, in the order of the steps.
        reports: Frames of the steps, such as "pairs" and "clusters" of near duplicates.
    """

    tapes: Corpus
    dropped: pl.DataFrame
    given: int
    given_tokens: int
    steps: Mapping[str, Mapping[str, Any]]
    reports: Mapping[str, pl.DataFrame] = field(default_factory=dict)

    def __post_init__(self) -> None:
        gone, ids = len(self.dropped), {tape.doc_id for tape in self.tapes}
        assert self.given == len(self.tapes) + gone, f"{self.given} in, {len(self.tapes)} kept, {gone} dropped"
        assert self.given_tokens == self.tapes.n_tokens + self.dropped["n_tokens"].sum(), "tokens in = kept + dropped"
        assert ids.isdisjoint(self.dropped["doc_id"]), "no tape is both kept and dropped"
        assert self.dropped["doc_id"].n_unique() == gone, "no tape is dropped twice"
        assert set(self.dropped["step"]) <= set(self.steps), "every drop names its step"

    @property
    def summary(self) -> pl.DataFrame:
        """One row per step: step, documents and tokens in, dropped and kept."""
        import polars as pl

        rows, documents, tokens = [], self.given, self.given_tokens
        for step in self.steps:
            gone = self.dropped.filter(pl.col("step") == step)
            lost = int(gone["n_tokens"].sum())
            rows.append((step, documents, len(gone), documents - len(gone), tokens, lost, tokens - lost))
            documents, tokens = documents - len(gone), tokens - lost
        assert (documents, tokens) == (len(self.tapes), self.tapes.n_tokens)
        names = "documents_in documents_dropped documents_kept tokens_in tokens_dropped tokens_kept".split()
        schema = {"step": pl.String(), **dict.fromkeys(names, pl.Int64())}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def then(self, later: Cleaned) -> Cleaned:
        """This outcome and that of later steps over the tapes it kept, as one.

        Args:
            later: What the later steps left of ``self.tapes``.

        Returns:
            Both together.

        Raises:
            UserError: The later steps began with other tapes, or a step's name or report occurs twice.
        """
        import polars as pl

        if (later.given, later.given_tokens) != (len(self.tapes), self.tapes.n_tokens):
            raise UserError(
                f"the later step began with {later.given} tapes and this one kept {len(self.tapes)}: "
                "give it the kept ones"
            )
        if twice := sorted({*self.steps} & {*later.steps} | {*self.reports} & {*later.reports}):
            raise UserError(f"step {twice[0]!r} was taken already: take each step once, or keep the outcomes apart")
        return Cleaned(
            later.tapes,
            pl.concat([self.dropped, later.dropped]),
            self.given,
            self.given_tokens,
            {**self.steps, **later.steps},
            {**self.reports, **later.reports},
        )

    def save(self, out: str | Path, *, unread: Sequence[tuple[str, str]] = ()) -> Path:
        """Write the kept tapes, the list of dropped ones and a report beside each other.

        Args:
            out: Directory, made if needed; files of these names are replaced.
            unread: (doc_id, reason) of documents that never became tapes; listed and counted beside those given.

        Returns:
            The directory; ``corpus(out / "tapes.jsonl")`` reads the tapes back.
        """
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        files = {TAPES: sha256_file(save_tapes(self.tapes, out / TAPES))}
        for name, frame in ((DROPPED, self.dropped), *((f"{n}.jsonl", f) for n, f in self.reports.items())):
            files[name] = sha256_file(write_atomic(out / name, frame.write_ndjson().encode()))
        lines = [json.dumps({"doc_id": i, "reason": reason}, ensure_ascii=False) + "\n" for i, reason in unread]
        files[UNREAD] = sha256_file(write_atomic(out / UNREAD, "".join(lines).encode()))
        report = {
            "kind": "cleaned",
            "corpus": self.tapes.name,
            "tokenizer": self.tapes.tokenizer,
            "fingerprint": corpus_fingerprint(self.tapes),
            "documents": {
                "given": self.given,
                "kept": len(self.tapes),
                "dropped": len(self.dropped),
                "unread": len(unread),
            },
            "tokens": {"given": self.given_tokens, "kept": self.tapes.n_tokens},
            "steps": {name: dict(values) for name, values in self.steps.items()},
            "summary": self.summary.to_dicts(),
            "versions": library_versions(LIBRARIES),
            "files": files,
        }
        write_json(out / REPORT, report)
        return out

    def __repr__(self) -> str:
        gone = len(self.dropped)
        return f"Cleaned({self.given:,} tapes = {len(self.tapes):,} kept + {gone:,} dropped by {', '.join(self.steps)})"


def cleaned(
    tapes: Corpus,
    drops: Mapping[int, Drop],
    *,
    step: str,
    parameters: Mapping[str, Any],
    reports: Mapping[str, pl.DataFrame] | None = None,
) -> Cleaned:
    """The outcome of one step.

    Args:
        tapes: What came in.
        drops: Why a tape goes, by its index.
        step: Name of the step.
        parameters: Its options, JSON-ready.
        reports: Its frames.

    Returns:
        The outcome; the kept tapes stay in their order and keep their name and tokenizer.

    Raises:
        UserError: No tape would be left.
    """
    kept = [tape for i, tape in enumerate(tapes) if i not in drops]
    if not kept:
        first = drops[min(drops)]
        raise UserError(
            f"step {step!r} would drop all {len(tapes)} tapes; the first, {first.tape.doc_id!r}: {first.reason}"
        )
    return Cleaned(
        Corpus(kept, name=tapes.name, tokenizer=tapes.tokenizer),
        drop_frame(drops[i] for i in sorted(drops)),
        len(tapes),
        tapes.n_tokens,
        {step: dict(parameters)},
        dict(reports or {}),
    )
