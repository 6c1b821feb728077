"""Options that several commands share, and the values behind them."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgflow_otp.db.dsn import check_dsn, find_dsn
from pgflow_otp.errors import ConfigurationError, PayloadError
from pgflow_otp.flow.payload import decode, encode
from pgflow_otp.runtime.spawning import start_embedded
from pgflow_otp.settings import LOG_LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgflow_otp.db.embedded import EmbeddedServer

Command = TypeVar("Command", bound="Callable[..., Any]")

dsn_option = click.option(
    "--dsn", metavar="DSN", help="Database, as URI or 'host=… dbname=…'. Default: see `pgflow-otp --help`."
)

_SETTINGS = (
    ("--name", str, "Name of the tree, by which commands find it (pgflow)."),
    ("--max-concurrency", int, "Handlers of one flow that may run at once (10)."),
    ("--batch-size", int, "Messages one claim may read (10)."),
    ("--min-poll-interval", float, "Seconds between polls that found nothing, at least (1)."),
    ("--max-poll-interval", float, "The same, at most (5)."),
    ("--heartbeat-interval", float, "Seconds between heartbeats, at most 20 (10)."),
    ("--recovery-interval", float, "Seconds between sweeps for stalled tasks (15)."),
    ("--stale-threshold", float, "Seconds past its timeout after which a task is stalled (60)."),
    ("--drain-timeout", float, "Seconds running handlers get at shutdown (30)."),
    ("--kill-grace", float, "Seconds from SIGTERM to SIGKILL of a handler (3)."),
    ("--boot-timeout", float, "Seconds importing a module may take (60)."),
    ("--idle-timeout", float, "Seconds after which an idle handler process is retired (60)."),
    ("--max-tasks-per-process", int, "Tasks after which a handler process is replaced (never)."),
    ("--max-payload-mb", float, "Largest input or output of a handler, in MiB (16)."),
)


def setting_options(command: Command) -> Command:
    """Add an option for every setting of a tree."""
    command = click.option(
        "--log-level", type=click.Choice(LOG_LEVELS, case_sensitive=False), help="Least severe level that is logged."
    )(command)
    for flag, kind, text in reversed(_SETTINGS):
        command = click.option(flag, type=kind, help=text)(command)
    return command


@contextmanager
def database(dsn: str | None) -> Iterator[str]:
    """Give the DSN that holds here; the embedded server runs meanwhile if it is the one."""
    found, server = resolve_database(dsn)
    try:
        yield found
    finally:
        if server is not None:
            server.release()


def resolve_database(dsn: str | None) -> tuple[str, EmbeddedServer | None]:
    """Return the DSN that holds here, and the embedded server, held, if it is the one."""
    if dsn is not None and not dsn.strip():
        raise ConfigurationError("--dsn is empty; give a connection string, or leave the option out")
    found = check_dsn(dsn, "--dsn") if dsn is not None else find_dsn()
    if found is not None:
        return found, None
    server, embedded_dsn = start_embedded()
    click.echo(f"using the embedded PostgreSQL: {server.uri}", err=True)
    return embedded_dsn, server


def json_input(context: click.Context, parameter: click.Parameter, value: str) -> Any:
    """Read an option's value as JSON, @file, or - for standard input."""
    if value == "-":
        raw, where = sys.stdin.buffer.read(), "standard input"
    elif value.startswith("@"):
        where = value[1:]
        try:
            with open(where, "rb") as file:
                raw = file.read()
        except OSError as error:
            raise click.BadParameter(f"cannot read {where}: {error.strerror}") from None
    else:
        raw, where = value.encode("utf-8", "surrogateescape"), repr(value)
    try:
        value_read = decode(raw)
        encode(value_read, "input")
    except PayloadError as error:
        text = str(error)
        raise click.BadParameter(f"{where[:80]} is {text}" if text.startswith("not JSON") else text) from None
    return value_read
