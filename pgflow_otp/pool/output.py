"""What a handler process prints: line by line to our log, and the last of it kept for the diagnosis of a failure.

Each process has a pipe of its own. Its own log records (loguru) come the same way, marked, so that level and fields are
not lost. A flood is held back where it comes from: the pipe fills, and only the one who floods it waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from collections import deque
from typing import TYPE_CHECKING, Any

import orjson
from loguru import logger

from pgflow_otp.flow.payload import storable

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgflow_otp.pool.outcome import Outcome

#: Bytes kept of an attempt's output, and of the stacks that are dumped at its deadline.
KEPT_OUTPUT = 16 * 1024
KEPT_STACK = 32 * 1024
#: Characters of an error with all that belongs to it.
LONGEST_DIAGNOSIS = 60_000
#: Begins a line that holds a log record as JSON.
RECORD_MARK = "\x1e"
#: Level of a printed line: shown unless only errors are.
OUTPUT_LEVEL = "OUTPUT"
_LONGEST_LINE = 3500
#: How much is read, and how many lines are logged, of one process in a slice of time.
_SLICE = 0.1
_BYTES_PER_SLICE = 512 * 1024
_LINES_PER_SLICE = 100
#: More than a pipe holds.
_PIPE = 128 * 1024
_STACK_HEAD = re.compile(r"(Current thread|Thread|Fatal Python error|Extension modules)\b.*")

#: Parts of stack lines that say nothing about the user's code.
_NOT_THE_USERS = ("/pgflow_otp/", 'File "<string>", line 1 in')

logger.level(OUTPUT_LEVEL, no=35, color="<white>")


class Output:
    """The reading end of a handler process's output.

    Args:
        descriptor: the pipe; this object's from now on.
        fields: what is bound to a logged line, asked anew for each bunch.
    """

    def __init__(self, descriptor: int, fields: Callable[[], dict[str, Any]]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor
        self._fields = fields
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._kept: deque[str] = deque()
        self._kept_size = 0
        self._stack: list[str] = []
        self._stack_size = 0
        self._in_stack = False
        self._slice_ends = 0.0
        self._bytes_left = self._lines_left = 0
        self._left_out = 0
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(descriptor, self._readable)

    def begin(self) -> None:
        """Another attempt begins: what came before is none of its own."""
        self._kept.clear()
        self._stack.clear()
        self._kept_size = self._stack_size = 0
        self._in_stack = False

    def drain(self) -> None:
        """Take in what has been written so far: of a process that is dead, what its pipe held."""
        self._bytes_left = max(self._bytes_left, _PIPE)
        while self._descriptor is not None and self._read():
            pass
        self._take(self._rest)
        self._rest = b""

    def explain(self, outcome: Outcome) -> Outcome:
        """Return a failure with what the process had to say: the stacks it has dumped, the last of what it printed."""
        self.drain()
        text = outcome.error or ""
        if self._stack:
            text += "\nstack at its end, innermost call first:\n" + "\n".join(self._stack)
        if self._kept:
            text += "\nlast output:\n" + "\n".join(f"  {line}" for line in self._kept)
        return dataclasses.replace(outcome, error=storable(text, LONGEST_DIAGNOSIS))

    def close(self) -> None:
        """Read no more. May be called again."""
        if self._pause is not None:
            self._pause.cancel()
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        self._tell_left_out()

    def _readable(self) -> None:
        if not self._read() and self._descriptor is not None and self._bytes_left <= 0:
            # Enough for now. It writes into a pipe that is full, and waits.
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_at(self._slice_ends, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        if self._descriptor is not None:
            self._loop.add_reader(self._descriptor, self._readable)

    def _read(self) -> bool:
        """Read once; False when there is nothing more, or nothing more for now."""
        assert self._descriptor is not None
        now = self._loop.time()
        if now >= self._slice_ends:
            self._tell_left_out()
            self._slice_ends = now + _SLICE
            self._bytes_left, self._lines_left = _BYTES_PER_SLICE, _LINES_PER_SLICE
        if self._bytes_left <= 0:
            return False
        try:
            data = os.read(self._descriptor, 65_536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
            return False
        self._bytes_left -= len(data)
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        if newline:
            self._take(whole)
        self._rest = rest
        if len(self._rest) > _LONGEST_LINE:
            self._take(self._rest)
            self._rest = b""
        return True

    def _take(self, data: bytes) -> None:
        if not data:
            return
        fields = self._fields()
        for line in data.decode("utf-8", "replace").split("\n"):
            text = line.rstrip("\r")
            if self._is_stack(text):
                self._keep_stack(text)
            elif text.startswith(RECORD_MARK):
                self._take_record(text[1:], fields)
            elif text:
                self._keep(text[:_LONGEST_LINE])
                self._log(OUTPUT_LEVEL, text[:_LONGEST_LINE], fields)

    def _is_stack(self, line: str) -> bool:
        """Whether a line is faulthandler's: a head, and the lines below it."""
        self._in_stack = bool(_STACK_HEAD.match(line)) or (self._in_stack and (line.startswith("  ") or not line))
        return self._in_stack

    def _keep_stack(self, line: str) -> None:
        if line and not any(part in line for part in _NOT_THE_USERS) and self._stack_size < KEPT_STACK:
            self._stack.append(f"  {line}")
            self._stack_size += len(line) + 1

    def _keep(self, line: str) -> None:
        self._kept.append(line)
        self._kept_size += len(line) + 1
        while self._kept_size > KEPT_OUTPUT:
            self._kept_size -= len(self._kept.popleft()) + 1

    def _take_record(self, text: str, fields: dict[str, Any]) -> None:
        try:
            record = orjson.loads(text)
            level, message, extra = str(record["level"]), str(record["message"]), dict(record["extra"])
            logger.level(level)
        except (ValueError, KeyError, TypeError):
            self._keep(text[:_LONGEST_LINE])
            self._log(OUTPUT_LEVEL, text, fields)
            return
        self._keep(f"{level}: {message}")
        self._log(level, message, {**fields, **extra})

    def _log(self, level: str, text: str, fields: dict[str, Any]) -> None:
        if self._lines_left <= 0:
            self._left_out += 1
            return
        self._lines_left -= 1
        logger.bind(**fields).log(level, "{}", text)

    def _tell_left_out(self) -> None:
        if self._left_out:
            logger.bind(**self._fields()).warning(f"{self._left_out} lines of output are left out here")
            self._left_out = 0
