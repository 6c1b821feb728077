"""The parent of a flow's handler processes: imports the user's module once, forks on request, reaps, signals.

Single thread, no database. Frames from the worker: {"m": "fork", slot, generation} with the handler's end of its
channel, {"m": "signal", slot, generation, signal}. Frames to the worker: "booted" or "boot_failed", "forked" with the
handler's pidfd, "fork_failed", "exited".
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgflow_otp.errors import PgflowError
from pgflow_otp.flow.target import load_target
from pgflow_otp.log import HandlerLog
from pgflow_otp.otp import process
from pgflow_otp.pool.handler import HandlerProcess, take_over_output

if TYPE_CHECKING:
    from pgflow_otp.flow.dsl import Flow
    from pgflow_otp.flow.target import Source
    from pgflow_otp.pool.control import ControlChannel

#: How readily the system ends a handler when memory runs out: before workers.
HANDLER_SCORE = 300


@dataclass(frozen=True, slots=True)
class HandlerConfig:
    """What a handler process has to know."""

    flow_slug: str
    target: str
    source: Source
    dsn: str
    max_payload: int
    tree: str
    log_level: str


@dataclass(slots=True)
class _Handler:
    pid: int
    slot: int
    generation: int
    pidfd: int | None


class ForkServer:
    """The loop of a forkserver."""

    def __init__(self, control: ControlChannel, config: HandlerConfig) -> None:
        self._control = control
        self._config = config
        self._handlers: dict[int, _Handler] = {}
        self._selector = selectors.DefaultSelector()
        #: What the user's import opened: handlers get these and no others.
        self._users_descriptors: tuple[int, ...] = ()
        #: Processes that the import has started.
        self._users_children: frozenset[int] = frozenset()
        self._log = HandlerLog(f"forkserver:{config.flow_slug}", config.log_level)

    def run(self) -> int:
        os.dup2(2, 1)  # What user code prints is log output; standard output belongs to the command's result.
        process.become_subreaper()
        process.offer_to_the_oom_killer(HANDLER_SCORE)
        before = process.open_descriptors()
        try:
            flow = self._load()
        except PgflowError as error:
            self._control.send({"m": "boot_failed", "reason": str(error)})
            return 0
        if threading.active_count() > 1:
            self._control.send({"m": "boot_failed", "reason": _THREADS_LEFT.format(target=self._config.target)})
            return 0
        self._users_children = frozenset(process.children())
        self._users_descriptors = tuple(process.open_descriptors() - before)
        self._control.send({"m": "booted"})
        wake = self._install_wakeup()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        while self._control.is_open:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if wake in ready:
                wake.recv(4096)
                self._reap()
            if self._control in ready:
                for frame in self._control.receive():
                    self._serve(frame, flow)
        self._kill_all()
        return 0

    def _load(self) -> Flow:
        flows = load_target(self._config.target, self._config.source)
        for flow in flows.values():
            if flow.slug == self._config.flow_slug:
                return flow
        raise PgflowError(f"{self._config.target} no longer holds a flow '{self._config.flow_slug}'")

    def _install_wakeup(self) -> socket.socket:
        read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        self._wake_write = write
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        return read

    def _serve(self, frame: dict[str, Any], flow: Flow) -> None:
        if frame["m"] == "fork":
            channel, output = self._control.take_descriptor(), self._control.take_descriptor()
            try:
                self._fork(frame["slot"], frame["generation"], channel, output, flow)
            finally:
                os.close(channel)
                os.close(output)
        elif frame["m"] == "signal":
            handler = next(
                (h for h in self._handlers.values() if (h.slot, h.generation) == (frame["slot"], frame["generation"])),
                None,
            )
            if handler is not None:
                process.signal_process(handler.pid, frame["signal"], group=not frame.get("alone"))

    def _fork(self, slot: int, generation: int, descriptor: int, output: int, flow: Flow) -> None:
        config = self._config

        def main() -> int:
            # What its own children leave behind comes to it, and on its death to us: then it is known whose it was.
            process.become_subreaper()
            take_over_output(output, self._log)
            channel = socket.socket(fileno=descriptor)
            channel.setblocking(True)
            return HandlerProcess(flow, channel, config.dsn, config.max_payload).run()

        try:
            pid = process.fork(
                main,
                keep=(descriptor, output, *self._users_descriptors),
                title=f"pgflow-otp: handler:{config.flow_slug}/{slot} [{config.tree}]",
                dies_with_parent=True,
            )
        except process.ForkError as error:
            self._control.send({"m": "fork_failed", "slot": slot, "generation": generation, "reason": str(error)})
            return
        pidfd = os.pidfd_open(pid) if process.HAS_PIDFD else None
        self._handlers[pid] = _Handler(pid, slot, generation, pidfd)
        forked = {"m": "forked", "slot": slot, "generation": generation, "pid": pid}
        if pidfd is None:
            self._control.send(forked)
        else:
            self._control.send({**forked, "pidfd": True}, pidfd)
            os.close(pidfd)

    def _reap(self) -> None:
        """Look at every dead child: kill what is left of its group while the group's id is still its own, then reap."""
        while True:
            process.kill_strangers({*self._handlers, *self._users_children})
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None:
                return
            handler = self._handlers.pop(dead.si_pid, None)
            if handler is not None:
                process.signal_process(dead.si_pid, signal.SIGKILL, group=True)
            _, status, usage = os.wait4(dead.si_pid, 0)
            if handler is not None:
                self._control.send(
                    {
                        "m": "exited",
                        "slot": handler.slot,
                        "generation": handler.generation,
                        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                        "core": os.WCOREDUMP(status) if os.WIFSIGNALED(status) else False,
                        "peak_kib": usage.ru_maxrss if sys.platform == "linux" else usage.ru_maxrss // 1024,
                    }
                )

    def _kill_all(self) -> None:
        for handler in self._handlers.values():
            process.signal_process(handler.pid, signal.SIGKILL, group=True)
        for handler in self._handlers.values():
            try:
                os.waitpid(handler.pid, 0)
            except ChildProcessError:
                pass


_THREADS_LEFT = (
    "importing {target} left threads running, and a process with threads cannot be forked safely; "
    "start them in Flow.setup instead, which runs in each handler process"
)
