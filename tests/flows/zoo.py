"""Handlers that do what their input says: the zoo."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import multiprocessing
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


def sleep_in_thread() -> None:
    time.sleep(3600)


def escape(path: str) -> None:
    """Leave a process behind that is in a session of its own and has no parent any more; write its pid to a file."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(f"{path}.new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"{path}.new", path)
            time.sleep(3600)
        os._exit(0)
    os.wait()


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
    elif what == "print":
        for number in range(request["lines"]):
            print(f"line {number} {request.get('text', '')}")
        if "then" in request:
            return act(request["then"], ctx)
    elif what == "write":
        sys.stderr.write("no newline at the end")
        raise ValueError("after writing")
    elif what == "log":
        ctx.logger.warning("something odd: {}", request["text"])
    elif what == "escape":
        escape(request["path"])
        if "then" in request:
            return act(request["then"], ctx)
    elif what == "surroundings":
        os.chdir("/")
        os.umask(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    elif what == "where":
        before = os.umask(0o22)
        os.umask(before)
        return {"folder": os.getcwd(), "umask": before, "timer": signal.getitimer(signal.ITIMER_REAL)[0]}
    elif what == "multiprocessing":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, -2, -3])
    elif what == "executor":
        with concurrent.futures.ProcessPoolExecutor(2) as executor:
            return list(executor.map(abs, [-1, -2, -3]))
    elif what == "waitpid":
        child = subprocess.Popen(["true"])
        assert os.waitpid(-1, 0)[0] == child.pid
        child.returncode = 0
    elif what == "setsid":
        try:
            os.setsid()
        except PermissionError:
            return "leads its session already"
    elif what == "threads":
        threading.Thread(target=sleep_in_thread, daemon=True).start()
        time.sleep(3600)
    elif what == "burn":
        while True:
            pass
    elif what == "allocate":
        return len(bytearray(request["mib"] * 2**20))
    elif what == "score":
        with open("/proc/self/oom_score_adj") as own, open(f"/proc/{os.getppid()}/oom_score_adj") as parents:
            return [int(own.read()), int(parents.read())]
    elif what == "garbage":
        for descriptor in range(3, 64):
            try:
                if "socket:" in os.readlink(f"/proc/self/fd/{descriptor}"):
                    os.write(descriptor, b"\xff" * 64)
            except FileNotFoundError:
                continue
    elif what == "wait_for_shutdown":
        with open(request["started"], "a") as started:
            started.write("x")
        while not ctx.shutdown_requested:
            time.sleep(0.01)
        return "told to stop"
    return "done"


limited = Flow("limited", max_attempts=1, base_delay=0, timeout=20)
forked = Flow("forked", max_attempts=1, base_delay=0, timeout=20)

one.step("act")(act)
limited.step("act", memory_mb=150, cpu_seconds=1)(act)


@forked.step()
def waits(request: Any, ctx: Context) -> Any:
    return act(request["waits"], ctx)


@forked.step()
def fails(request: Any, ctx: Context) -> Any:
    return act(request["fails"], ctx)


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
