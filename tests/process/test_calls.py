"""Calls to a running supervisor. Numbers are statements of OTP's semantics."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from support.processes import is_alive, wait_for, wait_gone
from support.tree_process import Tree

if TYPE_CHECKING:
    from pathlib import Path


def test_the_whole_cycle_of_a_child_of_a_static_supervisor() -> None:
    """Statements 50, 98, 100 to 104."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        assert tree.count() == {"specs": 3, "active": 3, "supervisors": 0, "workers": 3}
        assert tree.call("delete", id="a") == ["error", "running"]
        assert tree.call("restart", id="a") == ["error", "running"]
        assert tree.call("terminate", id="a") == ["ok", None, None]
        assert tree.call("terminate", id="a") == ["ok", None, None]
        assert tree.count() == {"specs": 3, "active": 2, "supervisors": 0, "workers": 3}
        assert tree.which()["a"]["state"] == "undefined"
        assert tree.call("start", id="a", start="obedient") == ["error", "already_present"]
        ok, pid, info = tree.call("restart", id="a")
        assert (ok, info["pid"]) == ("ok", pid)
        assert tree.which()["a"]["pid"] == pid
        assert tree.call("start", id="a", start="obedient") == ["error", "already_started"]
        tree.call("terminate", id="a")
        assert tree.call("delete", id="a") == ["ok", None, None]
        for call in ("delete", "restart", "terminate"):
            assert tree.call(call, id="a") == ["error", "not_found"]
        assert tree.call("start", id="a", start="obedient")[0] == "ok"
        assert list(tree.which()) == ["b", "c", "a"]
        assert tree.stop() == 0
        assert tree.order("exit")[-3:] == ["exit a", "exit c", "exit b"]


def test_a_call_does_not_touch_the_siblings() -> None:
    """Statements 56 and 64: the strategy, and the budget, are for restarts by itself."""
    with Tree("rest_for_one") as tree:
        tree.expect("boot")
        before = tree.pids()
        for _ in range(5):
            tree.call("terminate", id="a")
            assert tree.call("restart", id="a")[0] == "ok"
        after = tree.pids()
        assert (before["b"], before["c"]) == (after["b"], after["c"])
        assert tree.which()["a"]["restarts"] == 0
        tree.stop()


def test_a_terminated_child_comes_back_with_its_segment() -> None:
    """Statement 38."""
    with Tree("rest_for_one") as tree:
        tree.expect("boot")
        tree.call("terminate", id="c")
        tree.kill("b")
        tree.expect("start", path=["c"])
        assert tree.which()["c"]["state"] == "running"
        tree.stop()


@pytest.mark.parametrize(("start", "words"), [("refusing", "no licence"), ("raising", "RuntimeError: broken")])
def test_a_child_that_cannot_start_is_answered_with_the_reason_and_not_kept(start: str, words: str) -> None:
    """Statements 19, 23, 25 and 99; nobody else is told, and no process is left."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        error, reason = tree.call("start", id="x", start=start)
        assert error == "error"
        assert words in reason
        assert "x" not in tree.which()
        assert not any(e["path"] == ["x"] for e in tree.events if "path" in e)
        tree.stop()


@pytest.mark.parametrize(("restart", "listed"), [("permanent", True), ("transient", True), ("temporary", False)])
def test_a_child_that_has_nothing_to_do_is_listed_unless_temporary(restart: str, listed: bool) -> None:
    """Statement 20."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        assert tree.call("start", id="x", start="ignoring", fields={"restart": restart}) == ["ok", None, None]
        assert ("x" in tree.which()) is listed
        tree.stop()


def test_a_restart_by_call_that_fails_leaves_the_child_listed(tmp_path: Path) -> None:
    """Statement 101."""
    with Tree("unlucky", str(tmp_path / "marker")) as tree:
        tree.expect("boot")
        tree.call("terminate", id="u")
        assert tree.call("restart", id="u") == ["error", "failed to start: not again"]
        assert tree.which()["u"]["state"] == "undefined"
        tree.stop()


def test_a_specification_is_answered_with_every_default() -> None:
    """Statement 13."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        tree.ask("spec", id="a")
        assert tree.expect("spec")["fields"] == {
            "id": "a",
            "args": [],
            "restart": "permanent",
            "shutdown": 5000,
            "type": "worker",
            "significant": False,
            "start_timeout": 30.0,
            "watchdog": None,
            "dies_with_parent": True,
        }
        tree.ask("spec", id="nobody")
        assert tree.expect("spec")["fields"] is None
        tree.stop()


def test_the_arguments_of_a_temporary_child_are_not_kept() -> None:
    """Statement 37."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        for restart, kept in (("temporary", []), ("transient", ["big"])):
            fields = {"restart": restart, "args": ["big"]}
            assert tree.call("start", id=restart, start="told", fields=fields)[2]["arguments"] == ["big"]
            tree.ask("spec", id=restart)
            assert tree.expect("spec")["fields"]["args"] == kept
        tree.stop()


