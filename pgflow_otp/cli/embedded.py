"""pgflow-otp embedded: the embedded PostgreSQL by hand"""

from __future__ import annotations

import os

import click

from pgflow_otp.db.embedded import EmbeddedServer


@click.group()
def embedded() -> None:
    """Look at the embedded PostgreSQL, or stop it."""


@embedded.command()
def status() -> None:
    """Say whether it runs, and where."""
    server = EmbeddedServer()
    click.echo(f"{'running' if server.is_running() else 'not running'}: {server.uri}")
    click.echo(f"data: {server.data}")


@embedded.command()
def stop() -> None:
    """Stop it, whoever uses it. The data stays."""
    server = EmbeddedServer()
    was_running = server.is_running()
    server.stop()
    click.echo(f"{'stopped' if was_running else 'it was not running'}; the data is in {server.data}")


@embedded.command()
def path() -> None:
    """Print the folder of its data."""
    click.echo(EmbeddedServer().data)


@embedded.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def psql(arguments: tuple[str, ...]) -> None:
    """Open psql on it, starting it if needed. ARGUMENTS are psql's."""
    server = EmbeddedServer()
    dsn = server.acquire()
    server.hand_over()  # psql holds the server for as long as it runs.
    program = str(server.binaries / "psql")
    os.execv(program, [program, dsn, *arguments])
