"""Restart intensity: how many restarts within the sliding window are too many. Pure; the caller brings the time."""

from __future__ import annotations

from collections import deque


class RestartIntensity:
    """Counts the restarts of one supervisor (statements 58 to 62)."""

    def __init__(self, intensity: int, period: float) -> None:
        self._intensity = intensity
        self._period = period
        self._restarts: deque[float] = deque()

    def add(self, now: float) -> bool:
        """Note a restart at `now` (monotonic seconds). False: one too many, the supervisor has to give up."""
        self._restarts.append(now)
        while self._restarts[0] < now - self._period:
            self._restarts.popleft()
        return len(self._restarts) <= self._intensity
