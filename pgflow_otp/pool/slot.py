"""One place for a handler process: its life, its task, its deadline. All of it is events of the worker's loop.

The generation in every message about a slot makes a late kill or a late exit of an earlier process harmless.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

from pgflow_otp.flow.payload import storable
from pgflow_otp.otp.channel import Channel, ChannelBroken
from pgflow_otp.pool.frames import log_fields, slot_report, task_frame
from pgflow_otp.pool.killing import Killing
from pgflow_otp.pool.outcome import Outcome
from pgflow_otp.pool.output import Output
from pgflow_otp.pool.timers import Timers, either

if TYPE_CHECKING:
    from pgflow_otp.db.tasks import ClaimedTask, Verdict
    from pgflow_otp.pool.owner import SlotOwner
    from pgflow_otp.settings import Settings

#: Seconds the forkserver may take to tell how a handler ended that the kernel says is dead.
STATUS_WAIT = 2.0
#: Seconds a process that did not get ready has to show its stack.
_SHOW_STACK = 0.2


class Slot:
    """A handler process, when there is one, and the attempt it works on, when there is one."""

    def __init__(self, index: int, owner: SlotOwner, settings: Settings) -> None:
        self.index = index
        self.generation = 0
        self.task: ClaimedTask | None = None
        #: The process has said that it is set up, and is fit for a task.
        self.is_up = False
        self._owner = owner
        self._settings = settings
        self._channel: Channel | None = None
        self._output: Output | None = None
        self._pid: int | None = None
        self.pidfd: int | None = None
        #: When the attempt was given to the process, and when that was forked; the loop's time.
        self._given_at = 0.0
        self._forked_at = 0.0
        #: Why setting up the process fails: told when it is gone, with what it had to say.
        self._setup_failure: str | None = None
        self._is_dying = False
        self._is_tainted = False
        #: The attempt is this process's; else it waits for an earlier one to be gone, whose end is not its own.
        self._is_given = False
        self._tasks_done = 0
        #: Becomes the reason why setting up the process failed, or None.
        self._up: asyncio.Future[str | None] | None = None
        self._outcome: asyncio.Future[Outcome] | None = None
        #: What the attempt ends as once the process is gone: settled when it was killed.
        self._decided: Outcome | None = None
        self._gone = asyncio.Event()
        self._timers = Timers()
        self._killing = Killing(self, owner, self._timers)

    @property
    def age(self) -> float:
        """Seconds since its process was forked."""
        return self._age(self._forked_at)

    @property
    def has_process(self) -> bool:
        return self._channel is not None

    # One attempt

    async def run(self, task: ClaimedTask) -> Outcome:
        """Run one task in this slot, which has to be free."""
        self.task = task
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._outcome = outcome
        self._decided = None
        self._is_given = False
        if not self._is_dying:
            self._timers.cancel()
        try:
            failure = await self._raise_process(outcome)
            if failure is not None:
                # No process, no attempt: the task goes back as it came, and nothing is claimed until one comes up.
                return self._decided or Outcome("released")
            if not outcome.done() and self._decided is None:
                self._give(task)
            return await outcome
        finally:
            self.task = None
            self._outcome = None
            self._after_task()

    async def probe(self) -> bool:
        """Bring up a process without a task; whether that went well."""
        nobody: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._decided = None
        failure = await self._raise_process(nobody)
        if failure is None:
            self._after_task()
        return failure is None

    def end(self, outcome: Outcome, grace: float | None = None) -> bool:
        """Decide the attempt from outside: SIGTERM to the group, SIGKILL after the grace, each a timer of its own.

        Of an attempt that is decided already only the grace may still be cut short. Returns whether it was not.
        """
        if self._outcome is None or self._outcome.done():
            return False
        if self._decided is not None:
            if grace is not None and self.has_process:
                self._killing.kill_after(grace)
            return False
        self._decided = outcome
        if not self.has_process:
            self._outcome.set_result(outcome)
            self._set_up("the attempt was ended before")
            return True
        if self._is_dying:
            if grace is not None:
                self._killing.kill_after(grace)
            return True  # Its death is on the way already.
        self._timers.cancel()
        self._is_dying, self.is_up = True, False
        self._killing.terminate()
        self._killing.kill_after(self._settings.kill_grace if grace is None else grace)
        return True

    def tell_drain(self) -> None:
        """Let the handler know that the worker is being stopped."""
        if self.task is not None and self.is_up:
            self._send({"m": "drain"})

    async def _raise_process(self, outcome: asyncio.Future[Outcome]) -> str | None:
        """See that there is a process and that it is up; the reason if that cannot be."""
        while not self.is_up and not outcome.done():
            if not self._owner.is_booted:
                await either(outcome, self._owner.wait_booted())
                continue
            if self._is_dying:
                await either(outcome, self._gone.wait())
                continue
            if not self.has_process:
                self._fork()
            assert self._up is not None
            failure = await self._up
            if failure is not None:
                return None if outcome.done() else failure
        return None

    def _fork(self) -> None:
        loop = asyncio.get_running_loop()
        self.generation += 1
        self.is_up = self._is_dying = self._is_tainted = False
        self._setup_failure = None
        self._tasks_done = 0
        self._up = loop.create_future()
        self._gone.clear()
        self._forked_at = loop.time()
        read, write = os.pipe()
        self._output = Output(read, lambda: log_fields(f"handler:{self._owner.flow_slug}/{self.index}", self.task))
        try:
            ours, theirs = Channel.pair()
        except OSError:
            os.close(write)
            self._output.close()
            raise
        self._channel = ours
        self._owner.send({"m": "fork", "slot": self.index, "generation": self.generation}, theirs.fileno(), write)
        theirs.close()
        os.close(write)
        loop.add_reader(ours.fileno(), self._readable, self.generation)
        self._timers.after(self._settings.boot_timeout, self._setup_timed_out, self.generation)

    def _give(self, task: ClaimedTask) -> None:
        self._is_given = True
        self._given_at = asyncio.get_running_loop().time()
        assert self._output is not None
        self._output.drain()
        self._output.begin()
        self._send(*task_frame(task))
        # It waits for a frame, so it has the task now: the clock starts (195).
        self._timers.after(task.timeout, self._timed_out, self.generation)

    def _after_task(self) -> None:
        if not self.has_process or self._is_dying:
            return
        self._timers.cancel()
        most = self._settings.max_tasks_per_process
        if self._is_tainted or (most is not None and self._tasks_done >= most):
            self.retire(self.generation)
        else:
            self._timers.after(self._settings.idle_timeout, self.retire, self.generation)

    def retire(self, generation: int) -> None:
        """End an idle process by closing its channel; SIGKILL if it does not take the hint."""
        if self.generation != generation or self.task is not None or self._channel is None or self._is_dying:
            return
        self._timers.cancel()
        self._is_dying, self.is_up = True, False
        self._unwatch_channel()
        self._channel.socket.shutdown(socket.SHUT_RDWR)
        self._killing.kill_after(self._settings.kill_grace)

    # Deadlines and kills

    def _timed_out(self, generation: int) -> None:
        if self.generation == generation and self.task is not None:
            # What it answered in time counts, even if this process was stopped meanwhile and reads it only now (190):
            # a wait that a signal ends past its time reports no descriptor.
            self._readable(generation)
            self._killing.show_stack()
            self.end(Outcome("failed", error=f"Task timed out after {self.task.timeout}s"))

    def _setup_timed_out(self, generation: int) -> None:
        if self.generation == generation and not self.is_up:
            self._killing.show_stack()
            self._die(f"setup of the handler process took longer than {self._settings.boot_timeout:g} s", _SHOW_STACK)

    def _die(self, failure: str, grace: float) -> None:
        """The process could not be set up: it goes, and the attempt fails."""
        self._timers.cancel()
        self._is_dying, self.is_up = True, False
        self._killing.kill_after(grace)
        self._setup_failure = failure

    # What the process says

    def _readable(self, generation: int) -> None:
        if self.generation != generation or self._channel is None:
            return
        try:
            frames = self._channel.receive()
        except ChannelBroken as error:
            frames, garbage = error.frames, f"the handler process wrote garbage to its channel: {error}"
        else:
            garbage = ""
        for header, payload in frames:
            self._said(header, payload)
        if garbage:
            self.end(Outcome("failed", error=garbage))
        if self._channel is not None and not self._channel.is_open:
            # Not a death by itself: a handler may have closed it. The kernel or the forkserver tells.
            self._unwatch_channel()
            self.is_up = False
            if not self._is_dying:
                self._is_dying = True
                lost = Outcome("failed", error="the handler process closed its channel before giving a result")
                self._timers.after(STATUS_WAIT, self._channel_lost, generation, lost)

    def _channel_lost(self, generation: int, lost: Outcome) -> None:
        if self.generation == generation and self.has_process:
            self._is_dying = False
            if self.task is not None:
                self.end(lost)
            if not self._is_dying:
                self._die("the handler process closed its channel", 0.0)

    def _said(self, header: dict[str, Any], payload: bytes) -> None:
        message = header.get("m")
        if message == "up":
            if not self._is_dying:
                self._timers.cancel()
                self.is_up = True
                self._set_up(None)
        elif message == "setup_failed":
            error = storable(str(header.get("error")))
            self._die(f"setup of the handler process failed: {error}", self._settings.kill_grace)
        elif self._outcome is None or self._outcome.done() or self._decided is not None or self.task is None:
            return  # Too late: the attempt is over (128). The process is on its way out.
        elif message == "flow_input":
            generation = self.generation
            self._owner.load_flow_input(self.task, lambda raw: self._answer(generation, raw))
        elif message == "done":
            self._finish(Outcome("completed", output=payload), header)
        elif message == "failed":
            verdict: Verdict = "failed_for_good" if header.get("final") else "failed"
            self._finish(Outcome(verdict, error=storable(str(header.get("error")))), header)

    def _finish(self, outcome: Outcome, header: dict[str, Any]) -> None:
        assert self._outcome is not None
        outcome = self._explained(outcome)
        self._tasks_done += 1
        self._is_tainted = bool(header.get("last"))
        if not self._is_dying:
            self._timers.cancel()
        self._outcome.set_result(outcome)

    def _answer(self, generation: int, raw: bytes) -> None:
        if self.generation == generation and self.task is not None and self._channel is not None:
            self._send({"m": "flow_input"}, raw)

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        channel = self._channel
        assert channel is not None
        channel.send(header, payload)
        if channel.has_unsent:
            asyncio.get_running_loop().add_writer(channel.fileno(), self._writable, channel)

    def _writable(self, channel: Channel) -> None:
        channel.flush()
        if channel is self._channel and not channel.has_unsent:
            asyncio.get_running_loop().remove_writer(channel.fileno())

    def forked(self, pid: int, pidfd: int | None) -> None:
        """The forkserver has forked it. The kernel will tell when it is dead, where it gives a descriptor for that."""
        self._pid, self.pidfd = pid, pidfd
        if pidfd is not None:
            asyncio.get_running_loop().add_reader(pidfd, self._dead, self.generation)

    def _dead(self, generation: int) -> None:
        """The kernel says that it is dead; the forkserver is given a moment to say how."""
        if self.generation != generation or self.pidfd is None:
            return
        asyncio.get_running_loop().remove_reader(self.pidfd)
        self.is_up, self._is_dying = False, True
        self._timers.after(STATUS_WAIT, self.exited, generation, "handler process died; how is not known")

    def exited(self, generation: int, error: str) -> None:
        """It is dead and reaped, or there never was one: the slot is free for another."""
        if self.generation != generation or not self.has_process:
            return
        if self._channel is not None and self._channel.is_open:
            self._readable(generation)  # A result that arrived before the death counts.
        decided = self._explained(self._decided or Outcome("failed", error=error))
        self._set_up(self._setup_failure or f"{error} while it was set up")
        self.forget()
        if self._outcome is None or self._outcome.done():
            return
        if self._is_given or self._decided is not None:
            self._outcome.set_result(decided)

    def lost(self) -> None:
        """The forkserver is gone, and the process with it."""
        if self._channel is not None and self._channel.is_open:
            self._readable(self.generation)  # A result that arrived before counts.
        self.forget()
        if self._outcome is not None and not self._outcome.done():
            text = "The forkserver died repeatedly while this task ran"
            lost = Outcome("crashed", error=text) if self._is_given else Outcome("released")
            self._outcome.set_result(self._decided or lost)
        if self._up is not None and not self._up.done():
            self._up.set_result("the forkserver died")

    def forget(self) -> None:
        """Let go of the process. May be called again."""
        self._timers.cancel()
        if self._channel is not None:
            self._unwatch_channel()
            self._channel.close()
            self._channel = None
        if self._output is not None:
            self._output.close()
            self._output = None
        if self.pidfd is not None:
            asyncio.get_running_loop().remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = None
        self.is_up = self._is_dying = False
        self._gone.set()

    def report(self) -> dict[str, Any]:
        """Return what there is to see of it; the age of the attempt in seconds."""
        state = "dying" if self._is_dying else "starting" if not self.is_up else "busy" if self.task else "idle"
        age = self._age(self._given_at) if self._is_given else 0.0
        return slot_report(self.index, self._pid if self.has_process else None, state, self.task, age)

    def _set_up(self, failure: str | None) -> None:
        """The process is ready for tasks, or will never be. An attempt that was ended meanwhile blames nobody."""
        if self._up is None or self._up.done():
            return
        if failure is not None and self._decided is None:
            self._owner.setup_failed(self._explained(Outcome("failed", error=failure)).error or failure)
        self._up.set_result(failure)

    def _explained(self, outcome: Outcome) -> Outcome:
        """Return a failure with what the process had to say: its stacks, the last of its output."""
        if outcome.error is None or self._output is None:
            return outcome
        return self._output.explain(outcome)

    def _age(self, since: float) -> float:
        return asyncio.get_running_loop().time() - since

    def _unwatch_channel(self) -> None:
        assert self._channel is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._channel.fileno())
        loop.remove_writer(self._channel.fileno())
