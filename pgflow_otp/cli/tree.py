"""pgflow-otp tree and top: a running tree, as it is."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pgflow_otp.cli.control import call, tree_options
from pgflow_otp.cli.memory import resident_kib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgflow_otp.runtime.control_client import ControlClient

_STYLES = {
    "running": "green",
    "busy": "green",
    "idle": "dim",
    "restarting": "yellow",
    "starting": "yellow",
    "booting": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "dying": "red",
    "silent": "red",
}
#: Columns where nobody says how many there are.
_WIDE = 200


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the picture. Times in seconds, memory in KiB."""

    depth: int
    role: str
    pid: int | None
    state: str
    uptime: float | None = None
    restarts: int | None = None
    note: str = ""


@click.command()
@tree_options
def tree(name: str | None, as_json: bool) -> None:
    """Show a running tree: its processes, their states, restarts and memory, and what they work on.

    Restarts are counted within the period in which too many of them end the tree.
    """
    with call(name) as running:
        seen = _look(running)
    if as_json:
        click.echo(json.dumps(seen))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=_WIDE)  # For grep, a process is a line.
        console.print(picture(seen))


@click.command()
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, help="Seconds between two looks (1).")
@click.option("--count", type=click.IntRange(1), help="Looks to take (until Ctrl-C, or the end of the tree).")
@tree_options
def top(name: str | None, as_json: bool, interval: float, count: int | None) -> None:
    """Show a running tree again and again, like `tree`. With --json, a line for each look."""
    console = Console(highlight=False)
    if not as_json and not console.is_terminal:
        raise click.UsageError("top draws on a terminal; use --json here, or `pgflow-otp tree`")
    with call(name) as running:
        try:
            if as_json:
                for seen in _looks(running, interval, count):
                    click.echo(json.dumps(seen))
                    sys.stdout.flush()
                return
            with Live(console=console, screen=count is None, auto_refresh=False) as live:
                for seen in _looks(running, interval, count):
                    live.update(picture(seen), refresh=True)
        except KeyboardInterrupt:
            pass  # That is how one leaves it.


def _looks(running: ControlClient, interval: float, count: int | None) -> Iterator[dict[str, Any]]:
    taken = 0
    while True:
        yield _look(running)
        taken += 1
        if taken == count:
            return
        time.sleep(interval)


def _look(running: ControlClient) -> dict[str, Any]:
    """Return the tree's answer, with the memory of each process added."""
    seen: dict[str, Any] = running.ask("tree")
    pids = [row.pid for row in _rows(seen) if row.pid is not None]
    seen["resident_kib"] = {str(pid): kib for pid, kib in resident_kib(pids).items()}
    return seen


def picture(seen: dict[str, Any]) -> Group:
    """Draw a tree."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("process", no_wrap=True)
    for heading in ("pid", "state", "uptime", "restarts", "memory"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "state" else "right")
    table.add_column("", overflow="fold")
    memory = seen["resident_kib"]
    for row in _rows(seen):
        kib = memory.get(str(row.pid))
        table.add_row(
            Text("  " * row.depth + row.role),
            str(row.pid or ""),
            Text(row.state, style=_STYLES.get(row.state, "")),
            _span(row.uptime),
            "" if row.restarts is None else str(row.restarts),
            f"{kib / 1024:.0f} MiB" if kib is not None else "",
            Text(row.note),
        )
    failed = [m for m in seen["modules"] if m["status"] != "succeeded"]
    notes = [Text(f"{m['target']} is not served: {m.get('reason', m['status'])}", style="red") for m in failed]
    return Group(table, *notes)


def _rows(seen: dict[str, Any]) -> Iterator[Row]:
    yield Row(
        0, f"root [{seen['name']}]", seen["pid"], seen["state"], seen["uptime"], None, f"version {seen['version']}"
    )
    yield from _children(seen["children"], seen["workers"], 1)


def _children(children: list[dict[str, Any]], reports: dict[str, dict[str, Any]], depth: int) -> Iterator[Row]:
    for child in children:
        key, state = child["id"], child["state"]
        if key.startswith("starter") and state == "undefined":
            continue  # It has done its work.
        report = reports.get(key)
        note = ""
        if report is not None:
            state = report["state"]
            note = f"{report['running']} of {report['max_concurrency']} busy, database {report['database']}"
        elif key.startswith("worker:") and state == "running":
            state = "silent"
        uptime = child.get("uptime")
        pid = child["pid"] if state != "undefined" else None
        yield Row(depth, key, pid, "down" if state == "undefined" else state, uptime, child["restarts_in_period"], note)
        yield from _children(child.get("children", []), reports, depth + 1)
        if report is not None:
            yield from _handlers(report, depth + 1)


def _handlers(report: dict[str, Any], depth: int) -> Iterator[Row]:
    slug = report["slug"]
    if report["forkserver"] is not None:
        state = "booting" if report["state"] == "booting" else "running"
        yield Row(depth, f"forkserver:{slug}", report["forkserver"], state)
    for handler in report["handlers"]:
        task = handler.get("task")
        note = ""
        if task is not None:
            note = (
                f"{task['step']}[{task['index']}] attempt {task['attempt']}, {task['age']:.1f} s of {task['timeout']} s"
            )
            note += f", run {task['run_id']}"
        yield Row(depth, f"handler:{slug}/{handler['slot']}", handler["pid"], handler["state"], note=note)


def _span(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
