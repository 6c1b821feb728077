"""What a supervisor's decisions are made of: a child as it is known, what an operation may ask for, what it is sent."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from pgflow_otp.otp.child_spec import ChildSpec
    from pgflow_otp.otp.exit_reason import ExitReason

State: TypeAlias = Literal["undefined", "starting", "running", "stopping", "restarting"]


@dataclass(slots=True, eq=False)
class Child:
    """One child as its supervisor knows it. `handle` belongs to whoever carries out the actions."""

    spec: ChildSpec
    state: State = "undefined"
    handle: Any = None
    #: Pid of its process, or of the last one it had.
    pid: int | None = None
    #: Counts starts; tells an exit of this process from a late word about an earlier one.
    incarnation: int = 0
    #: The child died by itself and its operation is still waiting in the queue (54).
    unhandled_exit: ExitReason | None = None
    restarts: int = 0
    #: When it was restarted (monotonic seconds), within the period of its supervisor.
    restarted_at: list[float] = field(default_factory=list)

    def note_restart(self, now: float, period: float) -> None:
        """Count a restart, and remember when it was for as long as it may matter."""
        self.restarts += 1
        self.restarted_at = [then for then in self.restarted_at if then >= now - period] + [now]

    @property
    def is_down(self) -> bool:
        """Whether it has no process, and no restart is due. One that has died and whose turn has not come yet is still
        running for everybody who asks (44)."""
        return self.state == "undefined" and self.unhandled_exit is None


# What an operation may yield, and what it is sent back.


@dataclass(frozen=True, slots=True)
class Start:
    """Start a child; sends back Started, Ignored or StartFailed."""

    child: Child


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop children, all at the same time; sends back their exit reasons, in order."""

    children: tuple[Child, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Something worth a line in the log (136 to 140).

    Attributes:
        context: start_error, child_terminated, shutdown_error, shutdown (gave up), or progress.
        child: the offender.
        reason: why, in words.
        level: INFO or DEBUG for progress; DEBUG where somebody had asked for the start and is answered anyway (137).
        count: how many children a shutdown_error stands for: those of a dynamic supervisor are grouped (138).
    """

    context: Literal["start_error", "child_terminated", "shutdown_error", "shutdown", "progress"]
    child: Child
    reason: str
    level: Literal["DEBUG", "INFO", "ERROR"] = "ERROR"
    count: int = 1

    def offender(self) -> dict[str, Any]:
        """Return what is known of the child, as fields of a log record."""
        spec = self.child.spec
        start = spec.start if callable(spec.start) else type(spec.start)
        return {
            "pid": self.child.pid,
            "id": spec.id,
            "start": f"{start.__module__}.{start.__qualname__}",
            "restart": spec.restart,
            "significant": spec.significant,
            "shutdown": spec.shutdown,
            "type": spec.type,
        }

    def line(self) -> str:
        """Return context, reason and pid as one line, without the child's name."""
        text = {"progress": self.reason, "shutdown": f"{self.reason}; giving up"}.get(
            self.context, f"{self.context}: {self.reason}"
        )
        if self.count > 1:
            text += f" ({self.count} children)"
        elif self.child.pid is not None:
            text += f" (pid {self.child.pid})"
        return " ".join(text.split())[:1000]


@dataclass(frozen=True, slots=True)
class Later:
    """Queue an operation behind the waiting ones (70)."""

    operation: Callable[[], Operation]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the call this operation serves."""

    answer: Any


@dataclass(frozen=True, slots=True)
class Booted:
    """All static children are up (18)."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The supervisor ends; nothing of it is left."""

    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Started:
    """A child has acknowledged its start. `info` is what it said with it (19); `pid` is None of a node in this
    process."""

    info: Any = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """A child had nothing to do (20)."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A child did not start, and is gone."""

    reason: ExitReason


StartOutcome: TypeAlias = Started | Ignored | StartFailed
Command: TypeAlias = Start | Stop | Report | Later | Reply | Booted | Exit
Operation: TypeAlias = Generator[Command, Any, None]
