"""Restarts that fail, and how a supervisor stays usable meanwhile. Numbers are statements of OTP's semantics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.processes import wait_for
from support.tree_process import Tree

if TYPE_CHECKING:
    from pathlib import Path


def permit(gate: Path, word: str) -> None:
    """Let the child that waits in its init go on; a file is there whole or not at all."""
    draft = gate.with_suffix(".draft")
    draft.write_text(word)
    draft.rename(gate)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


def booted(tree: Tree, gate: Path) -> None:
    permit(gate, "ready")
    tree.expect("boot")


def failing(tree: Tree, gate: Path) -> None:
    """Crash the gated child and let its first restart fail: the next one waits in its init."""
    tree.kill("g")
    permit(gate, "fail")
    tree.expect("report", context="start_error", path=["g"])
    tree.expect("message", path=["g"])


def test_a_child_is_not_started_before_the_one_before_it_has_acknowledged(gate: Path) -> None:
    """Statement 17: calls are answered while one is in its init (28)."""
    with Tree("gated_one_for_one", str(gate)) as tree:
        tree.expect("message", path=["g"])
        seen = tree.which()
        assert (seen["a"]["state"], seen["g"]["state"], seen["c"]["state"]) == ("running", "starting", "undefined")
        booted(tree, gate)
        assert tree.order("start") == ["start a", "start g", "start c"]
        tree.stop()


def test_a_stop_aborts_a_start(gate: Path) -> None:
    """Statement 28: the half-started child is killed and reaped, the others are stopped in reverse."""
    with Tree("gated_one_for_one", str(gate)) as tree:
        tree.expect("message", path=["g"])
        assert tree.stop() == 0
        assert tree.order("exit") == ["exit a"]
        assert not any(e["event"] == "report" and e["context"] != "progress" for e in tree.events)


def test_what_is_seen_while_a_restart_is_tried_again(gate: Path) -> None:
    """Statements 70, 71 and 77."""
    with Tree("gated_rest_for_one", str(gate)) as tree:
        booted(tree, gate)
        a = tree.pids()["a"]
        failing(tree, gate)
        seen = tree.which()
        assert (seen["g"]["state"], seen["c"]["state"]) == ("starting", "undefined")
        # These wait for the attempt that is under way, and are served before the next one.
        for call in ("start", "restart", "delete"):
            tree.ask(call, id="g", start="obedient")
        tree.ask("count")
        permit(gate, "fail")
        answers = [tree.expect("answer")["answer"] for _ in range(3)]
        assert answers == [["error", "already_present"], ["error", "restarting"], ["error", "restarting"]]
        assert tree.pids()["a"] == a
        permit(gate, "ready")
        tree.expect("start", path=["c"])
        assert tree.order("start") == ["start a", "start g", "start c", "start g", "start c"]
        tree.stop()


def test_a_termination_cancels_the_next_try(gate: Path) -> None:
    """Statement 72: a queued retry then does nothing."""
    with Tree("gated_one_for_one", str(gate)) as tree:
        booted(tree, gate)
        failing(tree, gate)
        tree.ask("terminate", id="g")
        permit(gate, "fail")
        assert tree.expect("answer")["answer"] == ["ok", None, None]
        assert tree.which()["g"]["state"] == "undefined"
        permit(gate, "ready")
        assert tree.which()["g"]["state"] == "undefined"
        assert tree.call("restart", id="g")[0] == "ok"
        tree.stop()


def test_a_stop_ends_a_loop_of_restarts_within_one_attempt(gate: Path) -> None:
    """Statements 73 and 94."""
    with Tree("gated_one_for_one", str(gate)) as tree:
        booted(tree, gate)
        failing(tree, gate)
        assert tree.stop() == 0
        assert tree.order("exit")[-2:] == ["exit c", "exit a"]


def test_one_for_all_tries_the_whole_set_again(gate: Path) -> None:
    """Statement 76: the one already restarted is stopped again."""
    with Tree("gated_one_for_all", str(gate)) as tree:
        booted(tree, gate)
        tree.kill("c")
        permit(gate, "fail")
        tree.expect("report", context="start_error", path=["g"])
        permit(gate, "ready")
        tree.expect("start", path=["c"])
        assert tree.order("start")[3:] == ["start a", "start a", "start g", "start c"]
        assert tree.stop() == 0


def test_a_restart_may_find_nothing_to_do(gate: Path) -> None:
    """Statement 78."""
    with Tree("gated_rest_for_one", str(gate)) as tree:
        booted(tree, gate)
        tree.kill("g")
        permit(gate, "ignore")
        tree.expect("start", path=["c"])
        assert tree.which()["g"]["state"] == "undefined"
        assert not any(e["event"] == "report" and e["context"] == "start_error" for e in tree.events)
        tree.stop()


def test_calls_are_answered_in_a_storm_of_restarts(tmp_path: Path) -> None:
    """Statement 79: answers come between two of the attempts, and so does the stop."""
    with Tree("storm", str(tmp_path / "marker")) as tree:
        tree.expect("boot")
        tree.kill("u")
        for _ in range(5):
            tree.expect("report", context="start_error", path=["u"])
            seen = tree.which()
            assert seen["a"]["state"] == "running"
            assert seen["u"]["state"] in ("restarting", "starting")
        tree.stop()
        assert "exit a" in tree.order("exit")


def test_every_crash_counts_and_the_window_is_everybodys() -> None:
    """Statements 62 and 69: two children, one budget."""
    with Tree("impatient") as tree:
        tree.expect("boot")
        tree.kill("a")
        tree.expect("start", path=["a"])
        tree.kill("b")
        report = tree.expect("report", context="shutdown")
        assert report["path"] == ["b"]
        assert tree.expect("ended")["status"] == 70


def test_an_end_nobody_minds_costs_nothing() -> None:
    """Statements 34, 53 and 64."""
    with Tree("finishing") as tree:
        tree.expect("boot")
        tree.expect("exit", path=["once"], kind="normal")
        wait_for(lambda: tree.which()["once"]["state"] == "undefined", "its end to be noted")
        assert tree.which()["once"]["restarts"] == 0
        assert tree.which()["a"]["restarts"] == 0
        tree.stop()


@pytest.mark.parametrize(("mode", "survives_first"), [("any_significant", False), ("all_significant", True)])
def test_a_significant_child_ends_its_supervisor(mode: str, survives_first: bool) -> None:
    """Statements 113 to 117: a normal end does, a crash and a termination do not."""
    with Tree(mode) as tree:
        tree.expect("boot")
        tree.kill("s")
        tree.expect("start", path=["s"])
        tree.call("terminate", id="s")
        assert tree.call("restart", id="s")[0] == "ok"
        tree.ask("send", id="s", what="leave")
        tree.expect("exit", path=["s"], kind="normal")
        if survives_first:
            assert tree.which()["t"]["state"] == "running"
            tree.ask("send", id="t", what="leave")
        assert tree.expect("ended")["status"] == 0
        assert tree.order("exit")[-1] == "exit a"


def test_what_was_added_to_a_supervisor_is_lost_when_it_is_restarted() -> None:
    """Statement 111: it comes back from its specification."""
    with Tree("nested") as tree:
        tree.expect("boot")
        assert tree.call("start", path=["inner"], id="x", start="obedient")[0] == "ok"
        assert set(tree.which()) == {"a", "inner", "b", "c", "x"}
        for _ in range(2):  # one more than it may restart
            tree.kill("b")
            tree.expect("start", path=["inner", "b"])
        tree.expect("start", path=["inner", "c"])
        assert set(tree.which()) == {"a", "inner", "b", "c"}
        assert tree.stop() == 0


@pytest.mark.parametrize(("restart", "comes_back"), [("permanent", True), ("transient", False)])
def test_a_supervisor_that_ends_itself_should_not_be_permanent(restart: str, comes_back: bool) -> None:
    """Statement 119: its parent takes a permanent one for one that has to be there."""
    with Tree("leaving_inside", restart) as tree:
        tree.expect("boot")
        tree.ask("send", path=["inner"], id="s", what="leave")
        tree.expect("exit", path=["inner", "b"], requested=True)
        if comes_back:
            tree.expect("start", path=["inner", "s"])
        assert ("s" in tree.which()) is comes_back
        assert tree.stop() == 0
