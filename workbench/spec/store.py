"""Where prefix entries are kept: in memory under a byte budget, and on disk, one checked file per entry.

A file is safetensors with a JSON header in its metadata; a hash covers every byte of it. Files are written to a name of
their own, synced and renamed, so that readers in other processes see whole entries or none. The names of files only
say where to look: what an entry is, its contents decide.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import warnings
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from workbench.core.errors import CheckpointError, UserError, check_int
from workbench.core.manifest import sync_directory
from workbench.spec.prefix import PrefixEntry, Terms

FORMAT = 1
SUFFIX = ".safetensors"
EMPTY = "0" * 64
STALE = 3600.0  # seconds after which an unfinished file is nobody's


@dataclass
class StoreStats:
    """What a store holds and has done.

    Args:
        entries: Entries in memory.
        nbytes: Bytes in memory.
        files: Entries on disk.
        file_bytes: Bytes on disk.
        hits: Searches that gave an entry.
        misses: Searches that gave none.
        loads: Entries read from disk.
        evicted: Entries dropped from memory for room.
        removed: Files removed for room.
        refused: Files that could not be used.
    """

    entries: int = 0
    nbytes: int = 0
    files: int = 0
    file_bytes: int = 0
    hits: int = 0
    misses: int = 0
    loads: int = 0
    evicted: int = 0
    removed: int = 0
    refused: int = 0


class PrefixStore:
    """Prefix entries by token prefix and model fingerprint; for one thread at a time.

    Args:
        byte_budget: Bytes of entries to hold in memory at most; the least recently used go first. An entry larger
            than that is not held.
        path: Directory to keep entries in as well; made if needed. None keeps them in memory alone.
        disk_budget: Bytes of files there at most; None for no bound.

    Raises:
        UserError: A budget or the path is not valid.
    """

    def __init__(self, byte_budget: int, path: str | Path | None = None, *, disk_budget: int | None = None) -> None:
        self.byte_budget = check_int("byte_budget", byte_budget, low=0)
        self.disk_budget = None if disk_budget is None else check_int("disk_budget", disk_budget, low=0)
        self.path = None if path is None else Path(path)
        self._held: OrderedDict[str, PrefixEntry] = OrderedDict()  # least recently used first
        self._nbytes = 0
        self._written: set[str] = set()  # files this store has written or checked
        self._stats = StoreStats()
        if self.path is not None:
            if self.path.exists() and not self.path.is_dir():
                raise UserError(f"path={str(path)!r} is a file: give a directory for the store's own files")
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.path.glob(".*.part"):
                with suppress(FileNotFoundError):
                    if time.time() - left.stat().st_mtime > STALE:
                        left.unlink()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of the entries in memory."""
        return self._nbytes

    @property
    def stats(self) -> StoreStats:
        """What the store holds and has done so far."""
        sizes = [size for _, size, _ in self._files()]
        return StoreStats(
            **{
                **asdict(self._stats),
                "entries": len(self._held),
                "nbytes": self._nbytes,
                "files": len(sizes),
                "file_bytes": sum(sizes),
            }
        )

    def __repr__(self) -> str:
        return f"PrefixStore({len(self._held)} entries, {self._nbytes:,} of {self.byte_budget:,} bytes, {self.path})"

    def _repr_html_(self) -> str:
        from workbench.display import card

        found = self.stats
        rows: list[tuple[str, Any]] = [
            ("in memory", f"{found.entries:,} entries, {found.nbytes:,} of {self.byte_budget:,} bytes"),
            ("on disk", "–" if self.path is None else f"{found.files:,} entries, {found.file_bytes:,} bytes"),
            ("searches", f"{found.hits:,} found, {found.misses:,} not"),
            ("read from disk", found.loads),
            ("dropped for room", f"{found.evicted:,} from memory, {found.removed:,} from disk"),
            ("files refused", found.refused),
        ]
        return card("Prefix store", rows)._repr_html_()

    def put(self, entry: PrefixEntry) -> None:
        """Keep an entry; one of the same prefix and terms is replaced.

        Args:
            entry: The entry.
        """
        self._hold(entry)
        if self.path is None:
            return
        name = _name(entry)
        file = self.path / name
        if name in self._written and file.exists():
            _touch(file)
            return
        data = entry_bytes(entry)
        if self.disk_budget is not None and not self._make_room(len(data), name):
            return
        part = self.path / f".{name}.{os.getpid()}.part"
        try:
            with open(part, "wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(part, file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_directory(self.path)
        self._written.add(name)

    def find(self, tokens: Sequence[int], fingerprint: str) -> PrefixEntry | None:
        """The longest entry of a model that is a prefix of a text.

        Args:
            tokens: The text.
            fingerprint: The model's.

        Returns:
            The entry, or None. Files that cannot be used are passed over with a warning.
        """
        return next(self.candidates(tokens, fingerprint), None)

    def candidates(self, tokens: Sequence[int], fingerprint: str) -> Iterator[PrefixEntry]:
        """Entries of a model that are prefixes of a text, longest first.

        Args:
            tokens: The text.
            fingerprint: The model's.

        Yields:
            Entries; of one length, those in memory first.
        """
        text = tuple(int(token) for token in tokens)
        held = {
            key: entry
            for key, entry in self._held.items()
            if entry.terms.model == fingerprint and entry.tokens == text[: len(entry)]
        }
        found = [(-len(entry), 0, key) for key, entry in held.items()]
        hashes: dict[int, str] = {}
        for name, _, _ in self._files():
            model, length, digest = _parsed(name)
            if model != fingerprint or not 0 < length <= len(text) or name.removesuffix(SUFFIX) in held:
                continue
            if length not in hashes:
                hashes[length] = _tokens_hash(text[:length])
            if digest == hashes[length]:
                found.append((-length, 1, name))
        hit = False
        for _, on_disk, name in sorted(found):
            entry = self._load(name) if on_disk else held[name]
            if entry is None or entry.terms.model != fingerprint or entry.tokens != text[: len(entry)]:
                continue
            if on_disk:
                self._hold(entry)
            elif name in self._held:
                self._held.move_to_end(name)
            if not hit:
                hit = True
                self._stats.hits += 1
            yield entry
        if not hit:
            self._stats.misses += 1

    def clear(self) -> None:
        """Drop every entry from memory; files stay."""
        self._held.clear()
        self._nbytes = 0

    def _hold(self, entry: PrefixEntry) -> None:
        key, size = _key(entry), entry.nbytes
        if (old := self._held.pop(key, None)) is not None:
            self._nbytes -= old.nbytes
        if size > self.byte_budget:
            return
        while self._nbytes + size > self.byte_budget:
            _, dropped = self._held.popitem(last=False)
            self._nbytes -= dropped.nbytes
            self._stats.evicted += 1
        self._held[key] = entry
        self._nbytes += size

    def _files(self) -> list[tuple[str, int, float]]:
        """Name, bytes and time of last use of every file."""
        if self.path is None:
            return []
        out = []
        with os.scandir(self.path) as found:
            for item in found:
                if item.name.endswith(SUFFIX) and not item.name.startswith("."):
                    with suppress(FileNotFoundError):
                        facts = item.stat()
                        out.append((item.name, facts.st_size, facts.st_mtime))
        return out

    def _load(self, name: str) -> PrefixEntry | None:
        """An entry from disk; None, with a warning, when the file cannot be used, and without one when it is gone."""
        assert self.path is not None
        file = self.path / name
        try:
            entry = load_entry(file)
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            self._stats.refused += 1
            self._written.discard(name)
            warnings.warn(f"prefix entry passed over: {error}", stacklevel=4)
            return None
        self._stats.loads += 1
        self._written.add(name)
        _touch(file)
        return entry

    def _make_room(self, size: int, name: str) -> bool:
        """Remove the least recently used files until one more fits; False when it cannot."""
        assert self.path is not None and self.disk_budget is not None
        if size > self.disk_budget:
            return False
        files = sorted((used, other, n) for other, n, used in self._files() if other != name)
        total = sum(n for _, _, n in files)
        for _, other, n in files:
            if total + size <= self.disk_budget:
                break
            (self.path / other).unlink(missing_ok=True)
            self._stats.removed += 1
            total -= n
        return True


def entry_bytes(entry: PrefixEntry) -> bytes:
    """The file of an entry."""
    header = {"format": FORMAT, "terms": asdict(entry.terms), "drafter": entry.drafter}
    tensors = {"tokens": torch.tensor(entry.tokens, dtype=torch.int64)}
    tensors |= {name: x.detach().cpu().contiguous() for name, x in entry.tensors.items()}
    data = save(tensors, {"entry": json.dumps(header), "sha256": EMPTY})
    at = _hash_place(data)
    assert at is not None
    return data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + 64 :]


