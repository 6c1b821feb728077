"""Functions that exist where pg_cron does; it works in one database of a server only (sql-contract 2.11)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from pgflow_otp.db import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

Connection = psycopg.Connection[dict[str, Any]]
EVERY_MINUTE = "* * * * *"
JOBS = "select jobid, schedule, command from cron.job where jobname = 'pgflow_requeue_stalled_tasks'"


@pytest.fixture
def cron(server: str) -> Iterator[Connection]:
    """A session in the database of pg_cron, which gets the schema for the time of the test."""
    with psycopg.connect(server) as admin:
        row = admin.execute("select current_setting('cron.database_name', true)").fetchone()
    if not (row and row[0]):
        pytest.skip("the server does not load pg_cron")
    with psycopg.connect(make_conninfo(server, dbname=row[0]), autocommit=True, row_factory=dict_row) as connection:
        taken = "select from pg_namespace where nspname in ('cron', 'pgflow', 'pgflow_otp', 'pgmq', 'realtime')"
        if connection.execute(taken).fetchone():
            pytest.skip(f'the database "{row[0]}", which pg_cron works in, is in use')
        connection.execute("create extension pg_cron")
        try:
            with psycopg.connect(make_conninfo(server, dbname=row[0]), autocommit=True) as installer:
                schema.install(installer)
            yield connection
        finally:
            connection.execute("drop schema if exists pgflow, pgflow_otp, realtime cascade")
            connection.execute("drop extension if exists pgmq cascade")
            connection.execute("drop schema if exists pgmq cascade")
            connection.execute("drop extension pg_cron")


def setup(connection: Connection, interval: str) -> str:
    row = connection.execute("select pgflow.setup_requeue_stalled_tasks_cron(%s) as said", (interval,)).fetchone()
    assert row
    return str(row["said"])


def test_schedules_the_recovery_and_says_so(cron: Connection) -> None:
    said = setup(cron, EVERY_MINUTE)
    (job,) = cron.execute(JOBS).fetchall()
    assert (job["schedule"], job["command"]) == (EVERY_MINUTE, "select pgflow.requeue_stalled_tasks()")
    assert said == f"Scheduled pgflow_requeue_stalled_tasks (every {EVERY_MINUTE}, job_id={job['jobid']})"


def test_a_second_schedule_replaces_the_first(cron: Connection) -> None:
    setup(cron, EVERY_MINUTE)
    setup(cron, "*/5 * * * *")
    assert [job["schedule"] for job in cron.execute(JOBS).fetchall()] == ["*/5 * * * *"]


def test_a_bad_interval_is_refused_and_the_schedule_stays(cron: Connection) -> None:
    setup(cron, EVERY_MINUTE)
    with pytest.raises(psycopg.Error, match="invalid schedule: now and then"):
        setup(cron, "now and then")
    assert [job["schedule"] for job in cron.execute(JOBS).fetchall()] == [EVERY_MINUTE]


def test_the_scheduled_command_runs(cron: Connection) -> None:
    setup(cron, EVERY_MINUTE)
    (job,) = cron.execute(JOBS).fetchall()
    assert cron.execute(job["command"]).fetchone() == {"requeue_stalled_tasks": 0}


def test_old_logs_are_deleted_and_counted(cron: Connection) -> None:
    cron.execute(
        "insert into cron.job_run_details (jobid, runid, end_time) values"
        " (1, 1, now() - interval '25 hours'), (1, 2, now() - interval '23 hours'), (1, 3, null)"
    )
    row = cron.execute("select * from pgflow.cleanup_ensure_workers_logs()").fetchone()
    assert row == {"cron_deleted": 1}
    left = cron.execute(
        "select runid from cron.job_run_details where jobid = 1 and runid <= 3 order by runid"
    ).fetchall()
    assert [row["runid"] for row in left] == [2, 3]


def test_without_pg_cron_the_functions_are_not_there(server: str, template: str) -> None:
    with psycopg.connect(make_conninfo(server, dbname=template), autocommit=True) as connection:
        found = (
            "select from pg_proc where proname in ('setup_requeue_stalled_tasks_cron', 'cleanup_ensure_workers_logs')"
        )
        assert connection.execute(found).fetchone() is None
