"""Names what bytes look like, for error messages; nothing is decided by it."""

from __future__ import annotations

_HEAD_BYTES = 512
_PICTURES = ("a JPEG picture", "a PNG picture", "a GIF picture", "a WebP picture", "an AVIF picture")
_NEITHER_SOUND_NOR_VIDEO = (
    *_PICTURES, "HEIC", "an HTML page", "XML or SVG", "a PDF", "a playlist", "a Photoshop file",
    "a ZIP archive", "gzip data", "JSON", "text",
)  # fmt: skip


def is_no_clip(words: str) -> bool:
    """Whether what `describe` returned can be neither sound nor video, damaged or not."""
    return words in _NEITHER_SOUND_NOR_VIDEO


def describe_unreadable_picture(data: memoryview, *, reads_heic: bool) -> str:
    """Return the same for bytes that no picture could be read from: then pictures are damaged."""
    found = describe(data)
    if found in _PICTURES or (reads_heic and found == "HEIC"):
        return f"a damaged {found.removeprefix('a ').removeprefix('an ').removesuffix(' picture')}"
    return found


def describe(data: memoryview) -> str:
    """Return a few words on the content of a file, from its first bytes."""
    head = bytes(data[:_HEAD_BYTES])
    text = head.lstrip().lower()
    if not head:
        return "nothing"
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if text.startswith((b"<?xml", b"<svg")):
        return "XML or SVG"
    if head.startswith(b"%PDF"):
        return "a PDF"
    if head.startswith(b"#EXTM3U"):
        return "a playlist"
    if head[4:8] == b"ftyp":
        brand = head[8:12].decode("latin-1")
        if brand in ("avif", "avis"):
            return "an AVIF picture"
        return (
            "HEIC" if brand in ("heic", "heix", "mif1", "msf1", "hevc") else f"an MP4 family file ({brand!r})"
        )
    for magic, name in (
        (b"\xff\xd8", "a JPEG picture"),
        (b"\x89PNG", "a PNG picture"),
        (b"GIF8", "a GIF picture"),
        (b"8BPS", "a Photoshop file"),
        (b"\x1aE\xdf\xa3", "Matroska or WebM"),
        (b"OggS", "Ogg"),
        (b"ID3", "MP3"),
        (b"fLaC", "FLAC"),
        (b"PK\x03\x04", "a ZIP archive"),
        (b"\x1f\x8b", "gzip data"),
        (b"{", "JSON"),
    ):
        if head.startswith(magic):
            return name
    if head.startswith(b"RIFF"):
        return {b"WEBP": "a WebP picture", b"WAVE": "a WAV sound", b"AVI ": "an AVI video"}.get(
            head[8:12], "a RIFF file"
        )
    printable = sum(32 <= byte < 127 or byte in (9, 10, 13) for byte in head)
    return "text" if printable == len(head) else "unknown binary data"
