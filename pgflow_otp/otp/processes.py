"""The child processes of one supervisor process: started, asked, watched, killed and reaped.

Knows nothing of strategies; whoever owns them is told what happens to each.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from pgflow_otp.otp import process
from pgflow_otp.otp.channel import ChannelBroken
from pgflow_otp.otp.child import ChildProcess, start_process
from pgflow_otp.otp.exit_reason import ExitReason
from pgflow_otp.otp.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgflow_otp.otp.event_loop import EventLoop
    from pgflow_otp.otp.operation import Child


class Owner(Protocol):
    """Who decides."""

    def process_ready(self, running: ChildProcess) -> None:
        """It acknowledged its start."""

    def process_said(self, running: ChildProcess, message: dict[str, Any]) -> None:
        """It sent a message that is not about its own start or end."""

    def process_ended(self, running: ChildProcess, reason: ExitReason) -> None:
        """It is dead and reaped, and nothing of it is left."""


class Processes:
    """The running children.

    Args:
        loop: waits for them.
        name: name of the tree, shown in titles.
        owner: is told.
        clock: monotonic seconds.
    """

    def __init__(self, loop: EventLoop, name: str, owner: Owner, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._name = name
        self._owner = owner
        self._clock = clock
        self._running: dict[int, ChildProcess] = {}
        self._lifeline = os.pipe()

    def __iter__(self) -> Iterator[ChildProcess]:
        return iter(list(self._running.values()))

    def start(self, child: Child, extra_args: tuple[Any, ...]) -> ChildProcess:
        """Fork a child.

        Raises:
            process.ForkError, OSError: it could not be forked.
        """
        running = start_process(child, extra_args, self._name, self._lifeline[0], self._clock())
        self._running[running.pid] = running
        self._watch_channel(running)
        if running.pidfd is not None:
            self._loop.watch(running.pidfd, lambda: self.check(running))
        if child.spec.start_timeout is not None:
            running.deadline = self._loop.after(child.spec.start_timeout, running.start_timed_out)
        return running

    def send(self, running: ChildProcess, message: str, **content: Any) -> None:
        """Send a message; never blocks."""
        running.channel.send({"m": message, **content})
        self._watch_channel(running)

    def ask(self, running: ChildProcess, seconds: float | None, *, hurry: bool = False) -> None:
        """Request the end, and kill it after so many seconds; None: never (81, 82)."""
        running.ask(hurry=hurry)
        self._watch_channel(running)
        if seconds is not None:
            running.cancel_deadline()
            running.deadline = self._loop.after(seconds, running.kill)

    def check(self, running: ChildProcess) -> None:
        """Reap a child if it is dead. Its last frames come first."""
        if running.is_reaped:
            return
        status = running.try_reap()
        if status is None:
            return
        self._read(running)
        reason = ExitReason(status.kind, status.code, status.core, running.last_word or status.info)
        del self._running[running.pid]
        running.cancel_deadline()
        if running.watchdog is not None:
            running.watchdog.stop()
        if running.pidfd is not None:
            self._loop.unwatch(running.pidfd)
        self._loop.unwatch(running.channel.fileno())
        running.close()
        self._owner.process_ended(running, reason)

    def check_unwatched(self) -> None:
        """Look at the children that no pidfd tells of, and reap those we inherited (156, 160)."""
        for running in self:
            if running.pidfd is None:
                self.check(running)
        for pid in process.dead_strangers(self._running):
            process.reap(pid)
        process.kill_strangers(self._running)

    def close(self) -> None:
        """Kill and forget whatever is left."""
        for running in self:
            running.kill()
            running.close()
        for descriptor in self._lifeline:
            os.close(descriptor)

    def _read(self, running: ChildProcess) -> None:
        try:
            frames = running.channel.receive()
        except ChannelBroken as error:
            frames = error.frames
            garbage = f"sent garbage: {error}"
        else:
            garbage = ""
        if not running.channel.is_open:
            self._loop.unwatch(running.channel.fileno())
        for message, _ in frames:
            self._message(running, message)
        if garbage:
            running.last_word = garbage
            running.kill()

    def _message(self, running: ChildProcess, message: dict[str, Any]) -> None:
        if running.noted(message):
            return
        if message.get("m") == "pong":
            if running.watchdog is not None:
                running.watchdog.answered()
        elif message.get("m") != "ready":
            self._owner.process_said(running, message)
        elif not running.acknowledged and not running.killed:
            running.acknowledged = True
            running.info = message.get("info") or {}
            if not running.asked:
                running.cancel_deadline()
            if running.child.spec.watchdog is not None:
                running.watchdog = Watchdog(
                    self._loop, running, running.child.spec.watchdog, lambda: self.send(running, "ping")
                )
            self._owner.process_ready(running)

    def _watch_channel(self, running: ChildProcess) -> None:
        if running.channel.is_open:
            descriptor, write = running.channel.fileno(), running.channel.has_unsent
            self._loop.watch(descriptor, lambda: self._serve_channel(running), write=write)

    def _serve_channel(self, running: ChildProcess) -> None:
        running.channel.flush()
        self._read(running)
        self._watch_channel(running)
