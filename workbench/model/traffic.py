"""The least bytes and the products of one step, from a model's shape alone: what its speed is held against.

Weights are read once per forward, K/V rows of the context once, new ones written; the state of a delta layer is read
and written once. Logits, activations and launches are not counted. Legend: T rows of a forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.model.config import FULL, LINEAR, ModelConfig
from workbench.model.weights.names import parameter_table

STATE_BYTES = 4  # the recurrent state is float32 in every model


def weight_parts(config: ModelConfig) -> dict[str, int]:
    """Parameters by the step that reads them.

    Args:
        config: Shape of the model.

    Returns:
        "body" (every layer and the final norm), "head" (the vocabulary's rows, tied or not) and "mtp" (the MTP head
        without a vocabulary of its own; 0 where there is none).
    """
    table = parameter_table(config, mtp=config.mtp_num_hidden_layers > 0)
    sizes = {name: sum(math.prod(part.shape) for part in parts) for name, parts in table.items()}
    return {
        "body": sum(n for name, n in sizes.items() if name == "norm" or name.startswith("layers.")),
        "head": config.vocab_size * config.hidden_size,
        "mtp": sum(n for name, n in sizes.items() if name.startswith("mtp.")),
    }


def state_bytes(config: ModelConfig, *, itemsize: int = 2) -> int:
    """Bytes of one sequence's recurrent states and convolution windows.

    Args:
        config: Shape of the model.
        itemsize: Bytes of a number of the windows; default 2.

    Returns:
        Bytes over all delta layers.
    """
    window = (config.linear_conv_kernel_dim - 1) * config.conv_dim * itemsize
    return config.layer_types.count(LINEAR) * (window + STATE_BYTES * config.value_dim * config.linear_key_head_dim)


def forward_bytes(config: ModelConfig, *, rows: int = 1, context: int = 0, itemsize: int = 2, batch: int = 1) -> int:
    """Least bytes that a forward of the target moves, head included: plain decode is one row, a verify K + 1.

    Args:
        config: Shape of the model.
        rows: Rows per sequence; default 1.
        context: Rows the cache holds before.
        itemsize: Bytes of a weight and of a cached number; default 2.
        batch: Sequences; default 1.

    Returns:
        Bytes read and written.
    """
    parts = weight_parts(config)
    weights = (parts["body"] + parts["head"] + batch * rows * config.hidden_size) * itemsize
    kv = config.layer_types.count(FULL) * (context + rows) * _kv_row(config) * itemsize
    return weights + batch * (kv + 2 * state_bytes(config, itemsize=itemsize))


def draft_bytes(config: ModelConfig, *, context: int = 0, itemsize: int = 2, vocab: int | None = None) -> int:
    """Least bytes that one step of the MTP head moves.

    Args:
        config: Shape of the model.
        context: Rows its cache holds before.
        itemsize: Bytes of a weight and of a cached number; default 2.
        vocab: Rows of a trimmed head; None for the whole vocabulary.

    Returns:
        Bytes read and written.
    """
    head = (config.vocab_size if vocab is None else vocab) * config.hidden_size
    numbers = weight_parts(config)["mtp"] + head + config.hidden_size + (context + 1) * _kv_row(config)
    return numbers * itemsize


def forward_products(config: ModelConfig, *, rows: int, context: int = 0, logits: int = 1) -> int:
    """Floating-point operations of the products of one sequence's forward, two per multiply-add.

    Weights count once per row, attention over the rows a causal row sees, the delta rule as the recurrence: three
    products of a row with the state of each value head. Forms that do more work are not credited for it.

    Args:
        config: Shape of the model.
        rows: Rows of the forward.
        context: Rows before them.
        logits: Rows that the vocabulary head is applied to; default 1.

    Returns:
        Operations.
    """
    table = parameter_table(config, mtp=False)
    matrices = sum(
        math.prod(part.shape)
        for name, parts in table.items()
        for part in parts
        if name.startswith("layers.") and len(part.shape) > 1
    )
    seen = rows * context + rows * (rows + 1) // 2
    attention = 2 * config.layer_types.count(FULL) * config.num_attention_heads * config.head_dim * seen
    delta = 3 * config.layer_types.count(LINEAR) * config.value_dim * config.linear_key_head_dim * rows
    return 2 * (rows * matrices + logits * config.vocab_size * config.hidden_size + attention + delta)


def expected_emitted(joint: Sequence[float]) -> float:
    """Tokens a round emits on average at a joint acceptance.

    Args:
        joint: Share of all rounds in which slots 1..j were accepted, for every slot j.

    Returns:
        One, the bonus, plus the sum of the shares.
    """
    return 1.0 + sum(joint)


def _kv_row(config: ModelConfig) -> int:
    """Numbers of one token's K and V in one attention layer."""
    return 2 * config.num_key_value_heads * config.head_dim
