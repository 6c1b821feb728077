"""pgflow-otp runs"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from pgflow_otp.cli.options import database, dsn_option
from pgflow_otp.cli.progress import step_table
from pgflow_otp.client import Client
from pgflow_otp.db import flows
from pgflow_otp.db.connection import connect

if TYPE_CHECKING:
    from pgflow_otp.client import Run


@click.group()
def runs() -> None:
    """Look at runs."""


@runs.command()
@click.argument("run_id")
@dsn_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def show(run_id: str, dsn: str | None, as_json: bool) -> None:
    """Show a run: its steps, their times, and what failed and why."""
    with database(dsn) as found, Client(found) as client:
        run = client.get_run_with_states(run_id)
        with connect(found, "runs show") as connection:
            failures = flows.get_failed_tasks(connection, run.run_id)
    if as_json:
        shown = {**dataclasses.asdict(run), "failures": failures}
        click.echo(json.dumps(shown, indent=2, default=str, ensure_ascii=False))
        return
    _print(run, failures)


def _print(run: Run, failures: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    ended = run.completed_at or run.failed_at
    took = f", {(ended - run.started_at).total_seconds():.2f} s" if ended else ""
    console.print(step_table(run, f"{run.flow_slug}  run {run.run_id}  {run.status}{took}"))
    for failure in failures:
        where = f"{failure['step_slug']}[{failure['task_index']}]"
        head = f"\n{where}: {failure['status']} after {failure['attempts_count']} attempt(s)"
        console.print(Text(head, style="bold"))
        console.print(Text(failure["error_message"]))
