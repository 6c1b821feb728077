"""A flow whose handler hangs in C and keeps the GIL: no signal handler of Python's will ever run in it."""

from __future__ import annotations

import ctypes
import os
import time

from pgflow_otp import Flow

if os.environ.get("PGFLOW_BENCH_SLOW_IMPORT"):
    time.sleep(2)

hang = Flow("hang", timeout=3600, max_attempts=1)


@hang.step("hang")
def hang_in_c(path: str) -> None:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    ctypes.PyDLL(None).sleep(3600)
