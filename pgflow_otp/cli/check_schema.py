"""pgflow-otp check-schema"""

from __future__ import annotations

import click

from pgflow_otp.cli.options import database, dsn_option
from pgflow_otp.db.checks import find_faults
from pgflow_otp.db.connection import connect
from pgflow_otp.db.dsn import safe_dsn


@click.command(name="check-schema")
@dsn_option
@click.option(
    "--notify-trigger",
    type=click.Choice(["deferred", "pgmq_default"]),
    default="deferred",
    show_default=True,
    help="Which notify triggers are wanted; pgmq_default accepts those that run at each INSERT.",
)
def check_schema(dsn: str | None, notify_trigger: str) -> None:
    """Check the schema, whoever installed it: list every fault and warning with its remedy.

    Exit status 1 when there is a fault; warnings do not fail.
    """
    with database(dsn) as found, connect(found, "check-schema") as connection:
        found_faults = find_faults(connection, notify_trigger)
    faults = [fault for fault in found_faults if not fault.is_warning]
    if faults:
        click.echo(f"the schema in {safe_dsn(found)} has {len(faults)} fault{'s' * (len(faults) > 1)}:")
    else:
        click.echo(f"the schema in {safe_dsn(found)} is as it has to be")
    for fault in sorted(found_faults, key=lambda fault: fault.is_warning):
        click.echo(f"  • {'warning: ' * fault.is_warning}{fault.what}\n    {fault.remedy}")
    if faults:
        raise click.exceptions.Exit(1)
