"""Which database: argument, PGFLOW_DSN, DATABASE_URL, libpq's own variables, else the embedded server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgflow_otp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Seconds a connection attempt may take.
CONNECT_TIMEOUT = 10


def find_dsn(given: str | None = None, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the DSN that holds here; None when nothing is said and the embedded server is meant.

    Raises:
        ConfigurationError: the DSN cannot be read.
    """
    environment = os.environ if environment is None else environment
    for source, value in (
        ("--dsn", given),
        ("PGFLOW_DSN", environment.get("PGFLOW_DSN")),
        ("DATABASE_URL", environment.get("DATABASE_URL")),
    ):
        if value:
            return check_dsn(value, source)
    if any(key.startswith("PG") and key in _LIBPQ_VARIABLES for key in environment):
        return ""
    return None


def check_dsn(dsn: str, source: str = "the DSN") -> str:
    """Return the DSN, completed by a connect timeout.

    Raises:
        ConfigurationError: libpq cannot read it. The message leaves a password out.
    """
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise ConfigurationError(
            f"{source} is not a connection string; write postgresql://user:password@host/database or 'host=… dbname=…'"
        ) from None
    parts.setdefault("connect_timeout", str(CONNECT_TIMEOUT))
    return make_conninfo("", **parts)


def safe_dsn(dsn: str) -> str:
    """Return a DSN as it may be shown: without its password."""
    parts = {k: v for k, v in conninfo_to_dict(dsn).items() if k not in ("password", "connect_timeout", "sslpassword")}
    return make_conninfo("", **parts) or "libpq's defaults"


def unavailable_reason(error: psycopg.Error, dsn: str) -> str:
    """Return one line about a failed connection, without a password."""
    parts = conninfo_to_dict(dsn)
    text = " ".join(str(error).split())
    for secret in ("password", "sslpassword"):
        if parts.get(secret):
            text = text.replace(str(parts[secret]), "…")
    return f"cannot connect to PostgreSQL ({safe_dsn(dsn)}): {text}"


_LIBPQ_VARIABLES = frozenset(
    (
        "PGHOST",
        "PGHOSTADDR",
        "PGPORT",
        "PGDATABASE",
        "PGUSER",
        "PGPASSWORD",
        "PGPASSFILE",
        "PGSERVICE",
        "PGSERVICEFILE",
    )
)
