"""Which batch sizes of decoding get a CUDA graph: pure functions (llm processes at their start).

Knows no torch and no model: what a size costs is measured by whoever captures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_STEPS = 8  # from here on two sizes an octave


def graph_sizes(most: int) -> list[int]:
    """Return the sizes that pay for batches of 1 to `most` rows, ascending; the last is `most`.

    Decoding waits for weights, so that a few rows of padding cost next to nothing, while each graph costs
    memory and a part of the start. Small sizes double; from 8 on there is one between two powers of two, so
    that less than a third of the rows are padding.
    """
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        between = last >= _STEPS and last & (last - 1) == 0
        sizes.append(last * 3 // 2 if between else 1 << last.bit_length())
    return [*(size for size in sizes if size < most), most]


def padded_size(sizes: Sequence[int], rows: int) -> int | None:
    """Return the least of the ascending `sizes` that holds `rows`, None when none does."""
    return next((size for size in sizes if size >= rows), None)


def capture_within(
    sizes: Sequence[int], most_bytes: int, capture: Callable[[int], int], undo: Callable[[int], None]
) -> list[int]:
    """Capture sizes, the largest first, as long as they take at most `most_bytes`; return them ascending.

    `capture` returns what all sizes take with this one: small ones reuse the memory of large ones, so those
    come first. One that passes the limit is undone; smaller ones are still tried while there is none.
    """
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if capture(size) <= most_bytes:
            kept.append(size)
            continue
        undo(size)
        if kept:
            break
    return sorted(kept)
