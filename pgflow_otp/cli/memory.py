"""Resident memory of processes, without asking them."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def resident_kib(pids: Sequence[int]) -> dict[int, int]:
    """Return the resident memory in KiB of those processes that are there and may be looked at."""
    if os.path.exists("/proc/self/statm"):
        page = os.sysconf("SC_PAGE_SIZE") // 1024
        return {pid: pages * page for pid in pids if (pages := _resident_pages(pid)) is not None}
    return _from_ps(pids)


def _resident_pages(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _from_ps(pids: Sequence[int]) -> dict[int, int]:
    listed = ["ps", "-o", "pid=,rss=", "-p", ",".join(map(str, pids))]
    try:
        shown = subprocess.run(listed, capture_output=True, text=True, check=False, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {int(pid): int(kib) for pid, kib in (line.split() for line in shown.splitlines() if line.strip())}
