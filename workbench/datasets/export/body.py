"""What exports with a file per document share: which documents, which rows, what is written, what is checked.

Legend: S tokens, H hidden.
A format says how layers are numbered, on which side of the final norm its last rows lie, and how a sample is put into a
file and taken out of it again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, ClassVar

from safetensors import SafetensorError
from torch import Tensor

from workbench.core.errors import CapabilityError, CheckpointError, UserError
from workbench.core.manifest import FILE as MANIFEST
from workbench.core.manifest import sha256_file
from workbench.core.progress import progress
from workbench.core.staging import directory_bytes, staged
from workbench.datasets.export.fidelity import Fidelity
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import Exporter, ExportReport
from workbench.datasets.export.rule import excerpts
from workbench.datasets.export.samples import (
    FILE,
    LINES,
    PARTS,
    Facts,
    Line,
    Sample,
    append_line,
    digest_ids,
    digest_mask,
    read_lines,
    sample_problems,
)
from workbench.datasets.export.source import SequenceRow, SequenceSource

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

PROBED = 16  # documents whose excerpts hold logits: a wrong rule is wrong for all
READING = (KeyError, ValueError, TypeError, IndexError, RuntimeError, OSError, EOFError)
UNREADABLE = (*READING, UnpicklingError, SafetensorError)


class SampleWriter:
    """Puts samples into files below a directory.

    Args:
        out: The directory.
        facts: What the export is.
        parts: Embedding, head and final norm of the model, and the ids of its trimmed head.
    """

    def __init__(self, out: Path, facts: Facts, parts: ModelParts) -> None:
        self.out, self.facts, self.parts = out, facts, parts

    def put(self, sample: Sample) -> str:
        """Write one sample, and return its file's name from the directory."""
        raise AssertionError("a format writes its own samples")

    def finish(self) -> None:
        """Write what comes after the last sample."""

    def close(self) -> None:
        """Let go of open files, whether the export was finished or not."""


