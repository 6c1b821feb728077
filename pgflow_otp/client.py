"""The client: starting runs and looking at them."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

from pgflow_otp.db import flows
from pgflow_otp.db.connection import connect
from pgflow_otp.db.dsn import check_dsn, find_dsn, unavailable_reason
from pgflow_otp.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    FlowNotFound,
    PgflowError,
    RunFailed,
    RunNotFound,
    SchemaError,
)
from pgflow_otp.flow.dsl import Flow
from pgflow_otp.flow.payload import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

#: Seconds between two looks at a run that is waited for: short at first, then longer.
_SHORTEST_WAIT, _LONGEST_WAIT = 0.01, 0.5


@dataclass(frozen=True, slots=True)
class StepState:
    """A step of a run.

    Attributes:
        step_slug: the step.
        step_type: "single" or "map".
        status: created, started, completed, failed or skipped.
        output: what it gave, when completed.
        error_message: the last error, of a failed or skipped step.
        skip_reason: condition_unmet, handler_failed or dependency_skipped, when skipped.
        total_tasks, completed_tasks, failed_tasks, queued_tasks, started_tasks: its tasks by status.
        created_at, started_at, completed_at, failed_at, skipped_at: when; None: not yet.
    """

    step_slug: str
    step_type: str
    status: str
    output: Any
    error_message: str | None
    skip_reason: str | None
    total_tasks: int
    completed_tasks: int
    failed_tasks: int
    queued_tasks: int
    started_tasks: int
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    skipped_at: datetime | None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a flow.

    Attributes:
        run_id: its id.
        flow_slug: the flow.
        status: started, completed or failed.
        input: what it was started with.
        output: the outputs of the last steps, by slug, when completed.
        remaining_steps: steps that have not ended.
        started_at, completed_at, failed_at: when; None: not yet.
        steps: its steps in the order of definition; empty unless asked for.
    """

    run_id: UUID
    flow_slug: str
    status: str
    input: Any
    output: Any
    remaining_steps: int
    started_at: datetime
    completed_at: datetime | None
    failed_at: datetime | None
    steps: tuple[StepState, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether the run has completed or failed."""
        return self.status != "started"

    @property
    def error(self) -> str | None:
        """Which step failed and why, in words; None unless the run failed and its steps are known."""
        failed = next((s for s in self.steps if s.status == "failed"), None)
        return f"step '{failed.step_slug}' failed: {failed.error_message}" if failed else None


class Client:
    """Starts runs and reads them. One connection, opened on first use; not for several threads at once.

    Args:
        dsn: libpq connection string or URI. None: PGFLOW_DSN, DATABASE_URL, or libpq's own variables.
        connection: a psycopg connection to work on instead; everything then happens in the caller's transaction.

    Raises:
        ConfigurationError: the DSN cannot be read, or none is known.
    """

    def __init__(self, dsn: str | None = None, *, connection: psycopg.Connection[Any] | None = None) -> None:
        self._given = connection
        self._own: psycopg.Connection[Any] | None = None
        if connection is None:
            found = check_dsn(dsn) if dsn is not None else find_dsn()
            if found is None:
                raise ConfigurationError("no database is known: pass dsn=, or set PGFLOW_DSN")
            self._dsn = found

    def start_flow(self, flow: Flow | str, input: Any, *, run_id: UUID | None = None) -> UUID:
        """Start a run and return its id.

        Args:
            flow: the Flow or its slug.
            input: any JSON value; an array for a flow that begins with a map.
            run_id: the id to give the run; None: a random one.

        Raises:
            FlowNotFound: no worker has registered the flow in this database yet.
            PayloadError: the input is not JSON.
            PgflowError: the input does not fit the flow, or the run id is taken.
            DatabaseUnavailable: the database cannot be reached.
        """
        slug = _slug(flow)
        payload = encode(input, "input")
        with self._connection() as connection:
            try:
                return flows.start_flow(connection, slug, payload, run_id)
            except psycopg.errors.ForeignKeyViolation:
                raise FlowNotFound(slug) from None
            except psycopg.errors.UniqueViolation:
                raise PgflowError(f"there is a run {run_id} already") from None
            except psycopg.errors.RaiseException as error:
                raise PgflowError(str(error.diag.message_primary)) from None

    def start_flow_sync(self, flow: Flow | str, input: Any, *, timeout: float = 60) -> Run:
        """Start a run, wait for its end and return it with its steps.

        Args:
            flow: the Flow or its slug.
            input: any JSON value.
            timeout: seconds to wait; the run itself goes on after them.

        Raises:
            RunFailed: the run failed; carries it.
            TimeoutError: it has not ended in time.
            Others as for `start_flow`.
        """
        return self.wait(self.start_flow(flow, input), timeout=timeout)

    def wait(self, run_id: UUID, *, timeout: float = 60) -> Run:
        """Wait for the end of a run and return it with its steps. Errors as for `start_flow_sync`."""
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_WAIT
        while not self._has_finished(run_id):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"run {run_id} has not ended within {timeout} s; it goes on")
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_WAIT)
        run = self.get_run_with_states(run_id)
        if run.status == "failed":
            raise RunFailed(run, f"run {run_id} of '{run.flow_slug}' failed: {run.error or 'no step says why'}")
        return run

    def _has_finished(self, run_id: UUID) -> bool:
        """Whether the run has ended. A database that does not answer now may do so within the time one waits."""
        try:
            return self.get_run(run_id).is_finished
        except DatabaseUnavailable:
            return False

    def get_run(self, run_id: UUID | str) -> Run:
        """Return a run without its steps.

        Raises:
            RunNotFound: there is none of this id, or it is no id.
        """
        key = _run_id(run_id)
        with self._connection() as connection:
            row = flows.get_run(connection, key)
        if row is None:
            raise RunNotFound(run_id)
        return Run(**{name: row[name] for name in Run.__dataclass_fields__ if name != "steps"})

    def get_run_with_states(self, run_id: UUID | str) -> Run:
        """Return a run with its steps, both as of one moment.

        Raises:
            RunNotFound: there is none of this id, or it is no id.
        """
        key = _run_id(run_id)
        with self._connection() as connection, connection.transaction():
            if self._given is None:
                connection.execute("set transaction isolation level repeatable read, read only")
            row = flows.get_run(connection, key)
            if row is None:
                raise RunNotFound(run_id)
            steps = tuple(
                StepState(**{name: state[name] for name in StepState.__dataclass_fields__})
                for state in flows.get_step_states(connection, key)
            )
        return Run(**{name: row[name] for name in Run.__dataclass_fields__ if name != "steps"}, steps=steps)

    def flow_exists(self, flow: Flow | str) -> bool:
        """Return whether the flow is registered in this database."""
        with self._connection() as connection:
            return flows.flow_exists(connection, _slug(flow))

    def close(self) -> None:
        """Close the client's own connection. It is opened again when needed."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Any]]:
        if self._given is not None:
            yield self._given
            return
        if self._own is None or self._own.closed:
            self._own = connect(self._dsn, "client")
        try:
            yield self._own
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
            raise SchemaError("the pgflow schema is not installed in this database; run: pgflow-otp setup") from None
        except psycopg.OperationalError as error:
            if not self._own.closed:
                raise
            raise DatabaseUnavailable(unavailable_reason(error, self._dsn)) from None


def _slug(flow: Flow | str) -> str:
    if isinstance(flow, Flow):
        return flow.slug
    if isinstance(flow, str):
        return flow
    raise ConfigurationError(f"flow is {flow!r}; it has to be a Flow or its slug")


def _run_id(run_id: UUID | str) -> UUID:
    if isinstance(run_id, UUID):
        return run_id
    try:
        return UUID(run_id)
    except (ValueError, AttributeError, TypeError):
        raise RunNotFound(f"'{run_id}' (a run id looks like 6ba7b810-9dad-11d1-80b4-00c04fd430c8)") from None
