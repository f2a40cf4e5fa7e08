"""What a notebook shows of a model: one line, and a card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.model.config import LINEAR

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel


def facts(model: HybridModel) -> list[tuple[str, str]]:
    """Names and values of a model's card."""
    config = model.config
    linear = sum(kind == LINEAR for kind in config.layer_types)
    vocabulary = f"{config.vocab_size:,}, head {'tied' if config.tie_word_embeddings else 'of its own'}"
    number = sum(value.numel() for value in model.parameters())
    return [
        ("parameters", f"{number / 1e6:,.1f} M, {str(model.dtype).removeprefix('torch.')} on {model.device.type}"),
        ("layers", f"{config.num_layers}: {linear} gated DeltaNet, {config.num_layers - linear} gated attention"),
        ("hidden width", f"{config.hidden_size:,}"),
        ("vocabulary", vocabulary),
        ("context", f"{config.max_position_embeddings:,} tokens"),
        ("drafter", drafter(model)),
        ("numerics", "exact" if model.exact else "fast"),
    ]


def drafter(model: HybridModel) -> str:
    """What drafts, and over which ids."""
    if not model.can_draft:
        return "none: this checkpoint has no mtp.* weights"
    return "MTP head" if model.draft_head is None else f"MTP head over {model.draft_head.line}"


def one_line(model: HybridModel) -> str:
    """The ``repr`` of a model."""
    found = dict(facts(model))
    return f"HybridModel({name(model)}: {found['parameters']}, drafter: {found['drafter']}, {found['numerics']})"


def card_html(model: HybridModel) -> str:
    """The ``_repr_html_`` of a model."""
    from workbench.display import card

    return card(f"Model {name(model)}", facts(model))._repr_html_()


def name(model: HybridModel) -> str:
    """Last part of what the model was loaded from."""
    return model.source.rstrip("/").rpartition("/")[2] or "in memory"
