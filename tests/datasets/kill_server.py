"""Runs over dataset directories in processes that may be killed: forked from one that has imported everything.

Orders come as JSON lines; for each the process id is printed at once and the exit code at the end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from workbench.core.manifest import Manifest
from workbench.core.progress import quiet
from workbench.core.sealed import sync_directory
from workbench.core.tape import Corpus, Tape
from workbench.datasets import shards
from workbench.datasets.estimate import document_bytes
from workbench.datasets.shardfile import HashingFile, temporary_name
from workbench.datasets.shards import Part, ShardDirectory, plan_shards

SCHEMA = pa.schema([pa.field("doc_id", pa.string()), pa.field("values", pa.list_(pa.float32(), 8))])
ROWS = (7, 5, 9, 4, 6, 8)


def plain(out: str | Path, *, rows: tuple[int, ...] = ROWS, shard_rows: int = 12, **given: Any) -> None:
    """A dataset of no model: rows of drawn numbers, a function of their document alone."""
    manifest = Manifest(kind="plain", parameters={"rows": list(rows)}, versions={"numpy": "2.1.0"})
    names = [f"document {i}" for i in range(len(rows))]
    given = {"files": {"notes.txt": b"beside the shards"}, **given}
    given.setdefault("expected", document_bytes(SCHEMA, rows, texts={"doc_id": names}))
    plan = plan_shards(rows, shard_rows)

    def parts(documents: Iterator[int], _: list[int]) -> Iterator[Part]:
        for i in documents:
            values = np.random.default_rng(i).random(8 * rows[i], np.float32)
            column = pa.FixedSizeListArray.from_arrays(pa.array(values), 8)
            yield Part(i, pa.RecordBatch.from_arrays([pa.array([names[i]] * rows[i]), column], schema=SCHEMA), True)

    with ShardDirectory(Path(out), manifest, plan=plan, schema=SCHEMA, **given) as directory:
        directory.stream(lambda documents, bar: documents, parts, sizes=rows, desc="plain")
        directory.finish({"rows": sum(rows)})


class Steps:
    """Counts what changes the disk; ``act(part)`` comes before step ``at``, with what writes half of the step's data.

    Args:
        at: Which step, from 1; 0 for none.
        act: What happens then.
        ops: Names of the operations counted.
        on: Keep acting at every later step.
    """

    ALL = ("write", "fsync", "replace", "unlink", "mkdir")

    def __init__(self, at: int, act: Callable[[Callable[[], Any]], None], *, ops: Any = ALL, on: bool = False) -> None:
        self.at, self.act, self.ops, self.on, self.count = at, act, ops, on, 0

    def step(self, part: Callable[[], Any] = lambda: None) -> None:
        self.count += 1
        if self.count == self.at or (self.on and self.count > self.at > 0):
            self.act(part)

    def install(self, patch: Callable[[Any, str, Any], None] = setattr) -> None:
        def counted(name: str) -> None:
            plain = getattr(os, name)

            def call(*args: Any, **more: Any) -> Any:
                half = [args[0], args[1][: len(args[1]) // 2]] if name == "write" else []
                self.step(lambda: plain(*half) if half else None)
                return plain(*args, **more)

            patch(os, name, call)

        for name in self.ops:
            counted(name)
        hashed = HashingFile.write

        def write(sink: HashingFile, data: Any) -> int:
            view = memoryview(data)
            self.step(lambda: (sink.handle.write(view[: len(view) // 2]), sink.handle.flush()))
            return hashed(sink, data)

        patch(HashingFile, "write", write)


def die(part: Callable[[], Any]) -> None:
    """Half of the step, then kill -9."""
    part()
    os.kill(os.getpid(), signal.SIGKILL)


def named_first(self: ShardDirectory, entry: dict[str, Any]) -> None:
    """A mistake: the shard takes its name before it is listed."""
    final = self.out / entry["file"]
    os.replace(temporary_name(final), final)
    sync_directory(self.out)
    self.manifest.list_shard(self.out, entry)


def obey(order: dict[str, Any], engines: dict[str, Callable[..., Any]]) -> None:
    """Run one order."""
    mistake = order.get("mistake")
    state = {"commit": str(os.getpid()) if mistake == "a state of its own" else "c", "dirty": False}
    shards.git_state = lambda: dict(state)  # type: ignore[assignment]
    if mistake == "named first":
        ShardDirectory.place = named_first  # type: ignore[assignment]
    if order["engine"] in ("plain", "export"):
        os.fsync = lambda handle: None  # a killed process loses nothing that it has written, synced or not
    steps = Steps(order.get("at", 0), die)
    if "steps" in order:
        steps.install()
    with quiet():
        engines[order["engine"]](order["out"], **order.get("given", {}))
    if "steps" in order:
        Path(order["steps"]).write_text(str(steps.count))


def main() -> None:
    """Serve orders until there are no more."""
    import datasets  # noqa: F401  (forked runs have it already)

    from workbench.datasets import extract, extract_sequences, generate_corpus
    from workbench.datasets.export import export

    spec = importlib.util.spec_from_file_location("conftest", Path(__file__).resolve().parents[1] / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    sys.modules["conftest"] = conftest
    spec.loader.exec_module(conftest)
    model, random = conftest.build_tiny(), np.random.default_rng(3)
    tapes = Corpus([Tape(f"d{i}", random.integers(0, 83, 30 + i), split="s") for i in range(24)], name="c")
    options: dict[str, Any] = dict(gamma=3, top_k=8, chunk=16, shard_rows=8)
    asked = Corpus([Tape(f"p{i}", random.integers(1, 83, 3 + i % 7), 3 + i % 7) for i in range(8)], name="p")
    drawn: dict[str, Any] = dict(max_new_tokens=9, temperature=0.9, seed=3, shard_rows=2)
    broken = conftest.build_tiny(tied=False)
    broken.embed.data[7] = float("nan")  # which some of the documents hold
    engines: dict[str, Callable[..., Any]] = {
        "plain": plain,
        "extract": lambda out: extract(model, tapes, out=out, **options),
        "quarantine": lambda out: extract(broken, tapes, out=out, on_bad="quarantine", **options),
        "answers": lambda out: generate_corpus(model, asked, out=out, **drawn),
        "sequence": lambda out: extract_sequences(model, tapes, out=out, taps=[1, 3], chunk=64),
        "export": lambda out, data, to: export(data, to=to, model=model, out=out),
    }
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                obey(json.loads(line), engines)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
