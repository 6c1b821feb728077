"""Definitions and runs, for the starter and the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row, tuple_row
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from uuid import UUID

    import psycopg

    Connection = psycopg.Connection[Any]


def ensure_flow_compiled(connection: Connection, slug: str, shape: dict[str, Any]) -> tuple[str, list[str]]:
    """Register a flow or verify it; status and differences (pgflow.ensure_flow_compiled)."""
    result = _value(connection, "select pgflow.ensure_flow_compiled(%s, %s)", slug, Jsonb(shape))
    return result["status"], result["differences"]


def set_flow_type(connection: Connection, slug: str, flow_type: str) -> None:
    """Note whether a flow is a job; it is no part of the shape (runtime-contract 1.4)."""
    connection.execute("update pgflow.flows set flow_type = %s where flow_slug = %s", (flow_type, slug))


def track_worker_function(connection: Connection, function_name: str) -> None:
    """pgflow.track_worker_function, start mode process"""
    connection.execute("select pgflow.track_worker_function(%s, 'process')", (function_name,))


def start_flow(connection: Connection, slug: str, payload: bytes, run_id: UUID | None) -> UUID:
    """Start a run (pgflow.start_flow)."""
    query = "select run_id from pgflow.start_flow(%s, %s, %s)"
    return _value(connection, query, slug, Jsonb(payload, dumps=bytes), run_id)  # type: ignore[no-any-return]


def flow_exists(connection: Connection, slug: str) -> bool:
    """pgflow.flow_exists"""
    return bool(_value(connection, "select pgflow_otp.flow_exists(%s)", slug))


def get_run(connection: Connection, run_id: UUID) -> dict[str, Any] | None:
    """Return the row of a run."""
    return _row(connection, "select * from pgflow.runs where run_id = %s", run_id)


def get_step_states(connection: Connection, run_id: UUID) -> list[dict[str, Any]]:
    """Return the step states of a run in the order of definition, with their progress."""
    return _rows(
        connection,
        """
        select ss.*, st.step_type, p.total_tasks, p.completed_tasks, p.failed_tasks, p.queued_tasks, p.started_tasks
        from pgflow.step_states ss
        join pgflow.steps st on st.flow_slug = ss.flow_slug and st.step_slug = ss.step_slug
        join pgflow_otp.step_progress p on p.run_id = ss.run_id and p.step_slug = ss.step_slug
        where ss.run_id = %s
        order by st.step_index
        """,
        run_id,
    )


def get_failed_tasks(connection: Connection, run_id: UUID) -> list[dict[str, Any]]:
    """Return the tasks of a run that carry an error."""
    return _rows(
        connection,
        """
        select step_slug, task_index, status, attempts_count, error_message
        from pgflow.step_tasks
        where run_id = %s and error_message is not null
        order by step_slug, task_index
        """,
        run_id,
    )


def _value(connection: Connection, query: str, *args: Any) -> Any:
    row = connection.cursor(row_factory=tuple_row).execute(query.encode(), args).fetchone()
    return row[0] if row else None


def _row(connection: Connection, query: str, *args: Any) -> dict[str, Any] | None:
    rows = _rows(connection, query, *args)
    return rows[0] if rows else None


def _rows(connection: Connection, query: str, *args: Any) -> list[dict[str, Any]]:
    return connection.cursor(row_factory=dict_row).execute(query.encode(), args).fetchall()
