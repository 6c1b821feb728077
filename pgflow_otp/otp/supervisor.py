"""The event loop that carries out what the nodes decide. One thread, no database, no user code.

All supervisor nodes of one process live in one `Supervisor`; a node nested in another is a child like any other.
"""

from __future__ import annotations

import heapq
import os
import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pgflow_otp.otp import node as ops
from pgflow_otp.otp.channel import Channel, ChannelBroken
from pgflow_otp.otp.child import ChildProcess, start_process
from pgflow_otp.otp.child_spec import ChildSpec, SupervisorSpec
from pgflow_otp.otp.exit_reason import GAVE_UP, START_FAILED, ExitReason
from pgflow_otp.otp.process import HAS_PIDFD, ForkError

if TYPE_CHECKING:
    from collections.abc import Callable

Path = tuple[str, ...]
#: Seconds the remaining children get when the end is requested a second time (183).
HURRY = 2.0


class Hooks:
    """What the owner of a tree may follow. Every method may be left as it is."""

    def on_boot(self) -> None:
        """All static children of the root are up."""

    def on_start(self, path: Path, info: dict[str, Any]) -> None:
        """A child acknowledged its start."""

    def on_exit(self, path: Path, reason: ExitReason, info: dict[str, Any], *, requested: bool) -> None:
        """A child that had started is dead and reaped. `info` is what it had acknowledged with."""

    def on_message(self, path: Path, message: dict[str, Any]) -> None:
        """A child sent a message that is not the supervisor's own."""

    def on_report(self, path: Path, report: ops.Report, pid: int | None) -> None:
        """Something worth a line in the log happened."""

    def on_stopping(self) -> None:
        """The whole tree is about to stop."""


@dataclass(eq=False)
class Runner:
    """A node being run: its waiting operations, and what the current one waits for."""

    node: ops.Node
    path: Path
    parent: tuple[Runner, ops.Child] | None
    queue: deque[tuple[ops.Operation, Callable[[Any], None] | None]] = field(default_factory=deque)
    current: ops.Operation | None = None
    reply: Callable[[Any], None] | None = None
    waiting: ops.Start | ops.Stop | None = None
    reasons: dict[ops.Child, ExitReason] = field(default_factory=dict)
    booted: bool = False
    exited: bool = False


