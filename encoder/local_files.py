"""Media in files of the encoder's machine: only below folders that the operator names, only regular files.

Fetch worker. What counts is where the opened file really lies, links resolved; a client can't tell what
lies outside of the folders. Knows nothing of media formats or requests.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from transom.errors import ConfigError, MediaError

_READ_BYTES = 1 << 20
_HOSTS = ("", "localhost")
_NOT_THERE = "no readable file of this path lies in the folders that are allowed"


def is_file_url(url: str) -> bool:
    """Whether a URL names a file."""
    return url[:5].lower() == "file:"


class LocalFiles:
    """The allowed folders, none by default. `read` blocks; call it in a thread."""

    def __init__(self, folders: Sequence[str], max_bytes: int) -> None:
        """Resolve the folders; raise ConfigError for one that is not there."""
        self._folders: list[Path] = []
        self._max_bytes = max_bytes
        for folder in folders:
            path = Path(folder)
            if not path.is_absolute() or not path.is_dir():
                raise ConfigError(f"media_folders {folder!r}: an absolute path of a folder is needed")
            self._folders.append(path.resolve())

    def read(self, url: str) -> bytearray:
        """Return the bytes of the file that a file: URL names; raise MediaError when it may not be read."""
        descriptor = self._open(self._path(url))
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise MediaError("the file: URL names something that is not a regular file")
            if info.st_size > self._max_bytes:
                raise MediaError(f"the file has {info.st_size} bytes, limit {self._max_bytes}")
            return self._read(descriptor)
        except OSError:
            raise MediaError("the file can't be read") from None
        finally:
            os.close(descriptor)

    def _path(self, url: str) -> Path:
        if not self._folders:
            raise MediaError("file: URLs are not allowed here")
        try:
            parts = urlsplit(url)
        except ValueError:
            raise MediaError("the file: URL is malformed") from None
        if parts.netloc.lower() not in _HOSTS:
            raise MediaError("the file: URL names a host; file:///path is what can be read")
        if parts.query or parts.fragment:
            raise MediaError("the file: URL has a query or a fragment; in a path ? is %3F and # is %23")
        path = os.fsdecode(unquote_to_bytes(parts.path))
        if not path.startswith("/") or "\0" in path:
            raise MediaError("the file: URL has no absolute path")
        return Path(path)

    def _open(self, path: Path) -> int:
        try:
            place = path.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: links in a circle
            raise MediaError(_NOT_THERE) from None
        self._check(place)
        try:
            # Neither a pipe nor a terminal may hold the thread.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            descriptor = os.open(place, flags)
        except OSError:
            raise MediaError(_NOT_THERE) from None
        try:
            # A folder on the way may have been swapped for a link since: what was opened is what counts.
            self._check(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check(self, place: Path) -> None:
        if not any(place.is_relative_to(folder) for folder in self._folders):
            raise MediaError(_NOT_THERE)

    def _read(self, descriptor: int) -> bytearray:
        data = bytearray()
        while piece := os.read(descriptor, _READ_BYTES):
            data += piece
            if len(data) > self._max_bytes:
                raise MediaError(f"the file has more than {self._max_bytes} bytes, the limit")
        return data
