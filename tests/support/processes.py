"""Waiting for what really happens, and finding what is left over."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, TypeVar

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")

#: Every process that a test starts inherits this variable; the leak check looks for it.
TOKEN_VARIABLE = "PGFLOW_TEST_TOKEN"
#: Seconds after which a wait gives up; not a speed that is asked for.
PATIENCE = 30.0


def wait_for(what: Callable[[], Value | None], why: str, patience: float = PATIENCE) -> Value:
    """Return the first true value of `what`; fail with `why` when none comes."""
    deadline = time.monotonic() + patience
    while True:
        value = what()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {patience:g} s for {why}")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process lives. A zombie is dead: whoever should reap it may take its time."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_gone(pid: int) -> None:
    """Wait until a process is dead."""
    wait_for(lambda: not is_alive(pid), f"the end of process {pid}")


def ours(token: str) -> list[psutil.Process]:
    """Return the living processes that tests started, the PostgreSQL server left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(TOKEN_VARIABLE) == token and process.name() not in ("postgres", "pg_ctl"):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def titled(token: str, part: str) -> list[int]:
    """Return the pids of our processes whose title contains a text."""
    found = []
    for process in ours(token):
        try:
            if part in " ".join(process.cmdline()):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


#: Descriptors that fixtures of the whole session keep open.
permanent_descriptors: set[str] = set()


def note_permanent(descriptor: int) -> None:
    """Leave a descriptor out of the leak check."""
    permanent_descriptors.add(f"{descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")


def open_descriptors() -> set[str]:
    """Return this process's descriptors, as number and target."""
    shown = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            shown.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return shown
