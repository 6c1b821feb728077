"""The worker's end of its forkserver: starts it, watches it, replaces it, and carries messages."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from loguru import logger

from pgflow_otp.otp import process
from pgflow_otp.otp.channel import ChannelBroken
from pgflow_otp.pool.control import ControlChannel
from pgflow_otp.pool.forkserver import ForkServer, HandlerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

SHORTEST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0
#: Seconds a forkserver that was dismissed or killed may take to be gone.
_LAST_SECONDS = 1.0


class ForkserverLink:
    """One forkserver at a time.

    Args:
        config: what forkserver and handlers need.
        boot_timeout: seconds importing the user's module may take.
        on_message: gets every message about a handler, and the descriptor that came with it.
        on_lost: called when the forkserver died or was given up, before another is started.
        on_booted: called when one has imported the user's module.
    """

    def __init__(
        self,
        config: HandlerConfig,
        boot_timeout: float,
        on_message: Callable[[dict[str, Any], int | None], None],
        on_lost: Callable[[], None],
        on_booted: Callable[[], None],
    ) -> None:
        self._config = config
        self._boot_timeout = boot_timeout
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_booted = on_booted
        #: Set while a forkserver is there that has imported the user's module.
        self.booted = asyncio.Event()
        self._control: ControlChannel | None = None
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._boot_timer: asyncio.TimerHandle | None = None
        self._boot_error: str | None = None
        self._backoff = SHORTEST_BACKOFF
        self._restart: asyncio.Task[None] | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Fork it. The first time before anything else exists: no loop, no connection.

        Raises:
            process.ForkError: it cannot be forked.
        """
        ours, theirs = ControlChannel.pair()
        config = self._config
        try:
            self._pid = process.fork(
                lambda: ForkServer(theirs, config).run(),
                keep=(theirs.fileno(),),
                title=f"pgflow-otp: forkserver:{config.flow_slug} [{config.tree}]",
                dies_with_parent=True,
            )
        except process.ForkError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.socket.setblocking(False)
        self._control = ours
        self._pidfd = os.pidfd_open(self._pid) if process.HAS_PIDFD else None

    @property
    def pid(self) -> int | None:
        """Its pid; None while there is none."""
        return self._pid

    def attach(self) -> None:
        """Watch it from the running loop."""
        self._loop = asyncio.get_running_loop()
        assert self._control is not None
        self._loop.add_reader(self._control.fileno(), self._readable)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self.lose)
        self._boot_timer = self._loop.call_later(self._boot_timeout, self._boot_timed_out)

    def send(self, header: dict[str, Any], *descriptors: int) -> None:
        """Send a message; nothing happens while there is no forkserver. The descriptors stay the caller's."""
        control = self._control
        if control is None:
            return
        control.send(header, *descriptors)
        if control.has_unsent:
            self._loop.add_writer(control.fileno(), self._writable, control)

    def lose(self) -> None:
        """It died, or is given up: start another. Nothing happens when there is none."""
        if self._control is None:
            return
        was_booted = self.booted.is_set()
        self._drop(dismiss=False)
        self._on_lost()
        if self._closing:
            return
        delay = 0.0 if was_booted else self._backoff
        if was_booted:
            logger.warning("the forkserver died; starting another")
        self._backoff = min(self._backoff * 2, LONGEST_BACKOFF)
        self._restart = self._loop.create_task(self._start_again(delay))

    def start_anew(self) -> None:
        """Replace one that has nothing to do, so that the user's module is imported again."""
        if self._control is not None and not self._closing:
            self._drop(dismiss=True)
            self._restart = self._loop.create_task(self._start_again(0.0))

    def close(self) -> None:
        """End it and its handlers. May be called again."""
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
        self._drop(dismiss=True)

    async def _start_again(self, delay: float) -> None:
        while True:
            await asyncio.sleep(delay)
            try:
                await _join_idle_threads()
                self.start()
            except (process.ForkError, OSError) as error:
                delay = self._backoff
                self._backoff = min(self._backoff * 2, LONGEST_BACKOFF)
                logger.error(f"no forkserver: {error}; trying again in {delay:g} s")
                continue
            self.attach()
            return

    # What it says

    def _readable(self) -> None:
        control = self._control
        if control is None:
            return
        try:
            messages = control.receive()
        except ChannelBroken as error:
            logger.error(f"the forkserver sent garbage: {error}")
            self.lose()
            return
        for message in messages:
            name = message["m"]
            if name == "booted":
                self._backoff, self._boot_error = SHORTEST_BACKOFF, None
                self._cancel_boot_timer()
                self.booted.set()
                self._on_booted()
            elif name == "boot_failed":
                self._boot_failed(str(message["reason"]))
            else:
                self._on_message(message, control.take_descriptor() if message.get("pidfd") else None)
        if not control.is_open and control is self._control:
            self.lose()

    def _writable(self, control: ControlChannel) -> None:
        control.flush()
        if not control.has_unsent and control.is_open:
            self._loop.remove_writer(control.fileno())

    def _boot_timed_out(self) -> None:
        self._boot_failed(f"importing {self._config.target} takes longer than boot_timeout ({self._boot_timeout:g} s)")
        self.lose()

    def _boot_failed(self, reason: str) -> None:
        self._cancel_boot_timer()
        if reason != self._boot_error:
            logger.error(f"no tasks are taken: {reason}")
        self._boot_error = reason

    def _cancel_boot_timer(self) -> None:
        if self._boot_timer is not None:
            self._boot_timer.cancel()
            self._boot_timer = None

    # Its end

    def _drop(self, *, dismiss: bool) -> None:
        self.booted.clear()
        self._cancel_boot_timer()
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            self._loop.remove_writer(self._control.fileno())
            # The end of the channel tells it to kill and reap its handlers, so that none is left to the init process.
            self._control.socket.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._control = None
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._pid is not None:
            if not (dismiss and _reaped(self._pid)):
                process.signal_process(self._pid, signal.SIGKILL)
                _reaped(self._pid)
            self._pid = None


def _reaped(pid: int) -> bool:
    """Wait for an end that is near: it was dismissed or killed."""
    deadline = time.monotonic() + _LAST_SECONDS
    while True:
        try:
            if process.reap(pid) is not None:
                return True
        except ChildProcessError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)


async def _join_idle_threads() -> None:
    """End the threads that asyncio resolves host names with: nothing forks while another thread runs (164)."""
    loop = asyncio.get_running_loop()
    executor = getattr(loop, "_default_executor", None)
    if executor is not None:
        loop._default_executor = None  # type: ignore[attr-defined]
        executor.shutdown(wait=True)
