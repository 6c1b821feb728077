"""Installing the schema."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgflow_otp.db import schema
from pgflow_otp.errors import SchemaError


def test_installs_everything_and_a_second_run_changes_nothing(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        first = schema.install(connection)
        before = catalogue(connection)
        second = schema.install(connection)
        assert first.changed
        assert not second.changed
        assert catalogue(connection) == before
        schema.require(connection)


def test_concurrent_installers_wait_for_each_other(empty_database: str) -> None:
    reports: list[schema.SetupReport] = []

    def install() -> None:
        with psycopg.connect(empty_database, autocommit=True) as connection:
            reports.append(schema.install(connection))

    threads = [threading.Thread(target=install) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.changed for report in reports) == [False, False, True]


def test_an_error_leaves_nothing_behind(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [*schema.statements(), "select 1 / 0"]
    monkeypatch.setattr(schema, "statements", lambda: iter(parts))
    with psycopg.connect(empty_database, autocommit=True) as connection:
        before = catalogue(connection)
        with pytest.raises(psycopg.errors.DivisionByZero):
            schema.install(connection)
        assert catalogue(connection) == before


def test_pgmq_that_is_there_is_kept(empty_database: str) -> None:
    import pgmq.install

    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute(pgmq.install.get_embedded_install_sql().encode())
        connection.execute("select pgmq.create('mine')")
        report = schema.install(connection)
        assert "pgmq is there already" in report.steps
        row = connection.execute("select count(*) from pgmq.list_queues() where queue_name = 'mine'").fetchone()
        assert row == (1,)


def test_a_schema_of_another_runtime_is_left_alone(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("create schema pgflow")
        with pytest.raises(SchemaError, match="installed by another runtime"):
            schema.install(connection)


def test_a_newer_schema_is_refused(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        schema.install(connection)
        connection.execute("insert into pgflow_otp.migrations (version) values (999)")
        with pytest.raises(SchemaError, match="999"):
            schema.install(connection)
        with pytest.raises(SchemaError, match="upgrade pgflow-otp"):
            schema.require(connection)


def test_a_missing_schema_names_the_command(empty_database: str) -> None:
    with (
        psycopg.connect(empty_database, autocommit=True) as connection,
        pytest.raises(SchemaError, match="pgflow-otp setup"),
    ):
        schema.require(connection)


def test_a_role_without_privileges_is_told_so(empty_database: str) -> None:
    role = "pgflow_test_nobody"
    with psycopg.connect(empty_database, autocommit=True) as admin:
        admin.execute(sql.SQL("drop role if exists {0}; create role {0} login").format(sql.Identifier(role)))
        try:
            with (
                psycopg.connect(make_conninfo(empty_database, user=role), autocommit=True) as connection,
                pytest.raises(SchemaError, match="more privileges"),
            ):
                schema.install(connection)
        finally:
            admin.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def catalogue(connection: psycopg.Connection[Any]) -> list[Any]:
    return connection.execute(
        "select 'class', n.nspname, c.relname::text from pg_class c join pg_namespace n on n.oid = relnamespace "
        "where n.nspname in ('pgflow', 'pgflow_otp', 'pgmq', 'realtime') "
        "union all select 'proc', n.nspname, p.oid::regprocedure::text from pg_proc p "
        "join pg_namespace n on n.oid = pronamespace where n.nspname in ('pgflow', 'pgflow_otp', 'pgmq', 'realtime') "
        "order by 1, 2, 3"
    ).fetchall()
