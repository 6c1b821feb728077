"""When to look for work next. Pure; the caller brings randomness."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class PollTimer:
    """Decorrelated jitter between a shortest and a longest wait (runtime-contract 3.4)."""

    def __init__(self, shortest: float, longest: float, uniform: Callable[[float, float], float]) -> None:
        self._shortest = shortest
        self._longest = longest
        self._uniform = uniform
        self._current = shortest

    def found(self) -> float:
        """Work was found, or somebody said there is some: start again from the shortest wait."""
        self._current = self._shortest
        return self._current

    def empty(self) -> float:
        """Nothing was found: wait longer, at random, up to the longest."""
        self._current = self._uniform(self._shortest, max(self._shortest, min(3 * self._current, self._longest)))
        return self._current
