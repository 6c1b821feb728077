"""The worker's side: slots, deadlines, kills and refills. All of it is events of one asyncio loop.

A slot's generation is in every message about it, so that a late kill or a late exit of an earlier process is harmless.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loguru import logger

from pgflow_otp.flow.payload import storable
from pgflow_otp.otp import process
from pgflow_otp.otp.channel import Channel, ChannelBroken
from pgflow_otp.otp.exit_reason import signal_name
from pgflow_otp.pool.control import ControlChannel
from pgflow_otp.pool.forkserver import ForkServer, HandlerConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pgflow_otp.db.tasks import ClaimedTask, Verdict
    from pgflow_otp.settings import Settings

#: Seconds from SIGKILL until the worker takes matters into its own hands, and until it replaces the forkserver.
DIRECT_KILL_AFTER = 1.0
REPLACE_AFTER = 5.0
#: Seconds the forkserver may take to tell how a handler ended that the kernel says is dead.
STATUS_WAIT = 2.0
SHORTEST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. "released": it was never the handler's fault and costs nothing; "crashed": the same, but
    counted, since the task may be the cause."""

    verdict: Verdict
    output: bytes | None = None
    error: str | None = None


@dataclass(eq=False)
class Slot:
    """One place for a handler process."""

    index: int
    generation: int = 0
    channel: Channel | None = None
    pidfd: int | None = None
    is_up: bool = False
    is_dying: bool = False
    #: The process said that it is not fit for another task.
    is_tainted: bool = False
    tasks_done: int = 0
    up: asyncio.Future[str | None] | None = None
    task: ClaimedTask | None = None
    outcome: asyncio.Future[Outcome] | None = None
    #: What the attempt ends as once the process is gone: decided when it was killed.
    decided: Outcome | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def has_process(self) -> bool:
        return self.channel is not None


