"""How attempts end, in data and in words."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pgflow_otp.otp.exit_reason import signal_name

if TYPE_CHECKING:
    from pgflow_otp.db.tasks import Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. "released": it was never the handler's fault and costs nothing; "crashed": the same, but
    counted, since the task may be the cause. "cancelled": nobody waits for it any more, nothing is recorded."""

    verdict: Verdict | Literal["cancelled"]
    output: bytes | None = None
    error: str | None = None


def describe_death(frame: dict[str, Any], age: float) -> str:
    """Return how a handler process ended, in words. `age`: seconds since it was forked."""
    peak = f"peak memory {frame['peak_kib'] / 1024:.0f} MiB, age {age:.1f} s"
    if frame["signal"] is None:
        return f"handler process exited with status {frame['code']} before giving a result ({peak})"
    name = signal_name(frame["signal"])
    if frame["signal"] == signal.SIGXCPU:
        return f"handler process used more CPU time than the step's cpu_seconds allow (killed by {name}; {peak})"
    core = ", core dumped" if frame["core"] else ""
    hint = ", possibly out of memory" if frame["signal"] == signal.SIGKILL else ""
    return f"handler process was killed by {name} (signal {frame['signal']}{core}{hint}; {peak})"
