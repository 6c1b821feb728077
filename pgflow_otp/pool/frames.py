"""What a slot sends and shows: plain data made of a task and a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgflow_otp.db.tasks import ClaimedTask


def task_frame(task: ClaimedTask) -> tuple[dict[str, Any], bytes]:
    """Return header and payload that give a task to a handler process."""
    root = task.flow_input is not None
    payload = task.flow_input if root else task.input
    header = {
        "m": "task",
        "run_id": str(task.run_id),
        "step": task.step_slug,
        "index": task.task_index,
        "attempt": task.attempt,
        "timeout": task.timeout,
        "root": root,
    }
    return header, payload if payload is not None else b"null"


def log_fields(role: str, task: ClaimedTask | None) -> dict[str, Any]:
    """Return what is bound to a line that a handler process prints."""
    if task is None:
        return {"role": role}
    bound = {"step": task.step_slug, "index": task.task_index, "run": str(task.run_id), "attempt": task.attempt}
    return {"role": role, **bound}


def slot_report(index: int, pid: int | None, state: str, task: ClaimedTask | None, age: float) -> dict[str, Any]:
    """Return a slot as people see it; the age of its attempt in seconds."""
    shown: dict[str, Any] = {"slot": index, "pid": pid, "state": state}
    if task is not None:
        shown["task"] = {
            "run_id": str(task.run_id),
            "step": task.step_slug,
            "index": task.task_index,
            "attempt": task.attempt,
            "timeout": task.timeout,
            "age": round(age, 3),
        }
    return shown
