"""Handlers for the pool's benchmark, and the same as plain functions for the pools it is compared with."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

from pgflow_otp import Flow

bench = Flow("bench", max_attempts=1)


def work(request: Any) -> Any:
    """Do what the request says; None: nothing."""
    if request is None:
        return None
    what = request[0]
    if what == "segv":
        _note(request)
        ctypes.string_at(0)
    elif what == "hang":
        ctypes.PyDLL(None).sleep(3600)
    elif what == "until_term":
        _note(request[1:])

        def leave(number: int, frame: object) -> None:
            _note(request)
            os._exit(0)

        signal.signal(signal.SIGTERM, leave)
        time.sleep(3600)
    elif what == "pid":
        return os.getpid()
    return None


def _note(request: Any) -> None:
    """Write down when this was: the clock is everybody's."""
    with open(request[1], "w") as file:
        file.write(str(time.monotonic()))


bench.step("work")(work)
