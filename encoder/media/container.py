"""Opens sound and video containers with FFmpeg, restricted to what a chat needs.

Decode worker. Only the given bytes are read: no playlists, no references to other files or hosts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import av.error
import av.logging
from av.stream import Discard

from transom.encoder.media.faults import memory_fault
from transom.encoder.media.sniff import describe, is_no_clip
from transom.errors import MediaError

# Playlist, concatenation, image-sequence and network demuxers are left out: they open what the file names.
DEMUXERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,ivf,obu,av1,flv,asf,gif,"
    "ogg,mp3,wav,w64,flac,aac,amr,amrnb,amrwb,aiff,caf,au,ac3,eac3,dts,wv,ape,tta,opus"
)
_ATTACHED_PICTURE = 0x0400
# How demuxers say that they get no further in damaged bytes: some ask to be tried again, and again; an
# IndexError is PyAV's word for a packet of a track that has only now appeared.
NO_FURTHER = (av.error.InvalidDataError, av.error.EOFError, av.error.BlockingIOError, IndexError)

av.logging.set_level(av.logging.PANIC)


class MemoryReader(io.RawIOBase):
    """A seekable file over bytes that are not copied: media can be large and are opened more than once."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be sought."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; positions beyond the end read nothing."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Copy what fits from the position on."""
        part = self._data[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def reason(error: Exception) -> str:
    """Return what a library's error means for the media, in words that don't depend on the library."""
    if isinstance(error, (av.error.DecoderNotFoundError, av.error.PatchWelcomeError)):
        return "its codec is not supported"
    if isinstance(error, av.error.EOFError):
        return "it ends too early"
    if isinstance(error, av.error.InvalidDataError):
        return "it is damaged or of no known format"
    return "it can't be read"


@contextmanager
def open_container(data: memoryview, what: str) -> Iterator[Any]:
    """Open the bytes of a sound or video; raise MediaError when no allowed demuxer knows them."""
    if not len(data):
        raise MediaError(f"{what} is empty (0 bytes)")
    try:
        container = av.open(
            MemoryReader(data),
            options={"format_whitelist": DEMUXERS, "protocol_whitelist": "none"},
            metadata_errors="replace",
        )
    except MemoryError:
        raise MediaError(memory_fault(what)) from None
    except (av.error.FFmpegError, ValueError, OSError) as error:
        found = describe(data)
        if is_no_clip(found):
            raise MediaError(f"this is no {what}: the bytes look like {found}") from None
        raise MediaError(f"{what} can't be opened ({reason(error)}): the bytes look like {found}") from None
    try:
        yield container
    finally:
        container.close()


def video_stream(container: Any) -> Any:
    """Return the main video stream, cover pictures aside; raise MediaError when there is none."""
    streams = [s for s in container.streams.video if not int(s.disposition) & _ATTACHED_PICTURE]
    for stream in streams:
        if stream.codec_context is not None:
            return stream
    raise MediaError("video has no picture track that can be decoded")


def only(container: Any, stream: Any) -> None:
    """Let the demuxer pass over all other streams: their packets would be read for nothing."""
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all


def audio_stream(container: Any) -> Any | None:
    """Return the main sound stream, or None."""
    for stream in container.streams.audio:
        if stream.codec_context is not None and stream.codec_context.sample_rate:
            return stream
    return None


def duration_s(container: Any, stream: Any) -> float | None:
    """Return the length that the container claims, or None."""
    if stream.duration is not None and stream.time_base is not None and stream.duration > 0:
        return float(stream.duration * stream.time_base)
    if container.duration is not None and container.duration > 0:
        return float(container.duration / av.time_base)
    return None
