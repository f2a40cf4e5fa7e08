"""A workbench for speculative decoding of Qwen3.5-class models: decode, extract, replay, sweep, plot, train.

Names below are imported when first used; ``import workbench`` imports neither torch nor polars.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "load": "workbench.facade:load",
    "random_model": "workbench.model.shapes:random_model",
    "generate": "workbench.spec.generate:generate",
    "stream": "workbench.spec.generate:stream",
    "grammars": "workbench.spec.grammars",
    "Session": "workbench.spec.session:Session",
    "PrefixStore": "workbench.spec.store:PrefixStore",
    "Chat": "workbench.spec.chat:Chat",
    "compare_sessions": "workbench.spec.compare:compare_sessions",
    "corpus": "workbench.corpus",
    "prompts": "workbench.corpus:prompts",
    "generate_corpus": "workbench.datasets:generate_corpus",
    "load_answers": "workbench.datasets:load_answers",
    "token_counts": "workbench.corpus:token_counts",
    "dedup": "workbench.corpus:dedup",
    "near_dedup": "workbench.corpus:near_dedup",
    "contamination": "workbench.corpus:contamination",
    "drop_overlap": "workbench.corpus:drop_overlap",
    "split": "workbench.corpus:split",
    "quarantine": "workbench.datasets:quarantine",
    "clean": "workbench.datasets:clean",
    "extract": "workbench.datasets:extract",
    "extract_sequences": "workbench.datasets:extract_sequences",
    "load_anchors": "workbench.datasets:load_anchors",
    "load_quarantine": "workbench.datasets:load_quarantine",
    "load_sequences": "workbench.datasets:load_sequences",
    "read_sequence": "workbench.datasets:read_sequence",
    "topk_rows": "workbench.datasets:topk_rows",
    "topk_cost": "workbench.datasets:topk_cost",
    "record_bytes": "workbench.datasets:record_bytes",
    "export": "workbench.datasets.export:export",
    "replay": "workbench.replay",
    "load_table": "workbench.replay:load_table",
    "score": "workbench.replay:score",
    "own_tapes": "workbench.replay:own_tapes",
    "walk": "workbench.replay:walk",
    "walk_counts": "workbench.replay:walk_counts",
    "counts_of": "workbench.replay:counts_of",
    "slot_rates": "workbench.replay:slot_rates",
    "expected_rounds": "workbench.replay:expected_rounds",
    "TreeShape": "workbench.spec.tree:TreeShape",
    "tree_shapes": "workbench.spec.tree:tree_shapes",
    "tree_walk": "workbench.replay:tree_walk",
    "best_tree": "workbench.replay:best_tree",
    "explore": "workbench.sweep.explore:explore",
    "live_rounds": "workbench.replay:live_rounds",
    "compare_rounds": "workbench.replay:compare_rounds",
    "CostModel": "workbench.replay:CostModel",
    "predict": "workbench.replay:predict",
    "published_costs": "workbench.replay:published_costs",
    "sweep": "workbench.sweep",
    "load_sweep": "workbench.sweep:load_sweep",
    "recommend": "workbench.sweep:recommend",
    "compare_tables": "workbench.sweep:compare_tables",
    "plot": "workbench.plot",
    "display": "workbench.display",
    "FixedK": "workbench.spec.policies:FixedK",
    "AdaptiveFloor": "workbench.spec.policies:AdaptiveFloor",
    "MinConfidence": "workbench.spec.policies:MinConfidence",
    "Cumulative": "workbench.spec.policies:Cumulative",
    "Ema": "workbench.spec.policies:Ema",
    "Ladder": "workbench.spec.policies:Ladder",
    "Suspend": "workbench.spec.policies:Suspend",
    "Goodput": "workbench.spec.policies:Goodput",
    "Gate": "workbench.spec.policies:Gate",
    "Oracle": "workbench.spec.policies:Oracle",
    "Scripted": "workbench.spec.policies:Scripted",
    "policy_from": "workbench.spec.policies:policy_from",
    "oracle_schedules": "workbench.replay:oracle_schedules",
    "GenerateOptions": "workbench.spec.options:GenerateOptions",
    "Tape": "workbench.core.tape:Tape",
    "Corpus": "workbench.core.tape:Corpus",
    "UserError": "workbench.core.errors:UserError",
    "quiet": "workbench.core.progress:quiet",
}

__all__ = [
    "__version__",
    "AdaptiveFloor",
    "best_tree",
    "Chat",
    "clean",
    "compare_rounds",
    "compare_sessions",
    "compare_tables",
    "contamination",
    "corpus",
    "Corpus",
    "counts_of",
    "Cumulative",
    "CostModel",
    "dedup",
    "display",
    "drop_overlap",
    "Ema",
    "expected_rounds",
    "explore",
    "export",
    "extract",
    "extract_sequences",
    "FixedK",
    "Gate",
    "generate",
    "generate_corpus",
    "GenerateOptions",
    "Goodput",
    "grammars",
    "Ladder",
    "live_rounds",
    "load",
    "load_anchors",
    "load_answers",
    "load_quarantine",
    "load_sequences",
    "load_sweep",
    "load_table",
    "MinConfidence",
    "near_dedup",
    "Oracle",
    "oracle_schedules",
    "own_tapes",
    "plot",
    "policy_from",
    "predict",
    "PrefixStore",
    "prompts",
    "published_costs",
    "quarantine",
    "quiet",
    "random_model",
    "read_sequence",
    "recommend",
    "record_bytes",
    "replay",
    "score",
    "Scripted",
    "Session",
    "split",
    "slot_rates",
    "stream",
    "Suspend",
    "sweep",
    "Tape",
    "token_counts",
    "topk_cost",
    "topk_rows",
    "tree_shapes",
    "tree_walk",
    "TreeShape",
    "UserError",
    "walk",
    "walk_counts",
]

if TYPE_CHECKING:
    from workbench import display, plot
    from workbench.core.errors import UserError
    from workbench.core.progress import quiet
    from workbench.core.tape import Corpus, Tape
    from workbench.corpus import contamination, corpus, dedup, drop_overlap, near_dedup, prompts, split, token_counts
    from workbench.datasets import (
        clean,
        extract,
        extract_sequences,
        generate_corpus,
        load_anchors,
        load_answers,
        load_quarantine,
        load_sequences,
        quarantine,
        read_sequence,
        record_bytes,
        topk_cost,
        topk_rows,
    )
    from workbench.datasets.export import export
    from workbench.facade import load
    from workbench.model.shapes import random_model
    from workbench.replay import (
        CostModel,
        best_tree,
        compare_rounds,
        counts_of,
        expected_rounds,
        live_rounds,
        load_table,
        oracle_schedules,
        own_tapes,
        predict,
        published_costs,
        replay,
        score,
        slot_rates,
        tree_walk,
        walk,
        walk_counts,
    )
    from workbench.spec import grammars
    from workbench.spec.chat import Chat
    from workbench.spec.compare import compare_sessions
    from workbench.spec.generate import generate, stream
    from workbench.spec.options import GenerateOptions
    from workbench.spec.policies import (
        AdaptiveFloor,
        Cumulative,
        Ema,
        FixedK,
        Gate,
        Goodput,
        Ladder,
        MinConfidence,
        Oracle,
        Scripted,
        Suspend,
        policy_from,
    )
    from workbench.spec.session import Session
    from workbench.spec.store import PrefixStore
    from workbench.spec.tree import TreeShape, tree_shapes
    from workbench.sweep import compare_tables, load_sweep, recommend, sweep
    from workbench.sweep.explore import explore


def __getattr__(name: str) -> Any:
    target = _LAZY.get(name)
    if target is None:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}; it has {', '.join(sorted(_LAZY))}")
    module, _, attribute = target.partition(":")
    value = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
