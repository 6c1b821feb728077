"""A run, live on a terminal: a line per step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from pgflow_otp.client import Run, StepState

_MARKS = {
    "created": ("·", "dim"),
    "started": ("●", "cyan"),
    "completed": ("✔", "green"),
    "failed": ("✘", "red"),
    "skipped": ("↷", "yellow"),
}


class Progress:
    """Shows a run while it goes on; silent where nobody looks at a terminal."""

    def __init__(self, console: Console, flow_slug: str, run_id: Any) -> None:
        self._title = f"{flow_slug}  run {run_id}"
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=10, transient=False) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, run: Run) -> None:
        """Draw the run as it is now."""
        if self._live is not None:
            self._live.update(step_table(run, f"{self._title}  {time.monotonic() - self._began:.1f} s"))


def step_table(run: Run, title: str) -> Group:
    """Return a run as a line and a table of its steps."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for step in run.steps:
        mark, style = _MARKS[step.status]
        table.add_row(
            Text(mark, style=style),
            step.step_slug,
            Text(step.status, style=style),
            _tasks(step),
            _duration(step),
            Text(_note(step), style="dim", overflow="ellipsis", no_wrap=True),
        )
    return Group(Text(title, style="bold", no_wrap=True), table)


def _tasks(step: StepState) -> Any:
    if step.step_type != "map" or not step.total_tasks:
        return ""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=step.total_tasks, completed=step.completed_tasks, width=24),
        f"{step.completed_tasks}/{step.total_tasks}",
    )
    return bar


def _duration(step: StepState) -> str:
    ended = step.completed_at or step.failed_at or step.skipped_at
    if step.started_at is None or ended is None:
        return ""
    return f"{(ended - step.started_at).total_seconds():.2f} s"


def _note(step: StepState) -> str:
    if step.skip_reason and not step.error_message:
        return step.skip_reason
    return (step.error_message or "").split("\n")[0][:100]
