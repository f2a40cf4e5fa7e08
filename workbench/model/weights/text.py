"""The text side of a checkpoint: its config and its tokenizer, without a weight, for work on tapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.model.config import ModelConfig
from workbench.model.tokenizer import Tokenizer
from workbench.model.weights.load import checkpoint_directory, read_json

FILES = ["*.json", "*.jinja", "merges.txt", "vocab.json"]


@dataclass(frozen=True, eq=False)
class TextSide:
    """What of a checkpoint decides which tapes it can run.

    Args:
        config: Its architecture.
        tokenizer: Its tokenizer; None when the directory has none.
        source: What the user named.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    source: str


def load_text_side(source: str | Path) -> TextSide:
    """Read the config and the tokenizer of a checkpoint.

    Args:
        source: A directory, or a hub id "org/name" when no such directory exists; no weights are fetched then.

    Returns:
        The text side.

    Raises:
        CheckpointError: A file is missing or of another family.
    """
    path = checkpoint_directory(source, files=FILES)
    config = ModelConfig.from_dict(read_json(path / "config.json"))
    tokenizer = Tokenizer.load(path) if (path / "tokenizer.json").exists() else None
    return TextSide(config, tokenizer, str(source))
