"""What the facade adds to the packages below it: names resolved to checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.core.errors import CheckpointError

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel


def demo_checkpoint() -> Path:
    """Directory of the shipped demo checkpoint.

    Raises:
        CheckpointError: This installation has none.
    """
    path = Path(__file__).resolve().parent.parent / "data" / "demo"
    if not (path / "config.json").exists():
        raise CheckpointError("the demo checkpoint is not beside this installation: use a source checkout, or a path")
    return path


def load(
    source: str | Path = "demo",
    *,
    device: str | None = None,
    dtype: str | None = None,
    exact: bool | None = None,
) -> HybridModel:
    """Load a checkpoint.

    Args:
        source: "demo", a Hugging Face directory, or a hub id "org/name" (only then is the network asked).
        device: "cpu" (default) or "cuda".
        dtype: "float32", "bfloat16" or "float64"; default float32 on a CPU and bfloat16 on a GPU.
        exact: Numerical class; default True on a CPU (False in float64), False on a GPU.

    Returns:
        The model, with its tokenizer when the checkpoint has one.

    Raises:
        UserError: The source, the device or the type cannot be used; the sentence says why.
    """
    from workbench.model.weights.load import load_model

    where = demo_checkpoint() if str(source) == "demo" and not Path(source).is_dir() else source
    model = load_model(where, device=device, dtype=dtype, exact=exact)
    model.source = str(source)
    return model
