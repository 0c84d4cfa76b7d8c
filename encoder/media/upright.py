"""How a decoded video frame is to be turned and mirrored, as its container says.

Decode worker. Pure; knows nothing of decoders but the name of a frame's side data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MATRIX_BYTES = 36  # 3 x 3 of int32


@dataclass(frozen=True, slots=True)
class Turn:
    """What makes a frame upright: rows and columns change places first, then each may be reversed."""

    transpose: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of an upright frame; of a stored one, given the upright size."""
        return (width, height) if self.transpose else (height, width)

    def apply(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the upright view of (height, width, 3)."""
        if self.transpose:
            pixels = pixels.swapaxes(0, 1)
        return pixels[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


def turn_of(frame: Any) -> Turn:
    """Return the turn that a frame's display matrix stands for, to the next quarter.

    A point (x, y) is shown at (a x + c y, b x + d y) for a matrix a b . / c d . / . . .
    """
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX" and len(raw := bytes(data)) >= _MATRIX_BYTES:
            a, b, _, c, d = np.frombuffer(raw[:20], np.int32).tolist()
            if abs(b) > abs(a):
                return Turn(transpose=True, flip_rows=b < 0, flip_columns=c < 0)
            return Turn(flip_rows=d < 0, flip_columns=a < 0)
    return Turn()
