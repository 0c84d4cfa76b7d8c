"""Pools as a share of what is free: on this machine, in a container, and where nobody tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from transom.errors import ConfigError
from transom.llm.build import build_engine
from transom.llm.config import DecodeConfig
from transom.llm.free_memory import free_bytes, free_host_bytes

MEMINFO = "MemTotal:  9000 kB\nMemFree:   100 kB\nMemAvailable:   4000 kB\n"


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [
        ("max", "123", 4_096_000),
        ("2000000", "500000", 1_500_000),
        ("5", "7", 0),
        ("99000000", "0", 4_096_000),
    ],
)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, used: str, free: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    assert free_host_bytes(tmp_path / "meminfo", tmp_path) == free


def test_without_a_container_and_without_a_kernel_that_tells(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert free_host_bytes(tmp_path / "meminfo", tmp_path / "none") == 4_096_000
    with pytest.raises(ConfigError, match="set kv_memory_gb instead"):
        free_host_bytes(tmp_path / "none", tmp_path)
    with pytest.raises(ConfigError, match="what meta has free is not known"):
        free_bytes(torch.device("meta"))


def test_pools_take_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transom.llm.build.free_bytes", lambda device: 40_000_000)
    config = DecodeConfig(model="mimo-nano", kernels="torch", device="cpu", kv_memory_share=0.25)
    engine, _ = build_engine(config, lambda events: None)
    plan = engine._holdings._pools.plan
    assert 9_900_000 < plan.total_bytes <= 10_000_000
    assert f"in {plan.swa_bytes / 1e6:.1f} MB" in plan.describe()
