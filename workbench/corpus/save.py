"""Tapes as JSON lines, so that text the target generated once can be used again."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.core.errors import UserError
from workbench.core.manifest import write_atomic
from workbench.core.tape import Corpus


def save_tapes(tapes: Corpus, path: str | Path) -> Path:
    """Write tapes as JSON lines that ``corpus`` reads back, ids, masks and own-text facts included.

    Args:
        tapes: The documents.
        path: File that ends in .jsonl.

    Returns:
        The file.

    Raises:
        UserError: The name does not end in .jsonl.
    """
    path = Path(path)
    if path.suffix != ".jsonl":
        raise UserError(
            f"path={str(path)!r} is not valid: tapes are written as JSON lines, to a name that ends in .jsonl"
        )
    lines = []
    for tape in tapes:
        row = {
            "doc_id": tape.doc_id,
            "source": tape.source,
            "split": tape.split,
            "prompt_len": tape.prompt_len,
            "n_bytes": tape.n_bytes,
            "own": None if tape.own is None else tape.own.facts(),
            "supervised": None if tape.supervised is None else tape.supervised.tolist(),
            "tokens": tape.tokens.tolist(),
        }
        lines.append(json.dumps({key: value for key, value in row.items() if value is not None}, ensure_ascii=False))
    return write_atomic(path, ("\n".join(lines) + "\n").encode())
