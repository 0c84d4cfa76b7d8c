"""Where a benchmark's row comes from: commit, versions, machine. Knows no benchmark."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from transom import __version__


def origin(benchmark: str, device: str = "") -> dict[str, str]:
    """Return what a row needs to be traced; the commit is empty outside of a checkout.

    `device` names what computes; nothing stands for this machine's CPU.
    """
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() if done.returncode == 0 else ""
    except OSError:
        commit = ""
    return {
        "benchmark": benchmark,
        "commit": commit,
        "transom": __version__,
        "python": platform.python_version(),
        "device": device or f"cpu {platform.machine()}",
    }


def device_name(setting: str) -> str:
    """Return how rows name what a `device` setting means on this machine; nothing for its CPU."""
    if setting == "cpu":
        return ""
    import torch  # late: most benchmarks need none

    if setting == "auto" and not torch.cuda.is_available():
        return ""
    name = "cuda" if setting == "auto" else setting
    return torch.cuda.get_device_name(name) if name.startswith("cuda") and torch.cuda.is_available() else name
