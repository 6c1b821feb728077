"""A worker's second connection: it says that the worker lives, and asks whether what runs is still wanted.

Apart from the main connection: somebody's long transaction on a run must not silence a worker.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
from loguru import logger

from pgflow_otp.db import tasks, workers
from pgflow_otp.db.connection import connect_async
from pgflow_otp.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from pgflow_otp.db.tasks import ClaimedTask

#: Seconds between two looks whether what runs is still wanted.
LOOK = 1.0


class Heartbeat:
    """The loop of that connection.

    Args:
        dsn: the database.
        slug: the flow, for the connection's name.
        worker_id: who lives.
        interval: seconds between two signs of life.
        is_registered: whether there is a worker to speak of.
        running: the tasks that run now.
        on_unwanted: gets a task that nobody waits for any more: its run has ended, or its step is skipped.
        on_deprecated: called when the database wants the worker to make room for another.
    """

    def __init__(
        self,
        dsn: str,
        slug: str,
        worker_id: UUID,
        interval: float,
        *,
        is_registered: Callable[[], bool],
        running: Callable[[], Sequence[ClaimedTask]],
        on_unwanted: Callable[[ClaimedTask], None],
        on_deprecated: Callable[[], None],
    ) -> None:
        self._dsn = dsn
        self._slug = slug
        self._worker_id = worker_id
        self._interval = interval
        self._is_registered = is_registered
        self._running = running
        self._on_unwanted = on_unwanted
        self._on_deprecated = on_deprecated
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def run(self) -> None:
        """Beat until cancelled."""
        loop = asyncio.get_running_loop()
        next_beat = loop.time() + self._interval
        try:
            while True:
                await asyncio.sleep(min(LOOK, max(next_beat - loop.time(), 0.0)))
                is_due = loop.time() >= next_beat
                if is_due:
                    next_beat = loop.time() + self._interval
                if self._is_registered() and (is_due or self._running()):
                    try:
                        await self._look_and_beat(is_due)
                    except (psycopg.Error, DatabaseUnavailable) as error:
                        logger.debug(f"heartbeat failed: {' '.join(str(error).split())}")
        finally:
            if self._connection is not None:
                await self._connection.close()

    async def _look_and_beat(self, is_due: bool) -> None:
        if self._connection is None or self._connection.closed:
            self._connection = await connect_async(self._dsn, f"heartbeat:{self._slug}")
        if is_due and not await workers.heartbeat(self._connection, self._worker_id):
            self._on_deprecated()
        running = self._running()
        if running:
            for position in await tasks.unwanted(self._connection, self._worker_id, running):
                self._on_unwanted(running[position])
