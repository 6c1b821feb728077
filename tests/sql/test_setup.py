"""Installing the schema."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from support.engine import Engine
from support.vectors import SETUP

from pgflow_otp.db import schema
from pgflow_otp.db.checks import find_faults
from pgflow_otp.errors import SchemaError

VERSIONS = Path(__file__).parent.parent / "versions"

CATALOGUE = b"""
with s as (select oid, nspname from pg_namespace where nspname = any (%(schemas)s))
select 'column', s.nspname, c.relname::text || '.' || a.attname, concat_ws(
    ' ', a.attnum - (select count(*) from pg_attribute g
      where g.attrelid = a.attrelid and g.attnum between 1 and a.attnum and g.attisdropped),
    format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid))
from s join pg_class c on c.relnamespace = s.oid join pg_attribute a on a.attrelid = c.oid
left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
where a.attnum > 0 and not a.attisdropped
union all
select 'relation', s.nspname, c.relname, concat_ws(' ', c.relkind, c.relacl::text, obj_description(c.oid, 'pg_class'),
  case when c.relkind = 'v' then pg_get_viewdef(c.oid) end, case when c.relkind = 'i' then pg_get_indexdef(c.oid) end)
from s join pg_class c on c.relnamespace = s.oid
union all
select 'constraint', s.nspname, k.conrelid::regclass::text || '.' || k.conname,
  pg_get_constraintdef(k.oid) || k.convalidated
from s join pg_constraint k on k.connamespace = s.oid where k.contype <> 'n'
union all
select 'function', s.nspname, p.oid::regprocedure::text, concat_ws(' ', p.proargnames::text,
  pg_get_expr(p.proargdefaults, 0), pg_get_function_result(p.oid), l.lanname, p.provolatile, p.proparallel, p.prosecdef,
  p.proconfig::text, p.proacl::text, p.prosrc)
from s join pg_proc p on p.pronamespace = s.oid join pg_language l on l.oid = p.prolang
union all
select 'schema', s.nspname, '', n.nspacl::text from s join pg_namespace n on n.oid = s.oid
order by 1, 2, 3
"""
#: Rewrites the functions of schema pgflow to the schema that their private helpers were moved to.
MOVE_PRIVATE = b"""
do $$
declare
  v_definition text;
begin
  for v_definition in
    select replace(pg_get_functiondef(p.oid), 'pgflow_otp.', 'private.')
    from pg_proc p
    where p.pronamespace in ('pgflow'::regnamespace, 'private'::regnamespace) and p.prosrc like '%pgflow_otp.%'
  loop
    execute v_definition;
  end loop;
