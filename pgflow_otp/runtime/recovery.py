"""The recovery process: hands back the tasks of dead workers, and sweeps what is stalled."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from loguru import logger

from pgflow_otp import log
from pgflow_otp.db import workers
from pgflow_otp.db.connection import connect_async
from pgflow_otp.errors import DatabaseUnavailable
from pgflow_otp.runtime.backoff import Backoff
from pgflow_otp.runtime.waiting import wait_event

if TYPE_CHECKING:
    from pgflow_otp.otp.child import ChildContext
    from pgflow_otp.settings import Settings

#: Seconds of silence after which a worker of another tree counts as dead (runtime-contract 3.10).
SILENCE = 60.0
#: Seconds between two tries for rows that somebody else holds.
_HELD_ROWS_PAUSE = 0.1
_HELD_ROWS_TRIES = 20


def run_recovery(context: ChildContext, dsn: str, settings: Settings) -> int:
    """Start function of the recovery process."""
    log.configure("recovery", settings.log_level)
    return asyncio.run(Recovery(context, dsn, settings).run())


class Recovery:
    """One connection, one loop. Messages: `release` with a worker id in, `released` out."""

    def __init__(self, context: ChildContext, dsn: str, settings: Settings) -> None:
        self._context = context
        self._dsn = dsn
        self._settings = settings
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._to_release: list[UUID] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._connected_at = 0.0

    async def run(self) -> int:
        """Sweep until told to stop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_reader(self._context.channel.fileno(), self._message_arrived)
        self._context.ready()
        backoff = Backoff()
        next_sweep = loop.time() + self._settings.recovery_interval
        while not self._stopping:
            try:
                await self._release_dead()
                if loop.time() >= next_sweep:
                    await self._sweep()
                    next_sweep = loop.time() + self._settings.recovery_interval
                backoff.reset()
                # Somebody sits on rows of a dead worker: soon again, and the sweeps go on.
                wait = min(1.0, next_sweep - loop.time()) if self._to_release else next_sweep - loop.time()
            except (psycopg.Error, DatabaseUnavailable) as error:
                logger.debug(f"recovery waits for the database: {' '.join(str(error).split())}")
                await self._disconnect()
                wait = backoff.next()
            await wait_event(self._wake, max(0.0, wait))
            self._wake.clear()
        await self._disconnect()
        return 0

    async def _release_dead(self) -> None:
        for worker_id in list(self._to_release):
            if await self._release(worker_id):
                self._to_release.remove(worker_id)
                self._context.send("released", worker_id=str(worker_id))

    async def _release(self, worker_id: UUID) -> bool:
        """Hand back a worker's tasks; False when rows are held by others for longer than it is waited for."""
        connection = await self._connect()
        released = crashed = 0
        for _ in range(_HELD_ROWS_TRIES):
            now_released, crashed, remaining = await workers.release_worker(connection, worker_id)
            released += now_released
            if remaining == 0 or self._stopping:
                break
            await asyncio.sleep(_HELD_ROWS_PAUSE)
        if released:
            logger.info(f"handed back {released} task{'s' * (released > 1)} of dead worker {worker_id}")
        if crashed:
            failed = await workers.fail_crashed_tasks(connection, worker_id)
            logger.error(f"failed {failed} task(s) whose worker crashed three times while they ran")
        return remaining == 0

    async def _sweep(self) -> None:
        connection = await self._connect()
        requeued = await workers.recover_stalled_tasks(connection, self._settings.stale_threshold)
        if requeued:
            logger.info(f"requeued {requeued} stalled task{'s' * (requeued > 1)}")
        given_up = await workers.escalate_permanently_stalled(connection)
        if given_up:
            logger.error(f"failed {given_up} task(s) that stalled again and again")
        # After an outage every heartbeat is old: wait one window before anybody is called dead.
        if asyncio.get_running_loop().time() - self._connected_at > 2 * self._settings.heartbeat_interval:
            for worker_id in await workers.silent_workers(connection, SILENCE):
                logger.warning(f"worker {worker_id} has been silent for {SILENCE:g} s")
                await self._release(worker_id)

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = await connect_async(self._dsn, "recovery")
            self._connected_at = asyncio.get_running_loop().time()
        return self._connection

    async def _disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def _stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def _message_arrived(self) -> None:
        channel = self._context.channel
        messages = channel.receive_messages()
        if not channel.is_open:
            asyncio.get_running_loop().remove_reader(channel.fileno())
        for message in messages:
            if message["m"] == "shutdown":
                self._stop()
            elif message["m"] == "release":
                self._to_release.append(UUID(message["worker_id"]))
                self._wake.set()
