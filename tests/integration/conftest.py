"""Trees on the test's database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest
from support.processes import wait_for

from pgflow_otp import Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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


class Gate:
    """A handler that says it runs, and waits for the test."""

    def __init__(self, folder: Path) -> None:
        self.started = folder / "started"
        self.go = folder / "go"
        self.request = {"do": "wait_for_file", "started": str(self.started), "go": str(self.go)}

    def wait_started(self, times: int = 1) -> list[list[int]]:
        """Wait until the handler has begun so often; pids of handler and forkserver, each time."""
        wait_for(lambda: self._lines() >= times, f"{times} start(s) of the handler")
        return [[int(n) for n in line.split()] for line in self.started.read_text().splitlines()]

    def open(self) -> None:
        self.go.touch()

    def _lines(self) -> int:
        return len(self.started.read_text().splitlines()) if self.started.exists() else 0


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def pid_of(tree: Supervisor, child_id: str) -> int:
    def walk(children: list[dict[str, Any]]) -> int | None:
        for child in children:
            if child["id"] == child_id:
                return int(child["pid"]) if child["pid"] else None
            found = walk(child.get("children", []))
            if found:
                return found
        return None

    return wait_for(lambda: walk(tree.which_children()), f"{child_id} to run")
