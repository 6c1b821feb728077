"""The supervisor with real processes. Numbers are statements of OTP's semantics."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from support.processes import is_alive, titled, wait_for, wait_gone
from support.tree_process import Tree

if TYPE_CHECKING:
    from pathlib import Path


def test_children_start_in_order_and_stop_in_reverse() -> None:
    """Statements 16, 18, 80 and 192."""
    with Tree("rest_for_one") as tree:
        tree.expect("boot")
        assert tree.order("start") == ["start a", "start b", "start c"]
        assert tree.stop() == 0
        assert tree.order("exit") == ["exit c", "exit b", "exit a"]
        assert {e["kind"] for e in tree.events if e["event"] == "exit"} == {"shutdown"}


@pytest.mark.parametrize(
    ("strategy", "changed"),
    [("one_for_one", {"b"}), ("rest_for_one", {"b", "c"}), ("one_for_all", {"a", "b", "c"})],
)
def test_a_crash_cycles_what_the_strategy_says(strategy: str, changed: set[str]) -> None:
    """Statements 45 to 47: the others keep their pid."""
    with Tree(strategy) as tree:
        tree.expect("boot")
        before = tree.pids()
        tree.kill("b")
        tree.expect("start", path=["b"])
        if "c" in changed:
            tree.expect("start", path=["c"])
        after = tree.pids()
        assert {child for child in "abc" if before[child] != after[child]} == changed
        assert tree.which()["b"]["restarts"] == 1
        tree.stop()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGKILL])
def test_any_unrequested_death_is_a_crash_that_names_the_signal(number: int) -> None:
    """Statements 33 and 41."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        tree.kill("a", number)
        died = tree.expect("exit", path=["a"])
        assert signal.Signals(number).name in died["reason"]
        tree.expect("start", path=["a"])
        tree.stop()


def test_too_many_restarts_end_the_tree_in_order_with_status_70() -> None:
    """Statements 58, 65 and 135."""
    with Tree("impatient") as tree:
        tree.expect("boot")
        tree.kill("a")
        tree.expect("start", path=["a"])
        tree.kill("a")
        tree.expect("report", context="shutdown", reason="reached_max_restart_intensity")
        assert tree.expect("ended")["status"] == 70
        assert tree.order("exit")[-1] == "exit b"


def test_a_child_that_takes_no_notice_is_killed_after_its_time() -> None:
    """Statements 81, 83 and 84."""
    with Tree("stubborn") as tree:
        tree.expect("boot")
        assert tree.stop() == 0
        assert next(e for e in tree.events if e["event"] == "exit" and e["path"] == ["s"])["kind"] == "killed"
        assert any(e["event"] == "report" and e["context"] == "shutdown_error" for e in tree.events)


def test_brutal_kill_asks_nobody_and_is_no_error() -> None:
    """Statements 82 and 84."""
    with Tree("brutal") as tree:
        tree.expect("boot")
        assert tree.stop() == 0
        assert not any(e["event"] == "report" and e["context"] != "progress" for e in tree.events)


def test_asking_a_second_time_hurries() -> None:
    """Statement 183."""
    with Tree("forever") as tree:
        tree.expect("boot")
        tree.process.send_signal(signal.SIGTERM)
        tree.expect("stopping")
        tree.process.send_signal(signal.SIGTERM)
        assert tree.expect("ended")["status"] == 0


def test_asking_a_third_time_kills() -> None:
    """Statement 183."""
    with Tree("forever") as tree:
        tree.expect("boot")
        for _ in range(3):
            tree.process.send_signal(signal.SIGTERM)
            tree.which()  # It has been through its loop once.
            if tree.events[-1]["event"] == "ended":
                break
        assert tree.process.wait(30) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("refusing", "no licence"),
        ("raising", "RuntimeError: broken on purpose"),
        ("sleepy", "timeout: no acknowledgement within 0.3 s"),
    ],
)
def test_a_child_that_cannot_start_ends_the_tree_with_status_69(name: str, words: str) -> None:
    """Statements 21 to 25 and 27."""
    with Tree(name) as tree:
        report = tree.expect("report", context="start_error")
        assert report["path"] == ["x"]
        assert words in report["reason"]
        assert tree.expect("ended")["status"] == 69
        assert tree.order("start", "exit") == ["start a", "exit a"]


def test_a_child_that_has_nothing_to_do_stays_listed() -> None:
    """Statement 20."""
    with Tree("ignoring") as tree:
        tree.expect("boot")
        assert tree.which()["x"]["state"] == "undefined"
        assert tree.which()["c"]["state"] == "running"
        tree.stop()


def test_a_one_shot_child_runs_again_when_its_segment_does() -> None:
    """Statements 34 and 38."""
    with Tree("finishing") as tree:
        tree.expect("exit", path=["once"], kind="normal")
        tree.kill("a")
        tree.expect("start", path=["a"])
        tree.expect("exit", path=["once"], kind="normal")
        assert not any(
            e["event"] == "report" and e["path"] == ["once"] and e["context"] != "progress" for e in tree.events
        )
        assert tree.stop() == 0


