"""Draft tables of random texts with a stated acceptance profile, for trials and benchmarks of walks; no model is run.

Places of a text are easy or hard, in runs; whether a draft hits depends on the kind of place and, in part, on the place
itself, so that acceptance is clustered and chains from neighbouring starts agree, as in recorded tables. Nothing else
about such a table resembles a language. Legend: T tokens of a document, R = T - 1 rows, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError, check_int, check_real
from workbench.core.manifest import Manifest, library_versions, machine
from workbench.datasets.shards import ShardDirectory, plan_shards
from workbench.replay.options import ReplayOptions
from workbench.replay.table import KIND, DraftTable, load_table, table_schema

if TYPE_CHECKING:
    import pyarrow as pa

VOCABULARY = 1000


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How drafts are accepted in a synthetic table.

    Args:
        easy: Chance that a draft hits in an easy place.
        hard: The same in a hard one.
        stay: Chance that the next place is of the same kind; above 0.5, places come in runs.
        shared: Share of a hit's chance that belongs to the place, the same from every start.
        agree: Chance that the target's pick is the text; 1 makes own texts.
    """

    easy: float = 0.92
    hard: float = 0.45
    stay: float = 0.95
    shared: float = 0.6
    agree: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_real(name, value, low=0.0, high=1.0)


def synthetic_table(
    out: str | Path,
    *,
    documents: int = 8,
    tokens: tuple[int, int] = (2, 200),
    prompt_len: int = 0,
    sources: tuple[str, ...] = ("synthetic",),
    profile: Profile | None = None,
    k_max: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    shard_rows: int = ReplayOptions.shard_rows,
    hidden_size: int = 1024,
) -> DraftTable:
    """Write a draft table of random documents.

    Args:
        out: A directory that does not exist or is empty.
        documents: Documents; default 8.
        tokens: Shortest and longest document; lengths are uniform between.
        prompt_len: Tokens of every document's prompt, as far as it is that long.
        sources: Registers, given to documents in turn.
        profile: How drafts are accepted; None for ``Profile()``.
        k_max: Draft slots per start; default 8.
        temperature: Above 0, a table of draws with forced chains, which the estimator "ratio" needs.
        seed: Of everything random.
        shard_rows: Rows after which a shard ends, at the end of a document.
        hidden_size: Width that default floors go by.

    Returns:
        The table; its texts count as the target's own where ``profile.agree`` is 1.

    Raises:
        UserError: An option is not valid, or the directory holds something.
    """
    check_int("documents", documents, low=1)
    if len(tokens) != 2 or not 2 <= tokens[0] <= tokens[1]:
        raise UserError(f"tokens={tokens!r} is not valid: give the shortest and the longest length, both at least 2")
    chosen = profile or Profile()
    options = ReplayOptions(
        k_max=k_max, shard_rows=shard_rows, seed=seed, temperature=temperature, forced=temperature > 0
    )
    random = np.random.default_rng(seed)
    lengths = random.integers(tokens[0], tokens[1] + 1, documents)
    rows = (lengths - 1).tolist()
    facts = {"documents": documents, "tokens": list(tokens), "prompt_len": prompt_len, "sources": list(sources)}
    manifest = Manifest(
        kind=KIND,
        parameters=options.key(),
        model={
            "fingerprint": "synthetic",
            "name": "synthetic",
            "hidden_size": hidden_size,
            "vocab_size": VOCABULARY,
            "layers": 0,
            "dtype": "float32",
            "exact": True,
            "row_block": 16,
        },
        corpus={"name": "synthetic", "documents": documents, "tokens": int(lengths.sum())},
        machine=machine(device="cpu", device_name="", threads=1),
        versions=library_versions(),
        extra={"profile": asdict(chosen), **facts},
    )
    schema = table_schema(k_max, drawn=not options.plain, forced=options.forced)

    def batches(span: slice, bar: Any) -> Iterator[pa.RecordBatch]:
        for i in range(documents)[span]:
            head = {
                "doc_id": f"synthetic/{i}",
                "source": sources[i % len(sources)],
                "split": "",
                "own": ("greedy" if options.plain else "sampled") if chosen.agree == 1 else "",
                "length": int(lengths[i]),
                "prompt_len": min(prompt_len, int(lengths[i])),
                "n_bytes": int(lengths[i]),
                "sequence": i,
                "law_differs": "",
                "draws_differ": "" if chosen.agree == 1 else "its target disagrees with the text",
            }
            yield _batch(head, _columns(int(lengths[i]), k_max, chosen, seed, i), schema)
            bar.update(int(lengths[i]) - 1)

    with ShardDirectory(
        Path(out), manifest, plan=plan_shards(rows, shard_rows), schema=schema, resume=False
    ) as directory:
        directory.fill(batches, sizes=rows, desc="synthetic")
        directory.finish({"documents": documents, "rows": sum(rows), "tokens": int(lengths.sum())})
    return load_table(out, check_hashes=False)


