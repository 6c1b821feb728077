"""Handlers that do their worst: each fails its own task, with a reason, and nothing else.

    pgflow-otp run examples.hostile

Every hostile step may fail (`when_exhausted="skip"`); the last step reports what happened to them.
"""

import ctypes
import os
import resource
from typing import Any

from pgflow_otp import Context, Flow

hostile = Flow("hostile", max_attempts=1, timeout=30)


@hostile.step(when_exhausted="skip")
def segfault(order: Any) -> None:
    """Read from address 0, as a broken C extension would."""
    ctypes.string_at(0)


@hostile.step(timeout=1, when_exhausted="skip")
def hang(order: Any) -> None:
    """Block in C with the interpreter's lock held: no Python code of this process can stop it."""
    ctypes.PyDLL(None).sleep(3600)


@hostile.step(when_exhausted="skip")
def leave(order: Any) -> None:
    """End the process without a word."""
    os._exit(42)


@hostile.step(when_exhausted="skip")
def devour(order: Any) -> int:
    """Eat memory, under a limit the process gives itself."""
    limit = 512 * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return len(bytearray(1024 * 1024 * 1024))


@hostile.step(max_attempts=2, base_delay=0, when_exhausted="skip")
def recover(order: Any, ctx: Context) -> str:
    """Crash at the first attempt, succeed at the second."""
    if ctx.attempt == 1:
        os.abort()
    return f"attempt {ctx.attempt} succeeded"


@hostile.step(depends_on=[segfault, hang, leave, devour, recover])
def report(outcomes: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Say what became of each: the database knows."""
    rows = ctx.connection().execute(
        "select step_slug, status, attempts_count, error_message from pgflow.step_tasks "
        "where run_id = %s and step_slug <> %s order by step_slug",
        (ctx.run_id, ctx.step_slug),
    )
    return {
        step: {
            "status": status,
            "attempts": attempts,
            "error": error.split("\n")[0] if error else None,
            "output": outcomes.get(step),
        }
        for step, status, attempts, error in rows
    }
