"""Waiting for something that is down: growing, capped, jittered. Pure; the caller brings randomness."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Backoff:
    """Seconds to wait before each attempt in a row."""

    def __init__(
        self,
        shortest: float = 0.2,
        longest: float = 10.0,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._shortest = shortest
        self._longest = longest
        self._uniform = uniform
        self._next = shortest

    def next(self) -> float:
        """Return the wait before the next attempt."""
        wait = self._next * self._uniform(0.8, 1.2)
        self._next = min(self._next * 2, self._longest)
        return wait

    def reset(self) -> None:
        """The attempt succeeded."""
        self._next = self._shortest
