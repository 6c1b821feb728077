"""PostgreSQL for the tests: PGFLOW_TEST_DSN, else a container, else the embedded server."""

from __future__ import annotations

import gc
import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from psycopg.conninfo import make_conninfo

from pgflow_otp.db.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Give the DSN of a server on which databases may be created."""
    given = os.environ.get("PGFLOW_TEST_DSN")
    if given:
        yield given
        return
    if _container_engine_answers():
        from testcontainers.postgres import PostgresContainer

        with PostgresContainer("postgres:17-alpine", driver=None) as container:
            yield container.get_connection_url()
        return
    server = EmbeddedServer(
        folder, {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "300"}
    )
    try:
        yield make_conninfo(server.acquire(), dbname="postgres")
    finally:
        server.release()


def _container_engine_answers() -> bool:
    with warnings.catch_warnings():
        # Without an engine the client leaves its socket to the collector, which must not fail a test later.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            import docker

            client = docker.from_env(timeout=2)
            try:
                return bool(client.ping())
            finally:
                client.close()
        except Exception:
            return False
        finally:
            gc.collect()
