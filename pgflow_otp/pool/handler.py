"""Inside a handler process: take a task, run the user's function, answer. One task at a time, one channel, no database.

Frames from the worker: {"m": "task", …} with the input as payload, {"m": "flow_input"} with it, {"m": "drain"}.
Frames to the worker: "up", "done" with the output, "failed", "flow_input" (a request).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import resource
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

from pgflow_otp.db.connection import connect
from pgflow_otp.errors import NonRetryable, PayloadError
from pgflow_otp.flow.context import Context
from pgflow_otp.flow.payload import decode, encode, storable
from pgflow_otp.otp.channel import Frame, FrameReader, encode_frame, readable

if TYPE_CHECKING:
    import io
    import socket
    from collections.abc import Iterator

    from pgflow_otp.flow.definition import StepDefinition
    from pgflow_otp.flow.dsl import Flow
    from pgflow_otp.log import HandlerLog

#: Exit status of a handler process whose channel failed: it can do no more, and the worker sees why.
CHANNEL_LOST = 74
_MEBIBYTE = 1024 * 1024
#: What memory_mb limits: the heap and other private memory. Linux counts it apart from code and libraries.
MEMORY_LIMIT = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS


class TaskStopped(BaseException):
    """The attempt is over: SIGTERM came. A BaseException, so that `except Exception` does not swallow it."""


class HandlerProcess:
    """The loop of a handler process.

    Args:
        flow: the user's flow.
        channel: blocking socket to the worker.
        dsn: for `ctx.connection()`.
        max_payload: bytes an output may have.
    """

    def __init__(self, flow: Flow, channel: socket.socket, dsn: str, max_payload: int) -> None:
        self._flow = flow
        self._channel = channel
        self._dsn = dsn
        self._max_payload = max_payload
        self._reader = FrameReader()
        self._frames: list[Frame] = []
        self._drain_requested = False
        self._running = False

    def run(self) -> int:
        """Serve tasks until the channel ends."""
        signal.signal(signal.SIGTERM, self._stop_requested)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._flow.setup_function is not None:
            try:
                self._flow.setup_function()
            except Exception as error:
                self._send({"m": "setup_failed", "error": describe(error)})
                return 1
        self._surroundings = _Surroundings()
        self._send({"m": "up"})
        while True:
            frame = self._receive()
            if frame is None:
                return 0
            header, payload = frame
            if header["m"] == "task":
                self._serve(header, payload)
            elif header["m"] == "drain":
                self._drain_requested = True

    def _serve(self, header: dict[str, Any], payload: bytes) -> None:
        answer: dict[str, Any]
        output = b""
        try:
            self._running = True
            output = self._attempt(header, payload)
            answer = {"m": "done"}
        except TaskStopped:
            # The worker has settled this attempt as timed out or released; nothing said now would count.
            os._exit(0)
        except PayloadError as error:
            answer = {"m": "failed", "error": f"Handler output is not JSON encodable: {error}", "final": True}
        except NonRetryable as error:
            answer = {"m": "failed", "error": describe(error), "final": True}
        except MemoryError as error:
            answer = {
                "m": "failed",
                "error": describe(error) + self._memory_note(header["step"]),
                "final": False,
                "last": True,
            }
        except SystemExit as error:
            text = f"handler called sys.exit({error.code!r}) before giving a result"
            answer = {"m": "failed", "error": text, "final": False, "last": True}
        except Exception as error:
            answer = {"m": "failed", "error": describe(error), "final": False}
        except BaseException as error:
            answer = {"m": "failed", "error": describe(error), "final": False, "last": True}
        finally:
            self._running = False
        _flush()
        self._surroundings.restore()
        signal.signal(signal.SIGTERM, self._stop_requested)
        self._send(answer, output)
        if answer.get("last"):
            os._exit(0)  # It may be short of memory, or half torn down: the next task gets a sound process.

    def _attempt(self, header: dict[str, Any], payload: bytes) -> bytes:
        step = self._flow.steps.get(header["step"])
        if step is None:
            raise NonRetryable(f'unknown step "{header["step"]}" in flow {self._flow.slug}')
        value = decode(payload)
        context = Context(
            run_id=UUID(header["run_id"]),
            flow_slug=self._flow.slug,
            step_slug=step.slug,
            task_index=header["index"],
            attempt=header["attempt"],
            deadline=time.monotonic() + header["timeout"],
            load_flow_input=(lambda: value) if header["root"] else self._load_flow_input,
            is_shutdown_requested=self._poll_drain,
            connect=lambda: connect(self._dsn, f"handler:{self._flow.slug}/{step.slug}"),
        )
        try:
            with _Limits(step):
                output = _call(step, value, context)
        finally:
            context.close()
        raw = encode(output)
        if len(raw) > self._max_payload:
            raise PayloadError(
                f"output has {len(raw) / _MEBIBYTE:.1f} MiB, more than max_payload_mb "
                f"({self._max_payload / _MEBIBYTE:g}); store it elsewhere and return where it is"
            )
        return raw

    def _memory_note(self, step_slug: str) -> str:
        step = self._flow.steps.get(step_slug)
        limit = f", limited to memory_mb ({step.memory_mb} MiB)" if step is not None and step.memory_mb else ""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else _MEBIBYTE)
        return f"\n  peak memory {peak:.0f} MiB{limit}"

    def _load_flow_input(self) -> Any:
        self._send({"m": "flow_input"})
        while True:
            frame = self._receive()
            if frame is None:
                self._lose_channel()
            if frame[0]["m"] == "flow_input":
                return decode(frame[1])
            if frame[0]["m"] == "drain":
                self._drain_requested = True

    def _poll_drain(self) -> bool:
        """Look whether the worker said that it is being stopped, without waiting."""
        while not self._drain_requested and (self._frames or readable(self._channel, 0)):
            frame = self._receive()
            if frame is None or frame[0]["m"] == "drain":
                self._drain_requested = True
        return self._drain_requested

    def _stop_requested(self, number: int, frame: object) -> None:
        if not self._running:
            os._exit(0)
        raise TaskStopped

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        try:
            self._channel.sendall(encode_frame(header, payload))
        except OSError:
            self._lose_channel()

    def _receive(self) -> Frame | None:
        while not self._frames:
            try:
                data = self._channel.recv(262_144)
            except OSError:
                self._lose_channel()
            if not data:
                return None
            self._frames = self._reader.feed(data)
        return self._frames.pop(0)

    def _lose_channel(self) -> NoReturn:
        os._exit(CHANNEL_LOST)


class _Surroundings:
    """What a task may change for the one after it, as it was when the process had been set up."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._umask = os.umask(0o77)
        os.umask(self._umask)

    def restore(self) -> None:
        """Put it back. A timer that is left would go off in the next task."""
        os.umask(self._umask)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            if os.getcwd() == self._folder:
                return
        except OSError:
            pass
        with contextlib.suppress(OSError):
            os.chdir(self._folder)


