"""Peak memory of extraction and replay over a corpus and over eight of it, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from workbench.bench.arms import held_out, peak_megabytes
from workbench.core.progress import quiet
from workbench.core.tape import Corpus, Tape
from workbench.facade import load

TOKENS, DOCUMENTS = 512, 10


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the memory benchmark.

    Args:
        quick: Fewer documents.

    Yields:
        Peak resident megabytes of each kind at 1 and 8 times the corpus, and their ratio.
    """
    documents = 2 if quick else DOCUMENTS
    for kind in ("extract", "replay"):
        peaks = {}
        for times in (1, 8):
            command = [sys.executable, "-m", "workbench.bench.memory", kind, str(times), str(documents)]
            command.append(str(torch.get_num_threads()))
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks[times] = json.loads(done.stdout.splitlines()[-1])["mb"]
            facts = {"documents": times * documents, "context": TOKENS, "mode": "fast", "n": 1}
            yield {"name": f"peak of {kind} at {times}x", "value": peaks[times], "unit": "MB", **facts}
        yield {
            "name": f"peak of {kind}, 8x / 1x",
            "value": peaks[8] / peaks[1],
            "unit": "ratio",
            "mode": "fast",
            "n": 1,
        }


def child(kind: str, times: int, documents: int, threads: int) -> float:
    """Peak resident megabytes of this process after running over ``times`` copies of the corpus."""
    from workbench.datasets import extract
    from workbench.replay.table import replay

    torch.set_num_threads(threads)
    model = load("demo", exact=False)
    base = held_out(model, TOKENS, documents)
    copies = [Tape(f"{t.doc_id}#{i}", t.tokens, source=t.source) for i in range(times) for t in base]
    tapes = Corpus(copies, name="copies", tokenizer=base.tokenizer)
    with tempfile.TemporaryDirectory() as folder, quiet():
        if kind == "extract":
            extract(model, tapes, out=Path(folder) / "out", shard_rows=64)
        else:
            replay(model, tapes, out=Path(folder) / "out", shard_rows=4096)
    return peak_megabytes()


if __name__ == "__main__":
    print(json.dumps({"mb": child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))}))