def load_entry(path: str | Path) -> PrefixEntry:
    """Read an entry and check every byte of it.

    Args:
        path: The file.

    Returns:
        The entry.

    Raises:
        CheckpointError: The file is not one of an entry, or not as it was written.
        FileNotFoundError: There is none.
    """
    data = Path(path).read_bytes()
    at = _hash_place(data)
    if at is None:
        raise CheckpointError(f"{path} is not a whole prefix entry: its header cannot be read; remove it")
    blank = hashlib.sha256(data[:at] + EMPTY.encode() + data[at + 64 :]).hexdigest().encode()
    if blank != data[at : at + 64]:
        raise CheckpointError(f"{path} is not as it was written: its bytes do not have the hash it names; remove it")
    size = struct.unpack("<Q", data[:8])[0]
    try:
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["entry"])
        if header["format"] != FORMAT:
            raise CheckpointError(
                f"{path} is of format {header['format']!r}; this version reads {FORMAT}: remove it and prime again"
            )
        tensors = load(data)
        tokens = tuple(tensors.pop("tokens").tolist())
        drafter = None if header["drafter"] is None else tuple(header["drafter"])
        return PrefixEntry(Terms(**header["terms"]), tokens, tensors, drafter)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a prefix entry ({type(error).__name__}: {error}); remove it") from None


def _hash_place(data: bytes) -> int | None:
    """Where the hash stands in a file; None where there is none."""
    if len(data) < 8:
        return None
    size = struct.unpack("<Q", data[:8])[0]
    mark = b'"sha256":"'
    if 8 + size > len(data):
        return None
    at = data.find(mark, 8, 8 + size)
    if at < 0 or at + len(mark) + 64 > 8 + size:
        return None
    return at + len(mark)


def _touch(file: Path) -> None:
    with suppress(OSError):  # removed meanwhile, or of another user: only the order of removal depends on it
        os.utime(file)


def _tokens_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(array("q", tokens).tobytes()).hexdigest()[:32]


def _key(entry: PrefixEntry) -> str:
    terms = hashlib.sha256(json.dumps(asdict(entry.terms), sort_keys=True).encode()).hexdigest()[:16]
    return f"{entry.terms.model}-{len(entry)}-{_tokens_hash(entry.tokens)}-{terms}"


def _name(entry: PrefixEntry) -> str:
    return _key(entry) + SUFFIX


def _parsed(name: str) -> tuple[str, int, str]:
    """Model, length and hash of the tokens by a file's name; a name of another form matches nothing."""
    parts = name.removesuffix(SUFFIX).rsplit("-", 3)
    if len(parts) != 4 or not parts[1].isdecimal():
        return "", 0, ""
    return parts[0], int(parts[1]), parts[2]
