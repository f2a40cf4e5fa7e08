"""Sealed files show any changed byte and any cut; logs lose at most the line that was being written."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.sealed import append_line, read_lines, seal, unseal

VALUE = {"kind": "anchors", "list": [1, 2.5, None], "deep": {"é": "}\n", "sha": ""}, "sha": [{}]}


def test_every_flipped_bit_and_every_cut_is_seen():
    data = seal(VALUE)
    assert unseal(data) == VALUE and json.loads(data)["deep"] == VALUE["deep"]
    for at in range(8 * len(data)):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(ValueError):
            unseal(bytes(changed))
    for end in range(len(data)):
        with pytest.raises(ValueError):
            unseal(data[:end])
    for more in (b"\n", b"}", b"\0", data):
        with pytest.raises(ValueError):
            unseal(data + more)


def test_plain_json_hides_what_a_seal_shows():
    plain = json.dumps(VALUE, indent=1).encode()
    hidden = []
    for at in range(8 * len(plain)):
        changed = bytearray(plain)
        changed[at // 8] ^= 1 << at % 8
        try:
            json.loads(bytes(changed))
            hidden.append(at)
        except ValueError:
            pass
    assert len(hidden) > len(plain), "control: without a hash most flipped bits pass"


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text(), min_size=1), min_size=1, max_size=5), st.data())
def test_a_log_keeps_its_unharmed_lines(tmp_path_factory, lines, data):
    log = tmp_path_factory.mktemp("log") / "a.log"
    assert read_lines(log) == []
    for line in lines:
        append_line(log, line)
    assert read_lines(log) == lines
    written = log.read_bytes()
    log.write_bytes(written[: data.draw(st.integers(0, len(written) - 1))])
    kept = read_lines(log)
    assert kept == lines[: len(kept)] and (len(kept) < len(lines) or log.read_bytes() == written[:-1])
    changed = bytearray(written)
    changed[data.draw(st.integers(0, len(written) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    log.write_bytes(bytes(changed))
    kept = read_lines(log)
    assert len(lines) - 2 <= len(kept) < len(lines) + (bytes(changed[:-1]) == written[:-1])
    assert all(line in lines for line in kept)


@pytest.mark.parametrize("broken", ["write", "fsync"])
def test_a_line_that_does_not_fit_leaves_the_log_as_it_was(tmp_path, monkeypatch, broken):
    log = tmp_path / "a.log"
    append_line(log, {"a": 1})
    before, write = log.read_bytes(), os.write

    def full(handle, data=b""):
        if data:
            write(handle, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, full)
        with pytest.raises(OSError):
            append_line(log, {"b": 2})
    assert log.read_bytes() == before
    append_line(log, {"c": 3})
    assert read_lines(log) == [{"a": 1}, {"c": 3}]