def _columns(length: int, k_max: int, profile: Profile, seed: int, document: int) -> dict[str, np.ndarray]:
    """Columns of one document that differ between rows, and the slots that lie past its end."""
    random = np.random.default_rng([seed, document])
    rows = length - 1
    tape_T = random.integers(0, VOCABULARY, length)
    kind_T = (random.random() < 0.5) ^ (random.random(length) >= profile.stay).cumsum() % 2 == 1
    rate_T = np.where(kind_T, profile.easy, profile.hard)
    pick_T = np.where(random.random(length) < profile.agree, tape_T, (tape_T + 1) % VOCABULARY)
    at_RK = np.arange(rows)[:, None] + 1 + np.arange(k_max)
    past_RK = at_RK >= length
    at_RK = np.minimum(at_RK, length - 1)
    place_T, chance_RK = random.random(length), random.random((rows, k_max))
    of_place_RK = random.random((rows, k_max)) < profile.shared
    hit_RK = np.where(of_place_RK, place_T[at_RK], chance_RK) < rate_T[at_RK]
    miss_RK = np.where(random.random((rows, k_max)) < 0.5, tape_T[at_RK], (tape_T[at_RK] + 2) % VOCABULARY)
    miss_RK = np.where(miss_RK == pick_T[at_RK], (pick_T[at_RK] + 3) % VOCABULARY, miss_RK)
    noise_RK = 0.15 * random.standard_normal((rows, k_max))
    drawn_RK = np.clip(rate_T[at_RK] + np.where(hit_RK, 0.05, -0.2) + noise_RK, 0.01, 0.999)
    top_RK = np.maximum(drawn_RK, random.random((rows, k_max)) ** 2).astype(np.float32)
    target_p_R = random.uniform(0.2, 1.0, rows)
    return {
        "position": np.arange(rows),
        "token": tape_T[:-1],
        "next_token": tape_T[1:],
        "target_id": pick_T[1:],
        "target_margin": random.exponential(size=rows),
        "nll": -np.log(rate_T[1:]),
        "on_tape": pick_T[1:] == tape_T[1:],
        "draft_ids": np.where(hit_RK, pick_T[at_RK], miss_RK),
        "draft_top1": drawn_RK,
        "draft_margin": random.exponential(size=(rows, k_max)),
        "draft_top": top_RK,
        "target_p": target_p_R,
        "forced_q": np.clip(rate_T[at_RK] * random.uniform(0.2, 1.2, (rows, k_max)), 0.0, 1.0),
        "forced_top": top_RK,
        "forced_ids": np.where(hit_RK, tape_T[at_RK], miss_RK),
        "past": past_RK,
    }


def _batch(head: dict[str, Any], columns: dict[str, np.ndarray], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    arrays, past_RK = [], columns["past"]
    for field in schema:
        if field.name in head:
            arrays.append(pa.array([head[field.name]] * len(past_RK), field.type))
        elif pa.types.is_fixed_size_list(field.type):
            kind = field.type.value_type
            flat = columns[field.name].reshape(-1).astype(kind.to_pandas_dtype())
            flat = pa.array(flat, kind, mask=past_RK.reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, past_RK.shape[1]))
        else:
            arrays.append(pa.array(columns[field.name].astype(field.type.to_pandas_dtype()), field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
