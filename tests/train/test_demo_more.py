"""Further training text: what is read of a source distribution, and that held-out text stays held out."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.train.test_demo_corpus import make_document, make_readings
from workbench.core.errors import UserError
from workbench.train import demo_more as more
from workbench.train.demo_corpus import split_of, write_corpus
from workbench.train.demo_sources import Reading

PROSE = "\n".join(
    f"Paragraph {'abcdefgh'[i % 8]} says that the value is kept and never changed twice." for i in range(12)
)
CODE = "\n".join(f"def function_{'abcdefgh'[i % 8]}_{'xyz'[i % 3]}(value):\n    return value" for i in range(24))


def archive(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with tarfile.open(path, "w:gz") as tar:
        for inner, content in files.items():
            info = tarfile.TarInfo(f"{name.removesuffix('.tar.gz')}/{inner}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_documentation_and_code_are_read_and_the_rest_is_not(tmp_path):
    licensed = "# Permission is hereby granted, free of charge, to any person\n" + CODE
    files = {
        "docs/intro.txt": PROSE,
        "doc/source/use.rst": PROSE.upper(),
        "flask/app.py": CODE,
        "README.txt": PROSE,  # .txt outside the documentation
        "tests/test_app.py": CODE,
        "flask/_vendor/other.py": CODE,
        "flask/copied.py": licensed,
        "flask/table.py": "x = [" + "1234567890, " * 400 + "]\n",
        "flask/short.py": "x = 1\n",
        "flask/umlaut.py": CODE.replace("value", "wért"),
    }
    path = archive(tmp_path, "flask-3.1.0.tar.gz", {name: text.encode() for name, text in files.items()})
    found = {d.doc_id: d for d in more.read_archive(path, licence="BSD-3-Clause")}
    assert set(found) == {"docs/flask/docs/intro.txt", "docs/flask/doc/source/use.rst", "code/flask/flask/app.py"}
    assert all(d.licence == "BSD-3-Clause" for d in found.values())


def test_no_project_gives_more_than_its_share_of_code():
    documents = [make_document("code", f"p/{i}.py", CODE) for i in range(9)] + [make_document("docs", "p/a", PROSE)]
    size = len(documents[0].text)
    kept = more.some_code(documents, most=4 * size)
    assert sum(d.register == "code" for d in kept) == 4
    assert sum(d.register == "docs" for d in kept) == 1


def test_repeats_of_held_out_lines_are_left_out():
    held = [make_document("pydocs", "a", PROSE)]
    clean, leak = make_document("docs", "clean", CODE), make_document("docs", "leak", CODE + "\n" + PROSE)
    assert more.leave_out_heldout([clean, leak], held) == [clean]
    assert more.leave_out_heldout([clean, leak], []) == [clean, leak]  # the control: nothing held out, nothing left out


def test_a_project_of_unknown_licence_is_refused(tmp_path):
    archive(tmp_path / "more", "mystery-1.0.tar.gz", {"mystery.py": CODE.encode()})
    with pytest.raises(UserError, match=r"mystery-1\.0\.tar\.gz .* licence"):
        more.read_more(tmp_path, heldout=[])


def test_without_the_folder_there_is_no_further_text(tmp_path):
    assert more.read_more(tmp_path, heldout=[]) == Reading([], {}, {})


def test_further_text_goes_to_training_alone(tmp_path):
    readings = make_readings(40)
    extra = Reading([make_document("code", "p/a.py", CODE)], {}, {"p-1.tar.gz": "1" * 64})
    one = write_corpus(readings, tmp_path / "one", vocab_size=300, heldout_bytes=100_000, seed=0)
    two = write_corpus(readings, tmp_path / "two", more=extra, vocab_size=300, heldout_bytes=100_000, seed=0)
    for name in ("heldout.bin", "tokenizer.json"):
        assert one["sha256"][name] == two["sha256"][name]
    added = two["more"]["code"]["tokens"]
    assert added > 0 and two["tokens"]["train"] == one["tokens"]["train"] + added
    assert one["more"] == {} and two["sources"]["p-1.tar.gz"] == "1" * 64
    index = json.loads((tmp_path / "two" / "heldout_index.json").read_text())
    assert all(split_of(row["doc_id"]) == "heldout" for row in index)
    assert np.fromfile(tmp_path / "two" / "train.bin", np.uint16).size == two["tokens"]["train"]
