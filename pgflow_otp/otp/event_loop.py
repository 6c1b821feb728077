"""Descriptors, timers and signals in one thread. The supervisor's loop, without the supervisor."""

from __future__ import annotations

import heapq
import selectors
import signal
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Timer:
    """A callback at a time."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when

    def cancel(self) -> None:
        """Never call back. May be called again, and too late."""
        self.callback = None


class EventLoop:
    """Waits for descriptors and times, and calls back.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._wake_read, self._wake_write = socket.socketpair()

    def watch(self, descriptor: int, callback: Callable[[], None], *, write: bool = False) -> None:
        """Call back whenever the descriptor is readable (or writable). Again: change what is watched."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        if descriptor in self._selector.get_map():
            self._selector.modify(descriptor, events, callback)
        else:
            self._selector.register(descriptor, events, callback)

    def unwatch(self, descriptor: int) -> None:
        """Watch it no longer. Has to come before it is closed: its number gets another owner."""
        if descriptor in (self._selector.get_map() or ()):  # None once it is closed.
            self._selector.unregister(descriptor)

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once, so many seconds from now."""
        timer = Timer(self._clock() + seconds, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def turn(self) -> None:
        """Wait for the next thing to happen, and serve it.

        Deadlines come after events: what arrived in time counts, even when the whole tree had been stopped (190).
        """
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        timeout = max(0.0, self._timers[0].when - self._clock()) if self._timers else None
        # A wait that a signal interrupts past its time, as SIGCONT does, reports no event: look again.
        for key, _ in self._selector.select(timeout) or self._selector.select(0):
            if key.fd in self._selector.get_map():  # An earlier callback of this turn may have closed it.
                key.data()
        now = self._clock()
        while self._timers and self._timers[0].when <= now:
            timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()

    def on_signals(self, numbers: Iterable[int], callback: Callable[[bytes], None]) -> None:
        """Call back with the numbers of the signals that came, blocked ones that are pending included. What was
        ignored before stays ignored (184)."""
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

        def arrived() -> None:
            try:
                callback(self._wake_read.recv(4096))
            except BlockingIOError:
                pass

        self.watch(self._wake_read.fileno(), arrived)
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, _noted_by_wakeup_descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def _noted_by_wakeup_descriptor(number: int, frame: object) -> None:
    """Do nothing: the signal's number is in the wakeup descriptor already (186)."""
