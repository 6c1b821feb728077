"""pgflow-otp start"""

from __future__ import annotations

import os
from typing import Any

import click

from pgflow_otp.cli.options import dsn_option, resolve_database, setting_options
from pgflow_otp.db import schema
from pgflow_otp.db.connection import connect
from pgflow_otp.errors import ConfigurationError, DatabaseUnavailable, PgflowError
from pgflow_otp.otp.process import hold_stop_signals
from pgflow_otp.runtime.boot import BootConfig, command, hand_over, package_parent, user_source
from pgflow_otp.runtime.inspection import inspect_target
from pgflow_otp.runtime.rendezvous import check_free
from pgflow_otp.settings import Settings, settings_from


@click.command()
@click.option("--flows", "targets", multiple=True, required=True, metavar="TARGET", help="module or module:attribute.")
@dsn_option
@setting_options
def start(targets: tuple[str, ...], dsn: str | None, **given: Any) -> None:
    """Run the tree until it is told to stop.

    TARGET is `module` (all flows in it) or `module:attribute`; the current directory is importable. Give --flows as
    often as needed. SIGTERM or Ctrl-C stops in order: running handlers get --drain-timeout. Twice hurries, three times
    kills. SIGUSR1 writes the tree to the log. `pgflow-otp tree`, `top`, `scale`, `stop` and so on talk to it by its
    --name; two trees on a host need two names.
    """
    if os.getpid() == 1:
        hold_stop_signals()  # The kernel drops what PID 1 has no handler for; kept, it stops the tree later.
    settings = settings_from(given)
    check_free(settings.name)
    _check_targets(targets, settings)
    found, server = resolve_database(dsn)
    if server is None:
        _check_database(found)
    config = BootConfig(
        targets=targets,
        source=user_source(),
        dsn=found,
        settings=settings,
        embedded=server.hand_over() if server is not None else None,
    )
    become_root(config)


def become_root(config: BootConfig) -> None:
    """Replace this process by the root: a fresh interpreter under the same pid, as service managers expect."""
    descriptor = hand_over(config)
    os.set_inheritable(descriptor, True)
    hold_stop_signals()
    line = command(package_parent(), descriptor)
    os.execv(line[0], line)


def _check_targets(targets: tuple[str, ...], settings: Settings) -> None:
    """Fail early when no target at all can be served; otherwise the starter reports the bad ones."""
    reasons: list[str] = []
    for target in targets:
        try:
            inspect_target(target, user_source(), settings.boot_timeout)
        except PgflowError as error:
            reasons.append(str(error))
        else:
            return
    raise ConfigurationError("; ".join(reasons))


def _check_database(dsn: str) -> None:
    """A schema that does not fit is an error now; a database that is down is waited for."""
    try:
        with connect(dsn, "start") as connection:
            schema.require(connection)
    except DatabaseUnavailable as error:
        click.echo(f"{error}; going on, workers start when it answers", err=True)
