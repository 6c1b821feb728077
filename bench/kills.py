"""SIGKILL of each kind of process, in each state, until everything below it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from pgflow_otp import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Report

Value = TypeVar("Value")

TARGETS = {"root": "supervisor", "worker": "worker:hang", "forkserver": "forkserver:hang"}
STATES = ("in boot", "idle", "with a handler that hangs in C")
_TOKEN = "PGFLOW_BENCH_TOKEN"
_PATIENCE = 30.0


def measure_subtrees(report: Report, dsn: str, rounds: int) -> None:
    """Kill the root, a worker and a forkserver so often in each state."""
    os.environ[_TOKEN] = uuid.uuid4().hex
    os.environ["SPT_NOENV"] = "1"  # A title must not write over what /proc shows of the environment.
    for target in TARGETS:
        for state in STATES:
            slowest = 0.0
            for _ in range(rounds):
                took = _round(dsn, target, state)
                slowest = max(slowest, took)
                report.add(f"killed {target} {state}, until all below it are gone", "ms", took)
            report.add(f"the same, the slowest of {rounds}: {target} {state}", "ms", slowest)
            report.target(
                f"slowest end below a killed {target} {state} (ms)",
                f"the same, the slowest of {rounds}: {target} {state}",
                2000,
            )


def _round(dsn: str, target: str, state: str) -> float:
    os.environ["PGFLOW_BENCH_SLOW_IMPORT"] = "1" if state == "in boot" and target != "root" else ""
    tree = Supervisor.spawn("hanging:hang", dsn=dsn, stderr=subprocess.DEVNULL, min_poll_interval=0.01)
    try:
        if state != "in boot":
            tree.await_ready(_PATIENCE)
        if state.startswith("with"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "hangs"
                tree.client.start_flow("hang", str(path))
                tree.poll_now("hang")
                _wait(lambda: path.exists() and path.read_text() != "")
        victim = tree.pid if target == "root" else _wait(lambda: _titled(TARGETS[target])) or 0
        if state == "in boot":
            # The root as soon as it has a child, the others while they wait for the import.
            below = _wait(lambda: _below(victim)) if target != "forkserver" else []
        else:
            below = _below(victim)
        everybody = [psutil.Process(victim), *below]
        began = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        if target == "root":
            _wait(lambda: not _ours())
        else:
            _wait(lambda: not any(_lives(process) for process in everybody))
        return (time.perf_counter() - began) * 1e3
    finally:
        if target != "root":
            os.kill(tree.pid, signal.SIGKILL)
        tree.join()
        _wait(lambda: not _ours())


def _wait(holds: Callable[[], Value]) -> Value:
    deadline = time.monotonic() + _PATIENCE
    while not (value := holds()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was waited for did not happen; running: {[p.cmdline()[:1] for p in _ours()]}")
        time.sleep(0.002)
    return value


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _below(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _ours() -> list[psutil.Process]:
    """Return the processes of our trees that live."""
    mark = f"{_TOKEN}={os.environ[_TOKEN]}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if mark in Path(f"/proc/{entry}/environ").read_bytes():
                process = psutil.Process(int(entry))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def _titled(part: str) -> int | None:
    for process in _ours():
        try:
            if part in " ".join(process.cmdline()):
                return int(process.pid)
        except psutil.NoSuchProcess:
            continue
    return None
