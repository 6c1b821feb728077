"""Logs of every process: loguru to standard error, one write per record, the role bound to each."""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Message, Record

#: Fields that a line for people says already.
_NOT_SHOWN = ("role", "supervisor", "offender")
#: A record longer than this is cut: what is longer than PIPE_BUF may be torn by another process's write.
LONGEST_LINE = 4000
#: Milliseconds that a log whose reader does not read is waited for, once.
PATIENCE_MS = 100


def configure(role: str, level: str) -> None:
    """Send this process's records to standard error. Called once in every process, after it was forked.

    No `enqueue`: it would start a thread and share a lock with processes that may be killed (otp-semantics 178).
    """
    logger.remove()
    logger.configure(extra={"role": role})
    logger.add(
        _Sink().write, level=level.upper(), format=_format, colorize=_colorize(), backtrace=False, diagnose=False
    )


class HandlerLog:
    """Sends a handler process's records through its own pipe to its worker, which writes them into the log.

    Set up once in the parent of the handlers, for that is slow; each handler only says where its pipe is. Until then
    records go to standard error, as everybody's.
    """

    def __init__(self, role: str, level: str) -> None:
        self._descriptor: int | None = None
        self._sink = _Sink()
        logger.remove()
        logger.configure(extra={"role": role})
        logger.add(self._take, level=level.upper(), format=_format, colorize=False, backtrace=False, diagnose=False)

    def send_to(self, descriptor: int) -> None:
        """Send what comes from now on through this pipe."""
        self._descriptor = descriptor

    def _take(self, message: Message) -> None:
        if self._descriptor is None:
            self._sink.write(str(message))
            return
        record = message.record
        text = record["message"]
        if record["exception"] is not None:
            text += "\n" + "".join(traceback.format_exception(*record["exception"]))
        extra = {key: str(value) for key, value in record["extra"].items() if key not in ("role", "flow")}
        line = json.dumps({"level": record["level"].name, "message": text[: LONGEST_LINE // 2], "extra": extra})
        try:
            os.write(self._descriptor, f"\x1e{line}\n".encode())
        except OSError:
            pass


class _Sink:
    """Writes records to standard error, and waits for nobody: when its reader stops reading, records are dropped, and
    counted, instead of holding up the process."""

    def __init__(self) -> None:
        self._poll: select.poll | None = None
        self._dropped = 0

    def write(self, line: str) -> None:
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(2, select.POLLOUT)
        if not self._poll.poll(0 if self._dropped else PATIENCE_MS):
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            _write(f"{dropped} log records were dropped here: nobody read them\n")
        _write(line)


def _write(line: str) -> None:
    data = line.encode("utf-8", "replace")
    if len(data) > LONGEST_LINE:
        data = data[: LONGEST_LINE - 4].decode("utf-8", "ignore").encode() + "…\n".encode()
    try:
        os.write(2, data)
    except OSError:
        pass  # Nobody reads the log any more; the work goes on.


def _format(record: Record) -> str:
    fields = [f"{key}={{extra[{key}]}}" for key in record["extra"] if key not in _NOT_SHOWN]
    tail = (" <dim>" + " ".join(fields) + "</dim>") if fields else ""
    return (
        "<dim>{time:HH:mm:ss.SSS}</dim> <level>{level: <7}</level> <cyan>{extra[role]}</cyan> {message}"
        + tail
        + "\n{exception}"
    )


def _colorize() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and "NO_COLOR" not in os.environ
