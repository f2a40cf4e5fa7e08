"""Further training text for the demo corpus: documentation and code of permissively licensed Python projects.

`sources/more/` holds source distributions of the projects that `LICENCES` names, fetched one by one with

    pip download --no-deps --no-binary=:all: NAME

and the interpreter's own test suite is read beside them. All of it goes to the training split alone; documents that
repeat lines of held-out ones are left out. The folder may be missing: then there is no further text.
"""

import hashlib
import re
import sysconfig
import tarfile
from collections import Counter
from pathlib import Path, PurePosixPath

from workbench.core.errors import UserError
from workbench.train.demo_clean import clean_python, clean_rst, has_own_licence, rst_title
from workbench.train.demo_sources import PSF, Document, Reading, drop_repeats, sha256_file

LICENCES = {
    "django": "BSD-3-Clause", "sqlalchemy": "MIT", "sympy": "BSD-3-Clause", "numpy": "BSD-3-Clause",
    "scipy": "BSD-3-Clause", "pandas": "BSD-3-Clause", "scikit_learn": "BSD-3-Clause", "sphinx": "BSD-2-Clause",
    "docutils": "public domain", "twisted": "MIT", "pytest": "MIT", "networkx": "BSD-3-Clause",
    "celery": "BSD-3-Clause", "ipython": "BSD-3-Clause", "tornado": "Apache-2.0", "aiohttp": "Apache-2.0",
    "mypy": "MIT", "pip": "MIT", "werkzeug": "BSD-3-Clause", "flask": "BSD-3-Clause", "jinja2": "BSD-3-Clause",
    "pygments": "BSD-2-Clause", "click": "BSD-3-Clause", "requests": "Apache-2.0", "cryptography": "Apache-2.0",
    "statsmodels": "BSD-3-Clause", "dask": "BSD-3-Clause", "distributed": "BSD-3-Clause", "bokeh": "BSD-3-Clause",
    "xarray": "Apache-2.0", "astropy": "BSD-3-Clause", "trio": "MIT", "peewee": "MIT", "alembic": "MIT",
    "pymongo": "Apache-2.0", "wagtail": "BSD-3-Clause", "nltk": "Apache-2.0", "biopython": "BSD-3-Clause",
    "cython": "Apache-2.0", "numba": "BSD-2-Clause", "setuptools": "MIT", "attrs": "MIT", "coverage": "Apache-2.0",
    "textual": "MIT", "gunicorn": "MIT", "kombu": "BSD-3-Clause",
}  # fmt: skip
SKIPPED_PARTS = {"vendor", "_vendor", "vendored", "extern", "externals", "node_modules", "locale", "migrations",
                 "fixtures", "data", "lexers", "_mapping", "conf", "third_party", "typeshed", "test", "tests",
                 "testing"}  # fmt: skip
MOST_CODE = 2_000_000  # characters of code per project, so that no project's habits rule
LONGEST = 200_000  # characters; longer files are tables or generated
DOCS = (".rst", ".txt")


def _mostly_text(text: str) -> bool:
    """Whether a file reads like text: ASCII, few digits, few very long lines."""
    if len(text) < 400 or len(text) > LONGEST:
        return False
    letters = sum(c.isalpha() for c in text)
    digits = sum(c.isdigit() for c in text)
    lines = text.split("\n")
    longest = sum(len(line) for line in lines if len(line) > 160)
    return text.isascii() and letters > 0.4 * len(text) and digits < 0.12 * len(text) and longest < 0.2 * len(text)


def _document(project: str, path: PurePosixPath, raw: str, licence: str) -> Document | None:
    """A cleaned document of a project, or None where the file is of no use."""
    if path.suffix == ".py":
        if has_own_licence(raw):
            return None
        register, text, title = "code", clean_python(raw), path.as_posix()
    else:
        text = clean_rst(raw)
        register, title = "docs", rst_title(text) or path.as_posix()
    if not _mostly_text(text):
        return None
    return Document(f"{register}/{project}/{path}", register, title, f"{project}, {path}", licence, text)


def read_archive(archive: Path, *, licence: str) -> list[Document]:
    """Read documentation (.rst and .txt below a folder of docs) and code without tests of a source distribution.

    Args:
        archive: a `.tar.gz`.
        licence: SPDX identifier of the project.
    """
    project = re.split(r"-\d", archive.name, maxsplit=1)[0].lower()
    documents = []
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            docs = path.suffix in DOCS and bool({"doc", "docs", "Doc"} & set(path.parts[:-1]))
            skipped = SKIPPED_PARTS & set(path.parts[:-1]) or path.name.startswith("test_")
            if not member.isfile() or skipped or not (docs or path.suffix == ".py"):
                continue
            stream = tar.extractfile(member)
            assert stream is not None
            try:
                raw = stream.read().decode("utf-8")
            except UnicodeDecodeError:
                continue
            document = _document(project, path, raw, licence)
            if document:
                documents.append(document)
    return some_code(documents)


def some_code(documents: list[Document], *, most: int = MOST_CODE) -> list[Document]:
    """Keep all documentation, and code up to `most` characters in the order of the hash of its name."""
    kept, left = [], most
    for document in sorted(documents, key=lambda d: hashlib.sha256(f"more:{d.doc_id}".encode()).digest()):
        size = len(document.text) if document.register == "code" else 0
        if size <= left:
            kept.append(document)
            left -= size
    return sorted(kept, key=lambda d: d.doc_id)


def read_standard_tests() -> list[Document]:
    """Read the test suite of the running interpreter."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted((root / "test").rglob("*.py")):
        relative = PurePosixPath(path.relative_to(root).as_posix())
        try:
            document = _document("cpython", relative, path.read_text("utf-8"), PSF)
        except UnicodeDecodeError:
            continue
        if document:
            documents.append(document)
    return documents


def leave_out_heldout(documents: list[Document], heldout: list[Document], *, share: float = 0.02) -> list[Document]:
    """Drop documents of which more than `share` lies in lines of 40 characters or more that held-out text has too."""
    known = {line.strip() for d in heldout for line in d.text.split("\n") if len(line.strip()) >= 40}
    kept = []
    for document in documents:
        repeated = sum(len(line) for line in map(str.strip, document.text.split("\n")) if line in known)
        if repeated <= share * len(document.text):
            kept.append(document)
    return kept


def read_more(sources: Path, *, heldout: list[Document]) -> Reading:
    """Read all further training text.

    Args:
        sources: the corpus builder's folder; `more/` below it may be missing.
        heldout: held-out documents of the five registers.

    Raises:
        UserError: when `more/` holds an archive of a project whose licence is not known here.
    """
    folder = sources / "more"
    if not folder.is_dir():
        return Reading([], {}, {})
    archives = sorted(folder.glob("*.tar.gz"), key=lambda path: path.name.lower())
    documents: list[Document] = []
    for archive in archives:
        project = re.split(r"-\d", archive.name, maxsplit=1)[0].lower()
        if project not in LICENCES:
            raise UserError(
                f"{archive.name} in {folder} is not one of the projects whose licence was checked; remove it, "
                f"or use some of: {', '.join(LICENCES)}."
            )
        documents += read_archive(archive, licence=LICENCES[project])
    documents += read_standard_tests()
    found = Counter(d.doc_id for d in documents)
    documents = [d for d in documents if found[d.doc_id] == 1]
    kept, dropped = drop_repeats(leave_out_heldout(documents, heldout), share=0.3)
    return Reading(kept, dropped, {archive.name: sha256_file(archive) for archive in archives})
