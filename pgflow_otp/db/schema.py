"""Installing the schema: pgmq, core, helpers; one transaction under an advisory lock; a second run does nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pgmq.install
import psycopg

from pgflow_otp.errors import PgflowError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Version of the schema in sql/; forward only.
VERSION = 1
#: Classes of the two-key advisory lock: 1 is the definitions' (sql-contract 2.4), this one the installer's.
_LOCK = (7_091_306, 1)
OLDEST_SERVER = 150_000

_MIGRATIONS_TABLE = """
create table if not exists pgflow_otp.migrations (
  version int primary key,
  installed_at timestamptz not null default now()
);
"""


@dataclass(frozen=True, slots=True)
class SetupReport:
    """What `install` did.

    Attributes:
        changed: False when the schema was there already.
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
    """Install or verify the schema in the connection's database.

    Raises:
        SchemaError: the server is too old, the schema is newer than this package, was made by another runtime, or
            the role lacks a privilege. Nothing was changed.
    """
    try:
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(%s, %s)", _LOCK)
            installed = installed_version(connection)
            if installed == VERSION:
                return SetupReport(False, VERSION)
            return SetupReport(True, VERSION, tuple(_install(connection, installed)))
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaError(
            f"setup needs more privileges: {error.diag.message_primary}; "
            "run it as the owner of the database, or grant CREATE on the database to this role"
        ) from None
    except psycopg.errors.ReadOnlySqlTransaction:
        raise SchemaError("this server is read-only (a standby?); run setup against the primary") from None


def _install(connection: psycopg.Connection[Any], installed: int) -> Iterator[str]:
    if connection.info.server_version < OLDEST_SERVER:
        raise SchemaError(f"PostgreSQL {connection.info.server_version // 10_000} is too old; 15 or newer is needed")
    if installed > VERSION:
        raise SchemaError(
            f"the database holds schema version {installed}, newer than this package's {VERSION}; upgrade pgflow-otp"
        )
    if _exists(connection, "select to_regnamespace('pgflow') is not null"):
        raise SchemaError(
            "schema 'pgflow' was installed by another runtime; it is left alone. "
            "Use a database of its own for pgflow-otp"
        )
    yield _install_pgmq(connection)
    for statement in statements():
        connection.execute(statement.encode())
    yield f"installed schema pgflow and schema pgflow_otp, version {VERSION}"


def statements() -> Iterator[str]:
    """Return our SQL in the order in which it is run, pgmq's left out."""
    for folder in ("core", "helpers"):
        for file in sorted((sql_directory() / folder).glob("*.sql")):
            yield file.read_text(encoding="utf-8")
    yield _MIGRATIONS_TABLE
    yield f"insert into pgflow_otp.migrations (version) values ({VERSION});"


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


def _exists(connection: psycopg.Connection[Any], question: str) -> bool:
    row = connection.execute(question.encode()).fetchone()
    return bool(row and row[0])
