"""A workbench for speculative decoding of Qwen3.5-class models: decode, extract, replay, sweep, plot, train.

Names below are imported when first used; ``import workbench`` imports neither torch nor polars.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "load": "workbench.facade:load",
    "generate": "workbench.spec.generate:generate",
    "stream": "workbench.spec.generate:stream",
    "grammars": "workbench.spec.grammars",
    "Session": "workbench.spec.session:Session",
    "PrefixStore": "workbench.spec.store:PrefixStore",
    "Chat": "workbench.spec.chat:Chat",
    "compare_sessions": "workbench.spec.compare:compare_sessions",
    "corpus": "workbench.corpus",
    "extract": "workbench.datasets:extract",
    "load_anchors": "workbench.datasets:load_anchors",
    "replay": "workbench.replay",
    "load_table": "workbench.replay:load_table",
    "score": "workbench.replay:score",
    "own_tapes": "workbench.replay:own_tapes",
    "walk": "workbench.replay:walk",
    "slot_rates": "workbench.replay:slot_rates",
    "expected_rounds": "workbench.replay:expected_rounds",
    "TreeShape": "workbench.spec.tree:TreeShape",
    "tree_shapes": "workbench.spec.tree:tree_shapes",
    "tree_walk": "workbench.replay:tree_walk",
    "best_tree": "workbench.replay:best_tree",
    "live_rounds": "workbench.replay:live_rounds",
    "compare_rounds": "workbench.replay:compare_rounds",
    "plot": "workbench.plot",
    "display": "workbench.display",
    "FixedK": "workbench.spec.policies:FixedK",
    "AdaptiveFloor": "workbench.spec.policies:AdaptiveFloor",
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
    "compare_rounds",
    "compare_sessions",
    "corpus",
    "Corpus",
    "display",
    "expected_rounds",
    "extract",
    "FixedK",
    "generate",
    "GenerateOptions",
    "grammars",
    "live_rounds",
    "load",
    "load_anchors",
    "load_table",
    "own_tapes",
    "plot",
    "PrefixStore",
    "quiet",
    "replay",
    "score",
    "Session",
    "slot_rates",
    "stream",
    "Tape",
    "tree_shapes",
    "tree_walk",
    "TreeShape",
    "UserError",
    "walk",
]

if TYPE_CHECKING:
    from workbench import display, plot
    from workbench.core.errors import UserError
    from workbench.core.progress import quiet
    from workbench.core.tape import Corpus, Tape
    from workbench.corpus import corpus
    from workbench.datasets import extract, load_anchors
    from workbench.facade import load
    from workbench.replay import (
        best_tree,
        compare_rounds,
        expected_rounds,
        live_rounds,
        load_table,
        own_tapes,
        replay,
        score,
        slot_rates,
        tree_walk,
        walk,
    )
    from workbench.spec import grammars
    from workbench.spec.chat import Chat
    from workbench.spec.compare import compare_sessions
    from workbench.spec.generate import generate, stream
    from workbench.spec.options import GenerateOptions
    from workbench.spec.policies import AdaptiveFloor, FixedK
    from workbench.spec.session import Session
    from workbench.spec.store import PrefixStore
    from workbench.spec.tree import TreeShape, tree_shapes


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
