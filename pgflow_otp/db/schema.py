"""Installing the schema: pgmq, core, helpers; one transaction under an advisory lock; a second run does nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pgmq.install
import psycopg

from pgflow_otp.errors import PgflowError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Version of the schema in sql/; forward only. Each step up has a file in sql/migrations.
VERSION = 2
#: Classes of the two-key advisory lock: 1 is the definitions' (sql-contract 2.4), this one the installer's.
_LOCK = (7_091_306, 1)
OLDEST_SERVER = 150_000

#: Tables and what they need, run on a new database only; and functions and views, run at each install and upgrade.
_OWN_TABLES = "tables/0040_own.sql"
_OWN_FUNCTIONS = "helpers/otp"
_CORE_FUNCTIONS = ("core", "helpers/port")

#: What our functions use of a core that another runtime installed: its second level (queue identity).
_NEEDED_OF_CORE = """
select
  to_regprocedure('pgflow.complete_task(uuid,text,integer,jsonb)') is not null
  and to_regprocedure('pgflow.fail_task(uuid,text,integer,text)') is not null
  and to_regprocedure('pgflow.start_ready_steps(uuid)') is not null
  and to_regprocedure('pgflow.set_vt_batch(text,bigint[],integer[])') is not null
  and to_regprocedure('pgflow.cascade_resolve_conditions(uuid)') is not null
  and exists (
    select from pg_attribute where attrelid = to_regclass('pgflow.step_tasks') and attname = 'queue_name')
  and exists (
    select from pg_constraint where conrelid = to_regclass('pgflow.step_tasks') and conname = 'valid_status'
    and pg_get_constraintdef(oid) like '%''cancelled''%')
"""


@dataclass(frozen=True, slots=True)
class SetupReport:
    """What `install` did.

    Attributes:
        changed: False when everything was there already.
        version: version of the schema now installed.
        steps: one line for each thing that was done.
    """

    changed: bool
    version: int
    steps: tuple[str, ...] = field(default=())


def sql_directory() -> Path:
    """Return the folder of our SQL: inside the installed package, or at the top of a source tree."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "sql", package.parent / "sql"):
        if (candidate / "core").is_dir():
            return candidate
    raise PgflowError(f"the folder sql/ is missing beside {package}; reinstall pgflow-otp")


def install(connection: psycopg.Connection[Any]) -> SetupReport:
    """Install, upgrade, repair or verify the schema in the connection's database.

    A schema `pgflow` that another runtime installed is left as it is: only `pgflow_otp` is added beside it.

    Raises:
        SchemaError: the server is too old, the schema is newer than this package, another runtime's is too old to
            work with, somebody holds a lock on its tables, or the role lacks a privilege. Nothing was changed.
    """
    try:
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(%s, %s)", _LOCK)
            steps = tuple(_install(connection))
            return SetupReport(bool(steps), VERSION, steps)
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaError(
            f"setup needs more privileges: {error.diag.message_primary}; "
            "run it as the owner of the database, or grant CREATE on the database to this role"
        ) from None
    except psycopg.errors.ReadOnlySqlTransaction:
        raise SchemaError("this server is read-only (a standby?); run setup against the primary") from None
    except psycopg.errors.LockNotAvailable:
        raise SchemaError(
            "the schema cannot be upgraded while its tables are in use: stop the workers, then run setup again"
        ) from None


def _install(connection: psycopg.Connection[Any]) -> Iterator[str]:
    if connection.info.server_version < OLDEST_SERVER:
        raise SchemaError(f"PostgreSQL {connection.info.server_version // 10_000} is too old; 15 or newer is needed")
    installed = installed_version(connection)
    if installed > VERSION:
        raise SchemaError(
            f"the database holds schema version {installed}, newer than this package's {VERSION}; upgrade pgflow-otp"
        )
    if installed == VERSION:
        lost = missing_functions(connection)
        if lost:
            _run(connection, function_files(owns_core(connection)))
            yield f"made again what was missing: {', '.join(lost)}"
        return
    yield _install_pgmq(connection)
    if installed:
        _run(connection, upgrade(installed, owns_core(connection)))
        yield f"upgraded from version {installed} to {VERSION}"
    elif _exists(connection, "select to_regnamespace('pgflow') is not null"):
        if not _exists(connection, _NEEDED_OF_CORE):
            raise SchemaError(
                "schema 'pgflow' was installed by another runtime, at a level that is too old to work with "
                "(step_tasks has no queue_name, or a function is missing): upgrade it with that runtime first"
            )
        _run(connection, statements(with_core=False))
        yield "schema pgflow was installed by another runtime and is left as it is"
        yield f"installed schema pgflow_otp beside it, version {VERSION}"
    else:
        _run(connection, statements())
        yield f"installed schema pgflow and schema pgflow_otp, version {VERSION}"


