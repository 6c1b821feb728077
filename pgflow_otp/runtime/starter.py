"""The one-shot starter: import, register, ask for workers. Idempotent; runs again when what came before it did."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from loguru import logger

from pgflow_otp import log
from pgflow_otp.db import flows, schema
from pgflow_otp.db.connection import connect
from pgflow_otp.errors import DatabaseUnavailable, PgflowError, SchemaError
from pgflow_otp.runtime.backoff import Backoff
from pgflow_otp.runtime.inspection import FlowInfo, inspect_target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgflow_otp.flow.target import Source
    from pgflow_otp.otp.child import ChildContext
    from pgflow_otp.settings import Settings

#: SQLSTATEs that no waiting mends (runtime-contract 2.3), beside every constraint a definition can violate (class 23).
_PERMANENT = ("42883", "42P01", "42704", "42601", "42501", "22023", "0A000", "P0001")


@dataclass(frozen=True, slots=True)
class StarterConfig:
    """Which targets to bring up."""

    targets: tuple[str, ...]
    source: Source
    dsn: str
    settings: Settings


def run_starter(context: ChildContext, config: StarterConfig) -> int:
    """Start function of the starter process. Says `module` and `start_worker` for each flow, then `done`."""
    log.configure("starter", config.settings.log_level)
    context.channel.socket.setblocking(True)
    context.ready()
    found = list(_inspect_all(context, config))
    if found:
        _register_all(context, config, found)
    context.send("done")
    return 0


def _inspect_all(context: ChildContext, config: StarterConfig) -> Iterator[FlowInfo]:
    """Import every target. One that cannot be imported, or repeats a slug, does not block the others."""
    owners: dict[str, str] = {}
    for target in config.targets:
        try:
            flows_found = inspect_target(target, config.source, config.settings.boot_timeout)
        except PgflowError as error:
            _failed(context, target, str(error))
            continue
        for flow in flows_found:
            other = owners.setdefault(flow.slug.lower(), flow.target)
            if other == flow.target:
                yield flow
            else:
                _failed(context, flow.target, f"the slug '{flow.slug}' is served by {other} already")


def _register_all(context: ChildContext, config: StarterConfig, found: list[FlowInfo]) -> None:
    backoff = Backoff(1.0, 30.0)
    waiting = list(found)
    while waiting:
        try:
            with connect(config.dsn, "starter") as connection:
                schema.require(connection)
                while waiting:
                    _register(context, connection, waiting[0])
                    waiting.pop(0)
        except SchemaError as error:
            for flow in waiting:
                _failed(context, flow.target, str(error))
            return
        except (DatabaseUnavailable, psycopg.Error) as error:
            pause = backoff.next()
            reason = " ".join(str(error).split())
            logger.warning(f"registering {waiting[0].slug} has to wait, trying again in {pause:.1f} s: {reason}")
            context.send("module", target=waiting[0].target, status="retrying", reason=reason)
            time.sleep(pause)


def _register(context: ChildContext, connection: psycopg.Connection[Any], flow: FlowInfo) -> None:
    try:
        with connection.transaction():
            status, differences = flows.ensure_flow_compiled(connection, flow.slug, flow.shape)
            if status != "mismatch":
                flows.set_flow_type(connection, flow.slug, flow.flow_type)
                flows.track_worker_function(connection, f"python:{flow.target}"[:500])
    except psycopg.Error as error:
        if error.sqlstate in _PERMANENT or (error.sqlstate or "").startswith("23"):
            _failed(context, flow.target, f"the database refuses flow '{flow.slug}': {error.diag.message_primary}")
            return
        raise
    if status == "mismatch":
        _failed(
            context,
            flow.target,
            f"flow '{flow.slug}' differs from the one in the database: {'; '.join(differences)}. "
            "Give the new shape a new slug, or delete the old flow with its runs",
        )
        return
    if status == "recompiled":
        logger.warning(f"flow '{flow.slug}' had another shape and was replaced; its runs are gone")
    context.send("module", target=flow.target, slug=flow.slug, status="succeeded", compiled=status)
    context.send("start_worker", slug=flow.slug, target=flow.target)


def _failed(context: ChildContext, target: str, reason: str) -> None:
    logger.error(f"{target} is not served: {reason}")
    context.send("module", target=target, status="failed_permanent", reason=reason)
