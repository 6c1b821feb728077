"""Small things of the worker's loop that a slot waits with."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Timers:
    """Timers that are cancelled together."""

    def __init__(self) -> None:
        self._timers: list[asyncio.TimerHandle] = []

    def after(self, seconds: float, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call back once, so many seconds from now."""
        self._timers.append(asyncio.get_running_loop().call_later(seconds, callback, *arguments))

    def cancel(self) -> None:
        """Never call back for any of those set so far."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


async def either(outcome: asyncio.Future[Any], event: Coroutine[Any, Any, Any]) -> None:
    """Wait for an event, or for an outcome that makes waiting for it pointless."""
    waiting = asyncio.ensure_future(event)
    try:
        await asyncio.wait((outcome, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
