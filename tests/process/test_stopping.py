"""Ordered stops, also of children that do not play along. Numbers are statements of OTP's semantics."""

from __future__ import annotations

import os
import signal

import pytest
from support.processes import is_alive, titled, wait_gone
from support.tree_process import Tree


def test_a_child_that_hides_is_killed_all_the_same() -> None:
    """Statement 85: it has closed its channel, its lifeline and everything else, and ignores SIGTERM."""
    with Tree("hiding") as tree:
        tree.expect("boot")
        assert tree.stop() == 0
        assert next(e for e in tree.events if e["event"] == "exit")["kind"] == "killed"


def test_a_child_that_sends_garbage_is_replaced() -> None:
    """Statement 110; here there is no restart left. What it had said before counts."""
    with Tree("garbling") as tree:
        tree.expect("boot")
        assert "sent garbage" in tree.expect("exit", path=["g"])["reason"]
        assert tree.expect("ended")["status"] == 70


@pytest.mark.parametrize("status", [0, 1, 70])
@pytest.mark.parametrize("restart", ["permanent", "transient", "temporary"])
def test_children_that_leave_by_themselves_during_a_stop_are_not_restarted(status: int, restart: str) -> None:
    """Statements 84, 86 and 87. `slow` is stopped first and holds the stop up until `x` has left by itself."""
    with Tree("dynamic_static") as tree:
        tree.expect("boot")
        tree.call("start", id="x", start="leaving", fields={"args": [status], "restart": restart})
        tree.call("start", id="slow", start="stubborn", fields={"shutdown": "infinity"})
        pids = tree.pids()
        tree.process.send_signal(signal.SIGTERM)
        tree.expect("stopping")
        tree.ask("send", id="x", what="leave")
        exited = tree.expect("exit", path=["x"])
        assert not exited["requested"]
        os.kill(pids["slow"], signal.SIGKILL)
        assert tree.expect("ended")["status"] == 0
        assert tree.order("start").count("start x") == 1
        unclean = [
            e for e in tree.events if e["event"] == "report" and e["path"] == ["x"] and e["context"] != "progress"
        ]
        is_clean = status == 70 or (status == 0 and restart != "permanent")
        assert [e["context"] for e in unclean] == ([] if is_clean else ["shutdown_error"])


def test_children_of_a_dynamic_supervisor_are_stopped_together_each_with_its_own_time() -> None:
    """Statements 88, 122 and 138: three that take no notice are one report; nobody waits for another."""
    with Tree("dynamic") as tree:
        tree.expect("boot")
        for number in range(3):
            tree.call("start", id=f"s{number}", start="stubborn", fields={"shutdown": 300})
        tree.call("start", id="brutal", start="stubborn", fields={"shutdown": "brutal_kill"})
        tree.call("start", id="good", start="obedient", fields={"shutdown": "infinity"})
        assert tree.stop() == 0
        order = tree.order("exit")
        assert set(order[:2]) == {"exit brutal", "exit good"}
        reports = [e for e in tree.events if e["event"] == "report" and e["context"] == "shutdown_error"]
        assert [(e["reason"], e["count"]) for e in reports] == [("killed", 3)]


def test_a_call_that_comes_after_the_stop_is_refused() -> None:
    """Statement 87."""
    with Tree("forever") as tree:
        tree.expect("boot")
        tree.process.send_signal(signal.SIGTERM)
        tree.expect("stopping")
        assert tree.call("start", id="x", start="obedient") == ["error", "stopping"]
        tree.process.send_signal(signal.SIGTERM)
        tree.expect("ended")


def test_a_supervisor_in_a_process_of_its_own_stops_in_order() -> None:
    """Statements 18, 80, 89 and 95: the frame and the signal that ask it are one request."""
    with Tree("separate") as tree:
        tree.expect("boot")
        assert tree.nested("child_started") == ["b", "c"]
        assert tree.stop() == 0
        assert tree.nested("child_exited") == ["c", "b"]
        assert tree.order("exit") == ["exit inner", "exit a"]
        assert {e["kind"] for e in tree.events if e["event"] == "exit"} == {"shutdown"}


