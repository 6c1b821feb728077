"""Carries out with processes what the nodes decide. One thread, no database, no user code.

All supervisor nodes of one process live in one `Supervisor`; a node nested in another is a child like any other.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from pgflow_otp.otp import node as ops
from pgflow_otp.otp.channel import Channel, ChannelBroken
from pgflow_otp.otp.child import ChildProcess, start_process
from pgflow_otp.otp.child_spec import ChildSpec, SupervisorSpec
from pgflow_otp.otp.event_loop import EventLoop, Timer
from pgflow_otp.otp.exit_reason import START_FAILED, ExitReason
from pgflow_otp.otp.hooks import Hooks, Path
from pgflow_otp.otp.process import HAS_PIDFD, ForkError
from pgflow_otp.otp.runner import STOPPING, Runner

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds the remaining children get when the end is requested a second time (183).
HURRY = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)


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
        self._clock = clock
        self._hooks = hooks or Hooks()
        self._loop = EventLoop(clock)
        self._root = Runner(ops.Node(spec, clock), (), None, self)
        self._resumed: deque[Runner] = deque()
        self._processes: dict[ChildProcess, Runner] = {}
        self._lifeline = os.pipe()
        self._stop_requests = 0
        self._result: ExitReason | None = None

    # For the owner of the tree

    def run(self) -> int:
        """Run until the end; return the exit status (192). Call it in the main thread."""
        self._loop.on_signals(_SIGNALS, self._signals_arrived)
        self._root.enqueue(self._root.node.boot())
        try:
            while self._result is None:
                while self._resumed:
                    self._resumed.popleft().advance()
                if self._result is None:
                    self._loop.turn()
        finally:
            self._close()
        if self._stop_requests:
            return 0
        if self._result.kind == "start_failed":
            return START_FAILED
        return self._result.code  # GAVE_UP, or 0 when it has shut itself down

    @property
    def result(self) -> ExitReason | None:
        """Why the tree ended; None while it runs."""
        return self._result

    def stop(self) -> None:
        """Stop everything in order. Again: hurry. A third time: kill (183)."""
        self._stop_requests += 1
        if self._stop_requests == 1:
            self._hooks.on_stopping()
            self._root.request_stop(ExitReason("shutdown"))
        elif self._stop_requests == 2:
            for running in self._processes:
                running.ask(hurry=True)
                self._watch_channel(running)
                self._kill_after(running, HURRY)
        else:
            for running in self._processes:
                running.kill()

    def start_child(self, path: Path, spec: ChildSpec, reply: Callable[[Any], None] | None = None) -> None:
        """Add a child to the node at `path`. `reply` gets ("ok", info) or ("error", reason)."""
        self._call(path, lambda node: node.start_child(spec), reply)

    def terminate_child(self, path: Path, child_id: str, reply: Callable[[Any], None] | None = None) -> None:
        """Stop one child of the node at `path` and leave it down."""
        self._call(path, lambda node: node.terminate_child(child_id), reply)

    def restart_child(self, path: Path, child_id: str, reply: Callable[[Any], None] | None = None) -> None:
        """Start a child that is down. `reply` gets ("ok", info), or ("error", reason): "not_found", "running",
        "restarting", or why it did not start (101)."""
        self._call(path, lambda node: node.restart_child(child_id), reply)

    def delete_child(self, path: Path, child_id: str, reply: Callable[[Any], None] | None = None) -> None:
        """Forget a child that is down. `reply` gets ("ok", None), or ("error", reason) as of restart_child (102)."""
        self._call(path, lambda node: node.delete_child(child_id), reply)

    def count_children(self, path: Path = ()) -> dict[str, int]:
        """Count the children of the node at `path`: specs, active, supervisors, workers (104). Empty: no such node."""
        runner = self._runner(path)
        return runner.node.count_children() if runner is not None else {}

    def get_child_spec(self, path: Path) -> ChildSpec | None:
        """Return the specification of a child, every field filled in (13); None when there is no such child."""
        runner = self._runner(path[:-1]) if path else None
        child = runner.node.find(path[-1]) if runner is not None else None
        return child.spec if child is not None else None

    def send(self, path: Path, message: str, **content: Any) -> bool:
        """Send a message to a running child; False when it does not run. Never blocks."""
        runner = self._runner(path[:-1])
        child = runner.node.find(path[-1]) if runner is not None else None
        if child is None or not isinstance(child.handle, ChildProcess):
            return False
        child.handle.channel.send({"m": message, **content})
        self._watch_channel(child.handle)
        return True

    def which_children(self) -> list[dict[str, Any]]:
        """Return the tree as nested dicts: id, type, state, pid, restarts, uptime, children (103)."""
        return self._which(self._root)

    def attach(self, channel: Channel, on_readable: Callable[[], None]) -> None:
        """Watch a channel of the owner's."""
        self._loop.watch(channel.fileno(), on_readable)

    def detach(self, channel: Channel) -> None:
        """Watch it no longer; before it is closed."""
        self._loop.unwatch(channel.fileno())

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once, so many seconds from now."""
        return self._loop.after(seconds, callback)

    # What the nodes decided

    def resume(self, runner: Runner) -> None:
        self._resumed.append(runner)

    def start(self, runner: Runner, child: ops.Child) -> None:
        spec = child.spec
        if isinstance(spec.start, SupervisorSpec):
            nested = Runner(ops.Node(spec.start, self._clock), (*runner.path, spec.id), (runner, child), self)
            child.handle = nested
            nested.enqueue(nested.node.boot())
            return
        try:
            running = start_process(child, f"pgflow-otp: {spec.id} [{self.name}]", self._lifeline[0], self._clock())
        except (ForkError, OSError) as error:
            child.handle = None
            runner.child_started(child, ops.StartFailed(ExitReason("start_failed", info=str(error))))
            return
        child.handle = running
        self._processes[running] = runner
        self._watch_channel(running)
        if running.pidfd is not None:
            self._loop.watch(running.pidfd, lambda: self._check(running))
        if spec.start_timeout is not None:
            running.deadline = self._loop.after(spec.start_timeout, running.start_timed_out)

    def stop_child(self, child: ops.Child) -> None:
        handle, shutdown = child.handle, child.spec.shutdown
        if isinstance(handle, Runner):
            handle.request_stop(ExitReason("shutdown"))
            if isinstance(shutdown, int):
                self._loop.after(shutdown / 1000, lambda: self._kill_below(handle))
        elif not handle.acknowledged or shutdown == "brutal_kill":
            handle.asked = True
            handle.kill()
        elif not handle.asked:
            handle.ask()
            self._watch_channel(handle)
            if isinstance(shutdown, int):
                self._kill_after(handle, shutdown / 1000)

    def booted(self, runner: Runner) -> None:
        if runner.parent is None:
            self._hooks.on_boot()
        else:
            runner.parent[0].child_started(runner.parent[1], ops.Started())

    def exited(self, runner: Runner, reason: ExitReason) -> None:
        if runner.parent is None:
            self._result = reason
            return
        parent, child = runner.parent
        child.handle = None
        if parent.child_stopped(child, reason):
            return
        if runner.is_booted or not parent.child_started(child, ops.StartFailed(reason)):
            parent.child_died(child, reason)

    def report(self, runner: Runner, report: ops.Report) -> None:
        handle = report.child.handle
        pid = handle.pid if isinstance(handle, ChildProcess) else None
        self._hooks.on_report((*runner.path, report.child.spec.id), report, pid)

    def _kill_after(self, running: ChildProcess, seconds: float) -> None:
        running.cancel_deadline()
        running.deadline = self._loop.after(seconds, running.kill)

    def _kill_below(self, runner: Runner) -> None:
        if not runner.has_exited:
            for running, owner in self._processes.items():
                if owner.path[: len(runner.path)] == runner.path:
                    running.kill()

    # What happened to the processes

    def _check(self, running: ChildProcess) -> None:
        """Reap a child if it is dead. Its last frames come first."""
        status = running.try_reap()
        if status is None:
            return
        self._read(running)
        reason = ExitReason(status.kind, status.code, status.core, running.last_word or status.info)
        runner, child = self._processes.pop(running), running.child
        running.cancel_deadline()
        if running.pidfd is not None:
            self._loop.unwatch(running.pidfd)
        self._loop.unwatch(running.channel.fileno())
        running.close()
        child.handle = None

        if running.acknowledged:
            path = (*runner.path, child.spec.id)
            self._hooks.on_exit(path, reason, running.info, requested=running.asked)
        if runner.child_stopped(child, reason):
            return
        if running.acknowledged:
            runner.child_died(child, reason)
        else:
            runner.child_started(child, running.start_outcome(reason))

    def _read(self, running: ChildProcess) -> None:
        try:
            frames = running.channel.receive()
        except ChannelBroken as error:
            running.last_word = f"sent garbage: {error}"
            running.kill()
            frames = []
        if not running.channel.is_open:
            self._loop.unwatch(running.channel.fileno())
        for message, _ in frames:
            self._message(running, message)

    def _message(self, running: ChildProcess, message: dict[str, Any]) -> None:
        runner, child = self._processes[running], running.child
        if running.noted(message):
            return
        path = (*runner.path, child.spec.id)
        if message.get("m") != "ready":
            self._hooks.on_message(path, message)
        elif not running.acknowledged and not running.killed:
            running.acknowledged = True
            running.info = message.get("info") or {}
            running.cancel_deadline()
            self._hooks.on_start(path, running.info)
            runner.child_started(child, ops.Started(running.info))

    def _watch_channel(self, running: ChildProcess) -> None:
        if running.channel.is_open:
            descriptor, write = running.channel.fileno(), running.channel.has_unsent
            self._loop.watch(descriptor, lambda: self._serve_channel(running), write=write)

    def _serve_channel(self, running: ChildProcess) -> None:
        running.channel.flush()
        self._read(running)
        self._watch_channel(running)

    def _signals_arrived(self, numbers: bytes) -> None:
        # Our own signals before the deaths of children: a signal to the whole group must not lead to restarts (186).
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self.stop()
            elif number == signal.SIGUSR1:
                self._hooks.on_message((), {"m": "dump"})
        if not HAS_PIDFD and signal.SIGCHLD in numbers:
            for running in list(self._processes):
                self._check(running)

    def _close(self) -> None:
        for running in self._processes:
            running.kill()
            running.close()
        for descriptor in self._lifeline:
            os.close(descriptor)
        self._loop.close()

    # Looking things up

    def _call(
        self, path: Path, operation: Callable[[ops.Node], ops.Operation], reply: Callable[[Any], None] | None
    ) -> None:
        runner = self._runner(path)
        if runner is not None:
            runner.enqueue(operation(runner.node), reply)
        elif reply is not None:
            reply(STOPPING)

    def _runner(self, path: Path) -> Runner | None:
        runner = self._root
        for step in path:
            child = runner.node.find(step)
            if child is None or not isinstance(child.handle, Runner):
                return None
            runner = child.handle
        return runner

    def _which(self, runner: Runner) -> list[dict[str, Any]]:
        return [self._shown(child) for child in runner.node.children]

    def _shown(self, child: ops.Child) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "id": child.spec.id,
            "type": child.spec.type,
            "state": child.state,
            "pid": None,
            "restarts": child.restarts,
        }
        if isinstance(child.handle, ChildProcess):
            uptime = round(self._clock() - child.handle.started_at, 3)
            shown |= {"pid": child.handle.pid, "uptime": uptime, "info": child.handle.info}
        elif isinstance(child.handle, Runner):
            shown["children"] = self._which(child.handle)
        return shown
