"""Single statements of OTP's semantics that need no process, or only the shape of the code."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pgflow_otp
from pgflow_otp.otp.child_spec import ChildSpec, Flags, SupervisorSpec
from pgflow_otp.otp.exit_reason import ExitReason, exit_reason
from pgflow_otp.otp.node import Node
from pgflow_otp.otp.operation import Operation, Report, Start, Started, StartFailed, Stop

if TYPE_CHECKING:
    import pytest


def start(context: Any) -> None: ...


def reports(operation: Operation, *outcomes: Any) -> list[Report]:
    """Carry an operation out, each start with the next outcome (a success when none is left); return its reports."""
    seen: list[Report] = []
    waiting, value = list(outcomes), None
    while True:
        try:
            command = operation.send(value)
        except StopIteration:
            return seen
        value = None
        if isinstance(command, Start):
            value = waiting.pop(0) if waiting else Started({}, 4711)
            if isinstance(value, Started):
                command.child.pid = value.pid
        elif isinstance(command, Stop):
            value = [ExitReason("killed", signal.SIGKILL) for _ in command.children]
        elif isinstance(command, Report):
            seen.append(command)


def node(**flags: Any) -> Node:
    children = [ChildSpec(id="a", start=start, shutdown=700), ChildSpec(id="b", start=start, restart="transient")]
    return Node(SupervisorSpec(flags=Flags(**flags), children=children), lambda: 0.0)


def crash(supervisor: Node, name: str) -> Operation:
    child = supervisor.find(name)
    assert child is not None
    child.state = "undefined"
    child.unhandled_exit = ExitReason("exited", 1)
    return supervisor.child_exited(child, child.incarnation)


def test_the_wall_clock_does_not_matter() -> None:
    """Statement 61: nothing in the supervisor looks at it."""
    folder = Path(pgflow_otp.__file__).parent / "otp"
    for file in folder.glob("*.py"):
        text = file.read_text()
        assert "time.time(" not in text, file
        assert "datetime" not in text, file


def test_a_jump_of_the_wall_clock_changes_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statement 61."""
    supervisor = node(intensity=1, period=5)
    reports(supervisor.boot())
    for jump in (-1e9, 1e9):
        monkeypatch.setattr(time, "time", lambda j=jump: j)
        seen = [report.context for report in reports(crash(supervisor, "a"))]
        assert ("shutdown" in seen) == (jump > 0)  # the second within the period, whatever the wall clock says


def test_reports_say_who_and_why() -> None:
    """Statement 136: context, reason, and the offender field by field."""
    supervisor = node(intensity=1, period=5)
    reports(supervisor.boot())
    failed = StartFailed(ExitReason("start_failed", info="no licence"))
    seen = reports(crash(supervisor, "a"), failed)
    assert [(r.context, r.level) for r in seen] == [("child_terminated", "ERROR"), ("start_error", "ERROR")]
    assert seen[0].reason == "exited with status 1"
    assert "no licence" in seen[1].reason
    assert seen[0].offender() == {
        "pid": 4711, "id": "a", "start": f"{__name__}.start", "restart": "permanent", "significant": False,
        "shutdown": 700, "type": "worker",
    }  # fmt: skip
    assert "\n" not in seen[0].line()
    supervisor = node(intensity=0)
    reports(supervisor.boot())
    over = reports(crash(supervisor, "b"))
    assert [r.context for r in over] == ["child_terminated", "shutdown", "shutdown_error"]


def test_progress_is_told_at_the_level_of_who_wanted_it() -> None:
    """Statement 137: INFO at boot and on automatic restarts, DEBUG where somebody asked and gets an answer."""
    supervisor = node(intensity=5, period=5)
    assert {(r.context, r.level) for r in reports(supervisor.boot())} == {("progress", "INFO")}
    assert [(r.context, r.level) for r in reports(crash(supervisor, "a"))][-1] == ("progress", "INFO")
    new = ChildSpec(id="c", start=start)
    assert [(r.context, r.level) for r in reports(supervisor.start_child(new))] == [("progress", "DEBUG")]


def test_a_core_dump_is_part_of_the_reason() -> None:
    """Statement 163."""
    dumped = os.waitid_result((4711, 0, signal.SIGCHLD, signal.SIGSEGV, os.CLD_DUMPED))
    killed = os.waitid_result((4711, 0, signal.SIGCHLD, signal.SIGSEGV, os.CLD_KILLED))
    assert str(exit_reason(dumped, asked=False, killed=False)) == "killed by SIGSEGV (core dumped)"
    assert str(exit_reason(killed, asked=False, killed=False)) == "killed by SIGSEGV"
