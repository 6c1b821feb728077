"""Carries out with processes what the nodes decide. One thread, no database, no user code.

All supervisor nodes of one process live in one `Supervisor`; a node nested in another is a child like any other.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from pgflow_otp.otp import operation as ops
from pgflow_otp.otp.child import ChildProcess
from pgflow_otp.otp.child_spec import ChildSpec, SupervisorSpec
from pgflow_otp.otp.event_loop import EventLoop, Timer
from pgflow_otp.otp.exit_reason import START_FAILED, ExitReason
from pgflow_otp.otp.hooks import Hooks, Path
from pgflow_otp.otp.node import Node
from pgflow_otp.otp.process import ForkError
from pgflow_otp.otp.processes import Processes
from pgflow_otp.otp.runner import STOPPING, Runner

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from pgflow_otp.otp.channel import Channel

#: Seconds the remaining children get when the end is requested a second time (183).
HURRY = 2.0
#: Gets the answer to a call.
Reply: TypeAlias = "Callable[[Any], None]"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)


class Supervisor:
    """Runs a tree of supervisors until it is told to stop or gives up.

    Args:
        spec: the root supervisor.
        name: name of the tree, shown in titles.
        hooks: is told what happens.
        signals_escalate: whether a signal that asks for the end hurries when the stop has begun (183). Not where the
            one above asks by a frame and a signal that mean the same (95).
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
        signals_escalate: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._clock = clock
        self._hooks = hooks or Hooks()
        self._loop = EventLoop(clock)
        self._root = Runner(Node(spec, clock), (), None, self)
        self._resumed: deque[Runner] = deque()
        self._processes = Processes(self._loop, name, self, clock)
        self._runners: dict[ChildProcess, Runner] = {}
        self._stop_requests = 0
        self._signals_escalate = signals_escalate
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

    @property
    def is_stopping(self) -> bool:
        """Whether the end has been requested."""
        return self._stop_requests > 0

    def stop(self) -> None:
        """Stop everything in order. Again: hurry. A third time: kill (183)."""
        self._stop_requests += 1
        if self._stop_requests == 1:
            self._hooks.on_stopping()
            self._root.request_stop(ExitReason("shutdown"))
        elif self._stop_requests == 2:
            for running in self._processes:
                self._processes.ask(running, HURRY, hurry=True)
        else:
            for running in self._processes:
                running.kill()

    # Calls. `reply` gets ("ok", pid, info) or ("error", reason). A child of a dynamic supervisor may be named by the
    # pid of its process (107).

    def start_child(self, path: Path, spec: ChildSpec, reply: Reply | None = None) -> None:
        """Add a child to the node at `path`. Errors: "already_started", "already_present", "max_children", or why it
        did not start (98, 99, 121)."""
        self._call(path, lambda node: node.start_child(spec), reply)

    def terminate_child(self, path: Path, key: str | int, reply: Reply | None = None) -> None:
        """Stop one child of the node at `path` and leave it down. Error: "not_found" (100, 108)."""
        self._call(path, lambda node: node.terminate_child(key), reply)

    def restart_child(self, path: Path, key: str | int, reply: Reply | None = None) -> None:
        """Start a child that is down. Errors: "not_found", "running", "restarting", or why it did not start (101)."""
        self._call(path, lambda node: node.restart_child(key), reply)

    def delete_child(self, path: Path, key: str | int, reply: Reply | None = None) -> None:
        """Forget a child that is down. Errors: "not_found", "running", "restarting" (102)."""
        self._call(path, lambda node: node.delete_child(key), reply)

    def count_children(self, path: Path = ()) -> dict[str, int]:
        """Count the children of the node at `path`: specs, active, supervisors, workers (104). Empty: no such node."""
        runner = self._runner(path)
        return runner.node.count_children() if runner is not None else {}

    def get_child_spec(self, path: Path, key: str | int) -> ChildSpec | None:
        """Return the specification of a child, every field filled in (13); None when there is no such child."""
        child = self._child(path, key)
        return child.spec if child is not None else None

    def which_children(self) -> list[dict[str, Any]]:
        """Return the tree as nested dicts, in the order of start: id, type, state, pid, restarts (and those
        that still count against the intensity), uptime in seconds, info (what it acknowledged with), children (103)."""
        return self._which(self._root)

    def which_child(self, path: Path, key: str | int) -> dict[str, Any] | None:
        """Return one child as `which_children` shows it; None when there is no such child (103)."""
        runner = self._runner(path)
        child = runner.node.find(key) if runner is not None else None
        return self._shown(child, runner.node.spec.flags.period) if runner is not None and child is not None else None

    def send(self, path: Path, message: str, **content: Any) -> bool:
        """Send a message to a running child; False when it does not run. Never blocks."""
        child = self._child(path[:-1], path[-1])
        if child is None or not isinstance(child.handle, ChildProcess):
            return False
        self._processes.send(child.handle, message, **content)
        return True

    # For the owner's own descriptors and times

    def attach(self, source: Channel | socket | int, on_ready: Callable[[], None], *, write: bool = False) -> None:
        """Call back whenever a descriptor of the owner's is readable, or writable. Again: change what is watched."""
        self._loop.watch(_descriptor(source), on_ready, write=write)

    def detach(self, source: Channel | socket | int) -> None:
        """Watch it no longer; before it is closed."""
        self._loop.unwatch(_descriptor(source))

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once, so many seconds from now."""
        return self._loop.after(seconds, callback)

    # What the nodes decided

    def resume(self, runner: Runner) -> None:
        self._resumed.append(runner)

    def start(self, runner: Runner, child: ops.Child) -> None:
        spec = child.spec
        if isinstance(spec.start, SupervisorSpec):
            nested = Runner(Node(spec.start, self._clock), (*runner.path, spec.id), (runner, child), self)
            child.handle = nested
            nested.enqueue(nested.node.boot())
            return
        try:
            running = self._processes.start(child, runner.node.spec.extra_args)
        except (ForkError, OSError) as error:
            runner.child_started(child, ops.StartFailed(ExitReason("start_failed", info=str(error))))
            return
        child.handle, child.pid = running, running.pid
        self._runners[running] = runner

    def stop_child(self, child: ops.Child) -> None:
        handle, shutdown = child.handle, child.spec.shutdown
        seconds = shutdown / 1000 if isinstance(shutdown, int) else None
        if isinstance(handle, Runner):
            if shutdown == "brutal_kill":
                self._kill_below(handle)
            handle.request_stop(ExitReason("shutdown"))
            if seconds is not None:
                self._loop.after(seconds, lambda: self._kill_below(handle))
        elif not handle.acknowledged or shutdown == "brutal_kill":
            handle.asked = True
            handle.kill()
        elif not handle.asked:
            self._processes.ask(handle, seconds)

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
        self._hooks.on_report((*runner.path, report.child.spec.id), report)

    def _kill_below(self, runner: Runner) -> None:
        if not runner.has_exited:
            for running, owner in list(self._runners.items()):
                if owner.path[: len(runner.path)] == runner.path:
                    running.kill()

    # What happened to the processes

    def process_ready(self, running: ChildProcess) -> None:
        runner, child = self._runners[running], running.child
        self._hooks.on_start((*runner.path, child.spec.id), running.info)
        runner.child_started(child, ops.Started(running.info, running.pid))

    def process_said(self, running: ChildProcess, message: dict[str, Any]) -> None:
        self._hooks.on_message((*self._runners[running].path, running.child.spec.id), message)

    def process_ended(self, running: ChildProcess, reason: ExitReason) -> None:
        runner, child = self._runners.pop(running), running.child
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

    def _signals_arrived(self, numbers: bytes) -> None:
        # Our own signals before the deaths of children: a signal to the whole group must not lead to restarts (186).
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if self._signals_escalate or not self.is_stopping:
                    self.stop()
            elif number == signal.SIGUSR1:
                self._hooks.on_message((), {"m": "dump"})
        if signal.SIGCHLD in numbers:
            self._processes.check_unwatched()

    def _close(self) -> None:
        self._processes.close()
        self._loop.close()

    # Looking things up

    def _call(self, path: Path, operation: Callable[[Node], ops.Operation], reply: Reply | None) -> None:
        runner = self._runner(path)
        if runner is not None:
            runner.enqueue(operation(runner.node), reply)
        elif reply is not None:
            reply(("error", "not_found") if self._result is None and not self.is_stopping else STOPPING)

    def _runner(self, path: Path) -> Runner | None:
        runner = self._root
        for step in path:
            child = runner.node.find(step)
            if child is None or not isinstance(child.handle, Runner):
                return None
            runner = child.handle
        return runner

    def _child(self, path: Path, key: str | int) -> ops.Child | None:
        runner = self._runner(path)
        return runner.node.find(key) if runner is not None else None

    def _which(self, runner: Runner) -> list[dict[str, Any]]:
        return [self._shown(child, runner.node.spec.flags.period) for child in runner.node.children]

    def _shown(self, child: ops.Child, period: float) -> dict[str, Any]:
        now = self._clock()
        shown: dict[str, Any] = {
            "id": child.spec.id,
            "type": child.spec.type,
            "state": child.state,
            "pid": None,
            "restarts": child.restarts,
            "restarts_in_period": sum(then >= now - period for then in child.restarted_at),
        }
        if isinstance(child.handle, ChildProcess):
            uptime = round(now - child.handle.started_at, 3)
            shown |= {"pid": child.handle.pid, "uptime": uptime, "info": child.handle.info}
        elif isinstance(child.handle, Runner):
            shown["children"] = self._which(child.handle)
        return shown


def _descriptor(source: Channel | socket | int) -> int:
    return source if isinstance(source, int) else source.fileno()
