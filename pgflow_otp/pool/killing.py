"""How a handler process is ended: signals and escalation, each step a timer of its own, so that no end waits for
another's."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pgflow_otp.pool.timers import Timers

#: Seconds from SIGKILL until the worker sends it itself, and until the forkserver is given up.
DIRECT_KILL_AFTER = 1.0
GIVE_UP_AFTER = 5.0


class Victim(Protocol):
    """A slot, as far as its process has to be ended."""

    index: int
    generation: int
    pidfd: int | None

    @property
    def has_process(self) -> bool: ...


class Forkserver(Protocol):
    """Who sends the signals."""

    def send(self, header: dict[str, Any], *descriptors: int) -> None: ...
    def give_up_forkserver(self) -> None: ...


class Killing:
    """Signals to the process of one slot. Each is bound to a generation: it never hits a later process.

    Args:
        victim: the slot.
        forkserver: the handlers' parent, who sends signals.
        timers: the slot's.
    """

    def __init__(self, victim: Victim, forkserver: Forkserver, timers: Timers) -> None:
        self._victim = victim
        self._forkserver = forkserver
        self._timers = timers

    def terminate(self) -> None:
        """SIGTERM to the process and its group."""
        self._signal(self._victim.generation, signal.SIGTERM)

    def show_stack(self) -> None:
        """Let the process say what it is doing. Whether it does or not, its end comes in time."""
        self._signal(self._victim.generation, signal.SIGUSR2, alone=True)

    def kill_after(self, grace: float) -> None:
        """SIGKILL after so many seconds; then by ourselves; then the forkserver is given up, and everything it has."""
        generation = self._victim.generation
        self._timers.after(grace, self._signal, generation, signal.SIGKILL)
        self._timers.after(grace + DIRECT_KILL_AFTER, self._kill_directly, generation)
        self._timers.after(grace + GIVE_UP_AFTER, self._give_up, generation)

    def _signal(self, generation: int, number: signal.Signals, alone: bool = False) -> None:
        if self._is_there(generation):
            header = {"m": "signal", "slot": self._victim.index, "generation": generation, "signal": int(number)}
            self._forkserver.send({**header, "alone": alone})

    def _kill_directly(self, generation: int) -> None:
        if self._victim.generation == generation and self._victim.pidfd is not None:
            try:
                signal.pidfd_send_signal(self._victim.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _give_up(self, generation: int) -> None:
        if self._is_there(generation):
            self._forkserver.give_up_forkserver()

    def _is_there(self, generation: int) -> bool:
        return self._victim.generation == generation and self._victim.has_process
