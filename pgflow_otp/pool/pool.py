"""The handler processes of one worker: which slot takes a task, and who is told what the forkserver says."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from loguru import logger

from pgflow_otp.otp import process
from pgflow_otp.pool.breaker import Breaker
from pgflow_otp.pool.forkserver_link import ForkserverLink
from pgflow_otp.pool.outcome import Outcome, describe_death
from pgflow_otp.pool.slot import Slot

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pgflow_otp.db.tasks import ClaimedTask
    from pgflow_otp.pool.forkserver import HandlerConfig
    from pgflow_otp.settings import Settings


class HandlerPool:
    """Runs tasks in handler processes, at most `max_concurrency` at once.

    Args:
        config: what forkserver and handlers need.
        settings: times and limits.
        load_flow_input: asks the database for a run's input.
        on_ready: called when tasks can be run again, or for the first time.
    """

    def __init__(
        self,
        config: HandlerConfig,
        settings: Settings,
        load_flow_input: Callable[[ClaimedTask], Awaitable[bytes]],
        on_ready: Callable[[], None],
    ) -> None:
        self._link = ForkserverLink(
            config, settings.boot_timeout, self._forkserver_said, self._forkserver_lost, on_ready
        )
        self._breaker = Breaker(self._try_to_set_up, on_ready)
        self._settings = settings
        self.flow_slug = config.flow_slug
        self._slots = [Slot(i + 1, self, settings) for i in range(settings.max_concurrency)]
        self._load_flow_input = load_flow_input
        self._background: set[asyncio.Task[None]] = set()

    def start_forkserver(self) -> None:
        """Fork the forkserver. Before anything else exists: no loop, no connection."""
        self._link.start()

    def attach(self) -> None:
        """Watch the forkserver from the running loop."""
        self._link.attach()

    async def wait_booted(self) -> None:
        """Wait until the user's module is imported. Nothing is claimed before."""
        await self._link.booted.wait()

    @property
    def is_booted(self) -> bool:
        return self._link.booted.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether tasks should be claimed: the module is imported, and handler processes come up."""
        return self.is_booted and not self._breaker.is_open

    async def run(self, task: ClaimedTask) -> Outcome:
        """Run one task; the caller sees to it that a slot is free."""
        free = (slot for slot in self._slots if slot.task is None)
        return await min(free, key=lambda slot: (not slot.is_up, slot.has_process, slot.index)).run(task)

    @property
    def running(self) -> list[ClaimedTask]:
        """The tasks that have a slot."""
        return [slot.task for slot in self._slots if slot.task is not None]

    def cancel(self, task: ClaimedTask) -> bool:
        """End one task: its handler is told (SIGTERM), and killed after the grace. False when it is over already."""
        slot = next((slot for slot in self._slots if slot.task is task), None)
        return slot is not None and slot.end(Outcome("cancelled"))

    def kill_strays(self) -> None:
        """Kill what came to us as orphans: what handlers of a dead forkserver have left."""
        process.kill_strangers((self._link.pid,) if self._link.pid is not None else ())

    def tell_drain(self) -> None:
        """Let running handlers know that the worker is being stopped (`ctx.shutdown_requested`)."""
        for slot in self._slots:
            slot.tell_drain()

    def release_all(self, grace: float | None = None) -> None:
        """Kill what still runs; its attempts are handed back. `grace`: seconds to SIGKILL; None: kill_grace."""
        for slot in self._slots:
            slot.end(Outcome("released"), grace)

    def close(self) -> None:
        """Kill everything that is left. May be called again."""
        self._breaker.close()
        self.release_all(0.0)
        self._link.close()
        for slot in self._slots:
            slot.lost()
        for task in self._background:
            task.cancel()
        process.kill_strangers(())

    def resize(self, size: int) -> None:
        """Have room for so many tasks. Room that is no longer wanted stays, and its processes retire when idle: how
        many tasks run at once is the caller's to keep."""
        for index in range(len(self._slots), size):
            self._slots.append(Slot(index + 1, self, self._settings))

    def report(self) -> dict[str, Any]:
        """Return the forkserver's pid, and each handler process with what it works on (ages in seconds)."""
        return {"forkserver": self._link.pid, "handlers": [s.report() for s in self._slots if s.has_process or s.task]}

    # For the slots

    def send(self, header: dict[str, Any], *descriptors: int) -> None:
        self._link.send(header, *descriptors)

    def load_flow_input(self, task: ClaimedTask, answer: Callable[[bytes], None]) -> None:
        async def load() -> None:
            answer(await self._load_flow_input(task))

        loading = asyncio.get_running_loop().create_task(load())
        self._background.add(loading)
        loading.add_done_callback(self._background.discard)

    def setup_failed(self, reason: str) -> None:
        self._breaker.trip(reason)

    async def _try_to_set_up(self) -> bool:
        """Set up a process, from the module as it is now if nobody is at work."""
        if not any(slot.task or slot.has_process for slot in self._slots):
            self._link.start_anew()
        await self._link.booted.wait()
        idle = next((slot for slot in self._slots if slot.task is None and not slot.has_process), None)
        return idle is None or await idle.probe()

    def give_up_forkserver(self) -> None:
        logger.error("a killed handler does not go away; replacing the forkserver")
        self._link.lose()

    # From the forkserver

    def _forkserver_said(self, message: dict[str, Any], descriptor: int | None) -> None:
        slot, generation = self._slots[message["slot"] - 1], message["generation"]
        if message["m"] == "forked":
            if slot.generation == generation and slot.has_process:
                slot.forked(message["pid"], descriptor)
            elif descriptor is not None:
                os.close(descriptor)
        elif message["m"] == "fork_failed":
            slot.exited(generation, f"no handler process could be started: {message['reason']}")
        elif message["m"] == "exited":
            slot.exited(generation, describe_death(message, slot.age))

    def _forkserver_lost(self) -> None:
        for slot in self._slots:
            slot.lost()
