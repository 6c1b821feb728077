"""Checking a schema, whoever installed it: every fault with its remedy (runtime-contract 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgflow_otp.db import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    Connection = psycopg.Connection[Any]

TABLES = ("flows", "steps", "deps", "runs", "step_states", "step_tasks", "workers", "worker_functions")
FUNCTIONS = (
    "pgflow.start_flow(text,jsonb,uuid)",
    "pgflow.complete_task(uuid,text,integer,jsonb)",
    "pgflow.fail_task(uuid,text,integer,text)",
    "pgflow.start_tasks(text,bigint[],uuid,text)",
    "pgflow.start_tasks(text,bigint[],uuid,text,text)",
    "pgflow.ensure_flow_compiled(text,jsonb)",
    "pgflow.ensure_flow_compiled(text,jsonb,text,jsonb)",
    "pgflow.track_worker_function(text,text)",
    "pgflow.recover_stalled_tasks(double precision)",
    "pgflow.escalate_permanently_stalled()",
    "pgflow_otp.claim_tasks(text,text,uuid,integer,integer)",
    "pgflow_otp.settle_task(uuid,text,integer,uuid,timestamp with time zone,text,jsonb,text)",
    "pgflow_otp.release_worker(uuid)",
)
#: Claims of older levels, which workers would call by mistake.
ABSENT = ("pgflow.start_tasks(text,bigint[],uuid)", "pgflow.ensure_flow_compiled(text,jsonb,boolean)")
RECORD = (
    "flow_slug text, run_id uuid, step_slug text, input jsonb, msg_id bigint, task_index integer, flow_input jsonb, "
    "attempts_count integer"
)
TASK_STATUSES = ("queued", "started", "completed", "failed", "skipped", "cancelled")
CORE_LEVEL, HELPERS_LEVEL = 2, 6

_SETUP = "run: pgflow-otp setup"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something about the schema that is not as it has to be.

    Attributes:
        what: the fault, in words.
        remedy: what to do about it.
    """

    what: str
    remedy: str


def find_faults(connection: Connection) -> list[Fault]:
    """Return every fault of the schema in the connection's database; empty when workers can run."""
    if not _yes(connection, "select to_regnamespace('pgflow') is not null"):
        return [Fault("schema pgflow does not exist", _SETUP)]
    return list(_faults(connection))


def _faults(connection: Connection) -> Iterator[Fault]:
    for table in TABLES:
        if not _yes(connection, "select to_regclass(%s) is not null", f"pgflow.{table}"):
            yield Fault(f"table pgflow.{table} does not exist", "restore a backup, or install into a new database")
    if not _yes(
        connection,
        "select exists (select from pg_extension where extname = 'pgmq') or to_regclass('pgmq.meta') is not null",
    ):
        yield Fault("pgmq is not installed", f"create extension pgmq, or {_SETUP}")
    yield from _versions(connection)
    for signature in FUNCTIONS:
        if not _yes(connection, "select to_regprocedure(%s) is not null", signature):
            yield Fault(f"function {signature} does not exist", _SETUP)
    for signature in ABSENT:
        if _yes(connection, "select to_regprocedure(%s) is not null", signature):
            yield Fault(f"function {signature} of an older level still exists", f"drop function {signature}")
    record = _value(
        connection,
        "select string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' order by attnum) from pg_attribute "
        "where attrelid = to_regclass('pgflow.step_task_record') and attnum > 0 and not attisdropped",
    )
    if record != RECORD:
        yield Fault(f"type pgflow.step_task_record is ({record or 'missing'}), not ({RECORD})", _SETUP)
    yield from _statuses(connection)
    for table in ("steps", "step_tasks"):
        yield from _queue_name(connection, table)


def _versions(connection: Connection) -> Iterator[Fault]:
    for view, wanted in (("pgflow_version", CORE_LEVEL), ("extensions_version", HELPERS_LEVEL)):
        comment = _value(connection, "select obj_description(to_regclass(%s), 'pg_class')", f"pgflow.{view}") or ""
        digits = comment.rpartition("version=")[2]
        if not digits.isdigit():
            yield Fault(f"view pgflow.{view} carries no version", _SETUP)
        elif int(digits) < wanted:
            yield Fault(f"view pgflow.{view} says version {digits}; {wanted} is needed", _SETUP)
    ours = schema.installed_version(connection)
    if ours != schema.VERSION:
        found = f"version {ours}" if ours else "not installed"
        yield Fault(f"schema pgflow_otp is {found}; version {schema.VERSION} is needed", _SETUP)


def _statuses(connection: Connection) -> Iterator[Fault]:
    definition = _value(
        connection,
        "select pg_get_constraintdef(oid) from pg_constraint "
        "where conrelid = to_regclass('pgflow.step_tasks') and conname = 'valid_status'",
    )
    missing = [status for status in TASK_STATUSES if f"'{status}'" not in (definition or "")]
    if missing:
        yield Fault(f"constraint valid_status of pgflow.step_tasks does not allow {', '.join(missing)}", _SETUP)


def _queue_name(connection: Connection, table: str) -> Iterator[Fault]:
    not_null = _value(
        connection,
        "select attnotnull from pg_attribute where attrelid = to_regclass(%s) and attname = 'queue_name'",
        f"pgflow.{table}",
    )
    if not not_null:
        state = "does not exist" if not_null is None else "may be NULL"
        yield Fault(f"column queue_name of pgflow.{table} {state}", _SETUP)
    if not _yes(
        connection,
        "select exists (select from pg_constraint "
        "where conrelid = to_regclass(%s) and conname = 'queue_name_is_valid')",
        f"pgflow.{table}",
    ):
        yield Fault(f"constraint queue_name_is_valid of pgflow.{table} does not exist", _SETUP)


def _yes(connection: Connection, question: str, *args: Any) -> bool:
    return bool(_value(connection, question, *args))


def _value(connection: Connection, query: str, *args: Any) -> Any:
    row = connection.execute(query.encode(), args).fetchone()
    return row[0] if row else None
