"""Opening connections: named, with client-side limits, JSON passed through as bytes where asked for."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.adapt import Buffer, Loader
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from pgflow_otp.db.dsn import unavailable_reason
from pgflow_otp.errors import DatabaseUnavailable

#: A peer that is gone without a word is noticed after about half a minute.
_KEEPALIVES = {
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class RawJsonLoader(Loader):
    """Hands JSON on as the bytes it came in. A worker never looks into payloads."""

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


def raw_json(payload: bytes) -> Jsonb:
    """Return a parameter for a jsonb argument from JSON that is encoded already."""
    return Jsonb(payload, dumps=bytes)


def connect(dsn: str, role: str) -> psycopg.Connection[Any]:
    """Open a connection in autocommit mode.

    Args:
        dsn: libpq connection string or URI.
        role: shown as application_name, after "pgflow-otp: ".

    Raises:
        DatabaseUnavailable: it cannot be opened; the cause is chained, passwords are left out.
    """
    try:
        return psycopg.connect(_complete(dsn, role), autocommit=True)
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(unavailable_reason(error, dsn)) from None


async def connect_async(dsn: str, role: str) -> psycopg.AsyncConnection[Any]:
    """As `connect`, for asyncio, with jsonb results as bytes."""
    try:
        connection = await psycopg.AsyncConnection.connect(_complete(dsn, role), autocommit=True)
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(unavailable_reason(error, dsn)) from None
    connection.adapters.register_loader("jsonb", RawJsonLoader)
    return connection


def _complete(dsn: str, role: str) -> str:
    return make_conninfo(dsn, application_name=f"pgflow-otp: {role}"[:63], **_KEEPALIVES)