def statements(with_core: bool = True) -> Iterator[str]:
    """Return our SQL for a new database in the order in which it is run, pgmq's left out.

    Args:
        with_core: False: without schema `pgflow`, which another runtime installed.
    """
    yield from (_read(file) for file in (_files("tables") if with_core else [_OWN_TABLES]))
    yield from function_files(with_core)
    yield f"insert into pgflow_otp.migrations (version, owns_core) values ({VERSION}, {with_core});"


def upgrade(installed: int, with_core: bool = True) -> Iterator[str]:
    """Return the SQL that brings an older version to this one. Forward only.

    Raises:
        SchemaError: there is no such older version.
    """
    if not 0 < installed < VERSION:
        raise SchemaError(f"there is no upgrade from version {installed}; give a version from 1 to {VERSION - 1}")
    yield "set local lock_timeout = '10s';"
    for version in range(installed + 1, VERSION + 1):
        (migration,) = (file for file in _files("migrations") if Path(file).name.startswith(f"{version:04d}_"))
        yield _read(migration)
        breaking = "-- breaking" in _read(migration)
        values = f"{version}, {breaking}, {with_core}"
        yield f"insert into pgflow_otp.migrations (version, breaking, owns_core) values ({values});"
    yield from function_files(with_core)


def function_files(with_core: bool) -> Iterator[str]:
    """Return the SQL of functions and views, which may be run again at any time."""
    for folder in (_OWN_FUNCTIONS, *(_CORE_FUNCTIONS if with_core else ())):
        yield from (_read(file) for file in _files(folder))


def missing_functions(connection: psycopg.Connection[Any]) -> list[str]:
    """Return the names of functions and views of ours that the database lacks."""
    names: dict[str, None] = {}
    for text in function_files(owns_core(connection)):
        # What depends on an extension is indented, inside a block that looks for it.
        names |= dict.fromkeys(re.findall(r"^create or replace (?:function|view) (pgflow\w*\.\w+)", text, re.MULTILINE))
    found = connection.execute(
        "select n from unnest(%s::text[]) n where to_regclass(n) is null and not exists ("
        "select from pg_proc p where p.pronamespace = to_regnamespace(split_part(n, '.', 1)) "
        "and p.proname = split_part(n, '.', 2))",
        (list(names),),
    ).fetchall()
    return [row[0] for row in found]


def owns_core(connection: psycopg.Connection[Any]) -> bool:
    """Return whether schema `pgflow` is ours; False when another runtime installed it."""
    query = (
        "select coalesce((to_jsonb(m) ->> 'owns_core')::boolean, true) from pgflow_otp.migrations m "
        "order by version desc limit 1"
    )
    return _exists(connection, query)


def installed_version(connection: psycopg.Connection[Any]) -> int:
    """Return the version of our schema in the database; 0 when there is none."""
    if not _exists(connection, "select to_regclass('pgflow_otp.migrations') is not null"):
        return 0
    row = connection.execute("select coalesce(max(version), 0) from pgflow_otp.migrations").fetchone()
    return int(row[0]) if row else 0


def require(connection: psycopg.Connection[Any]) -> None:
    """Check that the database can be worked with.

    Raises:
        SchemaError: the schema is missing or of another version. Says which command mends it.
    """
    version = installed_version(connection)
    if version == 0:
        raise SchemaError("the pgflow schema is not installed in this database; run: pgflow-otp setup")
    if version < VERSION:
        raise SchemaError(f"the pgflow schema is version {version}, {VERSION} is needed; run: pgflow-otp setup")
    if version > VERSION:
        raise SchemaError(f"the pgflow schema is version {version}, this package knows {VERSION}; upgrade pgflow-otp")


def _install_pgmq(connection: psycopg.Connection[Any]) -> str:
    if _exists(connection, "select to_regclass('pgmq.meta') is not null"):
        return "pgmq is there already"
    if _exists(connection, "select exists (select from pg_available_extensions where name = 'pgmq')"):
        try:
            with connection.transaction():
                connection.execute("create extension pgmq")
            return "created extension pgmq"
        except psycopg.errors.InsufficientPrivilege:
            pass  # The server has it but this role may not create it: its SQL works without.
    version = pgmq.install.get_embedded_sql_version()
    connection.execute(pgmq.install.get_embedded_install_sql().encode())
    connection.execute(f"comment on schema pgmq is 'pgmq {version} (SQL only, by pgflow-otp)'".encode())
    return f"installed pgmq {version} (SQL only)"


def _files(folder: str) -> list[str]:
    return sorted(str(file.relative_to(sql_directory())) for file in (sql_directory() / folder).glob("*.sql"))


def _read(file: str) -> str:
    return (sql_directory() / file).read_text(encoding="utf-8")


def _run(connection: psycopg.Connection[Any], parts: Iterator[str]) -> None:
    for part in parts:
        connection.execute(part.encode())


def _exists(connection: psycopg.Connection[Any], question: str) -> bool:
    row = connection.execute(question.encode()).fetchone()
    return bool(row and row[0])
