"""A child process from both sides: what its supervisor holds of it, and what it is given itself."""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pgflow_otp.otp import process
from pgflow_otp.otp.channel import Channel
from pgflow_otp.otp.exit_reason import ExitReason, exit_reason
from pgflow_otp.otp.node import Ignored, StartFailed

if TYPE_CHECKING:
    from pgflow_otp.otp.event_loop import Timer
    from pgflow_otp.otp.node import Child, StartOutcome


@dataclass(eq=False)
class ChildContext:
    """What a child's start function gets first.

    Attributes:
        id: the child's id.
        channel: to the supervisor; frames with a key "m" that names the message.
        lifeline: a pipe that ends when the supervisor's process dies.
        parent_pid: the supervisor's pid.
    """

    id: str
    channel: Channel
    lifeline: int
    parent_pid: int

    def ready(self, **info: Any) -> None:
        """Acknowledge the start; the supervisor goes on with the next child."""
        self.channel.send({"m": "ready", "info": info})

    def ignore(self) -> None:
        """Say that there is nothing to do for this child; return right after (20)."""
        self.channel.send({"m": "ignore"})

    def fail(self, reason: str) -> None:
        """Say why the start failed; return or raise right after."""
        self.channel.send({"m": "failed", "reason": reason})

    def send(self, message: str, **content: Any) -> None:
        """Send a message to whoever runs the tree."""
        self.channel.send({"m": message, **content})


@dataclass(eq=False)
class ChildProcess:
    """A running child as its supervisor sees it."""

    child: Child
    pid: int
    pidfd: int | None
    channel: Channel
    started_at: float
    asked: bool = False
    killed: bool = False
    acknowledged: bool = False
    ignored: bool = False
    failure: str | None = None
    last_word: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    #: Timer after which it is killed.
    deadline: Timer | None = None

    def ask(self, *, hurry: bool = False) -> None:
        """Request the end: a frame, SIGTERM for whoever is blocked, SIGCONT for whoever is stopped (95)."""
        self.asked = True
        self.channel.send({"m": "shutdown", "hurry": hurry})
        process.signal_process(self.pid, signal.SIGTERM)
        process.signal_process(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.killed = True
        process.signal_process(self.pid, signal.SIGKILL)

    def start_timed_out(self) -> None:
        self.failure = f"timeout: no acknowledgement within {self.child.spec.start_timeout} s"
        self.kill()

    def cancel_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()

    def noted(self, message: dict[str, Any]) -> bool:
        """Keep what a message says about the child's own start or end; False when it is about something else."""
        name = message.get("m")
        if name == "ignore":
            self.ignored = True
        elif name == "failed":
            self.failure = str(message.get("reason"))
        elif name == "exit":
            self.last_word = str(message.get("reason"))
        else:
            return False
        return True

    def start_outcome(self, reason: ExitReason) -> StartOutcome:
        """Return what came of a start that ended without an acknowledgement (20, 23, 24)."""
        if self.ignored:
            return Ignored()
        if self.failure is not None:
            return StartFailed(ExitReason("start_failed", info=self.failure))
        return StartFailed(reason)

    def try_reap(self) -> ExitReason | None:
        """Return why it ended and forget it; None while it lives."""
        try:
            status = process.reap(self.pid)
        except ChildProcessError:
            return exit_reason(None, asked=self.asked, killed=self.killed, info=self.last_word)
        if status is None:
            return None
        return exit_reason(status, asked=self.asked, killed=self.killed, info=self.last_word)

    def close(self) -> None:
        self.channel.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def start_process(child: Child, title: str, lifeline: int, now: float) -> ChildProcess:
    """Fork a child.

    Raises:
        process.ForkError: it could not be forked.
    """
    ours, theirs = Channel.pair()
    context = ChildContext(child.spec.id, theirs, lifeline, os.getpid())
    try:
        pid = process.fork(
            lambda: _run(child, context),
            keep=(theirs.fileno(), lifeline),
            title=title,
            dies_with_parent=child.spec.dies_with_parent,
        )
    except process.ForkError:
        ours.close()
        raise
    finally:
        theirs.close()
    pidfd = os.pidfd_open(pid) if process.HAS_PIDFD else None
    return ChildProcess(child, pid, pidfd, ours, now)


def _run(child: Child, context: ChildContext) -> int:
    assert callable(child.spec.start)
    try:
        return child.spec.start(context, *child.spec.args) or 0
    except Exception as error:
        traceback.print_exc()
        context.channel.socket.setblocking(True)
        context.send("exit", reason=f"{type(error).__name__}: {error}"[:2000])
        return 1
