"""Fixtures of the GPU tests: the device, the demo checkpoint on it and on the CPU, and rows of what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.facade import demo_checkpoint
from workbench.model.hybrid import HybridModel
from workbench.model.weights.load import load_model

PROMPTS = Path(__file__).resolve().parents[2] / "data" / "prompts" / "demo.jsonl"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-device", default="cuda", help="where the GPU tests run; cpu is a rehearsal")
    parser.addoption("--rows", default="", help="JSONL file that measured rows are added to")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    name = request.config.getoption("--gpu-device", default="cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return torch.device(name)


@pytest.fixture(scope="session")
def on_device(device: torch.device) -> HybridModel:
    torch.backends.cuda.matmul.allow_tf32 = False
    return load_model(demo_checkpoint(), device=device, dtype="float32", exact=False)


@pytest.fixture(scope="session")
def on_cpu() -> HybridModel:
    return load_model(demo_checkpoint(), dtype="float32", exact=False)


@pytest.fixture(scope="session")
def prompts(on_cpu: HybridModel) -> list[list[int]]:
    assert on_cpu.tokenizer is not None
    lines = PROMPTS.read_text("utf-8").splitlines()
    return [on_cpu.tokenizer.encode(json.loads(line)["text"])[:64] for line in lines]


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Callable[..., None]]:
    path = request.config.getoption("--rows", default="")
    held: list[dict[str, Any]] = []

    def add(name: str, **values: Any) -> None:
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu (rehearsal)"
        held.append({"name": name, "device": gpu, "torch": torch.__version__, **values})
        print(json.dumps(held[-1]))

    yield add
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in held)
