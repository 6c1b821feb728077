"""pgflow-otp run"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console

from pgflow_otp.cli.options import dsn_option, json_input, resolve_database, setting_options
from pgflow_otp.cli.progress import Progress
from pgflow_otp.db import schema
from pgflow_otp.db.connection import connect
from pgflow_otp.errors import DatabaseUnavailable, TreeStartError
from pgflow_otp.otp.exit_reason import signal_name
from pgflow_otp.runtime.boot import user_source
from pgflow_otp.runtime.handle import Supervisor
from pgflow_otp.runtime.inspection import FlowInfo, inspect_target
from pgflow_otp.settings import Settings, settings_from

if TYPE_CHECKING:
    from pgflow_otp.client import Run

#: Seconds the tree may take to be ready, beyond the import of the module.
_READY_MARGIN = 30.0
#: Seconds between two looks at the run.
_LOOK = 0.1


@click.command()
@click.argument("target")
@click.option(
    "--input",
    "payload",
    callback=json_input,
    default="null",
    metavar="JSON",
    help="Input: JSON, @file, or - for stdin.",
)
@dsn_option
@setting_options
@click.pass_context
def run(context: click.Context, /, target: str, payload: Any, dsn: str | None, **given: Any) -> None:
    """Run one flow to its end and print its output as JSON.

    TARGET is `module:attribute`, or `module` if it holds one flow. Starts a tree, one run, shows its progress, and
    stops the tree. Standard output holds the output and nothing else. When interrupted (exit 130), the run stays in the
    database and goes on at the next start of its flow.
    """
    if "PGFLOW_LOG_LEVEL" not in os.environ:
        given["log_level"] = given.get("log_level") or "WARNING"
    if not given.get("name") and "PGFLOW_NAME" not in os.environ:
        given["name"] = f"run-{os.getpid()}"  # Any number may run at once.
    settings = settings_from(given)
    flow = _one_flow(target, settings)
    _stop_on_sigterm()
    found, server = resolve_database(dsn)
    try:
        with connect(found, "run") as connection:
            schema.require(connection)
        status = _run(flow, payload, found, settings)
    finally:
        if server is not None:
            server.release()
    context.exit(status)


def _run(flow: FlowInfo, payload: Any, dsn: str, settings: Settings) -> int:
    console = Console(stderr=True)
    live = console.is_terminal
    supervisor = Supervisor.spawn(
        [flow.target], dsn=dsn, stderr=subprocess.PIPE if live else None, **settings.as_json()
    )
    log = _forward_log(supervisor, console) if live else None
    status, run_id = 1, None
    try:
        supervisor.await_ready(settings.boot_timeout + _READY_MARGIN)
        run_id = supervisor.client.start_flow(flow.slug, payload)
        supervisor.poll_now(flow.slug)
        ended = _follow(supervisor, run_id, Progress(console, flow.slug, run_id))
        status = _show(ended)
    except KeyboardInterrupt as interrupt:
        status = 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
        more = "; the run goes on at the next start of its flow" if run_id else ""
        click.echo(f"interrupted: stopping{more}", err=True)
    finally:
        _stop(supervisor)
        if log is not None:
            log.join()
    return status


def _follow(supervisor: Supervisor, run_id: Any, progress: Progress) -> Run:
    with progress:
        while True:
            try:
                seen = supervisor.client.get_run_with_states(run_id)
                progress.show(seen)
                if seen.is_finished:
                    return seen
            except DatabaseUnavailable:
                pass  # The tree waits for the database, and so do we.
            ended = supervisor.join(timeout=_LOOK)
            if ended is not None:
                how = (
                    f"was killed by {signal_name(-ended)}"
                    if ended < 0
                    else f"ended with status {ended}, its log says why"
                )
                raise TreeStartError(f"the tree {how}; the run goes on at the next start of its flow")


def _show(ended: Run) -> int:
    if ended.status == "completed":
        try:
            click.echo(json.dumps(ended.output, indent=2, ensure_ascii=False))
        except OSError as error:
            click.echo(f"Error: the output could not be written: {error.strerror}", err=True)
            return 1
        return 0
    failed = next((s for s in ended.steps if s.status == "failed"), None)
    where = f"step '{failed.step_slug}'" if failed else "a step"
    reason = (failed.error_message or "").split("\n")[0] if failed else "see its tasks"
    click.echo(f"run {ended.run_id} failed: {where}: {reason}\nmore: pgflow-otp runs show {ended.run_id}", err=True)
    return 1


def _stop(supervisor: Supervisor) -> None:
    """Stop the tree; Ctrl-C meanwhile hurries it, and again kills it."""
    while True:
        try:
            supervisor.stop()
            return
        except KeyboardInterrupt:
            click.echo("hurrying", err=True)
            supervisor.request_stop()


def _one_flow(target: str, settings: Settings) -> FlowInfo:
    found = inspect_target(target, user_source(), settings.boot_timeout)
    if len(found) > 1:
        names = ", ".join(flow.target for flow in found)
        raise click.UsageError(f"{target} holds {len(found)} flows; name one: {names}")
    return found[0]


def _stop_on_sigterm() -> None:
    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt(number)

    signal.signal(signal.SIGTERM, interrupt)


def _forward_log(supervisor: Supervisor, console: Console) -> threading.Thread:
    """Print the tree's log above the live progress instead of across it."""
    source = supervisor.log
    assert source is not None

    def forward() -> None:
        for line in source:
            console.print(line.decode("utf-8", "replace").rstrip("\n"), markup=False, highlight=False)

    thread = threading.Thread(target=forward, name="log", daemon=True)
    thread.start()
    return thread