def test_a_nested_supervisor_gives_up_alone_and_is_rebuilt() -> None:
    """Statements 66, 132 and 133."""
    with Tree("nested") as tree:
        tree.expect("boot")
        before = tree.pids()
        tree.kill("b")
        tree.expect("start", path=["inner", "b"])
        tree.kill("b")
        tree.expect("report", context="shutdown", path=["inner", "b"])
        tree.expect("start", path=["inner", "c"])
        after = tree.pids()
        assert before["a"] == after["a"]
        assert before["c"] != after["c"]
        assert tree.which()["inner"]["restarts"] == 1
        tree.stop()
        assert tree.order("exit")[-3:] == ["exit c", "exit b", "exit a"]


def test_children_come_and_go_at_run_time() -> None:
    """Statements 98 to 100 and 122."""
    with Tree("dynamic") as tree:
        tree.expect("boot")
        for name in ("x", "y"):
            tree.ask("start", id=name, start="obedient")
            assert tree.expect("answer")["answer"][0] == "ok"
        tree.ask("start", id="x", start="obedient")
        assert tree.expect("answer")["answer"] == ["error", "already_started"]
        tree.ask("start", id="z", start="refusing")
        assert "no licence" in tree.expect("answer")["answer"][1]
        tree.ask("terminate", id="x")
        assert tree.expect("answer")["answer"][0] == "ok"
        tree.ask("terminate", id="x")
        assert tree.expect("answer")["answer"] == ["error", "not_found"]
        assert set(tree.which()) == {"y"}
        assert tree.stop() == 0


def test_a_restart_that_keeps_failing_gives_up(tmp_path: Path) -> None:
    """Statements 63, 74 and 75."""
    with Tree("unlucky", str(tmp_path / "marker")) as tree:
        tree.expect("boot")
        tree.kill("u")
        assert tree.expect("ended")["status"] == 70
        failures = [e for e in tree.events if e["event"] == "report" and e["context"] == "start_error"]
        assert len(failures) == 4
        assert tree.order("start").count("start a") == 1


@pytest.mark.parametrize("name", ["rest_for_one", "parent"])
def test_a_killed_supervisor_leaves_nobody(name: str, token: str) -> None:
    """Statements 142 and 146."""
    with Tree(name) as tree:
        tree.expect("boot")
        pids = list(tree.pids().values())
        grandchildren = titled(token, "grandchild")
        assert bool(grandchildren) == (name == "parent")
        os.kill(tree.process.pid, signal.SIGKILL)
        for pid in pids + grandchildren:
            wait_gone(pid)


def test_a_child_inherits_only_what_it_was_given() -> None:
    """Statements 144 and 171."""
    with Tree("descriptors") as tree:
        info = tree.expect("start", path=["d"])["info"]
        own = {"0", "1", "2", str(info["channel"]), str(info["lifeline"])}
        extra = {n: link for n, link in info["descriptors"].items() if n not in own and "/proc/" not in link}
        assert extra == {}
        assert info["descriptors"]["0"] == "/dev/null"
        tree.stop()


def test_a_stopped_child_is_not_left_behind() -> None:
    """Statements 95 and 189."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        pid = tree.kill("b", signal.SIGSTOP)
        assert tree.stop() == 0
        assert not is_alive(pid)


def test_the_terminals_signals_reach_only_the_root() -> None:
    """Statement 182: children have sessions of their own."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        for pid in tree.pids().values():
            assert os.getsid(pid) == pid
        tree.process.send_signal(signal.SIGINT)
        assert tree.expect("ended")["status"] == 0
        assert all(e["kind"] == "shutdown" for e in tree.events if e["event"] == "exit")


def test_many_crashes_leave_no_zombie_and_no_descriptor() -> None:
    """Statement 153."""
    with Tree("dynamic") as tree:
        tree.expect("boot")

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{tree.process.pid}/fd"))

        before = descriptors()
        for round_ in range(30):
            tree.ask("start", id=f"n{round_}", start="obedient")
            tree.expect("answer")
            tree.ask("terminate", id=f"n{round_}")
            tree.expect("answer")
        wait_for(lambda: descriptors() == before, "descriptors to be closed")
        tree.stop()


def test_two_children_that_die_in_the_same_moment_both_come_back() -> None:
    """Statement 69: the root is stopped, so that it sees both deaths at once."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        pids = tree.pids()
        tree.process.send_signal(signal.SIGSTOP)
        for child in "ab":
            os.kill(pids[child], signal.SIGKILL)
        tree.process.send_signal(signal.SIGCONT)

        def both_are_back() -> bool:
            now = tree.which()
            return all(now[c]["state"] == "running" and now[c]["pid"] != pids[c] for c in "ab")

        wait_for(both_are_back, "both to be started again, in whichever order")
        assert tree.which()["c"]["pid"] == pids["c"]
        assert tree.stop() == 0
        assert tree.order("exit")[-3:] == ["exit c", "exit b", "exit a"]


def test_a_death_and_a_stop_in_the_same_moment_end_in_order() -> None:
    """Statements 86, 87 and 186: as when a signal goes to the whole group."""
    with Tree("rest_for_one") as tree:
        tree.expect("boot")
        pids = tree.pids()
        tree.process.send_signal(signal.SIGSTOP)
        os.kill(pids["b"], signal.SIGTERM)
        tree.process.send_signal(signal.SIGTERM)
        tree.process.send_signal(signal.SIGCONT)
        assert tree.expect("ended")["status"] == 0
        assert tree.order("start") == ["start a", "start b", "start c"]
