"""Where documents come from: shipped samples, files, folders, Hugging Face datasets and lists, one mapping each.

Nothing is tokenized here. A document's content is read when it is asked for, so that a limit reads no more than it
needs and memory does not hold every text at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench.core.errors import UserError
from workbench.corpus.ondisk import is_dataset, open_dataset

DEMO = Path(__file__).resolve().parents[2] / "data" / "heldout"
DEMO_PROMPTS = DEMO.parent / "prompts" / "demo.jsonl"
TEXT_SUFFIXES = frozenset(
    ".txt .text .md .markdown .rst .tex .org .html .htm .xml .csv .tsv .json .yaml .yml .toml .ini .cfg .py .pyi .c .h "
    ".cc .cpp .hpp .cu .cuh .rs .go .java .js .jsx .ts .tsx .rb .php .pl .lua .sh .sql .r .jl .scala .kt .swift".split()
)
LINES = (".jsonl", ".ndjson")


Quarantine = list[tuple[str, str]]  # (doc_id, reason) of every document set aside


@dataclass(frozen=True, eq=False)
class Document:
    """One document before it is tokenized.

    Args:
        doc_id: Its id.
        source: Register or file it came from.
        split: Its split; "" when it carries none.
        content: Returns a mapping with the columns that ``content_column`` knows.
    """

    doc_id: str
    source: str
    split: str
    content: Callable[[], Mapping[str, Any]]


def set_aside(quarantine: Quarantine | None, doc_id: str, error: UserError) -> None:
    """List a document with the reason why it cannot be used; without a list, refuse it.

    Args:
        quarantine: The list, or None.
        doc_id: Id of the document.
        error: Why it cannot be used.

    Raises:
        UserError: There is no list.
    """
    if quarantine is None:
        raise error
    quarantine.append((doc_id, str(error)))


def in_quarantine(quarantine: Quarantine | None) -> str:
    """How many documents a list holds and why the last is there, as the end of a sentence; "" when it holds none."""
    return f"; {len(quarantine):,} in quarantine, such as: {quarantine[-1][1]}" if quarantine else ""


def read_source(
    source: Any, *, text_column: str, name: str = "", quarantine: Quarantine | None = None
) -> tuple[str, list[Document]]:
    """List the documents of a source.

    Args:
        source: "demo", "demo/<register>", a file, a directory of files or of a dataset, a Hugging Face dataset, or a
            list of texts or mappings.
        text_column: Column that holds text.
        name: Of a dataset in memory; "" for its own.
        quarantine: Lines of a file and items of a list that hold no document are appended here, under the id that
            their place gives them, and left out; None stops at the first.

    Returns:
        A short name without directories, and the documents in order.

    Raises:
        UserError: There is no such source, or its columns or lines cannot be used.
    """
    if isinstance(source, str) and (source == "demo" or source.startswith("demo/")):
        return source, list(_demo(source, text_column))
    if isinstance(source, (str, Path)):
        path = Path(source)
        if not path.exists():
            raise UserError(f"source {str(source)!r} does not exist: give 'demo', a file, a directory or a dataset")
        name = path.resolve().name
        if is_dataset(path):
            return name, read_source(open_dataset(path), text_column=text_column, name=name)[1]
        if path.is_dir():
            return name, list(_folder(path, text_column, quarantine))
        return name, list(_file(path, name, path.stem, text_column, quarantine))
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return name or _table_name(source), list(_table(source, text_column, name=name))
    if isinstance(source, Mapping):
        parts = [(str(split), _table(part, text_column, split=str(split), name=name)) for split, part in source.items()]
        return "dataset", [document for _, part in parts for document in part]
    if isinstance(source, Sequence):
        rows = [{text_column: row} if isinstance(row, str) else row for row in source]
        return "list", list(_listed(rows, text_column, quarantine))
    raise UserError(
        f"source of type {type(source).__name__} is not valid: give 'demo', a file, a directory, a Hugging Face "
        "Dataset, or a list of texts or mappings"
    )


def _demo(source: str, text_column: str) -> Iterator[Document]:
    files = {path.stem: path for path in sorted(DEMO.glob("*.parquet"))}
    if not files:
        raise UserError(
            "the demo samples are not here: they lie in data/heldout of a checkout of the workbench; clone it"
        )
    _, _, register = source.partition("/")
    if register and register not in files:
        raise UserError(
            f"source {source!r} is not valid: choose 'demo' or one of {', '.join(f'demo/{n}' for n in files)}"
        )
    for name in [register] if register else files:
        yield from _parquet(files[name], name, text_column)


def _folder(path: Path, text_column: str, quarantine: Quarantine | None) -> Iterator[Document]:
    readable = {*TEXT_SUFFIXES, *LINES, ".parquet"}
    found = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.suffix.lower() in readable
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not found:
        raise UserError(
            f"directory {str(path)!r} holds no document: files that end in .txt, .md, .py and other text suffixes, "
            ".jsonl or .parquet are read"
        )
    for file in found:
        inside = file.relative_to(path)
        register = inside.parts[0] if len(inside.parts) > 1 else path.resolve().name
        yield from _file(file, inside.as_posix(), register, text_column, quarantine)


def _file(path: Path, name: str, register: str, text_column: str, quarantine: Quarantine | None) -> Iterator[Document]:
    if path.suffix.lower() in LINES:
        yield from _lines(path, name, register, text_column, quarantine)
    elif path.suffix.lower() == ".parquet":
        yield from _parquet(path, register, text_column)
    else:
        yield Document(name, register, "", lambda: {text_column: _text(path)})


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it, or leave it out"
        ) from None


def _lines(path: Path, name: str, register: str, text_column: str, quarantine: Quarantine | None) -> Iterator[Document]:
    at = 0
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, 1):
            begin, at = at, at + len(line)
            if not line.strip():
                continue
            where, place = f"{path} line {number}", f"{name}:{number}"
            try:
                document = _row(_parsed(line, where), where, place, register, text_column)
            except UserError as error:
                set_aside(quarantine, place, error)
                continue
            yield replace(document, content=partial(_line, path, begin))


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error}): each line must be one JSON object") from None


def _line(path: Path, begin: int) -> Mapping[str, Any]:
    with open(path, "rb") as handle:
        handle.seek(begin)
        return json.loads(handle.readline())


def _listed(rows: Sequence[Any], text_column: str, quarantine: Quarantine | None) -> Iterator[Document]:
    for i, row in enumerate(rows):
        place = f"doc-{i:06d}"
        try:
            yield _row(row, f"document {i}", place, "", text_column)
        except UserError as error:
            set_aside(quarantine, place, error)


def _row(row: Any, where: str, default_id: str, register: str, text_column: str) -> Document:
    if not isinstance(row, Mapping):
        raise UserError(
            f"{where} holds a {type(row).__name__}: a mapping with 'text', 'messages', 'tokens' or another column of "
            "documents is needed"
        )
    content_column(list(row), text_column, where)
    doc_id = next((row[key] for key in ("doc_id", "id") if row.get(key) is not None), default_id)
    return Document(str(doc_id), _label(row.get("source"), register), _label(row.get("split"), ""), lambda: row)


def _parquet(path: Path, register: str, text_column: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is not a Parquet file that can be read ({error}): restore it, or leave it out"
        ) from None
    yield from _columns(
        table.column_names,
        lambda name: table.column(name).to_pylist(),
        lambda i: table.slice(i, 1).to_pylist()[0],
        count=len(table),
        name=path.name,
        register=register,
        text_column=text_column,
    )


def _table(source: Any, text_column: str, *, split: str = "", name: str = "") -> Iterator[Document]:
    if not hasattr(source, "__len__") or not hasattr(source, "column_names"):
        raise UserError(
            f"a dataset of type {type(source).__name__} is not valid: give a datasets.Dataset of known length, such as "
            "Dataset.from_list(list(stream.take(1000)))"
        )
    yield from _columns(
        source.column_names,
        lambda column: list(source[column]),
        source.__getitem__,
        count=len(source),
        name=name or _table_name(source),
        split=split or str(getattr(source, "split", None) or ""),
        text_column=text_column,
    )


def _table_name(source: Any) -> str:
    return str(getattr(getattr(source, "info", None), "dataset_name", None) or "dataset")


def _columns(
    names: list[str],
    column: Callable[[str], list[Any]],
    fetch: Callable[[int], Mapping[str, Any]],
    *,
    count: int,
    name: str,
    text_column: str,
    register: str = "",
    split: str = "",
) -> Iterator[Document]:
    content_column(names, text_column, name)
    id_column = next((n for n in ("doc_id", "id") if n in names), None)
    ids = column(id_column) if id_column else [f"{name}:{split + ':' if split else ''}{i}" for i in range(count)]
    sources = column("source") if "source" in names else [register] * count
    splits = column("split") if "split" in names else [split] * count
    for i in range(count):
        yield Document(str(ids[i]), _label(sources[i], register), _label(splits[i], split), partial(fetch, i))


def _label(given: Any, default: str) -> str:
    return default if given is None else str(given)


def content_column(names: list[str], text_column: str, where: str) -> str:
    """The column that holds the documents.

    Ids outrank text, which would be encoded again; a text column that was named outranks every other.

    Args:
        names: Columns there are.
        text_column: The one that holds text.
        where: For the sentence.

    Returns:
        "tokens", "input_ids", "messages", "prompt" or the text column.

    Raises:
        UserError: There is none of them.
    """
    order = ["tokens", "input_ids", "messages", *(["prompt"] if "completion" in names else []), "text", "prompt"]
    if text_column != "text":
        order = [text_column, *(name for name in order if name != "text")]
    for name in order:
        if name in names:
            return name
    raise UserError(
        f"{where} has the columns {', '.join(map(repr, names)) or '(none)'}: 'messages', 'tokens', 'input_ids', "
        f"'prompt' with 'completion', or {text_column!r} is needed; name another text column with text_column=..."
    )
