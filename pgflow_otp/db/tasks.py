"""Claiming and settling tasks: the worker's hot path. JSON goes through as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from psycopg.rows import class_row

from pgflow_otp.db.connection import raw_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    import psycopg

#: Seconds a message that was read without a task to claim stays hidden (runtime-contract 3.3).
READ_VISIBILITY = 5

Verdict: TypeAlias = Literal["completed", "failed", "failed_for_good", "released", "crashed"]


@dataclass(frozen=True, slots=True)
class ClaimedTask:
    """A task this worker has to run. Its claim is known by `started_at`, with the worker's id."""

    run_id: UUID
    step_slug: str
    task_index: int
    attempt: int
    max_attempts: int
    started_at: datetime
    timeout: int
    input: bytes | None
    flow_input: bytes | None

    @property
    def key(self) -> tuple[UUID, str, int]:
        return (self.run_id, self.step_slug, self.task_index)


async def claim_tasks(
    connection: psycopg.AsyncConnection[Any],
    flow_slug: str,
    queue_name: str,
    worker_id: UUID,
    quantity: int,
    kill_grace: float,
) -> list[ClaimedTask]:
    """Read messages and claim their tasks in one round trip (pgflow_otp.claim_tasks).

    The messages stay hidden for the step's timeout, `kill_grace` seconds and 2 more.
    """
    async with connection.cursor(row_factory=class_row(ClaimedTask)) as cursor:
        await cursor.execute(
            "select * from pgflow_otp.claim_tasks(%s, %s, %s, %s, %s, %s)",
            (flow_slug, queue_name, worker_id, READ_VISIBILITY, quantity, ceil(kill_grace)),
        )
        return await cursor.fetchall()


async def settle_task(
    connection: psycopg.AsyncConnection[Any],
    task: ClaimedTask,
    worker_id: UUID,
    outcome: Verdict,
    output: bytes | None,
    error: str | None,
) -> str:
    """Record how an attempt ended; returns the task's status, or "overtaken" (pgflow_otp.settle_task)."""
    cursor = await connection.execute(
        "select pgflow_otp.settle_task(%s, %s, %s, %s, %s, %s, %s, %s)",
        (
            task.run_id,
            task.step_slug,
            task.task_index,
            worker_id,
            task.started_at,
            outcome,
            None if output is None else raw_json(output),
            error,
        ),
    )
    row = await cursor.fetchone()
    return str(row[0]) if row else "gone"


async def get_flow_input(connection: psycopg.AsyncConnection[Any], run_id: UUID) -> bytes | None:
    """Return the run's input as JSON (pgflow_otp.get_flow_input)."""
    cursor = await connection.execute("select pgflow_otp.get_flow_input(%s)", (run_id,))
    row = await cursor.fetchone()
    return row[0] if row else None


async def unwanted(
    connection: psycopg.AsyncConnection[Any], worker_id: UUID, running: Sequence[ClaimedTask]
) -> list[int]:
    """Return the positions of those tasks that nobody waits for: their run has ended, their step is skipped, or they
    are no longer this worker's."""
    cursor = await connection.execute(
        """
        select mine.position - 1
        from unnest(%s::uuid[], %s::text[], %s::int[]) with ordinality as mine (run_id, step_slug, task_index, position)
        where not exists (
          select from pgflow.step_tasks as task
          join pgflow.step_states as state using (run_id, step_slug)
          join pgflow.runs as run using (run_id)
          where (task.run_id, task.step_slug, task.task_index) = (mine.run_id, mine.step_slug, mine.task_index)
            and task.status = 'started' and task.last_worker_id = %s
            and state.status = 'started' and run.status = 'started'
        )
        """,
        (
            [task.run_id for task in running],
            [task.step_slug for task in running],
            [task.task_index for task in running],
            worker_id,
        ),
    )
    return [row[0] for row in await cursor.fetchall()]
