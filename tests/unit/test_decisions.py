"""The pure parts of supervision: specs, flags, intensity, exit reasons. Numbers are statements of OTP's semantics."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from pgflow_otp.otp.child_spec import ChildSpec, Flags, FlagsError, SpecError, SupervisorSpec
from pgflow_otp.otp.exit_reason import exit_reason
from pgflow_otp.otp.intensity import RestartIntensity


def start(context: Any) -> None: ...


def test_a_child_spec_has_otps_defaults() -> None:
    """Statement 2."""
    worker = ChildSpec(id="w", start=start)
    nested = ChildSpec(id="s", start=SupervisorSpec(), type="supervisor")
    assert (worker.restart, worker.type, worker.shutdown) == ("permanent", "worker", 5000)
    assert nested.shutdown == "infinity"


@pytest.mark.parametrize(
    "fields",
    [
        {"id": ""},
        {"start": None},
        {"args": [1]},
        {"restart": "always"},
        {"shutdown": -10},
        {"shutdown": 1.5},
        {"shutdown": "later"},
        {"type": "thing"},
        {"start_timeout": 0},
        {"start": SupervisorSpec(), "type": "worker"},
    ],
)
def test_a_bad_field_of_a_child_spec_is_refused(fields: dict[str, Any]) -> None:
    """Statements 3 to 5."""
    with pytest.raises(SpecError):
        ChildSpec(**{"id": "c", "start": start, **fields})


@pytest.mark.parametrize("shutdown", [0, 1, 10_000, "infinity", "brutal_kill"])
def test_shutdown_values_that_are_accepted(shutdown: Any) -> None:
    """Statement 4."""
    assert ChildSpec(id="c", start=start, shutdown=shutdown).shutdown == shutdown


def test_two_children_of_one_id_are_refused() -> None:
    """Statement 6."""
    child = ChildSpec(id="c", start=start)
    with pytest.raises(SpecError, match="duplicate"):
        SupervisorSpec(children=[child, child])


@pytest.mark.parametrize(
    "fields",
    [{"strategy": "some"}, {"intensity": -1}, {"intensity": True}, {"period": 0}, {"period": -1}, {"period": "5"}],
)
def test_bad_flags_are_refused_as_flags(fields: dict[str, Any]) -> None:
    """Statements 9 and 10."""
    with pytest.raises(FlagsError):
        Flags(**fields)


def test_a_dynamic_supervisor_starts_empty_and_is_one_for_one() -> None:
    """Statement 120."""
    with pytest.raises(FlagsError):
        SupervisorSpec(dynamic=True, flags=Flags(strategy="one_for_all"))
    with pytest.raises(FlagsError):
        SupervisorSpec(dynamic=True, children=[ChildSpec(id="c", start=start)])


@pytest.mark.parametrize(("second", "allowed"), [(4.999, False), (5.0, False), (5.001, True)])
def test_the_window_is_inclusive(second: float, allowed: bool) -> None:
    """Statements 58 to 60: entries with t >= now - period count."""
    intensity = RestartIntensity(1, 5)
    assert intensity.add(0.0)
    assert intensity.add(second) is allowed


def test_intensity_zero_allows_no_restart() -> None:
    """Statement 58."""
    assert not RestartIntensity(0, 5).add(1.0)


@pytest.mark.parametrize(
    ("code", "status", "asked", "killed", "kind", "abnormal"),
    [
        (os.CLD_EXITED, 0, False, False, "normal", False),
        (os.CLD_EXITED, 0, True, False, "shutdown", False),
        (os.CLD_EXITED, 70, False, False, "shutdown", False),
        (os.CLD_EXITED, 1, False, False, "exited", True),
        (os.CLD_EXITED, 1, True, False, "exited", True),
        (os.CLD_KILLED, signal.SIGTERM, True, False, "shutdown", False),
        (os.CLD_KILLED, signal.SIGTERM, False, False, "signaled", True),
        (os.CLD_KILLED, signal.SIGKILL, True, True, "killed", True),
        (os.CLD_KILLED, signal.SIGKILL, False, False, "signaled", True),
        (os.CLD_DUMPED, signal.SIGSEGV, False, False, "signaled", True),
    ],
)
def test_wait_status_and_request_make_the_reason(
    code: int, status: int, asked: bool, killed: bool, kind: str, abnormal: bool
) -> None:
    """Statements 32, 41 and 42."""
    waited = os.waitid_result((1, 0, signal.SIGCHLD, status, code))
    reason = exit_reason(waited, asked=asked, killed=killed)
    assert (reason.kind, reason.is_abnormal) == (kind, abnormal)


def test_a_stolen_status_is_a_crash_never_a_success() -> None:
    reason = exit_reason(None, asked=False, killed=False)
    assert reason.is_abnormal


def test_an_unrequested_kill_hints_at_memory() -> None:
    """Statement 162."""
    waited = os.waitid_result((1, 0, signal.SIGCHLD, signal.SIGKILL, os.CLD_KILLED))
    assert "out of memory" in str(exit_reason(waited, asked=False, killed=False))
