"""pgflow-otp scale, start-worker, stop-worker, stop: commands that change a running tree."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgflow_otp.errors import PgflowError
from pgflow_otp.runtime.control_client import ControlClient
from pgflow_otp.runtime.rendezvous import find_tree

if TYPE_CHECKING:
    from collections.abc import Callable

Command = TypeVar("Command", bound="Callable[..., Any]")

#: Seconds a tree may take to bring up a worker.
_START_WAIT = 60.0


def tree_options(command: Command) -> Command:
    """Add the options of every command that talks to a running tree."""
    command = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")(command)
    return click.option(
        "--name", metavar="NAME", help="Which tree. Default: the one named pgflow, else the only one that runs."
    )(command)


def limit_options(command: Command) -> Command:
    """Add the options for a worker's limits."""
    command = click.option("--batch-size", type=click.IntRange(1, 10_000), help="Messages one claim may read.")(command)
    return click.option(
        "--max-concurrency", type=click.IntRange(1, 10_000), help="Handlers of the flow that may run at once."
    )(command)


def call(name: str | None) -> ControlClient:
    """Return a connection to the tree that is meant."""
    return ControlClient(find_tree(name))


@click.command()
@click.argument("slug")
@limit_options
@tree_options
def scale(slug: str, name: str | None, as_json: bool, max_concurrency: int | None, batch_size: int | None) -> None:
    """Change the limits of a flow's worker.

    Takes effect at once and interrupts nothing: with a lower limit, handlers that run are left to finish. It outlives
    restarts of the worker; a restart of the tree goes back to its settings.
    """
    if max_concurrency is None and batch_size is None:
        raise click.UsageError("give --max-concurrency, --batch-size, or both")
    with call(name) as tree:
        now = tree.ask("scale_worker", slug=slug, max_concurrency=max_concurrency, batch_size=batch_size)
    limits = f"max_concurrency {now.get('max_concurrency')}, batch_size {now.get('batch_size')}"
    if not now["running"]:
        known = ", ".join(f"{key} {now[key]}" for key in ("max_concurrency", "batch_size") if key in now)
        limits = f"{known} once its worker runs"
    _show(now, as_json, f"{slug}: {limits}")


@click.command("start-worker")
@click.argument("flow")
@limit_options
@click.option("--timeout", type=click.FloatRange(0), default=_START_WAIT, help="Seconds to wait until it is up (60).")
@tree_options
def start_worker(
    flow: str, name: str | None, as_json: bool, max_concurrency: int | None, batch_size: int | None, timeout: float
) -> None:
    """Serve another flow, or one whose worker was stopped.

    FLOW is a target, `module` or `module:attribute`, looked for where the tree looks; or the slug of a worker that
    stop-worker has stopped.
    """
    with call(name) as tree:
        answer = tree.ask("start_worker", timeout, target=flow, max_concurrency=max_concurrency, batch_size=batch_size)
    lines = [f"{slug}: started" for slug in answer["started"]]
    lines += [f"{slug}: runs already" for slug in answer["running"]]
    _show(answer, as_json, "\n".join(lines))


@click.command("stop-worker")
@click.argument("slug")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait; it stops all the same (no limit).")
@tree_options
def stop_worker(slug: str, name: str | None, as_json: bool, timeout: float | None) -> None:
    """Drain a flow's worker and leave it down.

    Running handlers get the tree's drain_timeout. It stays down, whatever else is restarted, until start-worker or a
    restart of the tree.
    """
    with call(name) as tree:
        answer = tree.ask("stop_worker", timeout, slug=slug)
    _show(answer, as_json, f"{slug}: {'stopped' if answer['was_running'] else 'was down already'}")


@click.command()
@click.option("--hurry", is_flag=True, help="Hand running tasks back at once instead of waiting for them.")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait; it stops all the same (no limit).")
@tree_options
def stop(name: str | None, as_json: bool, hurry: bool, timeout: float | None) -> None:
    """Stop a tree in order, and wait for its end."""
    with call(name) as tree:
        answer = tree.ask("stop", hurry=hurry)
        if not tree.wait_end(timeout):
            raise PgflowError(
                f"the tree '{answer['name']}' (pid {answer['pid']}) is still stopping after {timeout:g} s"
            )
    _show(answer, as_json, f"the tree '{answer['name']}' (pid {answer['pid']}) has ended")


def _show(answer: Any, as_json: bool, text: str) -> None:
    click.echo(json.dumps(answer) if as_json else text)