end
$$
"""


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


def test_the_extension_is_taken_where_the_server_has_it(empty_database: str, tmp_path: Path) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        if connection.info.server_version < 180_000:
            pytest.skip("extensions from a folder of one's own need PostgreSQL 18")
        offer_extension(connection, tmp_path)
        report = schema.install(connection)
        assert "created extension pgmq" in report.steps
        assert connection.execute("select count(*) from pg_extension where extname = 'pgmq'").fetchone() == (1,)
        connection.execute("select pgflow.create_flow('f')")
        assert find_faults(connection) == []


def offer_extension(connection: psycopg.Connection[Any], folder: Path) -> None:
    """Make `create extension pgmq` work in this session."""
    import pgmq.install

    version = pgmq.install.get_embedded_sql_version()
    extension = folder / "extension"
    extension.mkdir()
    (extension / "pgmq.control").write_text(
        f"comment = 'queue'\ndefault_version = '{version}'\nschema = 'pgmq'\nrelocatable = false\n"
    )
    (extension / f"pgmq--{version}.sql").write_text(pgmq.install.get_embedded_install_sql())
    for path in (extension, *extension.iterdir(), *list(folder.parents)[:3], folder):
        path.chmod(0o755)
    connection.execute(sql.SQL("set extension_control_path = {}").format(sql.Literal(f"$system:{folder}")))


def test_pgmq_is_missing_then_and_its_sql_is_installed_with_a_mark(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        schema.install(connection)
        row = connection.execute("select obj_description('pgmq'::regnamespace, 'pg_namespace')").fetchone()
        assert row
        assert "SQL only, by pgflow-otp" in row[0]


def test_what_somebody_dropped_is_made_again(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        schema.install(connection)
        before = catalogue(connection)
        connection.execute("drop function pgflow_otp.settle_tasks, pgflow.start_flow cascade")
        connection.execute("drop view pgflow.step_progress")
        report = schema.install(connection)
        assert report.steps == (
            "made again what was missing: pgflow_otp.settle_tasks, pgflow.start_flow, pgflow.step_progress",
        )
        assert catalogue(connection) == before


# Upgrades


def test_an_older_version_upgraded_is_the_current_schema(empty_database: str, database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as old, psycopg.connect(database, autocommit=True) as new:
        install_version(old, 1)
        assert schema.installed_version(old) == 1
        report = schema.install(old)
        assert report.steps == ("pgmq is there already", f"upgraded from version 1 to {schema.VERSION}")
        assert catalogue(old) == catalogue(new)
        assert find_faults(old) == []
        assert not schema.install(old).changed


def install_version(connection: psycopg.Connection[Any], version: int) -> None:
    """Install the schema as that version had it."""
    import pgmq.install

    connection.execute(SETUP.encode())  # the recording realtime.send that all test databases have
    connection.execute(pgmq.install.get_embedded_install_sql().encode())
    connection.execute((VERSIONS / f"{version}.sql").read_bytes())


def test_runs_of_an_older_version_go_on_after_the_upgrade(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        install_version(connection, 1)
        engine = Engine(empty_database, connection)
        engine.flow()
        engine.step("m", step_type="map")
        engine.step("z", "m")
        run = engine.start(list(range(60)))
        worker = engine.worker()
        engine.claim(worker, quantity=20)
        for index in range(10):
            engine.complete(run, "m", index, index)
        schema.install(connection)
        claimed = engine.claim(worker)
        assert engine.value("select count(*) from pgflow_otp.map_items") == 50
        assert sorted(task["input"] for task in claimed) == list(range(20, 60))
        for index in range(10, 60):
            engine.complete(run, "m", index, index)
        assert [task["input"] for task in engine.claim(worker)] == [{"m": list(range(60))}]
        engine.complete(run, "z", 0, "done")
        assert engine.run(run)["output"] == {"z": "done"}


def test_an_upgrade_waits_for_no_worker_for_long(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        psycopg.connect(empty_database, autocommit=True) as connection,
        psycopg.connect(empty_database) as busy,
    ):
        install_version(connection, 1)
        parts = [part.replace("'10s'", "'10ms'") for part in schema.upgrade(1)]
        monkeypatch.setattr(schema, "upgrade", lambda *_: iter(parts))
        busy.execute("select from pgflow.runs")
        with pytest.raises(SchemaError, match="stop the workers, then run setup again"):
            schema.install(connection)
        assert schema.installed_version(connection) == 1


@pytest.mark.parametrize("version", [-1, 0, schema.VERSION, 99])
def test_there_is_no_upgrade_from_a_version_that_never_was(version: int) -> None:
    with pytest.raises(SchemaError, match=f"no upgrade from version {version}"):
        list(schema.upgrade(version))


def test_every_version_has_its_migration() -> None:
    names = [file.name for file in sorted((schema.sql_directory() / "migrations").glob("*.sql"))]
    assert [int(name[:4]) for name in names] == list(range(2, schema.VERSION + 1))
    assert {file.name for file in VERSIONS.glob("*.sql")} == {f"{n}.sql" for n in range(1, schema.VERSION)}


# Beside another runtime's schema


def test_beside_a_schema_of_another_runtime_only_ours_is_added(foreign: str) -> None:
    with psycopg.connect(foreign, autocommit=True) as connection:
        before = catalogue(connection, "pgflow", "pgmq", "realtime")
        report = schema.install(connection)
        assert report.steps[1:] == (
            "schema pgflow was installed by another runtime and is left as it is",
            f"installed schema pgflow_otp beside it, version {schema.VERSION}",
        )
        assert catalogue(connection, "pgflow", "pgmq", "realtime") == before
        assert find_faults(connection) == []
        assert not schema.install(connection).changed
        schema.require(connection)
        connection.execute("drop function pgflow_otp.settle_tasks")
        assert schema.install(connection).steps == ("made again what was missing: pgflow_otp.settle_tasks",)


def test_our_functions_work_beside_a_schema_of_another_runtime(foreign: str) -> None:
    with psycopg.connect(foreign, autocommit=True) as connection:
        schema.install(connection)
        engine = Engine(foreign, connection)
        engine.flow()
        engine.step("a")
        engine.step("m", "a", step_type="map")
        engine.step("z", "m")
        worker = uuid.uuid4()
        engine.execute("select pgflow_otp.register_worker(%s, 'f', 'python:f')", worker)
        runs = [row["start_flows"] for row in engine.rows("select pgflow_otp.start_flows('f', array['{}', '{}'])")]
        for _ in range(3):
            claimed = engine.rows("select * from pgflow_otp.claim_tasks('f', 'f', %s, 5, 10)", worker)
            settled = engine.settle(worker, [(task, "completed", [1, 2]) for task in claimed])
            assert {row["status"] for row in settled} == {"completed"}
        assert [engine.run(run)["status"] for run in runs] == ["completed", "completed"]
        assert engine.run(runs[0])["output"] == {"z": [1, 2]}


def test_a_schema_of_another_runtime_that_is_too_old_is_refused(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("create schema pgflow")
        with pytest.raises(SchemaError, match="upgrade it with that runtime first"):
            schema.install(connection)
        assert connection.execute("select to_regnamespace('pgflow_otp')").fetchone() == (None,)


@pytest.fixture
def foreign(empty_database: str) -> str:
    """A database whose pgflow is not ours: version 1 of ours stands for it, cut off from our additions."""
    with psycopg.connect(empty_database, autocommit=True) as connection:
        install_version(connection, 1)
        connection.execute("drop view pgflow.step_progress")
        for name in ("register_worker", "get_flow_input", "flow_exists", "recover_stalled_tasks"):
            connection.execute(sql.SQL("drop function pgflow.{}").format(sql.Identifier(name)))
        # Its functions call helpers of a schema that our installation must not find.
        connection.execute("alter schema pgflow_otp rename to private")
        connection.execute(MOVE_PRIVATE)
    return empty_database


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


def catalogue(connection: psycopg.Connection[Any], *schemas: str) -> list[Any]:
    """Everything about the objects of some schemas that two installations have in common, in words."""
    names = list(schemas or ("pgflow", "pgflow_otp", "pgmq", "realtime"))
    return connection.execute(CATALOGUE, {"schemas": names}).fetchall()
