"""What a picture library's complaint means for a picture, in words that don't depend on the library.

Decode worker. Pure; the words of libraries name their classes, files and addresses, and change with versions.
"""

from __future__ import annotations

import re
import resource
import struct
import zlib

# What Pillow's plugins raise on broken files: nearly anything.
PICTURE_ERRORS = (
    OSError, ValueError, SyntaxError, EOFError, OverflowError, IndexError, KeyError, TypeError,
    AttributeError, ZeroDivisionError, RuntimeError, AssertionError, struct.error, zlib.error,
)  # fmt: skip
_TOO_EARLY = re.compile(r"truncat|end of (file|data)|not enough|unexpected end|premature|only got", re.I)
_TEXTS = re.compile(r"MAX_TEXT|text (chunk|memory)|Decompressed data too large", re.I)
_VARIANT = re.compile(
    r"not (available|supported|implemented)|unsupported|unknown (compression|(raw ?|pixel |file )?mode)"
    r"|cannot (load this image|decode|handle)|no codec|must be (1|2|4|8)",
    re.I,
)


def memory_fault(what: str) -> str:
    """Return the words for media whose decoding ran out of memory in this process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    bound = "there is" if limit == resource.RLIM_INFINITY else f"{limit // 2**20} MB, the limit of a decoder"
    return f"{what} needs more memory to decode than {bound}"


def picture_fault(error: Exception) -> str:
    """Return what an error of Pillow says of a picture."""
    text = str(error)
    if isinstance(error, EOFError) or _TOO_EARLY.search(text):
        return "its data is truncated"
    if _TEXTS.search(text):
        return "its text or colour profile inflates to more than is read"
    if isinstance(error, NotImplementedError) or _VARIANT.search(text):
        return "it uses a variant of its format that is not read"
    return "its data is damaged"
