"""Checking a schema, whoever installed it: every fault and warning with its remedy (runtime-contract 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgflow_otp.db import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    Connection = psycopg.Connection[Any]

TABLES = ("flows", "steps", "deps", "runs", "step_states", "step_tasks", "workers", "worker_functions")
#: What every runtime needs of the core.
CORE_FUNCTIONS = (
    "pgflow.start_flow(text,jsonb,uuid)",
    "pgflow.complete_task(uuid,text,integer,jsonb)",
    "pgflow.fail_task(uuid,text,integer,text)",
    "pgflow.track_worker_function(text,text)",
)
#: What workers of the siblings look for besides; ours need none of it.
SIBLING_FUNCTIONS = (
    "pgflow.start_tasks(text,bigint[],uuid,text)",
    "pgflow.start_tasks(text,bigint[],uuid,text,text)",
    "pgflow.ensure_flow_compiled(text,jsonb)",
    "pgflow.ensure_flow_compiled(text,jsonb,text,jsonb)",
    "pgflow.recover_stalled_tasks(double precision)",
    "pgflow.escalate_permanently_stalled()",
)
OWN_FUNCTIONS = (
    "pgflow_otp.claim_tasks(text,text,uuid,integer,integer,integer)",
    "pgflow_otp.settle_task(uuid,text,integer,uuid,timestamp with time zone,text,jsonb,text)",
    "pgflow_otp.settle_tasks(uuid,uuid[],text[],integer[],timestamp with time zone[],text[],text[],text[])",
    "pgflow_otp.start_flows(text,text[],uuid[])",
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
NOTIFY_TRIGGER = "trigger_notify_queue_insert_listeners"

_SETUP = "run: pgflow-otp setup"
_RESTORE = "restore a backup, or install into a new database"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something about the schema that is not as it has to be.

    Attributes:
        what: the fault, in words.
        remedy: what to do about it.
        is_warning: True when workers can run with it.
    """

    what: str
    remedy: str
    is_warning: bool = False


def find_faults(connection: Connection, notify_trigger: str = "deferred") -> list[Fault]:
    """Return every fault and warning of the schema in the connection's database; empty when all is well.

    Args:
        connection: in autocommit mode or not; nothing is changed.
        notify_trigger: "deferred", or "pgmq_default" to accept triggers that run at each INSERT (runtime-contract 4.2).
    """
    if not _yes(connection, "select to_regnamespace('pgflow') is not null"):
        return [Fault("schema pgflow does not exist", _SETUP)]
    return [*_faults(connection), *_warnings(connection, notify_trigger)]


def _faults(connection: Connection) -> Iterator[Fault]:
    for table in TABLES:
        if not _yes(connection, "select to_regclass(%s) is not null", f"pgflow.{table}"):
            yield Fault(f"table pgflow.{table} does not exist", _RESTORE)
    if not _yes(
        connection,
        "select exists (select from pg_extension where extname = 'pgmq') or to_regclass('pgmq.meta') is not null",
    ):
        yield Fault("pgmq is not installed", f"create extension pgmq, or {_SETUP}")
    installed = schema.installed_version(connection)
    if installed != schema.VERSION:
        found = f"version {installed}" if installed else "not installed"
        yield Fault(f"schema pgflow_otp is {found}; version {schema.VERSION} is needed", _SETUP)
    ours = installed == 0 or schema.owns_core(connection)
    yield from _functions(connection, ours, installed == schema.VERSION)
    if ours:
        yield from _versions(connection)
        yield from _record(connection)
    yield from _statuses(connection)
    for table in ("steps", "step_tasks"):
        yield from _queue_name(connection, table)


def _functions(connection: Connection, ours: bool, complete: bool) -> Iterator[Fault]:
    named = set()
    for signature in (*CORE_FUNCTIONS, *(SIBLING_FUNCTIONS if ours else ()), *(OWN_FUNCTIONS if complete else ())):
        if not _yes(connection, "select to_regprocedure(%s) is not null", signature):
            named.add(signature.partition("(")[0])
            yield Fault(f"function {signature} does not exist", _SETUP)
    if complete:
        for name in schema.missing_functions(connection):
            if name not in named:
                yield Fault(f"function or view {name} does not exist", _SETUP)
    for signature in ABSENT:
        if _yes(connection, "select to_regprocedure(%s) is not null", signature):
            yield Fault(f"function {signature} of an older level still exists", f"drop function {signature}")


def _record(connection: Connection) -> Iterator[Fault]:
    record = _value(
        connection,
        "select string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' order by attnum) from pg_attribute "
        "where attrelid = to_regclass('pgflow.step_task_record') and attnum > 0 and not attisdropped",
    )
    if record != RECORD:
        yield Fault(f"type pgflow.step_task_record is ({record or 'missing'}), not ({RECORD})", _RESTORE)


