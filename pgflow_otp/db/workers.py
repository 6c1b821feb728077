"""Workers: registration, heartbeat, and what happens to the tasks of those that died."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uuid import UUID

    import psycopg

    Connection = psycopg.AsyncConnection[Any]


async def register_worker(connection: Connection, worker_id: UUID, queue_name: str, function_name: str) -> None:
    """pgflow_otp.register_worker"""
    await connection.execute("select pgflow_otp.register_worker(%s, %s, %s)", (worker_id, queue_name, function_name))


async def heartbeat(connection: Connection, worker_id: UUID) -> bool:
    """Say that the worker lives; False when it has to leave (pgflow_otp.heartbeat)."""
    return bool(await _value(connection, "select pgflow_otp.heartbeat(%s)", worker_id))


async def mark_worker_stopped(connection: Connection, worker_id: UUID) -> None:
    """pgflow.mark_worker_stopped"""
    await connection.execute("select pgflow.mark_worker_stopped(%s)", (worker_id,))


async def release_worker(connection: Connection, worker_id: UUID) -> tuple[int, int, int]:
    """Hand back a dead worker's tasks; (released, crashed too often, held by others) (pgflow_otp.release_worker)."""
    cursor = await connection.execute("select * from pgflow_otp.release_worker(%s)", (worker_id,))
    row = await cursor.fetchone()
    return (row[0], row[1], row[2]) if row else (0, 0, 0)


async def fail_crashed_tasks(connection: Connection, worker_id: UUID) -> int:
    """pgflow_otp.fail_crashed_tasks"""
    return int(await _value(connection, "select pgflow_otp.fail_crashed_tasks(%s)", worker_id) or 0)


async def silent_workers(connection: Connection, silence: float) -> list[UUID]:
    """pgflow_otp.silent_workers"""
    cursor = await connection.execute("select pgflow_otp.silent_workers(%s)", (silence,))
    return [row[0] for row in await cursor.fetchall()]


async def recover_stalled_tasks(connection: Connection, stale_threshold: float) -> int:
    """Requeue overdue tasks; how many (pgflow_otp.requeue_stalled)."""
    query = "select requeued from pgflow_otp.requeue_stalled(%s)"
    return int(await _value(connection, query, stale_threshold) or 0)


async def escalate_permanently_stalled(connection: Connection) -> int:
    """Fail the tasks recovery gave up on; how many. In a transaction of its own (runtime-contract 3.13)."""
    return int(await _value(connection, "select pgflow_otp.escalate_stalled()") or 0)


async def _value(connection: Connection, query: str, *args: Any) -> Any:
    cursor = await connection.execute(query.encode(), args)
    row = await cursor.fetchone()
    return row[0] if row else None