def test_a_static_supervisor_knows_its_children_by_id_only() -> None:
    """Statement 107."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        pid = tree.pids()["a"]
        assert tree.call("terminate", id=pid) == ["error", "not_found"]
        assert tree.pids()["a"] == pid
        tree.stop()


def test_a_significant_child_is_refused_where_that_means_nothing() -> None:
    """Statements 11 and 112."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        error, reason = tree.call("start", id="s", start="obedient", fields={"significant": True})
        assert error == "error"
        assert "auto_shutdown" in reason
        assert "s" not in tree.which()
        tree.stop()


def test_calls_are_served_in_the_order_of_arrival() -> None:
    """Statement 105: nobody waits for an answer here, and the second call finds what the first has done."""
    with Tree("dynamic") as tree:
        tree.expect("boot")
        tree.ask("start", id="x", start="obedient")
        tree.ask("start", id="x", start="obedient")
        tree.ask("terminate", id="x")
        tree.ask("terminate", id="x")
        answers = [tree.expect("answer")["answer"] for _ in range(4)]
        assert [a[0] for a in answers] == ["ok", "error", "ok", "error"]
        tree.stop()


def test_a_dynamic_supervisor_also_knows_its_children_by_pid() -> None:
    """Statements 107, 108 and 120: somebody else's pid, and one that is gone, are not found and left alone."""
    with Tree("dynamic") as tree:
        tree.expect("boot")
        pid = tree.call("start", id="x", start="obedient")[1]
        assert tree.call("terminate", id=os.getpid()) == ["error", "not_found"]
        assert tree.call("terminate", id=pid) == ["ok", None, None]
        assert not is_alive(pid)
        assert tree.call("terminate", id=pid) == ["error", "not_found"]
        tree.stop()


def test_a_dynamic_supervisor_takes_so_many_children_and_gives_them_its_arguments() -> None:
    """Statements 121 and 123: the arguments come first, at the first start and at every restart."""
    with Tree("crowded") as tree:
        tree.expect("boot")
        assert tree.call("start", id="x", start="told", fields={"args": ["own"]})[2]["arguments"] == ["extra", "own"]
        tree.kill("x")
        assert tree.expect("start", path=["x"])["info"]["arguments"] == ["extra", "own"]
        assert tree.call("start", id="y", start="told")[0] == "ok"
        assert tree.call("start", id="z", start="told") == ["error", "max_children"]
        tree.call("terminate", id="x")
        assert tree.call("start", id="z", start="told")[0] == "ok"
        tree.stop()


def test_a_dynamic_supervisor_forgets_whoever_does_not_come_back() -> None:
    """Statements 34, 35, 53 and 78."""
    with Tree("dynamic") as tree:
        tree.expect("boot")
        for restart in ("transient", "temporary"):
            tree.call("start", id=restart, start="finishing", fields={"restart": restart})
            wait_for(lambda: not tree.which(), "the child to be forgotten")
        assert tree.call("start", id="x", start="ignoring") == ["ok", None, None]
        assert tree.which() == {}
        assert not any(e["event"] == "report" and e["context"] == "child_terminated" for e in tree.events)
        assert tree.count()["specs"] == 0
        tree.stop()


def test_fifty_children_are_counted_exactly() -> None:
    """Statement 104."""
    with Tree("dynamic") as tree:
        tree.expect("boot")
        for number in range(50):
            kind = "supervisor" if number < 5 else "worker"
            tree.ask("start", id=f"n{number}", start="obedient", fields={"type": kind, "restart": "temporary"})
        for _ in range(50):
            assert tree.expect("answer")["answer"][0] == "ok"
        assert tree.count() == {"specs": 50, "active": 50, "supervisors": 5, "workers": 45}
        for pid in tree.pids().values():
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: tree.count()["specs"] == 0, "all to be gone")
        assert tree.stop() == 0


def test_a_call_to_a_dead_supervisor_ends_at_once() -> None:
    """Statement 106: the end of the channel answers; nobody waits for a time to pass."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        pids = tree.pids()
        os.kill(tree.process.pid, signal.SIGKILL)
        tree.ask("which")
        with pytest.raises(AssertionError, match="the tree ended without"):
            tree.expect("which")
        for pid in pids.values():
            wait_gone(pid)
