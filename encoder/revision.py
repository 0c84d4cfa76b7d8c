"""Names the weights and the preprocessing of a checkpoint, for content keys. Encoder process."""

from __future__ import annotations

from pathlib import Path

from transom.media_key import framed_digest

_SAMPLE_BYTES = 64 * 1024
# Raised when the same bytes with the same settings would give other embeddings than before.
_PREPROCESSING = 2


def model_revision(folder: Path, *decoding: object) -> str:
    """Return a digest of config files, of the weight files' names, sizes, times, heads and tails.

    `decoding` are the settings that change the pixels of a picture or frame.
    """
    parts: list[bytes] = [str(_PREPROCESSING).encode(), *(str(value).encode() for value in decoding)]
    for place in (folder, folder / "audio_tokenizer"):
        config = place / "config.json"
        parts.append(config.read_bytes() if config.is_file() else b"")
        for path in sorted(place.glob("*.safetensors")):
            stat = path.stat()
            parts.append(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
            with path.open("rb") as file:
                parts.append(file.read(_SAMPLE_BYTES))
                file.seek(max(0, stat.st_size - _SAMPLE_BYTES))
                parts.append(file.read(_SAMPLE_BYTES))
    return framed_digest(*parts, person=b"model-revision")
