"""The measuring process: ``python -m workbench.bench NAME THREADS [--quick]`` prints rows as JSON lines."""

from __future__ import annotations

import importlib
import json
import sys

import torch


def main() -> None:
    """Run one benchmark with the thread count given."""
    name, threads, quick = sys.argv[1], int(sys.argv[2]), "--quick" in sys.argv
    torch.set_num_threads(threads)
    module = importlib.import_module(f"workbench.bench.{name}")
    for row in module.measure(quick=quick):
        print(json.dumps({"benchmark": name, **row}), flush=True)


if __name__ == "__main__":
    main()