class Timer:
    """A callback at a time; cancelled by clearing it."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when

    def cancel(self) -> None:
        self.callback = None


class Supervisor:
    """Runs a tree of supervisors until it is told to stop or gives up.

    Args:
        spec: the root supervisor.
        name: name of the tree, shown in titles.
        hooks: is told what happens.
        clock: monotonic seconds; injected by tests.

    Raises:
        SpecError, FlagsError: the specification is not valid.
    """

    def __init__(
        self,
        spec: SupervisorSpec,
        *,
        name: str,
        hooks: Hooks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.clock = clock
        self._hooks = hooks or Hooks()
        self._root = Runner(ops.Node(spec, clock), (), None)
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._resumed: deque[tuple[Runner, Any]] = deque()
        self._processes: dict[int, ChildProcess] = {}
        self._owners: dict[ChildProcess, Runner] = {}
        self._lifeline = os.pipe()
        self._wake_read, self._wake_write = socket.socketpair()
        self._stop_requests = 0
        self._result: ExitReason | None = None

    # For the owner of the tree

    def run(self) -> int:
        """Run until the end; return the exit status (192). Call it in the main thread."""
        self._install_signals()
        self._enqueue(self._root, self._root.node.boot())
        try:
            while self._result is None:
                self._drain()
                if self._result is not None:
                    break
                self._wait()
        finally:
            self._close()
        return self._status(self._result)

    @property
    def result(self) -> ExitReason | None:
        """Why the tree ended; None while it runs."""
        return self._result

    def stop(self) -> None:
        """Stop everything in order. Again: hurry. A third time: kill (183)."""
        self._stop_requests += 1
        if self._stop_requests == 1:
            self._hooks.on_stopping()
            self._request_stop(self._root, ExitReason("shutdown"))
        elif self._stop_requests == 2:
            for running in self._processes.values():
                running.ask()
                self._kill_at(running, self.clock() + HURRY)
        else:
            for running in self._processes.values():
                running.kill()

    def start_child(self, path: Path, spec: ChildSpec, reply: Callable[[Any], None] | None = None) -> None:
        """Add a child to the node at `path`. `reply` gets ("ok", info) or ("error", reason)."""
        runner = self._runner(path)
        if runner is None or runner.node.is_stopping:
            if reply:
                reply(("error", "stopping"))
            return
        self._enqueue(runner, runner.node.start_child(spec), reply)

    def terminate_child(self, path: Path, child_id: str, reply: Callable[[Any], None] | None = None) -> None:
        """Stop one child of the node at `path` and leave it down."""
        runner = self._runner(path)
        if runner is None or runner.node.is_stopping:
            if reply:
                reply(("error", "stopping"))
            return
        self._enqueue(runner, runner.node.terminate_child(child_id), reply)

    def send(self, path: Path, message: str, **content: Any) -> bool:
        """Send a message to a running child; False when it does not run. Never blocks."""
        running = self._process(path)
        if running is None:
            return False
        running.channel.send({"m": message, **content})
        self._watch_channel(running)
        return True

    def which_children(self) -> list[dict[str, Any]]:
        """Return the tree as nested dicts: id, type, state, pid, restarts, uptime, children (103)."""
        return self._which(self._root)

    def attach(self, channel: Channel, on_readable: Callable[[], None]) -> None:
        """Watch a channel of the owner's."""
        self._selector.register(channel.fileno(), selectors.EVENT_READ, on_readable)

    def detach(self, channel: Channel) -> None:
        self._selector.unregister(channel.fileno())

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once, so many seconds from now."""
        timer = Timer(self.clock() + seconds, callback)
        heapq.heappush(self._timers, timer)
        return timer

    # The loop

    def _wait(self) -> None:
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        timeout = max(0.0, self._timers[0].when - self.clock()) if self._timers else None
        for key, _ in self._selector.select(timeout):
            key.data()
        # Deadlines after events: what arrived in time counts, even when the whole tree had been stopped (190).
        now = self.clock()
        while self._timers and self._timers[0].when <= now:
            timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()

    def _drain(self) -> None:
        while self._resumed:
            runner, value = self._resumed.popleft()
            if not runner.exited:
                self._advance(runner, value)

    def _advance(self, runner: Runner, value: Any) -> None:
        while True:
            if runner.current is None:
                if not runner.queue:
                    return
                runner.current, runner.reply = runner.queue.popleft()
                value = None
            try:
                command = runner.current.send(value)
            except StopIteration:
                runner.current, value = None, None
                continue
            value = None
            if isinstance(command, ops.Start):
                runner.waiting = command
                self._start(runner, command.child)
                return
            if isinstance(command, ops.Stop):
                runner.waiting, runner.reasons = command, {}
                for child in command.children:
                    self._stop(child)
                return
            if isinstance(command, ops.Exit):
                self._node_exited(runner, command.reason)
                return
            self._perform(runner, command)

    def _perform(self, runner: Runner, command: ops.Command) -> None:
        if isinstance(command, ops.Report):
            handle = command.child.handle
            pid = handle.pid if isinstance(handle, ChildProcess) else None
            self._hooks.on_report((*runner.path, command.child.spec.id), command, pid)
        elif isinstance(command, ops.Later):
            runner.queue.append((command.operation(), None))
        elif isinstance(command, ops.Reply) and runner.reply is not None:
            runner.reply(command.answer)
        elif isinstance(command, ops.Booted):
            runner.booted = True
            if runner.parent is None:
                self._hooks.on_boot()
            else:
                self._resume_start(runner.parent[0], runner.parent[1], ops.Started())

    def _enqueue(self, runner: Runner, operation: ops.Operation, reply: Callable[[Any], None] | None = None) -> None:
        runner.queue.append((operation, reply))
        if runner.current is None:
            self._resumed.append((runner, None))

    def _resume_start(self, runner: Runner, child: ops.Child, outcome: ops.StartOutcome) -> None:
        if isinstance(runner.waiting, ops.Start) and runner.waiting.child is child:
            runner.waiting = None
            self._resumed.append((runner, outcome))

    def _resume_stop(self, runner: Runner, child: ops.Child, reason: ExitReason) -> bool:
        if not isinstance(runner.waiting, ops.Stop) or child not in runner.waiting.children:
            return False
        runner.reasons[child] = reason
        if len(runner.reasons) == len(runner.waiting.children):
            reasons = [runner.reasons[c] for c in runner.waiting.children]
            runner.waiting = None
            self._resumed.append((runner, reasons))
        return True

    # Starting and stopping

    def _start(self, runner: Runner, child: ops.Child) -> None:
        spec = child.spec
        if isinstance(spec.start, SupervisorSpec):
            nested = Runner(ops.Node(spec.start, self.clock), (*runner.path, spec.id), (runner, child))
            child.handle = nested
            self._enqueue(nested, nested.node.boot())
            return
        try:
            running = start_process(child, f"pgflow-otp: {spec.id} [{self.name}]", self._lifeline[0], self.clock())
        except ForkError as error:
            child.handle = None
            self._resume_start(runner, child, ops.StartFailed(ExitReason("start_failed", info=str(error))))
            return
        child.handle = running
        self._processes[running.pid] = running
        self._owners[running] = runner
        self._watch_channel(running)
        if running.pidfd is not None:
            self._selector.register(running.pidfd, selectors.EVENT_READ, lambda: self._check(running))
        if spec.start_timeout is not None:
            running.deadline = self.after(spec.start_timeout, lambda: self._start_timed_out(running))

    def _start_timed_out(self, running: ChildProcess) -> None:
        running.failure = f"timeout: no acknowledgement within {running.child.spec.start_timeout} s"
        running.kill()

    def _stop(self, child: ops.Child) -> None:
        handle, shutdown = child.handle, child.spec.shutdown
        if isinstance(handle, Runner):
            self._request_stop(handle, ExitReason("shutdown"))
            if isinstance(shutdown, int):
                self.after(shutdown / 1000, lambda: self._kill_node(handle))
            return
        if not handle.acknowledged or shutdown == "brutal_kill":
            handle.asked = True
            handle.kill()
        elif not handle.asked:
            handle.ask()
            self._watch_channel(handle)
            if isinstance(shutdown, int):
                self._kill_at(handle, self.clock() + shutdown / 1000)

    def _kill_at(self, running: ChildProcess, when: float) -> None:
        if running.deadline is not None:
            running.deadline.cancel()
        running.deadline = self.after(when - self.clock(), running.kill)

    def _kill_node(self, runner: Runner) -> None:
        for running, owner in self._owners.items():
            if owner.path[: len(runner.path)] == runner.path and not runner.exited:
                running.kill()

    def _request_stop(self, runner: Runner, reason: ExitReason) -> None:
        """Drop whatever the node is doing; a half-started child is killed when its turn comes (28, 87)."""
        if runner.node.is_stopping or runner.exited:
            return
        runner.node.is_stopping = True
        if runner.current is not None:
            runner.current.close()
        for operation, reply in runner.queue:
            operation.close()
            if reply is not None:
                reply(("error", "stopping"))
        runner.queue.clear()
        runner.waiting, runner.reply = None, None
        runner.current = runner.node.stop(reason)
        self._resumed.append((runner, None))

    # What happened

    def _check(self, running: ChildProcess) -> None:
        """Reap a child if it is dead. Its last frames come first."""
        reason = running.try_reap()
        if reason is None:
            return
        self._read(running)
        reason = ExitReason(reason.kind, reason.code, reason.core, running.last_word or reason.info)
        runner, child = self._owners.pop(running), running.child
        del self._processes[running.pid]
        if running.deadline is not None:
            running.deadline.cancel()
        if running.pidfd is not None:
            self._selector.unregister(running.pidfd)
        self._unwatch_channel(running)
        running.close()
        child.handle = None

        if running.acknowledged:
            path = (*runner.path, child.spec.id)
            self._hooks.on_exit(path, reason, running.info, requested=running.asked)
        if self._resume_stop(runner, child, reason):
            return
        if not running.acknowledged:
            self._resume_start(runner, child, _start_outcome(running, reason))
        elif not runner.node.is_stopping or child.state == "running":
            self._died(runner, child, reason)

    def _died(self, runner: Runner, child: ops.Child, reason: ExitReason) -> None:
        child.state = "undefined"
        child.unhandled_exit = reason
        if not runner.node.is_stopping:
            self._enqueue(runner, runner.node.child_exited(child, child.incarnation))

    def _node_exited(self, runner: Runner, reason: ExitReason) -> None:
        runner.exited = True
        if runner.current is not None:
            runner.current.close()
        for operation, reply in runner.queue:
            operation.close()
            if reply is not None:
                reply(("error", "stopping"))
        if runner.parent is None:
            self._result = reason
            return
        parent, child = runner.parent
        child.handle = None
        if self._resume_stop(parent, child, reason):
            return
        if not runner.booted:
            self._resume_start(parent, child, ops.StartFailed(reason))
        else:
            self._died(parent, child, reason)

    def _read(self, running: ChildProcess) -> None:
        try:
            frames = running.channel.receive()
        except ChannelBroken as error:
            running.last_word = f"sent garbage: {error}"
            running.kill()
            frames = []
        if not running.channel.is_open:
            self._unwatch_channel(running)
        for message, _ in frames:
            self._message(running, message)

    def _message(self, running: ChildProcess, message: dict[str, Any]) -> None:
        runner, child = self._owners[running], running.child
        name = message.get("m")
        if name == "ready" and not running.acknowledged:
            if running.killed:
                return
            running.acknowledged = True
            running.info = message.get("info") or {}
            if running.deadline is not None:
                running.deadline.cancel()
            self._hooks.on_start((*runner.path, child.spec.id), running.info)
            self._resume_start(runner, child, ops.Started(running.info))
        elif name == "ignore":
            running.ignored = True
        elif name == "failed":
            running.failure = str(message.get("reason"))
        elif name == "exit":
            running.last_word = str(message.get("reason"))
        else:
            self._hooks.on_message((*runner.path, child.spec.id), message)

    # Watching

    def _watch_channel(self, running: ChildProcess) -> None:
        if not running.channel.is_open:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if running.channel.has_unsent else 0)
        descriptor = running.channel.fileno()

        def serve() -> None:
            running.channel.flush()
            self._read(running)
            if running.channel.is_open:
                self._watch_channel(running)

        if running.watched:
            self._selector.modify(descriptor, events, serve)
        else:
            self._selector.register(descriptor, events, serve)
            running.watched = True

    def _unwatch_channel(self, running: ChildProcess) -> None:
        if running.watched:
            self._selector.unregister(running.channel.fileno())
            running.watched = False

    def _install_signals(self) -> None:
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._signals_arrived)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
            # What was ignored when we started (nohup, a background job of a shell) stays ignored (184).
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, _noted_by_wakeup_descriptor)

    def _signals_arrived(self) -> None:
        try:
            numbers = self._wake_read.recv(4096)
        except BlockingIOError:
            return
        # Our own signals before the deaths of children: a signal to the whole group must not lead to restarts (186).
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self.stop()
            elif number == signal.SIGUSR1:
                self._hooks.on_message((), {"m": "dump"})
        if not HAS_PIDFD and signal.SIGCHLD in numbers:
            for running in list(self._processes.values()):
                self._check(running)

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        for running in list(self._processes.values()):
            running.kill()
            running.close()
        for descriptor in self._lifeline:
            os.close(descriptor)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _status(self, reason: ExitReason) -> int:
        if self._stop_requests:
            return 0
        return START_FAILED if reason.kind == "start_failed" else GAVE_UP

    # Looking things up

    def _runner(self, path: Path) -> Runner | None:
        runner = self._root
        for step in path:
            child = runner.node.find(step)
            if child is None or not isinstance(child.handle, Runner):
                return None
            runner = child.handle
        return runner

    def _process(self, path: Path) -> ChildProcess | None:
        runner = self._runner(path[:-1])
        child = runner.node.find(path[-1]) if runner is not None else None
        return child.handle if child is not None and isinstance(child.handle, ChildProcess) else None

    def _which(self, runner: Runner) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = []
        for child in runner.node.children:
            entry: dict[str, Any] = {
                "id": child.spec.id,
                "type": child.spec.type,
                "state": child.state,
                "pid": None,
                "restarts": child.restarts,
            }
            if isinstance(child.handle, ChildProcess):
                entry["pid"] = child.handle.pid
                entry["uptime"] = round(self.clock() - child.handle.started_at, 3)
                entry["info"] = child.handle.info
            elif isinstance(child.handle, Runner):
                entry["children"] = self._which(child.handle)
            shown.append(entry)
        return shown


def _start_outcome(running: ChildProcess, reason: ExitReason) -> ops.StartOutcome:
    if running.ignored:
        return ops.Ignored()
    if running.failure is not None:
        return ops.StartFailed(ExitReason("start_failed", info=running.failure))
    return ops.StartFailed(reason)


def _noted_by_wakeup_descriptor(number: int, frame: object) -> None:
    """Do nothing: the signal's number is in the wakeup descriptor already (186)."""
