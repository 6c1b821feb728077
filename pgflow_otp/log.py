"""Logs of every process: loguru to standard error, one write per record, the role bound to each."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Record

#: Fields that a line for people says already.
_NOT_SHOWN = ("role", "supervisor", "offender")
#: A record longer than this is cut: what is longer than PIPE_BUF may be torn by another process's write.
LONGEST_LINE = 4000


def configure(role: str, level: str) -> None:
    """Send this process's records to standard error. Called once in every process, after it was forked.

    No `enqueue`: it would start a thread and share a lock with processes that may be killed (otp-semantics 178).
    """
    logger.remove()
    logger.configure(extra={"role": role})
    logger.add(_write, level=level.upper(), format=_format, colorize=_colorize(), backtrace=False, diagnose=False)


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
