"""pgflow-otp setup"""

from __future__ import annotations

import click
import pgmq.install

from pgflow_otp.cli.options import database, dsn_option
from pgflow_otp.db import schema
from pgflow_otp.db.connection import connect
from pgflow_otp.db.dsn import safe_dsn


@click.command()
@dsn_option
@click.option("--check", is_flag=True, help="Change nothing; say whether the schema is installed (exit 1 if not).")
@click.option("--print-sql", is_flag=True, help="Print the SQL instead of running it.")
@click.option(
    "--from",
    "installed",
    type=click.IntRange(1, schema.VERSION - 1),
    metavar="VERSION",
    help="With --print-sql: the SQL that upgrades a database from this version.",
)
def setup(dsn: str | None, check: bool, print_sql: bool, installed: int | None) -> None:
    """Install or upgrade the schema: pgmq, pgflow and our helpers.

    One transaction; a second run does nothing, or makes again what somebody dropped. Needs a role that may create
    schemas in the database. A schema pgflow that another runtime installed is left as it is. Stop the workers before
    an upgrade.
    """
    if installed is not None and not print_sql:
        raise click.UsageError("--from goes with --print-sql; without it, setup sees by itself which version is there")
    if print_sql:
        _print_sql(installed)
        return
    with database(dsn) as found, connect(found, "setup") as connection:
        where = safe_dsn(found)
        if check:
            version = schema.installed_version(connection)
            if version != schema.VERSION:
                state = f"version {version}" if version else "not installed"
                click.echo(f"the schema in {where} is {state}; version {schema.VERSION} is wanted: pgflow-otp setup")
                raise click.exceptions.Exit(1)
            click.echo(f"the schema in {where} is up to date (version {version})")
            return
        report = schema.install(connection)
        for step in report.steps:
            click.echo(step)
        state = "is installed" if report.changed else "was up to date already"
        click.echo(f"the schema in {where} {state} (version {report.version})")


def _print_sql(installed: int | None) -> None:
    click.echo("begin;")
    if installed is None:
        click.echo(f"-- pgmq {pgmq.install.get_embedded_sql_version()}; leave it out where the extension is installed")
        click.echo(pgmq.install.get_embedded_install_sql())
    for part in schema.statements() if installed is None else schema.upgrade(installed):
        click.echo(part)
    click.echo("commit;")
