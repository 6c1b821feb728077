"""pgflow-otp check-schema"""

from __future__ import annotations

import click

from pgflow_otp.cli.options import database, dsn_option
from pgflow_otp.db.checks import find_faults
from pgflow_otp.db.connection import connect
from pgflow_otp.db.dsn import safe_dsn


@click.command(name="check-schema")
@dsn_option
def check_schema(dsn: str | None) -> None:
    """Check the schema, whoever installed it: list every fault with its remedy.

    Exit status 1 when there is one.
    """
    with database(dsn) as found, connect(found, "check-schema") as connection:
        faults = find_faults(connection)
        if not faults:
            click.echo(f"the schema in {safe_dsn(found)} is as it has to be")
            return
    click.echo(f"the schema in {safe_dsn(found)} has {len(faults)} fault{'s' * (len(faults) > 1)}:")
    for fault in faults:
        click.echo(f"  • {fault.what}\n    {fault.remedy}")
    raise click.exceptions.Exit(1)
