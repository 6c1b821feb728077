"""What the kernel does to a tree, and what a tree does to the system. Numbers are statements of OTP's semantics."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from support.processes import wait_for, wait_gone
from support.tree_process import Tree

from pgflow_otp.otp import process

#: Without pidfds SIGCHLD tells of deaths; both ways are in use, depending on the system.
BY_SIGNAL = {"PGFLOW_TEST_NO_PIDFD": "1"}


def new_pid_namespace() -> tuple[str, ...]:
    """Return the command that makes what it runs PID 1; skip where the system does not allow that."""
    prefix = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no right to make a PID namespace")
    return prefix


@pytest.mark.parametrize("environment", [{}, BY_SIGNAL], ids=["pidfd", "SIGCHLD"])
def test_every_death_is_seen(environment: dict[str, str]) -> None:
    """Statements 153 and 156: one death, three in the same moment, and those of an ordered stop."""
    with Tree("one_for_one", environment=environment) as tree:
        tree.expect("boot")
        links = [os.readlink(f"/proc/{tree.process.pid}/fd/{n}") for n in os.listdir(f"/proc/{tree.process.pid}/fd")]
        assert any("pidfd" in link for link in links) is (not environment and process.HAS_PIDFD)
        tree.kill("a")
        tree.expect("start", path=["a"])
        pids = tree.pids()
        tree.process.send_signal(signal.SIGSTOP)
        for pid in (pids["a"], pids["b"]):
            os.kill(pid, signal.SIGKILL)
        tree.process.send_signal(signal.SIGCONT)

        def all_are_back() -> bool:
            now = tree.which()
            return all(now[c]["state"] == "running" and now[c]["pid"] != pids[c] for c in "ab")

        wait_for(all_are_back, "both to be replaced")
        assert tree.stop() == 0


@pytest.mark.parametrize("environment", [{}, BY_SIGNAL], ids=["pidfd", "SIGCHLD"])
def test_a_hundred_crashes_leave_no_zombie_and_no_descriptor(environment: dict[str, str]) -> None:
    """Statement 153."""
    with Tree("dynamic", environment=environment) as tree:
        tree.expect("boot")
        tree.call("start", id="x", start="obedient")
        root = psutil.Process(tree.process.pid)
        before = root.num_fds()
        for _ in range(100):
            tree.kill("x")
            tree.expect("start", path=["x"])
            assert sum(c.status() == psutil.STATUS_ZOMBIE for c in root.children()) <= 1
        assert root.num_fds() == before
        assert tree.stop() == 0


def test_a_child_that_was_reaped_by_somebody_else_is_a_crash() -> None:
    """Statement 158, the other way round: a status that nobody knows is never a success."""
    with Tree("thief") as tree:
        tree.expect("boot")
        tree.ask("steal", id="t")
        assert "unknown" in tree.expect("exit", path=["t"])["reason"]
        tree.expect("start", path=["t"])
        tree.stop()


@pytest.mark.parametrize("environment", [{}, BY_SIGNAL], ids=["pidfd", "SIGCHLD"])
def test_as_pid_1(environment: dict[str, str]) -> None:
    """Statements 160 and 191: orphans are reaped, a crash is mended, SIGTERM ends it."""
    with Tree("orphaning", prefix=new_pid_namespace(), environment=environment) as tree:
        orphan_parent = tree.expect("start", path=["o"])["info"]
        assert orphan_parent["ppid"] == 1
        tree.expect("boot")
        (root,) = psutil.Process(tree.process.pid).children()
        wait_for(lambda: [c.status() for c in root.children()].count(psutil.STATUS_ZOMBIE) == 0, "the orphan's end")
        assert len(root.children()) == 2
        next(c for c in root.children() if "pgflow-otp: a " in " ".join(c.cmdline())).kill()
        tree.expect("start", path=["a"])
        root.send_signal(signal.SIGTERM)
        assert tree.expect("ended")["status"] == 0
        tree.process.wait()


def test_a_fork_that_the_system_refuses_is_a_failed_start() -> None:
    """Statement 161: the supervisor survives, and the attempt counts as a restart."""
    with Tree("starving") as tree:
        tree.expect("boot")
        pid = tree.pids()["a"]
        tree.ask("starve")
        error, reason = tree.call("start", id="y", start="obedient")
        assert error == "error"
        assert "fork failed" in reason
        os.kill(pid, signal.SIGKILL)
        assert "fork failed" in tree.expect("report", context="start_error", path=["a"])["reason"]
        assert tree.expect("ended")["status"] == 70


def test_a_process_with_threads_does_not_fork() -> None:
    """Statement 164."""
    code = (
        "import threading; from pgflow_otp.otp.process import ForkError, fork\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "try: fork(lambda: 0, keep=(), title='x', dies_with_parent=True)\n"
        "except ForkError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "cannot fork while 2 threads run\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_that_end_the_tree(number: signal.Signals) -> None:
    """Statements 183, 184 and 192."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        tree.process.send_signal(number)
        assert tree.expect("ended")["status"] == 0
        assert tree.order("exit") == ["exit c", "exit b", "exit a"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(number: signal.Signals) -> None:
    """Statement 184: under nohup, and in the background of a shell."""
    name = number.name.removeprefix("SIG")
    with Tree("one_for_one", prefix=("/bin/sh", "-c", f"trap '' {name}; exec \"$@\"", "sh")) as tree:
        tree.expect("boot")
        tree.process.send_signal(number)
        assert tree.which()["a"]["state"] == "running"
        assert not any(e["event"] == "stopping" for e in tree.events)
        assert tree.stop() == 0


def test_sigusr1_asks_for_a_picture_of_the_tree() -> None:
    """Statement 185."""
    with Tree("one_for_one") as tree:
        tree.expect("boot")
        tree.process.send_signal(signal.SIGUSR1)
        tree.expect("message", path=[], message={"m": "dump"})
        tree.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_is_one_ordered_stop(number: signal.Signals) -> None:
    """Statements 182 and 186: Ctrl-C in a terminal, and a service manager that signals everybody."""
    with Tree("rest_for_one", prefix=("setsid",)) as tree:
        tree.expect("boot")
        assert os.getpgid(tree.process.pid) == tree.process.pid
        os.killpg(tree.process.pid, number)
        assert tree.expect("ended")["status"] == 0
        assert tree.order("exit") == ["exit c", "exit b", "exit a"]
        assert tree.order("start") == ["start a", "start b", "start c"]


def test_a_signal_to_a_child_does_not_reach_its_parent() -> None:
    """Statements 165 and 166: nothing of the parent's handling is left in a child, not even the wakeup descriptor."""
    with Tree("default_signals") as tree:
        info = tree.expect("start", path=["s"])["info"]
        assert info == {"blocked": [], "handled": [], "wakeup": -1, "ignored": [int(signal.SIGPIPE)]}
        tree.stop()


def test_a_parent_that_dies_right_after_the_fork_leaves_nobody() -> None:
    """Statements 31 and 146: the child compares its parent with the one it had before the fork."""
    with Tree("late") as tree:
        pid = tree.expect("message", path=["l"])["message"]["pid"]
        os.kill(tree.process.pid, signal.SIGKILL)
        wait_gone(pid)


def test_children_have_random_numbers_of_their_own() -> None:
    """Statement 175."""
    with Tree("dynamic") as tree:
        tree.expect("boot")
        numbers = [tree.call("start", id=f"r{n}", start="rolling")[2]["number"] for n in range(3)]
        assert len(set(numbers)) == 3
        tree.stop()
