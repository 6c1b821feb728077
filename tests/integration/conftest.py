"""Trees on the test's database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

from pgflow_otp import Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator


class Spawn(Protocol):
    """Starts a tree on the test's database and waits until it is ready."""

    def __call__(self, *flows: str, **settings: Any) -> Supervisor: ...


#: Quick looks: the tests wait for events, the tree should not wait for the clock.
QUICK: dict[str, Any] = {
    "min_poll_interval": 0.02,
    "max_poll_interval": 0.1,
    "recovery_interval": 0.5,
    "kill_grace": 0.5,
}


@pytest.fixture
def spawn(database: str) -> Iterator[Spawn]:
    """Start trees that are stopped at the end of the test."""
    started: list[Supervisor] = []

    def start(*flows: str, **settings: Any) -> Supervisor:
        tree = Supervisor.spawn(list(flows), dsn=database, **{**QUICK, **settings})
        started.append(tree)
        tree.await_ready(30)
        return tree

    yield start
    for tree in started:
        tree.stop()
