"""What an engine counts: tokens and time, for its load figures and the credit of waiting requests.

Written by the engine thread; other threads read figures that were true at some recent moment.
"""

from __future__ import annotations

from transom.llm.flight import Flight


class Meter:
    """Totals since the start. Model time is that with a batch at the device, `step_s` that of all steps."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.retractions = 0
        self._model_s = self._landed_s = 0.0
        self._computed_tokens = 0
        self._ahead_tokens = 0

    def landed(self, flight: Flight) -> None:
        """Count what a flight has computed."""
        self._model_s += flight.ended_s - max(flight.launched_s, self._landed_s)
        self._landed_s = flight.ended_s
        self._computed_tokens += sum(step.count for step in flight.steps)
        self._ahead_tokens += sum(step.count for step in flight.steps if step.ahead)

    @property
    def tokens_per_s(self) -> float:
        """What the model has computed in a second of its time so far, 1 at least."""
        return max(self._computed_tokens / self._model_s, 1.0) if self._model_s else 1.0

    def figures(self) -> dict[str, float]:
        return {
            "computed_tokens": self._computed_tokens,
            "ahead_tokens": self._ahead_tokens,
            "step_seconds": self.step_s,
            "model_seconds": self._model_s,
            "retractions": self.retractions,
        }
