"""The demo corpus: five registers of free text, a byte-level BPE tokenizer, token streams and held-out samples.

    python -m workbench.train.demo_corpus --sources DOWNLOADS --out OUT

Where the texts come from and how they are fetched is in `demo_sources`, how they are cleaned in `demo_clean`. This
module splits by document, trains the tokenizer on the training split alone and writes every file. It knows no model.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from workbench.core.errors import UserError
from workbench.train.demo_more import read_more
from workbench.train.demo_sources import READERS, Document, Reading, read_register, sha256_file
from workbench.train.demo_tokenizer import END_OF_TEXT, train_tokenizer, write_tokenizer

HELDOUT_SHARES = {"speeches": 0.04, "sqlite": 0.10, "pydocs": 0.04, "pycode": 0.04}  # SQLite's pages are short
HELDOUT_NOVEL = "novels/northanger-abbey-"


def split_of(doc_id: str) -> str:
    """Return the split of a document, a function of its id alone.

    One novel is held out whole; elsewhere a document is held out when its hash falls into the lowest share that
    `HELDOUT_SHARES` names.

    Args:
        doc_id: `register/name`.

    Returns:
        `"train"` or `"heldout"`.
    """
    register = doc_id.split("/", 1)[0]
    if register == "novels":
        return "heldout" if doc_id.startswith(HELDOUT_NOVEL) else "train"
    digest = hashlib.sha256(f"split:{doc_id}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARES[register] * 2**64 else "train"


def encode_stream(documents: list[Document], *, tokenizer: Tokenizer) -> tuple[np.ndarray, list[dict]]:
    """Encode documents into one stream, each followed by the end-of-text token.

    Args:
        documents: in the order of the stream.
        tokenizer: a `tokenizers.Tokenizer` of at most 65,536 ids.

    Returns:
        The stream (uint16) and, per document, `doc_id`, `register`, `start` and `end` (tokens; `end` excludes the
        end-of-text token that follows).
    """
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[np.ndarray] = []
    index: list[dict] = []
    at = 0
    for first in range(0, len(documents), 64):
        batch = documents[first : first + 64]
        encodings = tokenizer.encode_batch([d.text for d in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            pieces.append(np.asarray([*ids, end_id], dtype=np.uint16))
            index.append({"doc_id": document.doc_id, "register": document.register, "start": at, "end": at + len(ids)})
            at += len(ids) + 1
    return np.concatenate(pieces) if pieces else np.zeros(0, np.uint16), index


def repeated_share(documents: list[Document], *, shortest: int = 40) -> float:
    """Measure leakage: the share of held-out characters that lie in lines which training documents hold as well.

    Args:
        documents: the documents of one register, both splits.
        shortest: lines shorter than this many characters are not counted.

    Returns:
        A share between 0 and 1; 0 if nothing is held out.
    """
    lines: dict[str, list[str]] = {"train": [], "heldout": []}
    for document in documents:
        rows = (line.strip() for line in document.text.split("\n"))
        lines[split_of(document.doc_id)].extend(line for line in rows if len(line) >= shortest)
    train = set(lines["train"])
    total = sum(map(len, lines["heldout"]))
    return round(sum(len(line) for line in lines["heldout"] if line in train) / total, 4) if total else 0.0


def choose_sample(heldout: list[Document], *, heldout_bytes: int) -> Iterator[tuple[str, list[Document]]]:
    """Choose held-out documents to ship, an equal share of the bytes for every register.

    Documents are taken in the order of the hash of their id while they fit into what is left of the share.

    Args:
        heldout: the held-out documents of all registers.
        heldout_bytes: UTF-8 bytes of text over all registers, an upper bound.

    Yields:
        Register and its documents, sorted by id.
    """
    registers = sorted({d.register for d in heldout})
    for register in registers:
        left = heldout_bytes // len(registers)
        chosen = []
        mine = [d for d in heldout if d.register == register]
        for document in sorted(mine, key=lambda d: hashlib.sha256(f"sample:{d.doc_id}".encode()).digest()):
            size = len(document.text.encode())
            if size <= left:
                chosen.append(document)
                left -= size
        yield register, sorted(chosen, key=lambda d: d.doc_id)


def write_sample(documents: list[Document], path: Path) -> None:
    """Write documents to a Parquet file with the columns doc_id, source, split, title, origin, licence and text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"doc_id": d.doc_id, "source": d.register, "split": "heldout", "title": d.title, "origin": d.origin,
         "licence": d.licence, "text": d.text}
        for d in documents
    ]  # fmt: skip
    columns = ("doc_id", "source", "split", "title", "origin", "licence", "text")
    table = pa.Table.from_pylist(rows, schema=pa.schema([(name, pa.string()) for name in columns]))
    pq.write_table(table, path, compression="zstd", compression_level=19)


