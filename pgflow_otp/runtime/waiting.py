"""Waiting for an event, but not for ever."""

from __future__ import annotations

import asyncio


async def wait_event(event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set, or after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