class HandlerPool:
    """Runs tasks in handler processes, at most `max_concurrency` at once.

    Args:
        config: what forkserver and handlers need.
        settings: times and limits.
        load_flow_input: asks the database for a run's input.
    """

    def __init__(
        self,
        config: HandlerConfig,
        settings: Settings,
        load_flow_input: Callable[[ClaimedTask], Awaitable[bytes]],
    ) -> None:
        self._config = config
        self._settings = settings
        self._load_flow_input = load_flow_input
        self._slots = [Slot(i + 1) for i in range(settings.max_concurrency)]
        self._control: ControlChannel | None = None
        self._forkserver: int | None = None
        self._forkserver_pidfd: int | None = None
        self._loop: asyncio.AbstractEventLoop
        self._booted = asyncio.Event()
        self._boot_timer: asyncio.TimerHandle | None = None
        self._backoff = SHORTEST_BACKOFF
        self._closing = False
        self._background: set[asyncio.Task[None]] = set()
        self._boot_error: str | None = None

    # Life

    def start_forkserver(self) -> None:
        """Fork the forkserver. The first time before anything else exists: no loop, no connection."""
        ours, theirs = ControlChannel.pair()
        config = self._config
        self._forkserver = process.fork(
            lambda: ForkServer(theirs, config).run(),
            keep=(theirs.fileno(),),
            title=f"pgflow-otp: forkserver:{config.flow_slug} [{config.tree}]",
            dies_with_parent=True,
        )
        theirs.socket.close()
        ours.socket.setblocking(False)
        self._control = ours
        self._forkserver_pidfd = os.pidfd_open(self._forkserver) if process.HAS_PIDFD else None

    def attach(self) -> None:
        """Watch the forkserver from the running loop."""
        self._loop = asyncio.get_running_loop()
        assert self._control is not None
        self._loop.add_reader(self._control.fileno(), self._control_readable)
        if self._forkserver_pidfd is not None:
            self._loop.add_reader(self._forkserver_pidfd, self._forkserver_died)
        timeout = self._settings.boot_timeout
        self._boot_timer = self._loop.call_later(timeout, self._boot_timed_out)

    async def wait_booted(self) -> None:
        """Wait until the user's module is imported. Nothing is claimed before."""
        await self._booted.wait()

    @property
    def is_booted(self) -> bool:
        return self._booted.is_set()

    @property
    def free_slots(self) -> int:
        return sum(slot.task is None for slot in self._slots)

    @property
    def busy_slots(self) -> int:
        return len(self._slots) - self.free_slots

    def tell_drain(self) -> None:
        """Let running handlers know that the worker is being stopped (`ctx.shutdown_requested`)."""
        for slot in self._slots:
            if slot.task is not None and slot.channel is not None:
                self._send(slot, {"m": "drain"})

    def release_all(self) -> None:
        """Kill what still runs; its attempts are handed back."""
        for slot in self._slots:
            if slot.task is not None:
                self._end(slot, Outcome("released"))

    def close(self) -> None:
        """Kill everything that is left. May be called again."""
        self._closing = True
        self._dismiss_forkserver()
        for timer in [self._boot_timer, *(t for slot in self._slots for t in slot.timers)]:
            if timer is not None:
                timer.cancel()
        self._detach_forkserver(kill=True)
        for slot in self._slots:
            self._clear(slot)
            if slot.outcome is not None and not slot.outcome.done():
                slot.outcome.set_result(slot.decided or Outcome("released"))

    # One task

    async def run(self, task: ClaimedTask) -> Outcome:
        """Run one task; the caller sees to it that a slot is free."""
        slot = min((s for s in self._slots if s.task is None), key=lambda s: (not s.is_up, s.index))
        slot.task = task
        slot.outcome = self._loop.create_future()
        slot.decided = None
        if not slot.is_dying:
            self._cancel_timers(slot)
        try:
            failure = await self._raise_process(slot)
            if failure is not None:
                return slot.decided or Outcome("failed", error=failure)
            if not slot.outcome.done() and slot.decided is None:
                self._give(slot, task)
            return await slot.outcome
        finally:
            slot.task = None
            slot.outcome = None
            self._after_task(slot)

    async def _raise_process(self, slot: Slot) -> str | None:
        """See that the slot has a process that is up; returns why its setup failed."""
        while not slot.is_up and slot.outcome is not None and not slot.outcome.done():
            await self._booted.wait()
            if slot.is_dying:
                await self._gone(slot)
                continue
            if not slot.has_process:
                self._fork(slot)
            assert slot.up is not None
            failure = await slot.up
            if failure is not None:
                return failure
        return None

    async def _gone(self, slot: Slot) -> None:
        while slot.has_process:
            await asyncio.sleep(0.01)

    def _fork(self, slot: Slot) -> None:
        assert self._control is not None
        slot.generation += 1
        slot.is_up, slot.is_dying, slot.is_tainted, slot.tasks_done = False, False, False, 0
        slot.up = self._loop.create_future()
        ours, theirs = Channel.pair()
        slot.channel = ours
        self._control.send({"m": "fork", "slot": slot.index, "generation": slot.generation}, theirs.fileno())
        if self._control.has_unsent:
            self._flush_control(theirs)
        else:
            theirs.close()
        self._loop.add_reader(ours.fileno(), self._handler_readable, slot, slot.generation)
        timeout = self._settings.boot_timeout
        slot.timers.append(self._loop.call_later(timeout, self._setup_timed_out, slot, slot.generation))

    def _flush_control(self, theirs: Channel) -> None:
        control = self._control
        assert control is not None

        def writable() -> None:
            control.flush()
            if not control.has_unsent:
                self._loop.remove_writer(control.fileno())
            theirs.close()

        self._loop.add_writer(control.fileno(), writable)

    def _give(self, slot: Slot, task: ClaimedTask) -> None:
        root = task.flow_input is not None
        header = {
            "m": "task",
            "run_id": str(task.run_id),
            "step": task.step_slug,
            "index": task.task_index,
            "attempt": task.attempt,
            "timeout": task.timeout,
            "root": root,
        }
        payload = task.flow_input if root else task.input
        self._send(slot, header, payload if payload is not None else b"null")
        # The clock starts when the handler has the task (195); a process that never takes it is not waited for.
        slot.timers.append(
            self._loop.call_later(
                self._settings.boot_timeout,
                self._end,
                slot,
                Outcome("failed", error="handler process did not take the task"),
            )
        )

    def _after_task(self, slot: Slot) -> None:
        if not slot.has_process or slot.is_dying:
            return
        self._cancel_timers(slot)
        most = self._settings.max_tasks_per_process
        if self._closing or slot.is_tainted or (most is not None and slot.tasks_done >= most):
            self._retire(slot, slot.generation)
            return
        slot.timers.append(self._loop.call_later(self._settings.idle_timeout, self._retire, slot, slot.generation))

    def _retire(self, slot: Slot, generation: int) -> None:
        """End an idle process by closing its channel; SIGKILL if it does not take the hint."""
        if slot.generation != generation or slot.task is not None or slot.channel is None:
            return
        slot.is_dying, slot.is_up = True, False
        self._loop.remove_reader(slot.channel.fileno())
        self._loop.remove_writer(slot.channel.fileno())
        slot.channel.socket.shutdown(2)
        slot.timers.append(
            self._loop.call_later(self._settings.kill_grace, self._kill, slot, generation, signal.SIGKILL)
        )

    # Deadlines and kills

    def _timed_out(self, slot: Slot, generation: int) -> None:
        if slot.generation == generation and slot.task is not None and slot.decided is None:
            self._end(slot, Outcome("failed", error=f"Task timed out after {slot.task.timeout}s"))

    def _end(self, slot: Slot, outcome: Outcome) -> None:
        """Decide an attempt from outside: SIGTERM to the group, SIGKILL after the grace, each a timer of its own."""
        if slot.decided is not None or slot.outcome is None or slot.outcome.done():
            return
        slot.decided = outcome
        self._cancel_timers(slot)
        if not slot.has_process:
            slot.outcome.set_result(outcome)
            if slot.up is not None and not slot.up.done():
                slot.up.set_result(None)
            return
        slot.is_dying, slot.is_up = True, False
        generation = slot.generation
        self._kill(slot, generation, signal.SIGTERM)
        grace = self._settings.kill_grace
        slot.timers += [
            self._loop.call_later(grace, self._kill, slot, generation, signal.SIGKILL),
            self._loop.call_later(grace + DIRECT_KILL_AFTER, self._kill_directly, slot, generation),
            self._loop.call_later(grace + REPLACE_AFTER, self._give_up_forkserver, slot, generation),
        ]

    def _kill(self, slot: Slot, generation: int, number: signal.Signals) -> None:
        if slot.generation == generation and slot.has_process and self._control is not None:
            self._control.send({"m": "signal", "slot": slot.index, "generation": generation, "signal": int(number)})

    def _kill_directly(self, slot: Slot, generation: int) -> None:
        if slot.generation == generation and slot.pidfd is not None:
            try:
                signal.pidfd_send_signal(slot.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _give_up_forkserver(self, slot: Slot, generation: int) -> None:
        if slot.generation == generation and slot.has_process:
            logger.error("a killed handler does not go away; replacing the forkserver")
            self._forkserver_died()

    # What handlers say

    def _send(self, slot: Slot, header: dict[str, Any], payload: bytes = b"") -> None:
        assert slot.channel is not None
        channel = slot.channel
        channel.send(header, payload)
        if channel.has_unsent:

            def writable() -> None:
                channel.flush()
                if not channel.has_unsent or not channel.is_open:
                    self._loop.remove_writer(channel.fileno())

            self._loop.add_writer(channel.fileno(), writable)

    def _handler_readable(self, slot: Slot, generation: int) -> None:
        if slot.generation != generation or slot.channel is None:
            return
        try:
            frames = slot.channel.receive()
        except ChannelBroken as error:
            frames = []
            self._end(slot, Outcome("failed", error=f"the handler process wrote garbage to its channel: {error}"))
        if not slot.channel.is_open:
            # Not a death by itself: the process may have closed it. Its pidfd or the forkserver tells.
            self._loop.remove_reader(slot.channel.fileno())
            if slot.decided is None and slot.task is not None:
                slot.timers.append(self._loop.call_later(STATUS_WAIT, self._channel_lost, slot, generation))
        for header, payload in frames:
            self._handler_said(slot, header, payload)

    def _channel_lost(self, slot: Slot, generation: int) -> None:
        if slot.generation == generation:
            self._end(slot, Outcome("failed", error="the handler process closed its channel before giving a result"))

    def _handler_said(self, slot: Slot, header: dict[str, Any], payload: bytes) -> None:
        message = header.get("m")
        if message == "up":
            slot.is_up = True
            self._cancel_timers(slot)
            if slot.up is not None and not slot.up.done():
                slot.up.set_result(None)
        elif message == "setup_failed" and slot.up is not None and not slot.up.done():
            slot.is_dying = True
            slot.up.set_result(f"setup of the handler process failed: {header.get('error')}")
            grace = self._settings.kill_grace
            slot.timers.append(self._loop.call_later(grace, self._kill, slot, slot.generation, signal.SIGKILL))
        elif message == "began" and slot.task is not None and slot.decided is None:
            self._cancel_timers(slot)
            slot.timers.append(self._loop.call_later(slot.task.timeout, self._timed_out, slot, slot.generation))
        elif message == "flow_input" and slot.task is not None:
            self._in_background(self._answer_flow_input(slot, slot.generation, slot.task))
        elif message in ("done", "failed") and slot.outcome is not None and not slot.outcome.done():
            if slot.decided is not None:
                return  # Too late: the attempt had timed out (128). The process is on its way out.
            slot.tasks_done += 1
            slot.is_tainted = bool(header.get("last"))
            if message == "done":
                slot.outcome.set_result(Outcome("completed", output=payload))
            else:
                verdict: Verdict = "failed_for_good" if header.get("final") else "failed"
                slot.outcome.set_result(Outcome(verdict, error=storable(str(header.get("error")))))

    async def _answer_flow_input(self, slot: Slot, generation: int, task: ClaimedTask) -> None:
        payload = await self._load_flow_input(task)
        if slot.generation == generation and slot.task is task and slot.channel is not None:
            self._send(slot, {"m": "flow_input"}, payload)

    # What the forkserver says

    def _control_readable(self) -> None:
        control = self._control
        if control is None:
            return
        for frame in control.receive():
            message = frame["m"]
            if message == "booted":
                self._backoff = SHORTEST_BACKOFF
                self._boot_error = None
                self._booted.set()
                if self._boot_timer is not None:
                    self._boot_timer.cancel()
            elif message == "boot_failed":
                self._report_boot_failure(str(frame["reason"]))
            elif message == "forked":
                self._forked(frame, control.take_descriptor() if frame.get("pidfd") else None)
            elif message == "fork_failed":
                self._exited(frame, f"no handler process could be started: {frame['reason']}")
            elif message == "exited":
                self._exited(frame, _describe_death(frame))
        if not control.is_open and control is self._control:
            self._forkserver_died()

    def _forked(self, frame: dict[str, Any], pidfd: int | None) -> None:
        slot = self._slots[frame["slot"] - 1]
        if pidfd is None:
            return
        if slot.generation != frame["generation"] or not slot.has_process:
            os.close(pidfd)
            return
        slot.pidfd = pidfd
        self._loop.add_reader(pidfd, self._pidfd_readable, slot, slot.generation)

    def _pidfd_readable(self, slot: Slot, generation: int) -> None:
        """The kernel says that it is dead; the forkserver is given a moment to say how."""
        if slot.generation != generation or slot.pidfd is None:
            return
        self._loop.remove_reader(slot.pidfd)
        slot.is_up, slot.is_dying = False, True
        slot.timers.append(
            self._loop.call_later(
                STATUS_WAIT,
                self._exited,
                {"slot": slot.index, "generation": generation},
                "handler process died; how is not known",
            )
        )

    def _exited(self, frame: dict[str, Any], error: str) -> None:
        slot = self._slots[frame["slot"] - 1]
        if slot.generation != frame["generation"] or not slot.has_process:
            return
        if slot.channel is not None and slot.channel.is_open:
            self._handler_readable(slot, slot.generation)  # A result that arrived before the death counts.
        self._clear(slot)
        if slot.up is not None and not slot.up.done():
            slot.up.set_result(f"{error} while it was set up")
        if slot.outcome is not None and not slot.outcome.done():
            slot.outcome.set_result(slot.decided or Outcome("failed", error=error))

    def _setup_timed_out(self, slot: Slot, generation: int) -> None:
        if slot.generation == generation and not slot.is_up and slot.up is not None and not slot.up.done():
            slot.is_dying = True
            slot.up.set_result(f"setup of the handler process took longer than {self._settings.boot_timeout} s")
            self._kill(slot, generation, signal.SIGKILL)

    def _clear(self, slot: Slot) -> None:
        """Forget a dead process."""
        self._cancel_timers(slot)
        if slot.channel is not None:
            if slot.channel.fileno() >= 0:
                self._loop.remove_reader(slot.channel.fileno())
                self._loop.remove_writer(slot.channel.fileno())
            slot.channel.close()
            slot.channel = None
        if slot.pidfd is not None:
            self._loop.remove_reader(slot.pidfd)
            os.close(slot.pidfd)
            slot.pidfd = None
        slot.is_up = slot.is_dying = False

    def _cancel_timers(self, slot: Slot) -> None:
        for timer in slot.timers:
            timer.cancel()
        slot.timers.clear()

    # The forkserver's own troubles

    def _boot_timed_out(self) -> None:
        self._report_boot_failure(
            f"importing {self._config.target} takes longer than boot_timeout ({self._settings.boot_timeout} s)"
        )
        self._forkserver_died()

    def _report_boot_failure(self, reason: str) -> None:
        if reason != self._boot_error:
            logger.error(f"no tasks are taken: {reason}")
        self._boot_error = reason

    def _forkserver_died(self) -> None:
        """Replace it. What was running is handed back: that was not the handlers' fault, but it is counted."""
        if self._control is None:
            return
        was_booted = self._booted.is_set()
        self._booted.clear()
        if self._boot_timer is not None:
            self._boot_timer.cancel()
        self._detach_forkserver(kill=True)
        for slot in self._slots:
            self._clear(slot)
            if slot.up is not None and not slot.up.done():
                slot.up.set_result(None)
            if slot.outcome is not None and not slot.outcome.done():
                slot.outcome.set_result(
                    slot.decided or Outcome("crashed", error="The forkserver died repeatedly while this task ran")
                )
        if self._closing:
            return
        if was_booted:
            logger.warning("the forkserver died; starting another")
        self._in_background(self._restart_forkserver(0.0 if was_booted else self._backoff))
        self._backoff = min(self._backoff * 2, LONGEST_BACKOFF)

    async def _restart_forkserver(self, delay: float) -> None:
        while True:
            await asyncio.sleep(delay)
            if self._closing:
                return
            try:
                await _join_idle_threads()
                self.start_forkserver()
            except process.ForkError as error:
                logger.error(f"no forkserver: {error}; trying again in {self._backoff:g} s")
                delay = self._backoff
                self._backoff = min(self._backoff * 2, LONGEST_BACKOFF)
                continue
            self.attach()
            return

    def _detach_forkserver(self, *, kill: bool) -> None:
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            self._loop.remove_writer(self._control.fileno())
            self._control.close()
            self._control = None
        if self._forkserver_pidfd is not None:
            self._loop.remove_reader(self._forkserver_pidfd)
            os.close(self._forkserver_pidfd)
            self._forkserver_pidfd = None
        if self._forkserver is not None and kill:
            process.signal_process(self._forkserver, signal.SIGKILL)
            self._reap_forkserver(self._forkserver)
            self._forkserver = None

    def _dismiss_forkserver(self) -> None:
        """Close its channel and let it kill and reap its handlers, so that nobody is left to the init process."""
        if self._control is None or self._forkserver is None:
            return
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())
        self._control.socket.shutdown(socket.SHUT_RDWR)
        if self._reap_forkserver(self._forkserver):
            self._forkserver = None

    def _reap_forkserver(self, pid: int) -> bool:
        """Wait for its end, which is near: it was dismissed or killed."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            try:
                if process.reap(pid) is not None:
                    return True
            except ChildProcessError:
                return True
            time.sleep(0.001)
        return False

    def _in_background(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _join_idle_threads() -> None:
    """End the threads that asyncio resolves host names with: nothing forks while another thread runs (164)."""
    loop = asyncio.get_running_loop()
    executor = getattr(loop, "_default_executor", None)
    if executor is not None:
        loop._default_executor = None  # type: ignore[attr-defined]
        executor.shutdown(wait=True)


def _describe_death(frame: dict[str, Any]) -> str:
    peak = f"peak memory {frame['peak_kib'] / 1024:.0f} MiB"
    if frame["signal"] is None:
        return f"handler process exited with status {frame['code']} before giving a result ({peak})"
    name = signal_name(frame["signal"])
    core = ", core dumped" if frame["core"] else ""
    hint = ", possibly out of memory" if frame["signal"] == signal.SIGKILL else ""
    return f"handler process was killed by {name} (signal {frame['signal']}{core}{hint}; {peak})"
