"""Tiny random models for every test file, with and without transformers.

Widths are odd on purpose: head widths of 10, 12, 18, 20 and 24 and a hidden width of 30 leave tails in every vector
unit. ``tiny`` needs no transformers; ``hf_tiny`` writes a transformers checkpoint with an MTP head beside it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings

from workbench.model.config import FULL, LINEAR, ModelConfig
from workbench.model.hybrid import HybridModel

ROOT = Path(__file__).resolve().parents[1]

# "ci" draws the same examples every time, "default" explores; neither has a deadline, for machines are shared.
settings.register_profile("ci", settings.get_profile("ci"), deadline=None, print_blob=False)
settings.register_profile("default", settings.get_profile("default"), deadline=None)
settings.load_profile("default")

# Value heads per key head, with head counts and widths that differ in every variant.
SHAPES: dict[int, dict[str, int]] = {
    1: dict(linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=10, linear_value_head_dim=18,
            num_attention_heads=2, num_key_value_heads=1, head_dim=24),
    2: dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=20,
            num_attention_heads=4, num_key_value_heads=2, head_dim=24),
    3: dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=10,
            num_attention_heads=6, num_key_value_heads=2, head_dim=16),
}  # fmt: skip
LAYERS = (LINEAR, LINEAR, FULL, LINEAR, FULL)


def tiny_config(*, ratio: int = 2, tied: bool = True, mtp: bool = True, **fields: Any) -> ModelConfig:
    """Configuration of a tiny model with ``ratio`` value heads per key head; ``fields`` replace any of it."""
    base: dict[str, Any] = dict(
        vocab_size=83,
        hidden_size=30,
        intermediate_size=46,
        layer_types=LAYERS,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        mtp_num_hidden_layers=int(mtp),
        eos_token_id=(0,),
        **SHAPES[ratio],
    )
    return ModelConfig(**{**base, **fields})


@torch.no_grad()
def fill_random(model: torch.nn.Module, seed: int = 0) -> None:
    """Seeded weights of an initialisation's scale; every norm, decay and bias differs from its default."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in sorted(model.named_parameters()):
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
        leaf = name.rsplit(".", 1)[-1] if not name.endswith(".weight") else name.rsplit(".", 2)[-2]
        if leaf.lower() == "a_log":
            drawn = noise - 1.5
        elif leaf == "dt_bias":
            drawn = noise
        elif value.ndim == 1:
            gated = name.endswith(("mixer.norm", "linear_attn.norm.weight"))
            drawn = 0.2 * noise + (1.0 if gated else 0.0)
        elif leaf in ("o_proj", "out_proj", "down", "down_proj"):
            drawn = noise * value.shape[-1] ** -0.5 * 0.3
        elif leaf in ("conv", "conv1d"):
            drawn = 0.5 * noise
        else:
            vocabulary = leaf in ("embed", "embed_tokens", "head", "lm_head")
            drawn = noise * value.shape[-1] ** -0.5 * (0.75 if vocabulary else 0.6)  # logits reach about 3
        value.copy_(drawn)


def build_tiny(*, exact: bool = True, seed: int = 0, **fields: Any) -> HybridModel:
    """A random model by our own modules alone; ``fields`` go to ``tiny_config``."""
    model = HybridModel(tiny_config(**fields), exact=exact)
    fill_random(model, seed)
    model.source = "tiny"
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., HybridModel]:
    """Factory ``tiny(ratio=1|2|3, tied=, mtp=, exact=, seed=, **config fields)``: a fresh random model each call."""
    return build_tiny


@dataclass(frozen=True)
class Published:
    """A tiny checkpoint as transformers writes it, with an MTP head added.

    Args:
        path: The directory: config.json and model.safetensors, ``mtp.*`` tensors included.
        hf: The transformers model, float32, eval.
        tensors: Every tensor of the file by its published name.
        config: Parsed config.json.
    """

    path: Path
    hf: Any
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]


