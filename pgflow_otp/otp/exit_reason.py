"""Why a process ended: from what the kernel says and what we had asked for. Pure."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Literal

#: Exit status of a supervisor that gave up, of one that could not start, and of a bad configuration.
GAVE_UP = 70
START_FAILED = 69
BAD_CONFIGURATION = 78


@dataclass(frozen=True, slots=True)
class ExitReason:
    """The end of a process, or of a supervisor node within one.

    Attributes:
        kind: "normal", "shutdown" (asked for), "killed" (by us, past its time), "exited" (a status that is not 0),
            "signaled", "start_failed", or "unknown" (somebody else took the status).
        code: exit status or signal number.
        core: whether the kernel wrote a core dump.
        info: the child's own last word.
    """

    kind: Literal["normal", "shutdown", "killed", "exited", "signaled", "start_failed", "unknown"]
    code: int = 0
    core: bool = False
    info: str = ""

    @property
    def is_abnormal(self) -> bool:
        """Whether a transient child is restarted after it (statement 32)."""
        return self.kind not in ("normal", "shutdown")

    def __str__(self) -> str:
        text = {
            "exited": f"exited with status {self.code}",
            "signaled": f"killed by {signal_name(self.code)}{' (core dumped)' if self.core else ''}",
            "start_failed": "failed to start",
        }.get(self.kind, self.kind)
        if self.kind == "signaled" and self.code == signal.SIGKILL:
            text += ", possibly out of memory"  # statement 162
        return f"{text}: {self.info}" if self.info else text


def exit_reason(status: os.waitid_result | None, *, asked: bool, killed: bool, info: str = "") -> ExitReason:
    """Translate a wait status (statements 32 and 41 to 43).

    Args:
        status: what waitid gave; None when another part of the process had reaped the child.
        asked: whether we had requested the end.
        killed: whether we had sent SIGKILL.
        info: the child's last frame, which never changes the class.
    """
    if status is None:
        return ExitReason("unknown", info=info)
    code = status.si_status
    if status.si_code == os.CLD_EXITED:
        if code == 0:
            return ExitReason("shutdown" if asked else "normal", info=info)
        if code == GAVE_UP:
            return ExitReason("shutdown", code, info=info or "gave up after too many restarts")
        return ExitReason("exited", code, info=info)
    if killed and code == signal.SIGKILL:
        return ExitReason("killed", code, info=info)
    if asked and code == signal.SIGTERM:
        return ExitReason("shutdown", code, info=info)
    return ExitReason("signaled", code, status.si_code == os.CLD_DUMPED, info)


def signal_name(number: int) -> str:
    """Return a signal's name, as in SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
