"""Fixtures: one server per session, one fresh database per test, and a look for leftovers after each test."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from support.processes import TOKEN_VARIABLE, note_permanent, open_descriptors, ours, permanent_descriptors, wait_for
from support.server import postgres
from support.vectors import SETUP

from pgflow_otp.db import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def token() -> str:
    """A mark in the environment of every process that the tests start."""
    os.environ["SPT_NOENV"] = "1"  # Setting a title would otherwise write over what /proc shows of the environment.
    return os.environ.setdefault(TOKEN_VARIABLE, uuid.uuid4().hex)


@pytest.fixture(scope="session")
def server(token: str) -> Iterator[str]:
    """DSN of the server; its maintenance database."""
    folder = Path(tempfile.mkdtemp(prefix="pgflow-test-"))
    try:
        with postgres(folder) as dsn:
            yield dsn
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def template(server: str) -> Iterator[str]:
    """A database that holds the schema, and a realtime.send that records what is sent."""
    name = f"pgflow_template_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        with psycopg.connect(make_conninfo(server, dbname=name), autocommit=True) as connection:
            connection.execute(SETUP.encode())
            schema.install(connection)
        note_permanent(admin.fileno())
        yield name
        admin.execute(sql.SQL("drop database {}").format(sql.Identifier(name)))


@pytest.fixture
def database(server: str, template: str) -> Iterator[str]:
    """DSN of a fresh database with the schema. At the end nobody may be connected to it any more."""
    yield from _fresh_database(server, template)


@pytest.fixture
def empty_database(server: str) -> Iterator[str]:
    """DSN of a fresh database without anything."""
    yield from _fresh_database(server, "template1")


def _fresh_database(server: str, origin: str) -> Iterator[str]:
    name = f"pgflow_test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(origin)))
        yield make_conninfo(server, dbname=name)
        sessions = "select count(*) from pg_stat_activity where datname = %s"

        def nobody_left() -> bool:
            row = admin.execute(sessions, (name,)).fetchone()
            return bool(row and row[0] == 0)

        try:
            wait_for(nobody_left, f"the end of all sessions in {name}", 5)
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to the test's database, in autocommit mode."""
    with psycopg.connect(database, autocommit=True) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left(token: str) -> Iterator[None]:
    """No process and no descriptor may outlive its test."""
    before = open_descriptors()
    yield
    wait_for(lambda: not ours(token), f"the end of {[p.cmdline() for p in ours(token)]}", 5)
    left = {d for d in open_descriptors() - before - permanent_descriptors if "/proc/" not in d}
    assert not left, f"descriptors left open: {left}"


@pytest.fixture(autouse=True)
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the test's trees are found; short, for it becomes part of a socket's path."""
    folder = Path(tempfile.mkdtemp(prefix="pgflow-rt-"))
    monkeypatch.setenv("PGFLOW_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def command() -> list[str]:
    """The command line of pgflow-otp."""
    return [sys.executable, "-m", "pgflow_otp"]