class SampleExporter(Exporter):
    """An exporter that writes one file per document of a sequence store."""

    norms: ClassVar[Collection[str]] = ("post",)
    pattern: ClassVar[str] = ""
    writer: ClassVar[type[SampleWriter]] = SampleWriter

    @abstractmethod
    def layer_id(self, layer: int) -> int:
        """A layer, named by its output rows and counted from 0, in the numbering of the format."""

    def opened(self, out: Path) -> Any:
        """What ``take`` needs beside a sample's own file, opened once."""
        return None

    @abstractmethod
    def take(self, out: Path, line: Line, facts: Facts, opened: Any) -> Sample:
        """Read one sample back."""

    def norm_of(self, options: Any) -> str:
        """On which side of the final norm the last rows lie, "pre" or "post"; "" where there are none."""
        return next(iter(self.norms))

    def check_layers(self, layers: Sequence[int]) -> None:
        """Refuse layers that the format has no place for."""
        if not layers:
            raise CapabilityError(
                f"{self.name} needs the rows of at least one layer beside the last, and the data hold none: extract "
                "again with layers tapped"
            )

    def unfit(self, row: SequenceRow) -> str:
        """Why the format cannot hold a document, in words; "" when it can."""
        return "" if bool(row.mask_S.any()) else "no token of it is supervised"

    def notes(self, facts: Facts) -> list[str]:
        """What the user must know to train from the export."""
        return []

    def whole_problems(self, out: Path, facts: Facts, parts: ModelParts) -> list[str]:
        """What is wrong with files that are no samples, a sentence each."""
        return []

    def run(
        self,
        data_dir: str | Path,
        out: str | Path,
        parts: ModelParts,
        *,
        model: HybridModel | None = None,
        **options: Any,
    ) -> ExportReport:
        """Write an export; see ``Exporter.run``."""
        chosen = self.options(**options)
        source = SequenceSource.of(data_dir, parts)
        layers = source.chosen(chosen.layers)
        self.check_layers(layers)
        if source.num_layers - 1 in layers:
            raise CapabilityError(
                f"layers={list(layers)} holds the last layer, {source.num_layers - 1}, whose rows trainers take on "
                "either side of the final norm; they are exported as the last rows already: leave it out"
            )
        facts = self._facts(source, layers, chosen, parts)
        side = facts.norm["rows"]
        also = "norm='pre', which keeps the rows of the data" if side == "post" and "pre" in self.norms else ""
        written = chosen.hidden_dtype
        fidelity = Fidelity(
            model,
            source.manifest,
            documents=len(source),
            stored=source.hidden_dtype,
            written=written,
            side=side,
            also=also,
        )
        with staged(out) as stage:
            parts.save(stage / PARTS)
            self._write_samples(stage, source, layers, facts, parts, fidelity)
            rounding = fidelity.result() if side else None
            facts.rounding = {} if rounding is None else rounding.to_dict()
            others = [file for file in stage.rglob("*") if file.is_file() and not file.match(self.pattern)]
            facts.files = {file.relative_to(stage).as_posix(): sha256_file(file) for file in sorted(others)}
            facts.complete = True
            facts.write(stage)
        return ExportReport(
            format=self.name,
            out=str(out),
            documents=facts.documents,
            tokens=facts.tokens,
            bytes=directory_bytes(Path(out)),
            layers=layers,
            layer_ids=[each["id"] for each in facts.layers],
            norm=facts.norm["rows"],
            left_out=facts.left_out,
            notes=self.notes(facts) + ([rounding.sentence] if rounding and rounding.sentence else []),
            rounding=facts.rounding,
            parts_bytes=directory_bytes(Path(out) / PARTS),
        )

    def _facts(self, source: SequenceSource, layers: Sequence[int], options: Any, parts: ModelParts) -> Facts:
        manifest = source.manifest
        return Facts(
            to=self.name,
            hidden_size=source.hidden_size,
            vocab_size=int(manifest.model["vocab_size"]),
            num_layers=source.num_layers,
            hidden_dtype=options.hidden_dtype,
            norm={"rows": self.norm_of(options), "kind": parts.norm_kind, "eps": parts.eps},
            layers=[{"layer": i, "hf_index": i + 1, "id": self.layer_id(i)} for i in layers],
            draft_ids=None if parts.draft_ids_D is None else len(parts.draft_ids_D),
            source={
                "kind": manifest.kind,
                "manifest_sha256": sha256_file(source.path / MANIFEST),
                "model": manifest.model,
                "tokenizer": manifest.tokenizer,
                "corpus": manifest.corpus,
            },
        )

    def _write_samples(
        self,
        stage: Path,
        source: SequenceSource,
        layers: Sequence[int],
        facts: Facts,
        parts: ModelParts,
        fidelity: Fidelity,
    ) -> None:
        with (
            _closing(self.writer(stage, facts, parts)) as writer,
            open(stage / LINES, "w", encoding="utf-8") as lines,
            progress(len(source), desc=f"export to {self.name}", unit="doc") as bar,
        ):
            for row in source.documents(layers):
                bar.update(1)
                if reason := self.unfit(row):
                    facts.left_out[row.doc_id] = reason
                    continue
                sample = self.converted(row, layers, facts, parts)
                if sample.last_SH is not None:
                    fidelity.see(sample.ids_S, sample.last_SH, parts)
                file = writer.put(sample)
                append_line(lines, self._line(row, sample, file, layers, facts, parts, stage))
                facts.documents += 1
                facts.tokens += len(row.tokens_S)
            if not facts.documents:
                why = next(iter(facts.left_out.values()), "there are none")
                raise UserError(f"{self.name} can hold no document of {source.path} ({why}): check masks and lengths")
            writer.finish()

    def converted(self, row: SequenceRow, layers: Sequence[int], facts: Facts, parts: ModelParts) -> Sample:
        """A document's rows in the export's type and on its side of the final norm."""
        side = facts.norm["rows"]
        last_SH: Tensor | None = None
        if side:
            last_SH = (row.last_SH if side == "pre" else parts.normed(row.last_SH)).to(facts.dtype)
        return Sample(
            index=facts.documents,
            doc_id=row.doc_id,
            ids_S=row.tokens_S,
            mask_S=row.mask_S.long(),
            last_SH=last_SH,
            taps=[row.taps[layer].to(facts.dtype) for layer in layers],
        )

    def _line(
        self,
        row: SequenceRow,
        sample: Sample,
        file: str,
        layers: Sequence[int],
        facts: Facts,
        parts: ModelParts,
        stage: Path,
    ) -> Line:
        return Line(
            index=sample.index,
            doc_id=row.doc_id,
            file=file,
            tokens=len(row.tokens_S),
            supervised=int(row.mask_S.sum()),
            ids_sha256=digest_ids(row.tokens_S),
            mask_sha256=digest_mask(row.mask_S),
            sha256=sha256_file(stage / file),
            excerpts=excerpts(row, layers, parts, logits=sample.index < PROBED),
        )

    def validate(self, out: str | Path) -> list[str]:
        """Problems of an export, a sentence each; empty when it is sound."""
        path = Path(out)
        try:
            facts = Facts.read(path)
            parts = ModelParts.load(path / PARTS)
        except CheckpointError as error:
            return [str(error)]
        if facts.to != self.name:
            return [f"{path} holds an export to {facts.to!r} and {self.name!r} is asked for: name its own format"]
        problems: list[str] = []
        try:
            problems += self._claims(path, facts, parts)
            if (path / LINES).is_file():
                problems += self._samples(path, facts, parts)
                problems += self.whole_problems(path, facts, parts)
        except UNREADABLE as error:
            problems.append(f"{path} cannot be read ({type(error).__name__}: {_short(error)})")
        return problems

    def _samples(self, path: Path, facts: Facts, parts: ModelParts) -> list[str]:
        """What is wrong with the samples, and with their list."""
        problems, listed, documents, tokens = [], set(), 0, 0
        opened = self.opened(path)
        for line in read_lines(path):
            if line.index != documents:
                problems.append(f"{LINES} goes from sample {documents - 1} to {line.index}")
            listed.add(line.file)
            documents, tokens = documents + 1, tokens + line.tokens
            phrases = self._check(path, line, facts, parts, opened)
            problems += [f"{line.file} ({line.doc_id!r}): {phrase}" for phrase in phrases]
        if (documents, tokens) != (facts.documents, facts.tokens):
            problems.append(f"{LINES} lists {documents} documents where {FILE} says {facts.documents}")
        strange = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.match(self.pattern)} - listed
        return problems + [
            f"{name} lies among the samples and is none: readers would take it" for name in sorted(strange)
        ]

    def _claims(self, path: Path, facts: Facts, parts: ModelParts) -> list[str]:
        """What ``export.json`` says that cannot be, and files that are not what it lists."""
        found = [] if facts.complete else [f"{path} is not complete"]
        if facts.norm["rows"] not in self.norms:
            found.append(f"{FILE} says that last rows are {facts.norm['rows']!r}; {self.name} has {list(self.norms)}")
        if (facts.norm["kind"], facts.norm["eps"]) != (parts.norm_kind, parts.eps):
            found.append(f"{FILE} says another kind or eps of the final norm than the parts beside it")
        trimmed = None if parts.draft_ids_D is None else len(parts.draft_ids_D)
        if (facts.vocab_size, facts.hidden_size) != tuple(parts.head_VH.shape) or facts.draft_ids != trimmed:
            found.append(f"{FILE} says another vocabulary, width or draft head than the parts beside it")
        for each in facts.layers:
            due = self.layer_id(each["layer"])
            if each["id"] != due or each["hf_index"] != each["layer"] + 1:
                found.append(
                    f"{FILE} numbers layer {each['layer']} as {each['id']} (hidden_states[{each['hf_index']}]); "
                    f"{self.name} calls it {due} (hidden_states[{each['layer'] + 1}])"
                )
        for name, digest in facts.files.items():
            if not (path / name).is_file():
                found.append(f"{name} is missing")
            elif sha256_file(path / name) != digest:
                found.append(f"{name} does not match its hash")
        return found + ([] if LINES in facts.files else [f"{FILE} lists no {LINES}"])

    def _check(self, path: Path, line: Line, facts: Facts, parts: ModelParts, opened: Any) -> list[str]:
        if not (path / line.file).is_file():
            return ["it is missing"]
        try:
            sample = self.take(path, line, facts, opened)
            found = sample_problems(line, sample, facts, parts)
        except UNREADABLE as error:
            return [f"it cannot be read ({type(error).__name__}: {_short(error)})"]
        if not found and sha256_file(path / line.file) != line.sha256:
            found = ["its bytes are not those that were written"]
        return found


@contextmanager
def _closing(writer: SampleWriter) -> Iterator[SampleWriter]:
    try:
        yield writer
    finally:
        writer.close()


def _short(error: BaseException) -> str:
    """The beginning of an error's message, on one line."""
    return " ".join(str(error).split())[:200]
