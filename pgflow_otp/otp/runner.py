"""Runs the operations of one node, one after the other, and waits for what each of them waits for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from pgflow_otp.otp import operation as ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgflow_otp.otp.exit_reason import ExitReason
    from pgflow_otp.otp.hooks import Path
    from pgflow_otp.otp.node import Node

#: What a call is answered that comes when its node is stopping (87).
STOPPING = ("error", "stopping")


class Performer(Protocol):
    """Who carries out what a node decides."""

    def start(self, runner: Runner, child: ops.Child) -> None: ...
    def stop_child(self, child: ops.Child) -> None: ...
    def booted(self, runner: Runner) -> None: ...
    def exited(self, runner: Runner, reason: ExitReason) -> None: ...
    def report(self, runner: Runner, report: ops.Report) -> None: ...
    def resume(self, runner: Runner) -> None:
        """Call `runner.advance()` soon, but not now: this may be in the middle of another operation."""


class Runner:
    """A node being run.

    Args:
        node: its children and decisions.
        path: where it is in the tree.
        parent: the node above it and the child it is there; None for the root.
        performer: carries out the actions.
    """

    def __init__(self, node: Node, path: Path, parent: tuple[Runner, ops.Child] | None, performer: Performer) -> None:
        self.node = node
        self.path = path
        self.parent = parent
        self.is_booted = False
        self.has_exited = False
        self._performer = performer
        self._queue: deque[tuple[ops.Operation, Callable[[Any], None] | None]] = deque()
        self._current: ops.Operation | None = None
        self._reply: Callable[[Any], None] | None = None
        self._waiting: ops.Start | ops.Stop | None = None
        self._reasons: dict[ops.Child, ExitReason] = {}
        #: What the current operation is sent next, and whether it will be: several events may come at once.
        self._value: Any = None
        self._is_scheduled = False

    def enqueue(self, operation: ops.Operation, reply: Callable[[Any], None] | None = None) -> None:
        """Add an operation behind the waiting ones; `reply` gets its answer."""
        if self.node.is_stopping or self.has_exited:
            operation.close()
            if reply is not None:
                reply(STOPPING)
            return
        self._queue.append((operation, reply))
        if self._current is None:
            self._schedule(None)

    def advance(self) -> None:
        """Go on with the current operation, and with those after it, until one has to wait."""
        self._is_scheduled = False
        value, self._value = self._value, None
        if self._waiting is not None:
            return
        while not self.has_exited:
            if self._current is None:
                if not self._queue:
                    return
                self._current, self._reply = self._queue.popleft()
                value = None
            try:
                command = self._current.send(value)
            except StopIteration:
                self._current, value = None, None
                continue
            value = None
            if isinstance(command, ops.Start):
                self._waiting = command
                self._performer.start(self, command.child)
                return
            if isinstance(command, ops.Stop):
                self._waiting, self._reasons = command, {}
                for child in command.children:
                    self._performer.stop_child(child)
                return
            if isinstance(command, ops.Exit):
                self._end()
                self._performer.exited(self, command.reason)
                return
            operation = self._current
            self._perform(command)
            if self._current is not operation:
                return  # Whoever was told asked for the stop, which has been resumed already.

    def request_stop(self, reason: ExitReason) -> None:
        """Drop whatever the node is doing; a half-started child is killed when its turn comes (28, 87)."""
        if self.node.is_stopping or self.has_exited:
            return
        self.node.is_stopping = True
        self._drop()
        self._waiting = None
        self._current = self.node.stop(reason)
        self._schedule(None)

    def child_started(self, child: ops.Child, outcome: ops.StartOutcome) -> bool:
        """Pass on what came of a start; False when nobody waits for it any more."""
        if not isinstance(outcome, ops.Started):
            child.state = (
                "undefined"  # A stop that has just come, or comes before this is passed on, has nothing to do.
            )
        if not isinstance(self._waiting, ops.Start) or self._waiting.child is not child:
            return False
        self._waiting = None
        self._schedule(outcome)
        return True

    def child_stopped(self, child: ops.Child, reason: ExitReason) -> bool:
        """Pass on the end of a child that was asked for; False when it was not."""
        if not isinstance(self._waiting, ops.Stop) or child not in self._waiting.children:
            return False
        self._reasons[child] = reason
        child.state = "undefined"
        if len(self._reasons) == len(self._waiting.children):
            reasons = [self._reasons[c] for c in self._waiting.children]
            self._waiting = None
            self._schedule(reasons)
        return True

    def child_died(self, child: ops.Child, reason: ExitReason) -> None:
        """A child ended that nobody had asked to."""
        child.state = "undefined"
        child.unhandled_exit = reason
        if not self.node.is_stopping:
            self.enqueue(self.node.child_exited(child, child.incarnation))

    def _schedule(self, value: Any) -> None:
        self._value = value
        if not self._is_scheduled:
            self._is_scheduled = True
            self._performer.resume(self)

    def _perform(self, command: ops.Command) -> None:
        if isinstance(command, ops.Report):
            self._performer.report(self, command)
        elif isinstance(command, ops.Later):
            self._queue.append((command.operation(), None))
        elif isinstance(command, ops.Reply):
            reply, self._reply = self._reply, None
            if reply is not None:
                reply(command.answer)
        elif isinstance(command, ops.Booted):
            self.is_booted = True
            self._performer.booted(self)

    def _end(self) -> None:
        self.has_exited = True
        self._drop()

    def _drop(self) -> None:
        if self._current is not None:
            self._current.close()
            if self._reply is not None and not self.has_exited:
                self._reply(STOPPING)
        self._current, self._reply = None, None
        for operation, reply in self._queue:
            operation.close()
            if reply is not None:
                reply(STOPPING)
        self._queue.clear()
