"""Manifests: what made a dataset, on which machine, from what, and which bytes belong to it.

A manifest holds no timings, host names or absolute paths, so that a resumed run and an uninterrupted one write the
same bytes, and it ends with its own hash. While a run goes on, shards are listed in a log beside it, a line each; the
manifest takes them in when it is written anew. It knows nothing of tensors: callers pass device names, thread counts
and fingerprints in.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.core.sealed import append_line, read_lines, seal, sync_directory, unseal

FILE, LOG = "manifest.json", "manifest.log"
FORMAT = 2
IDENTITY = ("kind", "parameters", "model", "tokenizer", "template", "corpus", "machine", "versions")
LIBRARIES = ("specdec-workbench", "torch", "triton", "numpy", "safetensors", "tokenizers", "pyarrow", "datasets")


@dataclass
class Manifest:
    """Record of one dataset directory.

    Args:
        kind: What the directory holds, such as "anchors".
        parameters: Every option that shapes the data, seeds included.
        model: Fingerprint, name, shape and numerical class of the model.
        tokenizer: Fingerprint of the tokenizer; "" when ids were given.
        template: Fingerprint of the chat template; "" without one.
        corpus: Name, fingerprint and size of the corpus.
        machine: From ``machine``.
        versions: From ``library_versions``, of the run that began.
        later_versions: Those of runs that went on with others of the same majors, in order.
        git: States of the checkout that wrote into the directory, in order; empty outside a checkout.
        extra: What else a reader needs, such as constants of the final norm.
        counts: Documents, records, tokens.
        shards: Per shard its file, sha256, bytes, rows and document range.
        files: sha256 of every other file of the directory.
        complete: The run reached its end.
    """

    kind: str
    parameters: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    template: str = ""
    corpus: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    later_versions: list[dict[str, str]] = field(default_factory=list)
    git: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    shards: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The manifest as a JSON-ready mapping."""
        data = json.loads(json.dumps(asdict(self), allow_nan=False))
        data["files"] = dict(sorted(data["files"].items()))  # in whichever order they were written
        return {"format": FORMAT, **data}

    def write(self, directory: Path) -> Path:
        """Write ``manifest.json`` into a directory, whole or not at all; what its log lists is in it from then on.

        Args:
            directory: Where the dataset lies.

        Returns:
            The file.
        """
        file = write_atomic(directory / FILE, seal(self.to_dict()))
        (directory / LOG).unlink(missing_ok=True)
        return file

    def list_shard(self, directory: Path, shard: Mapping[str, Any]) -> None:
        """List one more shard, at the cost of one line whatever the number of shards.

        Args:
            directory: Where the dataset lies.
            shard: Its file, sha256, bytes, rows and what it holds.
        """
        append_line(directory / LOG, shard)
        insort(self.shards, dict(shard), key=lambda listed: listed["file"])

    @classmethod
    def read(cls, directory: str | Path) -> Manifest:
        """Read the manifest of a dataset directory, and of an incomplete one what its log lists.

        Args:
            directory: Where the dataset lies.

        Returns:
            The manifest.

        Raises:
            CheckpointError: There is none, it is of another format, or its bytes are not those that were written.
        """
        path = Path(directory) / FILE
        if not path.is_file():
            raise CheckpointError(f"{directory} has no {FILE}: give a directory that the workbench wrote")
        data = path.read_bytes()
        try:
            found = json.loads(data)["format"]
            if found == FORMAT:
                value = unseal(data)
                del value["format"]
                manifest = cls(**value)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path} is not a manifest as the workbench writes it ({type(error).__name__}: {error}), so it was "
                "damaged or changed: restore it, or make the dataset again"
            ) from None
        if found != FORMAT:
            raise CheckpointError(
                f"{path} is of format {found!r}; this version reads {FORMAT}: make the dataset again, or use the "
                "version of the workbench that wrote it"
            )
        if not manifest.complete:
            listed = {shard["file"]: shard for shard in [*manifest.shards, *read_lines(path.with_name(LOG))]}
            manifest.shards = [listed[name] for name in sorted(listed)]
        return manifest

    def differences(self, other: Manifest) -> list[str]:
        """Name what keeps two manifests from describing one run; of library versions, majors of those both name.

        Args:
            other: The manifest of the run about to start.

        Returns:
            Phrases such as "parameters.gamma is 5 there and 4 now"; empty when the run is the same.
        """
        there, now = self.to_dict(), other.to_dict()
        pairs = [pair for name in IDENTITY for pair in _leaves(name, there.get(name), now.get(name))]
        return [f"{name} is {a!r} there and {b!r} now" for name, a, b in pairs if _differ(name, a, b)]


def _leaves(name: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _leaves(f"{name}.{key}", a.get(key), b.get(key))
    else:
        yield name, a, b


def _differ(name: str, a: Any, b: Any) -> bool:
    if name.startswith("versions."):
        return bool(a and b) and major_version(a) != major_version(b)
    return bool(a != b)


def major_version(text: str) -> str:
    """The part of a version that promises compatibility: the first number, and the second before 1.0."""
    parts = text.split(".")
    return ".".join(parts[:2]) if parts[0] == "0" else parts[0]


def write_atomic(path: Path, data: bytes) -> Path:
    """Write a file through a temporary name, synced and renamed, so that it is whole or absent.

    Args:
        path: Final name.
        data: Contents.

    Returns:
        The path.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write a value as indented JSON, whole or not at all; NaN is refused."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    return write_atomic(path, (text + "\n").encode())


def sha256_file(path: Path) -> str:
    """Hash of a file's bytes, read in blocks, as 64 hex digits."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def library_versions(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Versions of Python and of the installed distributions among ``names``."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine(*, device: str = "cpu", device_name: str = "", threads: int = 1) -> dict[str, Any]:
    """Kind of machine a run's bits belong to; no host name is in it.

    Args:
        device: Kind of device, such as "cpu" or "cuda"; default "cpu".
        device_name: Its product name; "" for the processor's own.
        threads: Threads the numerical library uses; default 1.

    Returns:
        Mapping of processor, system, device and threads.
    """
    cpu = _cpu_name()
    return {
        "cpu": cpu,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "device_name": device_name or cpu,
        "threads": int(threads),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_state(root: Path | None = None) -> dict[str, Any] | None:
    """Commit of a checkout and whether its tracked files differ from it.

    Args:
        root: Top of the checkout; None for the one this package was imported from.

    Returns:
        {"commit", "dirty"}, or None where there is no checkout or no git.
    """
    top = Path(__file__).resolve().parents[2] if root is None else root
    if not (top / ".git").exists():
        return None
    try:
        commit = _git(top, "rev-parse", "HEAD").strip()
        dirty = bool(_git(top, "status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": dirty}


def _git(top: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(top), *arguments], capture_output=True, check=True, text=True, timeout=30)
    return done.stdout
