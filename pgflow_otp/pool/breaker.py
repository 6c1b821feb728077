"""The circuit breaker of a pool: while no handler process can be set up, nothing is claimed, and a try is made now and
then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SHORTEST_PAUSE = 1.0
LONGEST_PAUSE = 30.0


class Breaker:
    """Open while the last try failed.

    Args:
        attempt: sets up a handler process without a task; whether that went well.
        on_closed: called when it does again.
    """

    def __init__(self, attempt: Callable[[], Awaitable[bool]], on_closed: Callable[[], None]) -> None:
        self._attempt = attempt
        self._on_closed = on_closed
        self._pause = SHORTEST_PAUSE
        self._reason: str | None = None
        self._trying: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._trying is not None

    def trip(self, reason: str) -> None:
        """A process could not be set up. Of its reason, the log gets the first line, and once."""
        first = reason.split("\n", 1)[0]
        if first != self._reason:
            self._reason = first
            logger.error(f"no tasks are taken until a handler process comes up: {first}")
        if self._trying is None:
            self._trying = asyncio.get_running_loop().create_task(self._try_again())

    def close(self) -> None:
        """Try no more."""
        if self._trying is not None:
            self._trying.cancel()

    async def _try_again(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            if await self._attempt():
                break
        self._pause, self._reason, self._trying = SHORTEST_PAUSE, None, None
        logger.info("a handler process has come up; tasks are taken again")
        self._on_closed()