def test_a_supervisor_in_a_process_of_its_own_restarts_and_gives_up(token: str) -> None:
    """Statements 66, 132, 133 and 135: its budget is its own, giving up is `shutdown`, its parent builds it anew."""
    with Tree("separate") as tree:
        tree.expect("boot")
        for round_ in range(2):
            (pid,) = titled(token, "pgflow-otp: b ")
            os.kill(pid, signal.SIGKILL)
            if round_ == 0:
                tree.expect_nested("child_started", "c")
        assert tree.expect("exit", path=["inner"])["kind"] == "shutdown"
        tree.expect("start", path=["inner"])
        assert tree.which()["inner"]["restarts"] == 1
        assert tree.which()["a"]["restarts"] == 0
        assert tree.stop() == 0


def test_a_killed_middle_supervisor_takes_its_children_along_and_is_built_anew(token: str) -> None:
    """Statements 134 and 142."""
    with Tree("separate") as tree:
        tree.expect("boot")
        before = titled(token, "pgflow-otp: b ") + titled(token, "pgflow-otp: c ")
        tree.kill("inner")
        for pid in before:
            wait_gone(pid)
        tree.expect("start", path=["inner"])
        after = titled(token, "pgflow-otp: b ") + titled(token, "pgflow-otp: c ")
        assert len(after) == 2
        assert not set(after) & set(before)
        tree.stop()


@pytest.mark.parametrize("argument", ["lives", "dies"])
def test_a_supervisor_stops_when_its_parent_is_gone(argument: str, token: str) -> None:
    """Statements 90 and 131: in order, or with its parent."""
    with Tree("separate", argument) as tree:
        tree.expect("boot")
        pids = [pid for part in ("inner", "a ", "b ", "c ") for pid in titled(token, f"pgflow-otp: {part}")]
        assert len(pids) == 4
        os.kill(tree.process.pid, signal.SIGKILL)
        for pid in pids:
            wait_gone(pid)


def test_a_wedged_child_shows_its_stack_and_is_replaced() -> None:
    """A child that answers pings is left alone meanwhile, and so is one that is stopped and goes on."""
    with Tree("watched", keep_stderr=True) as tree:
        tree.expect("boot")
        died = tree.expect("exit", path=["w"])
        assert "SIGABRT" in died["reason"]
        assert "did not answer for 0.4 s" in died["reason"]
        tree.expect("start", path=["w"])
        assert tree.which()["a"]["restarts"] == 0
        tree.stop()
        assert tree.process.stderr is not None
        stack = tree.process.stderr.read().decode()
        assert "Fatal Python error: Aborted" in stack
        assert "in wedged" in stack


def test_a_wedged_child_that_survives_sigabrt_is_killed() -> None:
    with Tree("watched_hard") as tree:
        tree.expect("boot")
        assert tree.expect("exit", path=["w"])["reason"].startswith("killed: did not answer")
        tree.expect("start", path=["w"])
        tree.stop()


def test_a_child_or_a_tree_that_is_stopped_and_goes_on_is_not_wedged() -> None:
    """Statement 190: what counts is the child's own running time. The watchdog bites after five looks, and more than
    ten go by: another child, watched alike, is replaced twice meanwhile."""
    with Tree("watched") as tree:
        tree.expect("boot")
        pid = tree.kill("a", signal.SIGSTOP)
        for _ in range(2):
            tree.expect("exit", path=["w"])
        os.kill(pid, signal.SIGCONT)
        tree.expect("message", path=["a"])
        assert tree.pids()["a"] == pid
        assert is_alive(pid)
        tree.stop()


def test_an_idle_child_is_pinged_and_answers() -> None:
    with Tree("answering") as tree:
        tree.expect("boot")
        for _ in range(8):
            tree.expect("message", path=["a"])
        assert tree.which()["a"]["restarts"] == 0
        tree.stop()
