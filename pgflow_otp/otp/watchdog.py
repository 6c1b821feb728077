"""Finds a child that lives and does not answer: wedged in C, in a lock, in a system call that never returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgflow_otp.otp import process

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgflow_otp.otp.child import ChildProcess
    from pgflow_otp.otp.event_loop import EventLoop, Timer

#: Pings in the time after which a silent child is taken for wedged.
PINGS = 4
#: Seconds from SIGABRT, which writes the stack, to SIGKILL.
ABORT_GRACE = 2.0


class Watchdog:
    """Pings one child.

    What counts is the child's own running time: silence is summed up in intervals during which the child was not
    stopped, and an interval that took longer than planned, since we were stopped ourselves, counts once (190).

    Args:
        loop: calls back.
        running: the child.
        limit: seconds of silence.
        ping: sends it a ping; it has to answer with a pong.
    """

    def __init__(self, loop: EventLoop, running: ChildProcess, limit: float, ping: Callable[[], None]) -> None:
        self._loop = loop
        self._running = running
        self._limit = limit
        self._ping = ping
        self._silence = 0.0
        self._timer: Timer | None = None
        self._next()

    def answered(self) -> None:
        """It lives."""
        self._silence = 0.0

    def stop(self) -> None:
        """Watch it no longer. May be called again."""
        if self._timer is not None:
            self._timer.cancel()

    def _next(self) -> None:
        self._ping()
        self._timer = self._loop.after(self._limit / PINGS, self._look)

    def _look(self) -> None:
        if self._running.asked:
            return  # Its shutdown has a deadline of its own.
        if not process.is_stopped(self._running.pid):
            self._silence += self._limit / PINGS
        if self._silence <= self._limit:
            self._next()
        else:
            self._running.abort(f"did not answer for {self._limit:g} s")
            self._timer = self._loop.after(ABORT_GRACE, self._running.kill)
