"""Counts of what an engine does: where its time goes, and whether it compiles while it serves."""

from __future__ import annotations

from dataclasses import dataclass

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass
class EngineStats:
    """Counts since the engine started.

    Attributes:
      steps: prefill and decode steps started.
      host_seconds: time in ``Engine.step`` besides waiting for the device: scheduling, planning,
        starting steps, handing out tokens.
      wait_seconds: time in ``Engine.step`` waiting for the device.
      selection_tokens: computed to choose documents.
      restored_tokens: of documents that came back from the host's memory.
    """

    steps: int = 0
    host_seconds: float = 0.0
    wait_seconds: float = 0.0
    selection_tokens: int = 0
    restored_tokens: int = 0

    def __post_init__(self) -> None:
        self._compilations_before = _compilations()

    def count(self, started: bool, seconds: float, waited: float) -> None:
        """Adds one call of ``Engine.step``."""
        self.steps += started
        self.host_seconds += seconds - waited
        self.wait_seconds += waited

    @property
    def host_ms_per_step(self) -> float:
        """Milliseconds of the host's own work for each step; 0 before the first one."""
        return 1000 * self.host_seconds / self.steps if self.steps else 0.0

    @property
    def compilations(self) -> int:
        """Programs that this process has compiled since the engine started; 0 is right."""
        return _compilations() - self._compilations_before


class _CompilationCounter:
    """Counts what jax says it compiles, in the whole process: there is no narrower way to know."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration: float, **_: object) -> None:
        self.count += event == _COMPILE_EVENT


_counter = _CompilationCounter()


def _compilations() -> int:
    return _counter.count
