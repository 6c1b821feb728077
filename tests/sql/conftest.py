"""The database as its callers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engine import Engine

if TYPE_CHECKING:
    import psycopg


@pytest.fixture
def engine(database: str, connection: psycopg.Connection[Any]) -> Engine:
    return Engine(database, connection)
