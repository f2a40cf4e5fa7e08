"""Load a Hugging Face directory: config, single or sharded safetensors under any published prefix, tokenizer.

Nothing is unpickled and no code of the checkpoint runs. The network is asked only for an "org/name" that is no path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.core.errors import CheckpointError, UserError
from workbench.model.config import ModelConfig, token_ids
from workbench.model.hybrid import HybridModel
from workbench.model.tokenizer import Tokenizer
from workbench.model.weights.draft_file import DRAFT_FILE
from workbench.model.weights.names import IGNORED, Part, canonical, parameter_table

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.json"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_model(
    source: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    exact: bool | None = None,
) -> HybridModel:
    """Load a checkpoint.

    Args:
        source: A directory, or a hub id "org/name" when no such directory exists.
        device: Where to put it; default "cpu".
        dtype: Weight type; default float32 on a CPU and bfloat16 on a GPU.
        exact: Numerical class; default True on a CPU (False in float64), False on a GPU.

    Returns:
        The model in eval mode, with its tokenizer and its draft vocabulary when the directory has them.

    Raises:
        CheckpointError: A file is missing, truncated, of another family, or its tensors do not fit the config, or
            the draft vocabulary is of another head.
        UserError: The device or the type is unknown.
    """
    path = checkpoint_directory(source)
    where = device_of(device)
    kind = dtype_of(dtype, where)
    config = ModelConfig.from_dict(read_json(path / "config.json"))
    index = _index(path)
    has_mtp = any(name.startswith("mtp.") for name in index)
    config = replace(config, mtp_num_hidden_layers=1 if has_mtp else 0, eos_token_id=_eos(path, config))
    with torch.device(where):
        exact = where.type == "cpu" and kind != torch.float64 if exact is None else exact
        model = HybridModel(config, exact=exact).to(kind)
    _fill(model, index, parameter_table(config, mtp=has_mtp))
    model.tokenizer = Tokenizer.load(path) if (path / "tokenizer.json").exists() else None
    model.source, model.path = str(source), path
    if (path / DRAFT_FILE).exists():
        model.trim_draft_vocab(path / DRAFT_FILE)
    return model.requires_grad_(False).eval()


def device_of(device: str | torch.device | None) -> torch.device:
    """The device a request names; None is the CPU, and one that torch does not see is refused."""
    try:
        where = torch.device("cpu" if device is None else device)
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda"):
        raise UserError(f"device={device!r} is not valid: use 'cpu' or 'cuda'")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda' was asked for, but torch sees no GPU here: use 'cpu', or install a CUDA torch")
    return where


def dtype_of(dtype: str | torch.dtype | None, where: torch.device) -> torch.dtype:
    """The type a request names; None is float32 on a CPU and bfloat16 on a GPU."""
    if dtype is None:
        return torch.float32 if where.type == "cpu" else torch.bfloat16
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise UserError(f"dtype={dtype!r} is not valid: choose one of {', '.join(map(repr, _DTYPES))}")
    return found  # type: ignore[return-value]


def checkpoint_directory(source: str | Path, *, files: Sequence[str] = _HUB_FILES) -> Path:
    """The directory of a checkpoint; a hub id that is no directory here is fetched.

    Args:
        source: A directory, or a hub id "org/name".
        files: Patterns of the files that are fetched from the hub.

    Returns:
        The directory.

    Raises:
        CheckpointError: It is neither, or it could not be fetched.
    """
    path = Path(source)
    return path if path.is_dir() else _from_hub(str(source), files)


def _from_hub(source: str, files: Sequence[str]) -> Path:
    if source.endswith(".gguf"):
        raise CheckpointError(f"{source!r}: GGUF files are not read yet; convert to a safetensors directory")
    if not _HUB_ID.match(source):
        raise CheckpointError(
            f"{source!r} is not a directory here; give a checkpoint directory, 'demo', or a hub id such as 'org/name'"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(files)))
    except Exception as error:
        raise CheckpointError(
            f"{source!r} is not a directory here and could not be fetched from the hub ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:160]}); give a directory, or check the id and the network"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    if not path.exists():
        raise CheckpointError(
            f"{path.parent} has no {path.name}; a checkpoint directory needs it: restore it, or give another directory"
        )
    try:
        data = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); restore it from the checkpoint's source") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; a JSON object is needed")
    return data


def _eos(path: Path, config: ModelConfig) -> tuple[int, ...]:
    file = path / "generation_config.json"
    if not file.exists():
        return config.eos_token_id
    eos = read_json(file).get("eos_token_id")
    if eos is None:
        return config.eos_token_id
    listed = token_ids("generation_config.json eos_token_id", eos)
    return tuple(dict.fromkeys((*listed, *config.eos_token_id)))


def _index(path: Path) -> dict[str, tuple[Path, str]]:
    """Canonical tensor name to (file, name in the file), over every safetensors file of the directory."""
    listing = path / "model.safetensors.index.json"
    if listing.exists():
        table = read_json(listing).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise CheckpointError(f"{listing} has no weight_map of names to files; restore it from the checkpoint")
        files = [path / name for name in sorted(set(table.values()))]
    else:
        files = sorted(file for file in path.glob("*.safetensors") if file.name != DRAFT_FILE)
    if not files:
        raise CheckpointError(f"{path} has no *.safetensors file; only safetensors weights are read")
    index: dict[str, tuple[Path, str]] = {}
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{listing.name} lists {file.name}, which is not in {path}; fetch the missing shard")
        try:
            with safe_open(file, framework="pt") as handle:
                names = list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a whole safetensors file ({error}); fetch it again") from None
        for name in names:
            if IGNORED.match(name):
                continue
            key = canonical(name)
            if key in index:
                raise CheckpointError(f"{path} holds {key} twice ({index[key][1]!r} and {name!r}); keep one of them")
            index[key] = (file, name)
    return index


def _fill(model: HybridModel, index: dict[str, tuple[Path, str]], table: dict[str, list[Part]]) -> None:
    wanted = [part for parts in table.values() for part in parts]
    missing = [part.name for part in wanted if part.name not in index]
    extra = sorted(set(index) - {part.name for part in wanted})
    if model.config.tie_word_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
    if missing or extra:
        lines = [f"{len(missing)} missing: {', '.join(missing)}"] if missing else []
        lines += [f"{len(extra)} left over: {', '.join(extra)}"] if extra else []
        raise CheckpointError(
            f"the tensors of this checkpoint do not fit its config; {'; '.join(lines)}. Check that config.json and "
            "the weights belong together"
        )
    handles: dict[Path, Any] = {}
    params = dict(model.named_parameters())
    try:
        for name, parts in table.items():
            at, target = 0, params[name].data
            for part in parts:
                file, stored = index[part.name]
                if file not in handles:
                    handles[file] = safe_open(file, framework="pt")
                tensor = handles[file].get_tensor(stored)
                if tuple(tensor.shape) != part.shape:
                    raise CheckpointError(
                        f"{stored} in {file.name} has shape {tuple(tensor.shape)}, but config.json asks for "
                        f"{part.shape}: check that config.json and the weights belong together"
                    )
                rows = part.shape[0]
                target[at : at + rows] = tensor.reshape(target[at : at + rows].shape).to(target.dtype)
                at += rows
    except SafetensorError as error:
        raise CheckpointError(f"a tensor could not be read ({error}); fetch the checkpoint again") from None
    for name, value in params.items():
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"weights of {name} hold NaN or infinity; the checkpoint is damaged: fetch it again")
