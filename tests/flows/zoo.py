"""Handlers that do what their input says: the zoo."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from pgflow_otp import Context, Flow, NonRetryable, job

one = Flow("one", max_attempts=1, base_delay=0, timeout=2)
many = Flow("many", max_attempts=1, base_delay=0, timeout=10)
patient = Flow("patient", max_attempts=3, base_delay=0, timeout=60)


class Broken(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no message either")


class Demanding(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)


def act(request: Any, ctx: Context) -> Any:
    """Do what the request says."""
    what = request["do"]
    if what == "segv":
        ctypes.string_at(0)
    elif what == "abort":
        os.abort()
    elif what == "os_exit":
        os._exit(request["status"])
    elif what == "sys_exit":
        sys.exit("enough")
    elif what == "hang_py":
        while True:
            pass
    elif what == "hang_c":
        ctypes.PyDLL(None).sleep(3600)
    elif what == "stop_self":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "ignore_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    elif what == "swallow":
        while True:
            try:
                time.sleep(3600)
            except BaseException:
                continue
    elif what == "kill_self":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "alloc":
        resource.setrlimit(resource.RLIMIT_AS, (512 * 2**20, 512 * 2**20))
        return len(bytearray(2**30))
    elif what == "raise":
        raise ValueError(request["text"])
    elif what == "raise_broken":
        raise Broken
    elif what == "raise_demanding":
        raise Demanding(7, "needs two arguments")
    elif what == "interrupt":
        raise KeyboardInterrupt
    elif what == "never":
        raise NonRetryable("no use to try again")
    elif what == "close_fds":
        os.closerange(3, 1000)
    elif what == "grandchild":
        return subprocess.Popen(["sleep", "3600"]).pid
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(3600,)).start()
    elif what == "nan":
        return {"ratio": float("nan")}
    elif what == "set":
        return {"items": [{1, 2}]}
    elif what == "nul":
        return "a\x00b"
    elif what == "big":
        return "x" * request["size"]
    elif what == "echo":
        return request["value"]
    elif what == "pid":
        return os.getpid()
    elif what == "sleep":
        time.sleep(request["seconds"])
    elif what == "context":
        return {
            "run_id": str(ctx.run_id),
            "flow": ctx.flow_slug,
            "step": ctx.step_slug,
            "index": ctx.task_index,
            "attempt": ctx.attempt,
            "flow_input": ctx.flow_input,
            "in_time": 0 < ctx.deadline <= 60,
            "shutdown": ctx.shutdown_requested,
            "rows": ctx.connection().execute("select 1").fetchone(),
        }
    elif what == "flaky" and ctx.attempt < request["succeeds_at"]:
        raise ConnectionError(f"attempt {ctx.attempt} had no luck")
    elif what == "wait_for_file":
        # Says that it runs, and waits until the test lets it go on.
        with open(request["started"], "a") as started:
            started.write(f"{os.getpid()} {os.getppid()}\n")
        while not os.path.exists(request["go"]):
            time.sleep(0.01)
    elif what == "wait_for_shutdown":
        with open(request["started"], "a") as started:
            started.write("x")
        while not ctx.shutdown_requested:
            time.sleep(0.01)
        return "told to stop"
    return "done"


one.step("act")(act)
many.map("act")(act)


@patient.step("act")
def act_patiently(request: Any, ctx: Context) -> Any:
    return act(request, ctx)


@patient.step(depends_on=["act"])
async def after(deps: Any, ctx: Context) -> Any:
    await asyncio.sleep(0)
    return {"saw": deps, "input": ctx.flow_input}


@job("greet")
def greet(name: str) -> str:
    return f"hello {name}"
