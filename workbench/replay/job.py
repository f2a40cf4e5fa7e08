"""A replay as a job: the rows of a draft table, made document by document or in groups, by whichever process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.tape import Corpus
from workbench.datasets.engine import Job
from workbench.datasets.groups import batch_limit, plan_groups
from workbench.datasets.shards import Part, in_order
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import HostCopies
from workbench.replay.columns import table_batch
from workbench.replay.options import ReplayOptions
from workbench.replay.own import differs, sequence_of
from workbench.replay.run import Chunk, chain_tape, run_group

Read = Iterable[tuple[int, Chunk, bool]]  # index of a document, rows of it, whether they are its last


@dataclass(frozen=True, eq=False)
class Replaying(Job[Read]):
    """The rows of a draft table.

    Args:
        desc: Name on the progress bar.
        sizes: Tokens to run per document.
        schema: Columns.
        corpus: The documents.
        options: What is recorded.
        facts: What is the same in all rows of each document, from ``document_facts``.
    """

    corpus: Corpus
    options: ReplayOptions
    facts: Sequence[dict[str, Any]]

    def items(self, model: HybridModel, documents: Sequence[int], bar: Any) -> Iterator[Read]:
        """Chunks of the documents."""
        return _chunks(model, self.corpus, documents, self.sizes, self.options, bar)

    def parts(self, items: Iterator[Read], documents: Sequence[int]) -> Iterator[Part]:
        """Their rows."""
        columns, tapes = self.options.columns(), self.corpus.tapes
        every = (
            Part(i, table_batch(tapes[i], self.facts[i], chunk, columns, self.schema), last)
            for item in items
            for i, chunk, last in item
        )
        return in_order(every, documents)


def document_facts(model: HybridModel, corpus: Corpus, options: ReplayOptions) -> list[dict[str, Any]]:
    """What is the same in all rows of each document."""
    here, shaping = fingerprint(model), options.shaping()
    found = []
    for i, tape in enumerate(corpus):
        facts: dict[str, Any] = {"own": tape.own.kind if tape.own and tape.own.model == here else ""}
        if not options.plain:
            law, draws = differs(tape, here, shaping, options.seed)
            facts |= {"sequence": sequence_of(tape, i), "law_differs": law, "draws_differ": draws}
        found.append(facts)
    return found


def _chunks(
    model: HybridModel,
    corpus: Corpus,
    documents: Sequence[int],
    rows: Sequence[int],
    options: ReplayOptions,
    bar: Any,
) -> Iterator[Read]:
    """Chunks of the wanted documents, each to be read where they are written.

    Draws and ranks need what came before, so such chunks are read as they are made, document by document.
    """
    if options.ranks:
        for i in documents:
            for chunk in chain_tape(model, corpus.tapes[i], options, sequence=sequence_of(corpus.tapes[i], i)):
                yield [(i, chunk, chunk.first + len(chunk.nll) == rows[i])]
                bar.update(len(chunk.nll))
        return
    wanted, copies = set(documents), HostCopies(model.device)
    for group in plan_groups(rows, batch_limit(model, options.batch if options.plain else 1, options.chunk)):
        if wanted.isdisjoint(group):
            continue
        tapes = [corpus.tapes[i] for i in group]
        sequence = sequence_of(tapes[0], group[0])
        for passed in run_group(model, tapes, options, copies, documents=group, sequence=sequence):
            yield passed.chunks()
            bar.update(sum(passed.counts))
