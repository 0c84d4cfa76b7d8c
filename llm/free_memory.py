"""How much memory a device has left, for pools that take a share of it (llm processes at their start).

On a CPU that is what the machine could give without swapping, or what the container's limit leaves of it.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from transom.errors import ConfigError

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of the device. Raise ConfigError where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        raise ConfigError(f"kv_memory_share: what {device} has free is not known, set kv_memory_gb instead")
    return free_host_bytes(_MEMINFO, _CGROUP)


def free_host_bytes(meminfo: Path, cgroup: Path) -> int:
    """Return what these files of the kernel say is free; no or an unlimited `cgroup` takes nothing away."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        raise ConfigError(f"kv_memory_share: {meminfo} does not tell what is free, set kv_memory_gb instead")
    free = int(found[1]) * 1024
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        return min(free, max(int(limit) - int(used), 0))
    except (OSError, ValueError):  # "max" is no number
        return free
