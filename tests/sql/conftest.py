"""The database as its callers see it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from support import reset
from support.engine import Engine
from support.processes import note_permanent, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from psycopg.errors import Diagnostic


class Shared:
    """One database for the tests after each other, replaced when one of them has changed what it defines."""

    def __init__(self, server: str, template: str) -> None:
        self.server = server
        self.template = template
        self.name = ""
        self.origin = ""
        self.keeper: psycopg.Connection[Any]

    def open(self) -> str:
        if not self.name:
            self.name = f"pgflow_test_{uuid.uuid4().hex[:12]}"
            with psycopg.connect(self.server, autocommit=True) as admin:
                query = "create database {} template {}"
                admin.execute(sql.SQL(query).format(sql.Identifier(self.name), sql.Identifier(self.template)))
            self.keeper = psycopg.connect(make_conninfo(self.server, dbname=self.name), autocommit=True)
            note_permanent(self.keeper.fileno())
            self.origin = reset.fingerprint(self.keeper)
        return make_conninfo(self.server, dbname=self.name)

    def clean(self) -> None:
        """Nobody may be connected any more; be as new for the next test, or gone."""
        others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        as_new = False
        try:
            wait_for(lambda: self.keeper.execute(others).fetchone() == (0,), "the end of all sessions", 5)
            reset.empty(self.keeper)
            as_new = reset.fingerprint(self.keeper) == self.origin
        except psycopg.Error:
            pass  # Something is missing that only a new database gives back.
        finally:
            if not as_new:
                self.drop()

    def drop(self) -> None:
        if self.name:
            self.keeper.close()
            with psycopg.connect(self.server, autocommit=True) as admin:
                admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(self.name)))
            self.name = ""


@pytest.fixture(scope="session")
def shared(server: str, template: str) -> Iterator[Shared]:
    database = Shared(server, template)
    try:
        yield database
    finally:
        database.drop()


@pytest.fixture
def database(shared: Shared) -> Iterator[str]:
    """DSN of a database as fresh as a new one. At the end nobody may be connected to it any more."""
    yield shared.open()
    shared.clean()


@pytest.fixture
def engine(database: str, connection: psycopg.Connection[Any]) -> Engine:
    return Engine(database, connection)


@pytest.fixture
def refused(engine: Engine) -> Callable[..., Diagnostic]:
    """Make a call that has to fail and to change nothing; gives what the server says about it."""

    def call(query: str, *args: Any) -> Diagnostic:
        before = engine.everything()
        with pytest.raises(psycopg.Error) as caught:
            engine.execute(query, *args)
        assert engine.everything() == before
        return caught.value.diag

    return call
