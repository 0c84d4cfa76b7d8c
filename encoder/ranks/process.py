"""A rank: the process of one device. Prepares pieces on the device, embeds batches, hands the rows over.

Three kinds of threads, so that none waits for another's work: the main one reads orders, two prepare, one
runs the towers, one hands over. A crash here ends this process and nothing else.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transom.encoder.engine import Patches, Towers, choose_device
from transom.encoder.media.wire import MemoryFile, map_array
from transom.encoder.preprocess import FramePreprocessor, MelPreprocessor
from transom.encoder.ranks import wire
from transom.encoder.ranks.progress import PREPARE_THREADS, Progress
from transom.errors import MediaError, TransomError
from transom.log import setup_from_arguments

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
Span = tuple[float, float]
Prepared = tuple[Patches | Tensor, Span]


class Rank:
    """Serves one front over one socket."""

    def __init__(self, sock: socket.socket, towers: Towers, progress: Progress) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._towers = towers
        self._progress = progress
        self._frames = FramePreprocessor(towers.processor_cfg, towers.device)
        self._mel = MelPreprocessor(towers.audio_cfg.mel, towers.device)
        self._preparing = ThreadPoolExecutor(PREPARE_THREADS, "prepare", initializer=self._name_thread)
        self._thread_numbers = iter(range(PREPARE_THREADS))
        self._local = threading.local()
        self._delivering = ThreadPoolExecutor(1, "deliver")
        self._batches: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
        self._pieces: dict[int, tuple[Future[Prepared], int | None]] = {}

    def _name_thread(self) -> None:
        self._local.number = next(self._thread_numbers)

    def serve(self) -> None:
        """Take orders until the front is gone."""
        threading.Thread(target=self._run_batches, name="forward", daemon=True).start()
        while True:
            try:
                order, fd = wire.receive_order(self._sock)
            except (EOFError, ConnectionResetError):
                return
            if isinstance(order, (wire.Frames, wire.Sound)):
                self._pieces[order.number] = self._preparing.submit(self._prepare, order, fd), fd
            elif isinstance(order, wire.Forward):
                self._batches.put(order.numbers)
            elif isinstance(order, wire.Drop):
                for number in order.numbers:
                    self._drop(number)

    def _drop(self, number: int) -> None:
        future, fd = self._pieces.pop(number, (None, None))
        if future is not None and future.cancel() and fd is not None:
            os.close(fd)

    def _send(self, answer: wire.Answer, fd: int | None = None) -> None:
        with self._send_lock:
            wire.send(self._sock, answer, fd)

    def _prepare(self, order: wire.Frames | wire.Sound, fd: int | None) -> Prepared:
        """Preparing thread: make patches or mel frames on the device."""
        self._progress.begin(self._local.number, order.number)
        started = time.monotonic()
        device = self._towers.device
        try:
            if device.type != "cuda":
                return self._make(order, fd), (started, time.monotonic())
            # A stream of its own: the copy to the device must not wait for the running forward.
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                payload = self._make(order, fd)
                stream.synchronize()
            return payload, (started, time.monotonic())
        finally:
            self._progress.end(self._local.number)

    @torch.inference_mode()
    def _make(self, order: wire.Frames | wire.Sound, fd: int | None) -> Patches | Tensor:
        if isinstance(order, wire.Frames):
            shape = (order.frames, order.height, order.width, 3)
            return Patches(*self._frames(map_array(fd, np.uint8, shape), order.target))
        return self._mel(map_array(fd, np.float32, (order.samples,)), order.skip, order.frames)

    def _run_batches(self) -> None:
        """Forward thread."""
        try:
            while True:
                self._run_batch(self._batches.get())
        except BaseException:
            logger.exception("the forward thread ended")
            # Without it the rank would take pieces and never answer.
            os._exit(1)

    def _run_batch(self, numbers: tuple[int, ...]) -> None:
        batch: list[tuple[int, Patches | Tensor, Span]] = []
        for number in numbers:
            future, _ = self._pieces.pop(number, (None, None))
            if future is None:
                continue
            try:
                batch.append((number, *future.result()))
            except CancelledError:
                continue
            except Exception as error:
                self._fail(number, error)
        started = time.monotonic()
        results = self._towers.embed([payload for _, payload, _ in batch]) if batch else []
        forward = (started, time.monotonic())
        self._send(wire.Done(pieces=len(batch), forward_s=forward))
        for (number, _, prepared), rows in zip(batch, results, strict=True):
            if isinstance(rows, Exception):
                self._fail(number, rows)
            else:
                self._delivering.submit(self._deliver, number, rows, prepared, forward)

    def _fail(self, number: int, error: Exception) -> None:
        is_media = isinstance(error, MediaError)
        if not is_media:
            logger.error("piece %d failed", number, exc_info=error)
        message = error.message if isinstance(error, TransomError) else type(error).__name__
        self._send(wire.Failed(number=number, message=message, is_media=is_media))

    def _deliver(self, number: int, rows: Tensor, prepared: Span, forward: Span) -> None:
        """Delivering thread: the rows leave in memory that the front maps."""
        try:
            values = self._towers.to_host(rows)
            file = MemoryFile(values.nbytes)
            try:
                file.write(values.reshape(-1).view(np.uint8).data)
                shape = (values.shape[0], values.shape[1])
                self._send(
                    wire.Rows(number=number, shape=shape, prepared_s=prepared, forward_s=forward), file.fd
                )
            finally:
                file.close()
        except OSError as error:
            logger.error("piece %d can't be handed over: %s", number, error)
            os._exit(1)


def _confine(parent: int) -> bool:
    """Die with the front, leave no core file; return False when the front is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.getppid() == parent


def main() -> int:
    """Entry of the process: descriptor of the socket, pid of the front, log level, text or json."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    setup_from_arguments("rank", sys.argv[3:5])
    if not _confine(parent):
        return 0
    sock = socket.socket(fileno=descriptor)
    start: Any
    start, page = wire.receive_order(sock)
    assert isinstance(start, wire.Start)
    assert page is not None
    if start.threads:
        torch.set_num_threads(start.threads)
    try:
        device, dtype = choose_device(start.device, start.dtype, start.index)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        towers = Towers(Path(start.folder), device, dtype)
    except TransomError as error:
        wire.send(sock, wire.Unready(code=error.code, message=error.message))
        return 1
    rank = Rank(sock, towers, Progress(page))
    wire.send(sock, wire.Ready(device=str(device), dtype=dtype))
    rank.serve()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Torch's and the threads' orderly ends would only cost time: the front has gone.
    os._exit(code)