def _flush() -> None:
    """Let what was printed arrive before the result does."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # The user's code has closed or replaced it.


def _call(step: StepDefinition, value: Any, context: Context) -> Any:
    result = step.handler(value, context) if step.takes_context else step.handler(value)
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result


def take_over_output(descriptor: int, handler_log: HandlerLog) -> None:
    """Let everything this process prints go to its worker line by line, log records and the stacks of a crash too.

    SIGUSR2 makes it show what every thread is doing, even one that hangs in C and keeps the GIL.
    """
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.stdout = sys.__stdout__ = _lines_to(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _lines_to(2)  # type: ignore[misc]
    handler_log.send_to(descriptor)
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR2, descriptor, all_threads=True)


def _lines_to(descriptor: int) -> io.TextIOWrapper:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


class _Limits:
    """The step's limits for the length of a task: soft ones, so that the process gets its own back."""

    def __init__(self, step: StepDefinition) -> None:
        self._wanted: list[tuple[int, int]] = []
        self._before: list[tuple[int, tuple[int, int]]] = []
        if step.memory_mb is not None:
            self._wanted.append((MEMORY_LIMIT, step.memory_mb * _MEBIBYTE))
        if step.cpu_seconds is not None:
            used = resource.getrusage(resource.RUSAGE_SELF)
            self._wanted.append((resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + step.cpu_seconds + 1))

    def __enter__(self) -> None:
        for kind, value in self._wanted:
            before = resource.getrlimit(kind)
            self._before.append((kind, before))
            resource.setrlimit(kind, (value, before[1]))

    def __exit__(self, *_: object) -> None:
        for kind, before in self._before:
            resource.setrlimit(kind, before)


def describe(error: BaseException) -> str:
    """Return an exception as text that PostgreSQL can store: type, message, and the user's own frames."""
    try:
        message = str(error)
    except BaseException as broken:
        message = f"<its message cannot be read: {type(broken).__name__}>"
    lines = [f"{type(error).__name__}: {message}" if message else type(error).__name__]
    lines += _frames_of(error)
    return storable("\n".join(lines))


def _frames_of(error: BaseException) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__):
        if "/pgflow_otp/" not in frame.filename:
            yield f"  {frame.filename}, line {frame.lineno}, in {frame.name}"
            if frame.line:
                yield f"    {frame.line}"
