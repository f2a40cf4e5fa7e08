"""The measuring process, which prints rows as JSON lines.

``python -m workbench.bench NAME THREADS [--quick] [--shape JSON]``
"""

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
    rows = module.measure(quick=quick)
    if "--shape" in sys.argv:
        options = json.loads(sys.argv[sys.argv.index("--shape") + 1])
        on = torch.cuda.get_device_name() if options["device"] == "cuda" else ""
        rows = (
            {**row, "device_name": on} for row in module.measure_shape(options.pop("shape"), quick=quick, **options)
        )
    for row in rows:
        print(json.dumps({"benchmark": name, **row}), flush=True)


if __name__ == "__main__":
    main()
