"""Bytes per token of what other trainers read, beside the bytes of datasets made here, for the same documents.

Of a layout only what grows with tokens counts: ids, masks and rows of 2 bytes a value; headers and file names do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.core.errors import CheckpointError, UserError, check_int
from workbench.core.manifest import Manifest

if TYPE_CHECKING:
    import polars as pl

UNITS = {"anchors": "anchor", "sequence": "token"}


@dataclass(frozen=True)
class Layout:
    """What a token takes in another project's files.

    Args:
        name: Project and variant.
        ids: Bytes of ids and masks.
        value: Bytes of a value of a row, with its share of scales in ``ids``; default 2, bfloat16.
        taps: Rows of tapped layers beside the last one; None for as many as are asked for.
        last: Rows of the last layer; default 1.
        padded: Every document takes the sequence length.
    """

    name: str
    ids: int
    value: int = 2
    taps: int | None = None
    last: int = 1
    padded: bool = False

    def token_bytes(self, hidden_size: int, taps: int) -> int:
        """Bytes of a token.

        Args:
            hidden_size: Width of a row.
            taps: Tapped layers asked for.

        Returns:
            The bytes.
        """
        rows = self.last + (taps if self.taps is None else self.taps)
        return self.ids + rows * hidden_size * self.value


# Ids and masks as each project writes them; sources are its readers and writers in the releases of 2026.
LAYOUTS = (
    Layout("speculators", ids=4 + 8 + 8),  # Arrow input_ids int32 and loss_mask int64, token_ids int64 in safetensors
    Layout("speculators fp8", ids=4 + 8 + 8 + 4, value=1),  # one float32 scale per token over all of its rows
    Layout("specforge dspark", ids=8 + 8),
    Layout("specforge eagle3", ids=8 + 8, taps=3),
    Layout("deepspec", ids=4 + 1 + 1),
    Layout("modelopt", ids=8 + 8),
    Layout("nemo-automodel dspark", ids=8 + 8, padded=True),
)


def record_bytes(*paths: str | Path, layers: int = 5, seq_length: int | None = None) -> pl.DataFrame:
    """Bytes on disk of datasets made here beside what other trainers' formats take for the same documents.

    Args:
        paths: Finished directories of anchor records or sequence stores, all of one model and one corpus.
        layers: Tapped layers in the other formats; default 5, the DSpark recipe.
        seq_length: Tokens to which a padding format pads every document; None leaves padding out.

    Returns:
        Rows of datasets first, in the order given, then of formats: name, measured (read from the files, or computed
        from the layout), unit ("anchor" or "token"), units, unit_bytes, total_bytes, token_bytes (total over the
        tokens of the documents) and ratio (token_bytes over that of the first dataset).

    Raises:
        UserError: No directory was given, or they are not of one model and corpus, or do not leave out the same of it.
        CheckpointError: A directory is no finished dataset of these kinds.
    """
    import polars as pl

    if not paths:
        raise UserError("record_bytes needs a directory: give those of anchor records or sequence stores")
    layers = check_int("layers", layers, low=0)
    manifests = [_finished(path) for path in paths]
    first = manifests[0]
    for path, manifest in zip(paths, manifests, strict=True):
        for part in ("model", "corpus"):
            ours, theirs = getattr(first, part)["fingerprint"], getattr(manifest, part)["fingerprint"]
            if ours != theirs:
                raise UserError(
                    f"{path} is of another {part} than {paths[0]} ({theirs} and {ours}): compare datasets of one model "
                    "and one corpus"
                )
        if (stored := manifest.counts["tokens"]) != first.counts["tokens"]:
            raise UserError(
                f"{path} stores {stored:,} tokens and {paths[0]} {first.counts['tokens']:,}, since they leave out "
                "other documents: compare datasets of the same documents"
            )
    tokens, documents = first.counts["tokens"], first.counts["documents"]
    rows = []
    for path, manifest in zip(paths, manifests, strict=True):
        unit, total = UNITS[manifest.kind], sum(shard["bytes"] for shard in manifest.shards)
        units = manifest.counts["records"] if unit == "anchor" else tokens
        rows.append((Path(path).name, True, unit, units, total / units, total))
    for layout in LAYOUTS:
        each = layout.token_bytes(first.model["hidden_size"], layers)
        stored = tokens
        if layout.padded and seq_length is not None:
            stored = documents * check_int("seq_length", seq_length, low=-(-tokens // documents))
        rows.append((layout.name, False, "token", stored, float(each), stored * each))
    names = ("name", "measured", "unit", "units", "unit_bytes", "total_bytes")
    frame = pl.DataFrame(rows, schema=names, orient="row").with_columns(token_bytes=pl.col("total_bytes") / tokens)
    return frame.with_columns(ratio=pl.col("token_bytes") / frame["token_bytes"][0])


def _finished(path: str | Path) -> Manifest:
    manifest = Manifest.read(path)
    if manifest.kind not in UNITS:
        raise CheckpointError(f"{path} holds {manifest.kind!r}: give anchor records or a sequence store")
    if not manifest.complete:
        raise CheckpointError(f"{path} is incomplete: run again into it to go on")
    return manifest
