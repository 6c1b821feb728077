"""A child process from both sides: what its supervisor holds of it, and what it is given itself."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pgflow_otp.otp import process
from pgflow_otp.otp.channel import Channel
from pgflow_otp.otp.exit_reason import ExitReason, exit_reason
from pgflow_otp.otp.operation import Ignored, StartFailed

if TYPE_CHECKING:
    from pgflow_otp.otp.event_loop import Timer
    from pgflow_otp.otp.operation import Child, StartOutcome
    from pgflow_otp.otp.watchdog import Watchdog


@dataclass(eq=False)
class ChildContext:
    """What a child's start function gets first.

    Attributes:
        id: the child's id.
        tree: the name of the tree.
        channel: to the supervisor; frames with a key "m" that names the message.
        lifeline: a pipe that ends when the supervisor's process dies.
        parent_pid: the supervisor's pid.
    """

    id: str
    tree: str
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
    watchdog: Watchdog | None = None
    is_reaped: bool = False
    #: Timer after which it is killed.
    deadline: Timer | None = None

    def ask(self, *, hurry: bool = False) -> None:
        """Request the end: a frame, SIGTERM for whoever is blocked, SIGCONT for whoever is stopped (95)."""
        self.asked = True
        self.channel.send({"m": "shutdown", "hurry": hurry})
        process.signal_process(self.pid, signal.SIGTERM)
        process.signal_process(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, unless it is dead and gone: its pid may be somebody else's by now (155)."""
        if self.is_reaped:
            return
        self.killed = True
        process.signal_process(self.pid, signal.SIGKILL)

    def abort(self, why: str) -> None:
        """Make it write its stack to standard error and die."""
        self.last_word = why
        process.signal_process(self.pid, signal.SIGABRT)

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
            self.is_reaped = True
            return exit_reason(None, asked=self.asked, killed=self.killed, info=self.last_word)
        if status is None:
            return None
        self.is_reaped = True
        return exit_reason(status, asked=self.asked, killed=self.killed, info=self.last_word)

    def close(self) -> None:
        self.channel.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def start_process(child: Child, extra_args: tuple[Any, ...], tree: str, lifeline: int, now: float) -> ChildProcess:
    """Fork a child.

    Args:
        child: what is to run.
        extra_args: arguments of its start function before its own.
        tree: name of the tree.
        lifeline: read end of a pipe that nobody but us holds the other end of.
        now: monotonic seconds.

    Raises:
        process.ForkError: it could not be forked.
    """
    ours, theirs = Channel.pair()
    context = ChildContext(child.spec.id, tree, theirs, lifeline, os.getpid())
    args = (*extra_args, *child.spec.args)
    try:
        pid = process.fork(
            lambda: _run(child, context, args),
            keep=(theirs.fileno(), lifeline),
            title=f"pgflow-otp: {child.spec.id} [{tree}]",
            dies_with_parent=child.spec.dies_with_parent,
        )
    except process.ForkError:
        ours.close()
        raise
    finally:
        theirs.close()
    return ChildProcess(child, pid, process.open_pidfd(pid), ours, now)


def _run(child: Child, context: ChildContext, args: tuple[Any, ...]) -> int:
    assert callable(child.spec.start)
    faulthandler.enable(2)  # A crash in C, and a watchdog's SIGABRT, leave their stack in the log.
    try:
        return child.spec.start(context, *args) or 0
    except Exception as error:
        traceback.print_exc()
        context.channel.socket.setblocking(True)
        context.send("exit", reason=f"{type(error).__name__}: {error}"[:2000])
        return 1
