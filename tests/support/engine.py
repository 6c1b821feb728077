"""The database as its callers see it: one method per call, rows as dicts, other sessions where it is about locks."""

from __future__ import annotations

import json
import threading
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row, scalar_row
from psycopg.types.json import Jsonb

from support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Item = tuple[dict[str, Any], str, Any]

#: For an output: SQL NULL, where None is the JSON null.
NOTHING: Any = object()

TABLES = ("flows", "steps", "deps", "workers", "worker_functions", "runs", "step_states", "step_tasks")


def as_json(value: Any) -> Jsonb | None:
    return None if value is NOTHING else Jsonb(value)


class Engine:
    """One session of the test's database."""

    def __init__(self, dsn: str, connection: psycopg.Connection[Any]) -> None:
        self.dsn = dsn
        self.connection = connection

    # Asking

    def execute(self, query: str, *args: Any) -> psycopg.Cursor[Any]:
        return self.connection.execute(query.encode(), args or None)

    def value(self, query: str, *args: Any) -> Any:
        """First column of the first row; None without a row."""
        with self.connection.cursor(row_factory=scalar_row) as cursor:
            return cursor.execute(query.encode(), args or None).fetchone()

    def rows(self, query: str, *args: Any) -> list[dict[str, Any]]:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query.encode(), args or None).fetchall()

    def row(self, query: str, *args: Any) -> dict[str, Any]:
        (found,) = self.rows(query, *args)
        return found

    # Definitions

    def flow(self, slug: str = "f", max_attempts: int = 3, base_delay: int = 0, timeout: int = 60) -> None:
        self.execute("select pgflow.create_flow(%s, %s, %s, %s)", slug, max_attempts, base_delay, timeout)

    def step(self, slug: str, *parents: str, flow: str = "f", **options: Any) -> dict[str, Any]:
        """pgflow.add_step; options by the names of its arguments, patterns as Python values."""
        values = {k: Jsonb(v) if k.endswith("_pattern") else v for k, v in options.items()}
        named = "".join(f", {name} => %s" for name in values)
        return self.row(
            f"select * from pgflow.add_step(%s, %s, %s::text[]{named})", flow, slug, list(parents), *values.values()
        )

    # Runs and tasks

    def start(self, value: Any = NOTHING, flow: str = "f", run_id: uuid.UUID | None = None) -> uuid.UUID:
        """Start a run; its input is `{}` unless given."""
        given = Jsonb({}) if value is NOTHING else Jsonb(value)
        started: uuid.UUID = self.value("select run_id from pgflow.start_flow(%s, %s, %s)", flow, given, run_id)
        return started

    def worker(self, name: str = "python:test", queue: str = "f") -> uuid.UUID:
        worker_id = uuid.uuid4()
        self.execute("select pgflow.register_worker(%s, %s, %s)", worker_id, queue, name)
        return worker_id

    def read(self, queue: str = "f", quantity: int = 1_000, visibility: int = 5) -> list[int]:
        query = "select msg_id from pgmq.read(queue_name => %s, vt => %s, qty => %s)"
        return [row["msg_id"] for row in self.rows(query, queue, visibility, quantity)]

    def start_tasks(
        self, messages: list[int] | None, worker: uuid.UUID, flow: str = "f", queue: str | None = "f"
    ) -> list[dict[str, Any]]:
        query = "select * from pgflow.start_tasks(%s, %s::bigint[], %s, %s) order by run_id, step_slug, task_index"
        return self.rows(query, flow, messages, worker, queue)

    def claim(self, worker: uuid.UUID | None = None, flow: str = "f", quantity: int = 1_000) -> list[dict[str, Any]]:
        """Read and claim, as a worker of another runtime does."""
        queue = flow.lower()
        return self.start_tasks(self.read(queue, quantity), worker or self.worker(queue=queue), flow, queue)

    def complete(self, run: uuid.UUID, step: str, index: int = 0, output: Any = NOTHING) -> list[dict[str, Any]]:
        return self.rows("select * from pgflow.complete_task(%s, %s, %s, %s)", run, step, index, as_json(output))

    def fail(self, run: uuid.UUID, step: str, index: int = 0, error: str = "no luck") -> list[dict[str, Any]]:
        return self.rows("select * from pgflow.fail_task(%s, %s, %s, %s)", run, step, index, error)

    def own_claim(
        self, worker: uuid.UUID, flow: str = "f", quantity: int = 1_000, **named: Any
    ) -> list[dict[str, Any]]:
        """pgflow_otp.claim_tasks"""
        more = "".join(f", {name} => %s" for name in named)
        query = f"select * from pgflow_otp.claim_tasks(%s, %s, %s, 5, %s{more}) order by run_id, step_slug, task_index"
        return self.rows(query, flow, flow.lower(), worker, quantity, *named.values())

    def settle(self, worker: uuid.UUID, items: Sequence[Item]) -> list[dict[str, Any]]:
        """pgflow_otp.settle_tasks; each item a claimed task, its outcome, and its output or error."""
        return self.rows(
            "select * from pgflow_otp.settle_tasks(%s, %s, %s, %s, %s, %s, %s, %s)",
            worker,
            [task["run_id"] for task, _, _ in items],
            [task["step_slug"] for task, _, _ in items],
            [task["task_index"] for task, _, _ in items],
            [task["started_at"] for task, _, _ in items],
            [outcome for _, outcome, _ in items],
            [None if outcome != "completed" or said is NOTHING else json.dumps(said) for _, outcome, said in items],
            [None if outcome == "completed" else said for _, outcome, said in items],
        )

    def settle_one(self, worker: uuid.UUID, item: Item) -> str:
        """pgflow_otp.settle_task"""
        task, outcome, said = item
        status: str = self.value(
            "select pgflow_otp.settle_task(%s, %s, %s, %s, %s, %s, %s, %s)",
            task["run_id"],
            task["step_slug"],
            task["task_index"],
            worker,
            task["started_at"],
            outcome,
            as_json(said) if outcome == "completed" else None,
            None if outcome == "completed" else said,
        )
        return status

    # What is stored

    def run(self, run: uuid.UUID) -> dict[str, Any]:
        return self.row("select * from pgflow.runs where run_id = %s", run)

    def state(self, run: uuid.UUID, step: str) -> dict[str, Any]:
        return self.row("select * from pgflow.step_states where run_id = %s and step_slug = %s", run, step)

    def task(self, run: uuid.UUID, step: str, index: int = 0) -> dict[str, Any]:
        query = "select * from pgflow.step_tasks where run_id = %s and step_slug = %s and task_index = %s"
        return self.row(query, run, step, index)

    def statuses(self, run: uuid.UUID) -> dict[str, str]:
        """Status of each step of a run."""
        rows = self.rows("select step_slug, status from pgflow.step_states where run_id = %s order by 1", run)
        return {row["step_slug"]: row["status"] for row in rows}

    def live(self, queue: str = "f") -> list[dict[str, Any]]:
        """Messages of a queue, visible or not."""
        return self._messages("q", queue)

    def archived(self, queue: str = "f") -> list[dict[str, Any]]:
        return self._messages("a", queue)

    def visible_in(self, run: uuid.UUID, step: str, index: int = 0) -> float | None:
        """Seconds until the message of a task becomes visible; None when it is not in its queue."""
        task = self.task(run, step, index)
        query = sql.SQL("select extract(epoch from vt - clock_timestamp()) from pgmq.{} where msg_id = %s")
        table = sql.Identifier(f"q_{task['queue_name']}")
        row = self.connection.execute(query.format(table), (task["message_id"],)).fetchone()
        return float(row[0]) if row else None

    def events(self) -> list[str]:
        """Names of the events since the last look, in the order in which they were sent."""
        return [event for event, _ in self.payloads()]

    def payloads(self) -> list[tuple[str, dict[str, Any]]]:
        """As `events`, with what each carries; topic and privacy are checked here."""
        found = self.rows("delete from realtime.messages returning *")
        for row in found:
            assert row["topic"] == f"pgflow:run:{row['payload']['run_id']}"
            assert row["private"] is False
        return [(row["event"], row["payload"]) for row in sorted(found, key=lambda row: row["id"])]

    def everything(self) -> dict[str, Any]:
        """All rows of all tables and queues: equal before and after a call that changes nothing."""
        queues = [row["queue_name"] for row in self.rows("select queue_name from pgmq.list_queues() order by 1")]
        stored = {table: self.rows(f"select * from pgflow.{table} t order by t::text") for table in TABLES}
        return {
            **stored,
            "queues": queues,
            "live": {queue: self.live(queue.lower()) for queue in queues},
            "archived": {queue: self.archived(queue.lower()) for queue in queues},
            "sent": self.rows("select * from realtime.messages order by id"),
        }

    def age(self, seconds: float) -> None:
        """Let time go by: everything about tasks and runs happened so much earlier."""
        for table, columns in {
            "runs": ("started_at", "completed_at", "failed_at"),
            "step_states": ("created_at", "started_at", "completed_at", "failed_at", "skipped_at"),
            "step_tasks": ("queued_at", "started_at", "completed_at", "failed_at"),
            "workers": ("started_at", "last_heartbeat_at"),
        }.items():
            moved = ", ".join(f"{column} = {column} - make_interval(secs => %(s)s)" for column in columns)
            self.connection.execute(f"update pgflow.{table} set {moved}".encode(), {"s": seconds})

    def _messages(self, kind: str, queue: str) -> list[dict[str, Any]]:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            table = sql.Identifier("pgmq", f"{kind}_{queue}")
            return cursor.execute(sql.SQL("select * from {} order by msg_id").format(table)).fetchall()

    # Other sessions

    @contextmanager
    def transaction(self) -> Iterator[Engine]:
        """Another session with an open transaction, committed at the end unless it was ended before."""
        with psycopg.connect(self.dsn) as own:
            yield Engine(self.dsn, own)

    def in_another_session(self, work: Callable[[Engine], Any]) -> tuple[threading.Thread, list[Any]]:
        """Do something in a session of its own, at the same time; its result, or error, ends up in the list."""
        results: list[Any] = []

        def run() -> None:
            with psycopg.connect(self.dsn, autocommit=True) as own:
                try:
                    results.append(work(Engine(self.dsn, own)))
                except psycopg.Error as error:
                    results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, results

    def wait_blocked(self, sessions: int = 1) -> None:
        """Wait until so many sessions of this database wait for a lock."""
        query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        wait_for(lambda: self.value(query) >= sessions, f"{sessions} session(s) to wait for a lock")
