"""How long a WAV file says that it is: FFmpeg cuts the claim to what is there.

Decode worker. Reads the chunk headers alone; pure.
"""

from __future__ import annotations

import struct

# Writers to a pipe, which don't know the length, leave one of these.
_UNKNOWN = (0, 0x7FFFFFFF, 0xFFFFFFFF)
_MOST_CHUNKS = 64


def wav_length_s(data: memoryview) -> float | None:
    """Return the seconds that the header of a RIFF WAVE file claims, or None when it claims nothing."""
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        return None
    position, byte_rate = 12, 0
    for _ in range(_MOST_CHUNKS):
        if position + 8 > len(data):
            return None
        kind, size_bytes = struct.unpack_from("<4sI", data, position)
        if kind == b"fmt " and position + 20 <= len(data):
            (byte_rate,) = struct.unpack_from("<I", data, position + 16)
        if kind == b"data":
            return size_bytes / byte_rate if byte_rate and size_bytes not in _UNKNOWN else None
        position += 8 + size_bytes + size_bytes % 2
    return None
