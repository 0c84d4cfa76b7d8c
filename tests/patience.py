"""How long tests wait for what must come. A machine may be slow or stand still; what hangs never comes."""

from __future__ import annotations

PATIENCE_S = 180.0  # shorter than what pyproject.toml gives a test in all
