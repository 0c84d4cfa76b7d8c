"""What `device` may be for the language model."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from transom.errors import ConfigError
from transom.llm import engine as engine_module
from transom.llm.build import pick_device
from transom.llm.runner import make_current


def test_a_device_that_is_none_is_told_in_one_line() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError) as caught:
        pick_device("abacus")
    assert caught.value.message == "device 'abacus' is none: expected auto, cpu, cuda or cuda:N"


def test_a_numbered_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cpu", "cuda", "cuda:1"):
        make_current(torch.device(name))
    assert chosen == [torch.device("cuda:1")]


def test_the_engine_thread_makes_its_device_current(
    model: Any, make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the thread that launches kernels, and each thread has a current device of its own."""
    seen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        engine_module, "make_current", lambda device: seen.append((threading.current_thread().name, device))
    )
    engine = make_harness(model).engine
    engine.start(lambda error: None)
    engine.stop()
    assert seen == [("engine", torch.device("cpu"))]