def mtp_tensors(config: ModelConfig, seed: int = 5) -> dict[str, torch.Tensor]:
    """Random ``mtp.*`` tensors by their published names and shapes."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    at = "mtp.layers.0"
    shapes = {
        "mtp.fc": (h, 2 * h),
        "mtp.pre_fc_norm_embedding": (h,),
        "mtp.pre_fc_norm_hidden": (h,),
        "mtp.norm": (h,),
        f"{at}.input_layernorm": (h,),
        f"{at}.post_attention_layernorm": (h,),
        f"{at}.self_attn.q_proj": (2 * q, h),
        f"{at}.self_attn.k_proj": (kv, h),
        f"{at}.self_attn.v_proj": (kv, h),
        f"{at}.self_attn.o_proj": (h, q),
        f"{at}.self_attn.q_norm": (d,),
        f"{at}.self_attn.k_norm": (d,),
        f"{at}.mlp.gate_proj": (i, h),
        f"{at}.mlp.up_proj": (i, h),
        f"{at}.mlp.down_proj": (h, i),
    }
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def publish(path: Path, config: ModelConfig, seed: int = 0) -> Published:
    """Build a random transformers model of this shape, save it with a random MTP head, and return both."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    fields = config.to_dict()
    for ours in ("architectures", "model_type", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        fields.pop(ours)
    hf = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).float().eval()
    fill_random(hf, seed)
    hf.save_pretrained(path)
    tensors = {**load_file(path / "model.safetensors"), **mtp_tensors(config)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text("utf-8"))
    raw["mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(raw), "utf-8")
    return Published(path, hf, tensors, raw)


@pytest.fixture(scope="session")
def hf_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Published]:
    """Factory ``hf_tiny(ratio=, tied=, **config fields)``: a transformers checkpoint with an MTP head, built once."""
    pytest.importorskip("transformers")
    made: dict[str, Published] = {}

    def build(*, seed: int = 0, **fields: Any) -> Published:
        key = repr((seed, sorted(fields.items())))
        if key not in made:
            made[key] = publish(tmp_path_factory.mktemp("hf_tiny"), tiny_config(**fields), seed)
        return made[key]

    return build


def load_helper(name: str) -> ModuleType:
    """Import a helper module that lies beside the tests, by its path."""
    full = f"workbench_tests_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, ROOT / "tests" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def reference64() -> ModuleType:
    """The independent float64 evaluation of tests/reference64.py."""
    return load_helper("reference64")


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The target of tables of tests/toy.py, and the walk over every path of its draws."""
    return load_helper("toy")


@pytest.fixture(scope="session")
def enumeration() -> ModuleType:
    """Laws of what rounds emit, of tests/enumeration.py."""
    return load_helper("enumeration")


@pytest.fixture(scope="session")
def policies_module() -> ModuleType:
    """Random policies of every family, of tests/policies.py."""
    return load_helper("policies")


@pytest.fixture(scope="session")
def kernel_checking() -> ModuleType:
    """Checks of the kernels, of tests/kernels/checking.py."""
    return load_helper("kernels/checking")


@pytest.fixture(scope="session")
def covering() -> Callable[..., list[dict[str, Any]]]:
    """``covering(factors, times=, seed=)``: cells of a covering design."""
    return load_helper("designs").covering


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT_VOCAB = 256 + len(SPECIAL) + 2  # bytes, special tokens, two merges


def write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer of 261 ids, its config and a chat template that marks assistant text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    table = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *table, "th", "the"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    pad = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    config = {"eos_token": "<|endoftext|>", "bos_token": None, "pad_token": pad}
    (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint directory of a tiny text model, to be read only: weights, MTP head, tokenizer, chat template."""
    path = tmp_path_factory.mktemp("tiny_dir")
    build_tiny(vocab_size=TEXT_VOCAB).save(path)
    write_tokenizer(path)
    return path


@pytest.fixture
def threads() -> Iterator[Callable[[int], Any]]:
    """Factory of contexts in which torch runs on that many threads; the number before is restored."""

    @contextmanager
    def using(n: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(n)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    yield using


@pytest.fixture(scope="session")
def kill_server() -> ModuleType:
    """Runs over dataset directories, of tests/datasets/kill_server.py."""
    return load_helper("datasets/kill_server")
