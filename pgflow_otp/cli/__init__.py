"""The command line. Thin: it reads options, calls the library, and shows what came of it."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

import click

from pgflow_otp.cli.check_schema import check_schema
from pgflow_otp.cli.control import scale, start_worker, stop, stop_worker
from pgflow_otp.cli.embedded import embedded
from pgflow_otp.cli.run import run
from pgflow_otp.cli.runs import runs
from pgflow_otp.cli.setup import setup
from pgflow_otp.cli.start import start
from pgflow_otp.cli.tree import top, tree
from pgflow_otp.errors import PgflowError

_EPILOG = """\b
Database: --dsn, else PGFLOW_DSN, DATABASE_URL, or libpq's PG* variables,
else an embedded PostgreSQL in your data directory (extra "embedded").

\b
Exit status: 0 success; 1 the run failed or a check found faults; 2 wrong usage;
69 the tree or the database could not be reached; 70 gave up after too many
restarts; 78 wrong configuration; 130 interrupted.
"""


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("pgflow-otp"), prog_name="pgflow-otp")
def cli() -> None:
    """Run PostgreSQL workflows on a supervised tree of processes."""


for _command in (start, run, tree, top, scale, start_worker, stop_worker, stop, setup, check_schema, runs, embedded):
    cli.add_command(_command)


def _open_standard_descriptors() -> None:
    """Give a closed standard descriptor to /dev/null, before something else gets its number and is written to."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def main() -> None:
    """Entry point of the console script. A user's mistake ends in one line, never in a traceback."""
    _open_standard_descriptors()
    try:
        status = cli(prog_name="pgflow-otp", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # Whoever read our output has gone; there is nobody left to tell.
        sys.exit(1)
    except PgflowError as error:
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        sys.exit(error.exit_code)
    sys.exit(status if isinstance(status, int) else 0)