def _versions(connection: Connection) -> Iterator[Fault]:
    for view, wanted in (("pgflow_version", CORE_LEVEL), ("extensions_version", HELPERS_LEVEL)):
        comment = _value(connection, "select obj_description(to_regclass(%s), 'pg_class')", f"pgflow.{view}") or ""
        digits = comment.rpartition("version=")[2]
        remedy = f"comment on view pgflow.{view} is 'PgFlow version={wanted}'"
        if not digits.isdigit():
            yield Fault(f"view pgflow.{view} carries no version", remedy)
        elif int(digits) < wanted:
            yield Fault(f"view pgflow.{view} says version {digits}; {wanted} is needed", remedy)


def _statuses(connection: Connection) -> Iterator[Fault]:
    definition = _value(
        connection,
        "select pg_get_constraintdef(oid) from pg_constraint "
        "where conrelid = to_regclass('pgflow.step_tasks') and conname = 'valid_status'",
    )
    missing = [status for status in TASK_STATUSES if f"'{status}'" not in (definition or "")]
    if missing:
        values = ", ".join(f"'{status}'" for status in TASK_STATUSES)
        yield Fault(
            f"constraint valid_status of pgflow.step_tasks does not allow {', '.join(missing)}",
            f"alter table pgflow.step_tasks add constraint valid_status check (status in ({values})), "
            "after dropping the one that is there",
        )


def _queue_name(connection: Connection, table: str) -> Iterator[Fault]:
    not_null = _value(
        connection,
        "select attnotnull from pg_attribute where attrelid = to_regclass(%s) and attname = 'queue_name'",
        f"pgflow.{table}",
    )
    if not_null is None:
        yield Fault(f"column queue_name of pgflow.{table} does not exist", _RESTORE)
    elif not not_null:
        remedy = f"alter table pgflow.{table} alter queue_name set not null"
        yield Fault(f"column queue_name of pgflow.{table} may be NULL", remedy)
    if not _yes(
        connection,
        "select exists (select from pg_constraint "
        "where conrelid = to_regclass(%s) and conname = 'queue_name_is_valid')",
        f"pgflow.{table}",
    ):
        check = "check (pgflow.is_valid_queue_name(queue_name))"
        remedy = f"alter table pgflow.{table} add constraint queue_name_is_valid {check}"
        yield Fault(f"constraint queue_name_is_valid of pgflow.{table} does not exist", remedy)


def _warnings(connection: Connection, notify_trigger: str) -> Iterator[Fault]:
    """Triggers of the flows' queues that wake workers late or hold producers up (runtime-contract 4)."""
    if not _yes(connection, "select to_regclass('pgflow.flows') is not null and to_regclass('pgmq.meta') is not null"):
        return
    triggers = connection.execute(
        "select lower(f.flow_slug), t.tginitdeferred, t.tgnargs > 0, coalesce(m.is_partitioned, false) "
        "from pgflow.flows f "
        "join pg_trigger t on t.tgrelid = to_regclass(format('pgmq.%%I', 'q_' || lower(f.flow_slug))) "
        "left join pgmq.meta m on lower(m.queue_name) = lower(f.flow_slug) where t.tgname = %s order by 1",
        (NOTIFY_TRIGGER,),
    ).fetchall()
    throttled = _yes(connection, "select to_regclass('pgmq.notify_insert_throttle') is not null")
    for queue, deferred, has_argument, partitioned in triggers:
        if not deferred and notify_trigger == "deferred":
            yield Fault(
                f'the notify trigger of queue "{queue}" runs at each INSERT: producers wait for each other',
                "the next start of a tree defers it; with --notify-trigger pgmq_default this is accepted",
                is_warning=True,
            )
        if throttled and not _yes(
            connection, "select exists (select from pgmq.notify_insert_throttle where queue_name = %s)", queue
        ):
            yield Fault(
                f'the notify trigger of queue "{queue}" has no throttle row: it never notifies',
                "start a tree that listens to it, or call pgmq.enable_notify_insert",
                is_warning=True,
            )
        if partitioned and not has_argument:
            yield Fault(
                f'queue "{queue}" is partitioned and its notify trigger does not name it: it never notifies',
                "update pgmq to 1.13.1 or newer, or use signal_strategy=polling",
                is_warning=True,
            )


def _yes(connection: Connection, question: str, *args: Any) -> bool:
    return bool(_value(connection, question, *args))


def _value(connection: Connection, query: str, *args: Any) -> Any:
    row = connection.execute(query.encode(), args or None).fetchone()
    return row[0] if row else None
