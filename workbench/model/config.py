"""Architecture of a Qwen3.5-class decoder, read from and written to Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core.errors import CheckpointError

LINEAR, FULL = "linear_attention", "full_attention"


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids of a config field that holds null, one id or a list of them.

    Args:
        name: The field, for the sentence.
        value: Its value.

    Returns:
        The ids, in order.

    Raises:
        CheckpointError: The value is none of these.
    """
    listed = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
        raise CheckpointError(f"{name}={value!r} is not valid: it must be a token id, a list of them, or null")
    return tuple(listed)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of the decoder and its MTP head.

    Args:
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width H of the residual stream.
        intermediate_size: Width I of the SwiGLU block.
        layer_types: "linear_attention" or "full_attention" per layer.
        num_attention_heads: Query heads of a full-attention layer.
        num_key_value_heads: Key/value heads of a full-attention layer.
        head_dim: Width D of one attention head.
        linear_num_key_heads: Key heads Hk of a delta layer.
        linear_num_value_heads: Value heads Hv of a delta layer, a multiple of Hk.
        linear_key_head_dim: Width Dk of a delta key head.
        linear_value_head_dim: Width Dv of a delta value head.
        linear_conv_kernel_dim: Taps of the causal depthwise convolution.
        rms_norm_eps: Epsilon of every RMSNorm.
        rope_theta: Base of the rotary frequencies.
        partial_rotary_factor: Share of head_dim that is rotated.
        max_position_embeddings: Longest context the model may be used at.
        tie_word_embeddings: The head is the embedding.
        mtp_num_hidden_layers: MTP layers in the checkpoint; 0 means it cannot draft.
        eos_token_id: Ids that end a text; may be empty.
        extra: Fields of the source config kept as they were.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    mtp_num_hidden_layers: int = 1
    eos_token_id: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        positive = (
            "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
            "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
            "max_position_embeddings"
        )
        for name in positive.split():
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"config {name}={value!r} is not valid: it must be a positive integer")
        if not self.layer_types or any(kind not in (LINEAR, FULL) for kind in self.layer_types):
            raise CheckpointError(
                f"config layer_types={list(self.layer_types)!r} is not valid: each entry must be {LINEAR!r} or {FULL!r}"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise CheckpointError(
                f"config has {self.linear_num_value_heads} linear value heads over {self.linear_num_key_heads} key "
                "heads; the first must be a multiple of the second"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"config has {self.num_attention_heads} query heads over {self.num_key_value_heads} key/value heads; "
                "the first must be a multiple of the second"
            )
        if self.linear_conv_kernel_dim < 2:
            raise CheckpointError(
                f"config linear_conv_kernel_dim={self.linear_conv_kernel_dim} is not valid: it must be at least 2"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise CheckpointError(
                f"config partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} gives "
                f"{self.rotary_dim} rotated dimensions; an even number from 2 to head_dim is needed"
            )
        if self.mtp_num_hidden_layers not in (0, 1):
            raise CheckpointError(
                f"config mtp_num_hidden_layers={self.mtp_num_hidden_layers} is not supported: 0 or 1 is "
                "(the released Qwen3.5 checkpoints have 1)"
            )

    @property
    def num_layers(self) -> int:
        """Layers of the trunk, the MTP layer not counted."""
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def conv_dim(self) -> int:
        """Channels C of the convolution: q, k and v of a delta layer."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.value_dim

    @property
    def value_dim(self) -> int:
        """Width Hv * Dv of a delta layer's values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a ``config.json`` mapping, flat or with the text model nested under ``text_config``.

        Args:
            raw: Parsed JSON.

        Returns:
            The configuration.

        Raises:
            CheckpointError: A field is missing, of another family, or inconsistent.

        Source: transformers ``Qwen3_5TextConfig`` field names and defaults.
        """
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise CheckpointError(f"config text_config={text!r} is not valid: it must be a JSON object")
        kind = text.get("model_type", "")
        if kind not in ("qwen3_5_text", "qwen3_5"):
            raise CheckpointError(
                f"config model_type={kind!r} is not supported: a dense Qwen3.5 text model ('qwen3_5_text', or "
                "'qwen3_5' with a text_config) is"
            )
        needed = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"
        ).split()
        missing = [name for name in needed if name not in text]
        if missing:
            raise CheckpointError(f"config.json lacks {', '.join(missing)}; every one of these is needed")
        if text.get("attention_bias"):
            raise CheckpointError("config attention_bias=true is not supported: Qwen3.5 projections have no bias")
        if text.get("attn_output_gate", True) is not True:
            raise CheckpointError("config attn_output_gate=false is not supported: Qwen3.5 attention is gated")
        if text.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"config hidden_act={text['hidden_act']!r} is not supported: 'silu' is")

        def whole(name: str, default: int | None = None) -> int:
            value = text.get(name, default)
            if not isinstance(value, int) or isinstance(value, bool):
                raise CheckpointError(f"config {name}={value!r} is not valid: it must be an integer")
            return value

        rope = text.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"config rope_parameters={rope!r} is not valid: it must be a JSON object")
        if rope.get("rope_type", "default") != "default":
            raise CheckpointError(f"config rope_type={rope['rope_type']!r} is not supported: 'default' is")

        def number(name: str, default: float, fields: Mapping[str, Any]) -> float:
            value = fields.get(name, text.get(name, default))
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise CheckpointError(f"config {name}={value!r} is not valid: it must be a positive number")
            return float(value)

        layers = whole("num_hidden_layers")
        kinds = text.get("layer_types")
        if kinds is None:
            every = whole("full_attention_interval", 4)
            if every < 1:
                raise CheckpointError(f"config full_attention_interval={every} is not valid: it must be at least 1")
            kinds = [FULL if (i + 1) % every == 0 else LINEAR for i in range(layers)]
        if not isinstance(kinds, list | tuple) or len(kinds) != layers:
            raise CheckpointError(
                f"config layer_types={kinds!r} does not fit num_hidden_layers={layers}: a list of one kind per layer "
                "is needed"
            )
        return cls(
            vocab_size=whole("vocab_size"),
            hidden_size=whole("hidden_size"),
            intermediate_size=whole("intermediate_size"),
            layer_types=tuple(kinds),
            num_attention_heads=whole("num_attention_heads"),
            num_key_value_heads=whole("num_key_value_heads"),
            head_dim=whole("head_dim", 256),
            linear_num_key_heads=whole("linear_num_key_heads"),
            linear_num_value_heads=whole("linear_num_value_heads"),
            linear_key_head_dim=whole("linear_key_head_dim"),
            linear_value_head_dim=whole("linear_value_head_dim"),
            linear_conv_kernel_dim=whole("linear_conv_kernel_dim", 4),
            rms_norm_eps=number("rms_norm_eps", 1e-6, {}),
            rope_theta=number("rope_theta", 10_000.0, rope),
            partial_rotary_factor=number("partial_rotary_factor", 0.25, rope),
            max_position_embeddings=whole("max_position_embeddings", 32_768),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
            mtp_num_hidden_layers=whole("mtp_num_hidden_layers", 0),
            eos_token_id=token_ids("config eos_token_id", text.get("eos_token_id", raw.get("eos_token_id"))),
            extra=dict(raw),
        )

    def to_dict(self) -> dict[str, Any]:
        """Write a flat ``config.json`` mapping that transformers' ``Qwen3_5ForCausalLM`` reads.

        Returns:
            A JSON-ready mapping; ``mtp_num_hidden_layers`` is the field released checkpoints use.
        """
        eos: Any = list(self.eos_token_id)
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "layer_types": list(self.layer_types),
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "linear_num_key_heads": self.linear_num_key_heads,
            "linear_num_value_heads": self.linear_num_value_heads,
            "linear_key_head_dim": self.linear_key_head_dim,
            "linear_value_head_dim": self.linear_value_head_dim,
            "linear_conv_kernel_dim": self.linear_conv_kernel_dim,
            "mamba_ssm_dtype": "float32",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            },
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "mtp_num_hidden_layers": self.mtp_num_hidden_layers,
            "mtp_use_dedicated_embeddings": False,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        }