def choose_prompts(documents: list[Document], *, count: int) -> list[dict[str, str]]:
    """Cut prompts out of documents of one register: openings and passages from the middle, by turns.

    A prompt starts where a paragraph starts and stops at the end of a word (prose) or of a line (documentation and
    code), after 200 to 400 characters where the text allows.

    Args:
        documents: held-out documents; those shorter than 1,200 characters are passed over.
        count: number of prompts; fewer when there are fewer documents.

    Returns:
        Rows of `id` (the document's id and the character offset), `source` (the register) and `text`.
    """
    long_enough = [d for d in documents if len(d.text) >= 1200]
    ordered = sorted(long_enough, key=lambda d: hashlib.sha256(f"prompt:{d.doc_id}".encode()).digest())
    prompts = []
    for number, document in enumerate(ordered[:count]):
        start = 0 if number % 2 == 0 else document.text.rfind("\n\n", 0, len(document.text) // 2) + 2
        start += len(document.text[start:]) - len(document.text[start:].lstrip("\n"))
        passage = document.text[start : start + 400]
        stops = "\n" if document.register in ("pydocs", "pycode") else " \n"
        end = max(passage.rfind(stop, 200) for stop in stops)
        text = (passage[:end] if end > 0 else passage).rstrip()
        prompts.append({"id": f"{document.doc_id}@{start}", "source": document.register, "text": text})
    return prompts


def write_json(value: object, path: Path) -> None:
    """Write a value as indented JSON, keys in the order given, through a temporary name."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
    os.replace(temporary, path)


def write_stream(stream: np.ndarray, path: Path) -> None:
    """Write a token stream as raw little-endian uint16, through a temporary name."""
    temporary = path.with_name(path.name + ".tmp")
    stream.astype("<u2").tofile(temporary)
    os.replace(temporary, path)


def count_register(reading: Reading, *, lengths: dict[str, int]) -> dict:
    """Count documents, bytes and tokens of one register, by split.

    Args:
        reading: the register's documents.
        lengths: tokens per document id, end-of-text included.
    """
    counts: dict[str, dict[str, int]] = {}
    for split in ("train", "heldout"):
        mine = [d for d in reading.documents if split_of(d.doc_id) == split]
        tokens = [lengths[d.doc_id] for d in mine]
        counts[split] = {
            "documents": len(mine),
            "bytes": sum(len(d.text.encode()) for d in mine),
            "tokens": sum(tokens),
            "longest_tokens": max(tokens, default=0),
        }
    return counts


def count_more(documents: list[Document], *, lengths: dict[str, int]) -> dict:
    """Count documents, bytes and tokens of the further training text, by register."""
    counts: dict[str, dict[str, int]] = {}
    for document in documents:
        mine = counts.setdefault(document.register, {"documents": 0, "bytes": 0, "tokens": 0})
        mine["documents"] += 1
        mine["bytes"] += len(document.text.encode())
        mine["tokens"] += lengths[document.doc_id]
    return counts


def build_demo_corpus(
    sources: Path,
    out: Path,
    *,
    vocab_size: int = 4096,
    heldout_bytes: int = 1_800_000,
    seed: int = 0,
) -> dict:
    """Build the demo corpus from downloaded packages and the running interpreter's standard library.

    The same sources, interpreter, library versions and arguments give the same bytes. The split depends on document
    ids alone, the order of the streams on `seed`.

    Args:
        sources: folder with the four packages that `workbench.train.demo_sources` names.
        out: folder for tokenizer.json, tokenizer_config.json, train.bin, heldout.bin, heldout_index.json, meta.json,
            prompts.jsonl and heldout/{register}.parquet; made if missing.
        vocab_size: ids of the tokenizer, special tokens included.
        heldout_bytes: upper bound of the text in the Parquet samples, in bytes over all registers.
        seed: seed of the documents' order.

    Returns:
        The contents of meta.json.

    Raises:
        UserError: when a source is missing or a number is out of range.
    """
    sources, out = Path(sources), Path(out)
    if not sources.is_dir():
        raise UserError(f"The folder of sources {sources} does not exist; make it and fetch the packages into it.")
    readings = {register: read_register(register, sources=sources) for register in READERS}
    heldout = [d for reading in readings.values() for d in reading.documents if split_of(d.doc_id) == "heldout"]
    more = read_more(sources, heldout=heldout)
    return write_corpus(readings, out, more=more, vocab_size=vocab_size, heldout_bytes=heldout_bytes, seed=seed)


def write_corpus(
    readings: dict[str, Reading],
    out: Path,
    *,
    vocab_size: int,
    heldout_bytes: int,
    seed: int,
    more: Reading | None = None,
) -> dict:
    """Split, tokenize and write documents that were read already; see `build_demo_corpus` for the arguments.

    `more` is text to train on that the split, the tokenizer and the samples do not know of.
    """
    (out / "heldout").mkdir(parents=True, exist_ok=True)
    documents = sorted((d for r in readings.values() for d in r.documents), key=lambda d: d.doc_id)
    order = np.random.default_rng(seed).permutation(len(documents))
    shuffled = [documents[i] for i in order]
    train = [d for d in shuffled if split_of(d.doc_id) == "train"]
    heldout = [d for d in shuffled if split_of(d.doc_id) == "heldout"]
    tokenizer = train_tokenizer((d.text for d in train), vocab_size=vocab_size)
    write_tokenizer(tokenizer, out)
    extra = more.documents if more else []
    mixed = [*train, *extra]
    mixed = [mixed[i] for i in np.random.default_rng(seed).permutation(len(mixed))] if extra else train
    train_stream, train_index = encode_stream(mixed, tokenizer=tokenizer)
    heldout_stream, heldout_index = encode_stream(heldout, tokenizer=tokenizer)
    write_stream(train_stream, out / "train.bin")
    write_stream(heldout_stream, out / "heldout.bin")
    write_json(heldout_index, out / "heldout_index.json")
    sample, prompts = {}, []
    for register, chosen in choose_sample(heldout, heldout_bytes=heldout_bytes):
        write_sample(chosen, out / "heldout" / f"{register}.parquet")
        prompts += choose_prompts(chosen, count=5)
        sample[register] = {"documents": len(chosen), "bytes": sum(len(d.text.encode()) for d in chosen)}
    lines = (json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
    (out / "prompts.jsonl").write_text("".join(lines), "utf-8")
    lengths = {row["doc_id"]: row["end"] - row["start"] + 1 for row in train_index + heldout_index}
    everything = [*readings.values(), *([more] if more else [])]
    meta = {
        "seed": seed,
        "vocab_size": vocab_size,
        "heldout_shares": HELDOUT_SHARES | {"novels": "Northanger Abbey"},
        "heldout_bytes": heldout_bytes,
        "tokens": {"train": int(train_stream.size), "heldout": int(heldout_stream.size)},
        "registers": {name: count_register(reading, lengths=lengths) for name, reading in readings.items()},
        "more": count_more(extra, lengths=lengths),
        "sample": sample,
        "overlap": {name: repeated_share(reading.documents) for name, reading in readings.items()},
        "sources": {file: digest for reading in everything for file, digest in reading.files.items()},
        "sha256": {name: sha256_file(out / name) for name in ("train.bin", "heldout.bin", "tokenizer.json")},
        "versions": {
            "python": sys.version.split()[0],
            **{name: version(name) for name in ("numpy", "tokenizers", "pyarrow")},
        },
        "dropped": {doc_id: why for reading in everything for doc_id, why in sorted(reading.dropped.items())},
    }
    write_json(meta, out / "meta.json")
    return meta


def main() -> None:
    """Build the corpus from the command line and print its counts as JSON."""
    parser = argparse.ArgumentParser(description="Build the demo corpus.")
    parser.add_argument("--sources", type=Path, required=True, help="folder of the downloaded packages")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--heldout-bytes", type=int, default=1_800_000)
    parser.add_argument("--seed", type=int, default=0)
    meta = build_demo_corpus(**vars(parser.parse_args()))
    print(json.dumps({key: meta[key] for key in ("tokens", "registers", "sample", "overlap", "sha256")}, indent=1))


if __name__ == "__main__":
    main()
