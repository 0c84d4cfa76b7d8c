"""The decode worker process: takes jobs of its encoder one by one and answers with pixels and samples.

A crash, a loop or a memory bomb in a decoder ends this process and nothing else. Loads no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import signal
import socket
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transom.encoder.media import wire
from transom.encoder.media.audio import decode_audio
from transom.encoder.media.faults import memory_fault
from transom.encoder.media.image import decode_image
from transom.encoder.media.session import Sessions
from transom.encoder.media.video import plan_clip
from transom.errors import MediaError
from transom.log import setup_from_arguments
from transom.messages import MediaSize

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PARTS_AHEAD = 2


class _Stopped(Exception):
    """The encoder does not want the rest."""


class _Link:
    """The socket to the encoder, with a bound on the parts that it has not taken over yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sessions = Sessions()
        self._ahead = 0
        self._over: list[int] = []

    def next_job(self) -> tuple[wire.Job, int | None]:
        while self._over:
            self.sessions.forget(self._over.pop())
        while True:
            request, fd = wire.receive_request(self.sock)
            if isinstance(request, wire.Ack):
                self._ahead -= 1
            elif isinstance(request, wire.Forget):
                self.sessions.forget(request.clip)
            elif not isinstance(request, wire.Stop):
                return request, fd

    def send_size(self, size: MediaSize) -> None:
        """Send the size of the item that is about to be decoded."""
        wire.send(self.sock, wire.Measured(size=size))

    def send_part(self, reply: wire.Reply, values: NDArray[Any]) -> None:
        """Send one part; wait while too many are under way; raise _Stopped when told to stop."""
        while self._take(wait=self._ahead >= _PARTS_AHEAD):
            pass
        file = wire.MemoryFile(values.nbytes)
        try:
            if values.nbytes:
                file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            wire.send(self.sock, reply, file.fd)
        finally:
            file.close()
        self._ahead += 1

    def _take(self, *, wait: bool) -> bool:
        """Take one message; return False when there is none and no need to wait."""
        self.sock.setblocking(wait)
        try:
            request, _ = wire.receive_request(self.sock)
        except BlockingIOError:
            return False
        finally:
            self.sock.setblocking(True)
        if isinstance(request, wire.Stop):
            raise _Stopped
        if isinstance(request, wire.Forget):
            self._over.append(request.clip)
            return True
        assert isinstance(request, wire.Ack)
        self._ahead -= 1
        return True


def _run_image(link: _Link, job: wire.ImageJob, data: memoryview) -> tuple[str, ...]:
    image = decode_image(data, job, link.send_size)
    height, width = image.pixels.shape[:2]
    link.send_part(wire.Picture(height=height, width=width, target=image.target), image.pixels)
    return ()


def _run_audio(link: _Link, job: wire.AudioJob, data: memoryview) -> tuple[str, ...]:
    notes: list[str] = []
    for samples, last in decode_audio(data, job, notes, link.send_size):
        link.send_part(wire.Sound(samples=len(samples), last=last), samples)
    return tuple(notes)


def _run_plan(link: _Link, job: wire.VideoJob, data: memoryview) -> tuple[str, ...]:
    wire.send(link.sock, plan_clip(data, job))
    return ()


def _run_slice(link: _Link, job: wire.SliceJob, data: memoryview) -> tuple[str, ...]:
    for position, pixels in link.sessions.of(job.clip, data).units(job):
        frames, height, width = pixels.shape[:3]
        reply = wire.FrameUnit(position=position, frames=frames, height=height, width=width)
        link.send_part(reply, pixels)
    return ()


def _run_track(link: _Link, job: wire.TrackJob, data: memoryview) -> tuple[str, ...]:
    session = link.sessions.of(job.clip, data)
    last = False
    for samples, last in session.pieces(job):
        link.send_part(wire.Sound(samples=len(samples), last=last), samples)
    return session.notes() if last else ()


def _run(link: _Link, job: wire.Job, fd: int) -> tuple[str, ...]:
    size_bytes = os.fstat(fd).st_size
    # Private: older kernels map no memory as shared that is sealed against writing.
    data = memoryview(mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    if isinstance(job, wire.ImageJob):
        return _run_image(link, job, data)
    if isinstance(job, wire.AudioJob):
        return _run_audio(link, job, data)
    if isinstance(job, wire.SliceJob):
        return _run_slice(link, job, data)
    if isinstance(job, wire.TrackJob):
        return _run_track(link, job, data)
    return _run_plan(link, job, data)


def serve(sock: socket.socket) -> None:
    """Answer jobs until the encoder goes away."""
    link = _Link(sock)
    wire.send(sock, wire.Finished())  # ready
    while True:
        try:
            job, fd = link.next_job()
        except EOFError:
            return
        if fd is None:
            raise RuntimeError("job without a file")
        reply: wire.Reply
        try:
            reply = wire.Finished(notes=_run(link, job, fd))
        except _Stopped:
            reply = wire.Finished()
        except MediaError as error:
            reply = wire.Failed(message=error.message)
        except MemoryError:
            reply = wire.Failed(message=memory_fault("media"))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        except Exception:
            # Decoders raise what they like on hostile bytes; the item pays, not the process.
            logger.exception("decoder failed")
            reply = wire.Failed(message="media can't be decoded: its data is damaged")
        finally:
            os.close(fd)
        with contextlib.suppress(BrokenPipeError):
            wire.send(sock, reply)


def _confine(memory_mb: int) -> None:
    """Die with the encoder, leave no core file, stay below the memory limit."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        limit = memory_mb * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Entry of the process: descriptor of the socket, pid of the encoder, memory limit in MB, how to log."""
    descriptor, parent, memory_mb = (int(value) for value in sys.argv[1:4])
    setup_from_arguments("decoder", sys.argv[4:6])
    _confine(memory_mb)
    if os.getppid() != parent:
        return
    with socket.socket(fileno=descriptor) as sock:
        serve(sock)


if __name__ == "__main__":
    main()
