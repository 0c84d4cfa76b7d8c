"""Batches on their way through the model: the engine plans the next one while one is computed.

On a CPU a thread of its own computes, one batch after the other; a GPU works on its own, and the thread waits
for it. Used by the engine thread; knows neither pools nor schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from transom.llm.request import Request
from transom.llm.runner import Batch, ModelRunner, Step
from transom.llm.sampler import Draw, Drawn


class Flight:
    """One batch, launched. `steps` are in the order in which they were planned."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.batch: Batch | None = None
        self.drawn: Drawn | None = None
        self.launched_s = self.ended_s = time.perf_counter()
        self.future: Future[None] = Future()

    @property
    def foreseeable(self) -> bool:
        """Tell whether the next step can be planned before this one has ended.

        What a prompt leaves in the cache, and what memory of its tokens a sampler has, is not known before.
        """
        return all(
            step.decoding and step.request.sampler is not None and not step.request.sampler.remembers
            for step in self.steps
        )

    @property
    def landed(self) -> bool:
        return self.future.done()

    def draws(self) -> dict[Request, Draw]:
        """Wait for the end; return the draw of each request that was due one, or raise what went wrong."""
        self.future.result()
        assert self.batch is not None
        assert self.drawn is not None
        return dict(zip(self.batch.place_of, self.drawn.draws(), strict=True))


class Runway:
    """Launches flights, which land in the order of their launch.

    With `overlap`, `launch` returns at once and `on_landing` is called, by another thread, when a flight has
    ended; without, it returns when the flight has ended.
    """

    def __init__(
        self, runner: ModelRunner, device: torch.device, on_landing: Callable[[], None], *, overlap: bool
    ) -> None:
        self._runner = runner
        self._on_landing = on_landing
        self._computes_itself = device.type != "cpu"
        self._thread = ThreadPoolExecutor(1, "device") if overlap else None

    def launch(self, steps: Sequence[Step], before: Flight | None) -> Flight:
        """Compute `steps` behind `before`, which has not landed yet. Errors come out of the flight."""
        flight = Flight(steps)
        try:
            flight.batch = self._runner.prepare(steps, before.batch if before else None)
            if self._thread is None or self._computes_itself:
                self._compute(flight, before)
            if self._thread is None:
                self._end(flight)
                flight.future.set_result(None)
            else:
                flight.future = self._thread.submit(self._fly, flight, before)
                flight.future.add_done_callback(lambda _: self._on_landing())
        except Exception as error:
            flight.future.set_exception(error)
        return flight

    def close(self) -> None:
        """Wait for what is in flight; nothing can be launched afterwards."""
        if self._thread is not None:
            self._thread.shutdown()

    def _fly(self, flight: Flight, before: Flight | None) -> None:
        if flight.drawn is None:
            self._compute(flight, before)
        self._end(flight)

    def _compute(self, flight: Flight, before: Flight | None) -> None:
        assert flight.batch is not None
        tokens = None
        if len(flight.batch.fed):
            if before is None or before.drawn is None:
                raise RuntimeError("the step before failed")
            tokens = before.drawn.tokens
        flight.drawn = self._runner.compute(flight.batch, tokens)

    def _end(self, flight: Flight) -> None:
        assert flight.drawn is not None
        flight.drawn.wait()
        flight.ended_s = time.perf_counter()
