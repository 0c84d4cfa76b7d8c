"""Keeps an event loop free of work that grows with a size (front and fetch workers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

_LARGE_BYTES = 1024 * 1024
T = TypeVar("T")


async def off_loop(size_bytes: int, function: Callable[..., T], *args: Any) -> T:
    """Call a function whose work grows with a size: small ones here, large ones in a thread."""
    if size_bytes < _LARGE_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)
