"""Talking to a running tree: over the handle, over the control socket, and by the commands."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import stat
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from integration.conftest import QUICK, pid_of
from support.processes import PATIENCE, titled, wait_for, wait_gone

from pgflow_otp import ConfigurationError, PgflowError, Supervisor, TreeStartError
from pgflow_otp.runtime.control_client import ControlClient
from pgflow_otp.runtime.rendezvous import find_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.conftest import Gate, Spawn

    Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pgflow(command: list[str]) -> Run:
    """Run a command to its end."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL
        )

    return run


def call(tree: Supervisor) -> ControlClient:
    return ControlClient(find_tree(tree.name))


def running(tree: Supervisor, slug: str) -> int:
    return int(tree.check_worker(slug)["running"])


# What there is to see


def test_tree_shows_each_process_and_what_it_works_on(spawn: Spawn, gate: Gate, pgflow: Run) -> None:
    tree = spawn("flows.zoo:patient", name="shop")
    run_id = tree.client.start_flow("patient", gate.request)
    handler, forkserver = gate.wait_started()[0]
    shown = pgflow("tree")
    assert shown.returncode == 0, shown.stderr
    lines = {line.split()[0]: line.split() for line in shown.stdout.splitlines()}
    assert lines["root"][1:4] == ["[shop]", str(tree.pid), "running"]
    assert lines["worker:patient"][1:3] == [str(pid_of(tree, "worker:patient")), "running"]
    assert lines["forkserver:patient"][1:3] == [str(forkserver), "running"]
    assert lines["handler:patient/1"][1:3] == [str(handler), "busy"]
    assert "act[0] attempt 1," in " ".join(lines["handler:patient/1"])
    assert str(run_id) in lines["handler:patient/1"]
    assert "MiB" in lines["worker:patient"]
    assert "1 of 10 busy, database connected" in shown.stdout
    as_json = json.loads(pgflow("tree", "--json").stdout)
    assert as_json["resident_kib"][str(handler)] > 1000
    (seen,) = as_json["workers"]["worker:patient"]["handlers"]
    assert seen["task"] | {"age": 0} == {
        "run_id": str(run_id), "step": "act", "index": 0, "attempt": 1, "timeout": 60, "age": 0
    }  # fmt: skip
    assert seen["task"]["age"] > 0
    gate.open()


def test_tree_counts_the_restarts_of_the_period(spawn: Spawn, pgflow: Run) -> None:
    tree = spawn("flows.zoo:one")
    worker = pid_of(tree, "worker:one")
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: pid_of(tree, "worker:one") != worker, "another worker")
    seen = json.loads(pgflow("tree", "--json").stdout)
    (nodes,) = [child for child in seen["children"] if child["id"] == "workers"]
    assert nodes["children"][0]["restarts_in_period"] == 1
    assert next(c for c in seen["children"] if c["id"] == "recovery")["restarts_in_period"] == 0


def test_a_worker_that_does_not_answer_holds_nobody_up(spawn: Spawn, pgflow: Run) -> None:
    tree = spawn("flows.zoo:one", "flows.zoo:many")
    worker = pid_of(tree, "worker:one")
    os.kill(worker, signal.SIGSTOP)
    try:
        shown = pgflow("tree").stdout
        with pytest.raises(PgflowError, match="the worker of 'one' does not answer"):
            tree.check_worker("one")
    finally:
        os.kill(worker, signal.SIGCONT)
    states = {line.split()[0]: line.split()[2] for line in shown.splitlines() if "worker:" in line}
    assert states == {"worker:one": "silent", "worker:many": "running"}


def test_top_draws_again_and_again(spawn: Spawn, command: list[str], pgflow: Run) -> None:
    spawn("flows.zoo:one", name="shop")
    looks = [
        json.loads(line) for line in pgflow("top", "--json", "--interval", "0.1", "--count", "3").stdout.splitlines()
    ]
    assert len(looks) == 3
    assert looks[0]["uptime"] < looks[1]["uptime"] < looks[2]["uptime"]
    refused = pgflow("top")
    assert refused.returncode == 2
    assert "top draws on a terminal; use --json here, or `pgflow-otp tree`" in refused.stderr
    ours, theirs = pty.openpty()
    drawing = subprocess.Popen(
        [*command, "top", "--interval", "0.1"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    screen = b""
    while screen.count(b"worker:one") < 3:
        assert select.select([ours], [], [], PATIENCE)[0]
        screen += os.read(ours, 65_536)
    drawing.send_signal(signal.SIGINT)
    while select.select([ours], [], [], PATIENCE)[0]:
        try:
            screen += os.read(ours, 65_536)
        except OSError:
            break
    assert drawing.wait() == 0
    os.close(ours)
    assert b"Traceback" not in screen


# Limits


def test_scale_up_takes_effect_at_once_and_interrupts_nothing(spawn: Spawn, gate: Gate, pgflow: Run) -> None:
    tree = spawn("flows.zoo:many", max_concurrency=1)
    run_id = tree.client.start_flow("many", [gate.request] * 4)
    gate.wait_started(1)
    done = pgflow("scale", "many", "--max-concurrency", "3")
    assert (done.returncode, done.stdout) == (0, "many: max_concurrency 3, batch_size 10\n")
    pids = {line[0] for line in gate.wait_started(3)}
    assert len(pids) == 3
    assert running(tree, "many") == 3
    assert tree.scale_worker("many", max_concurrency=1) == {
        "slug": "many", "running": True, "max_concurrency": 1, "batch_size": 10
    }  # fmt: skip
    assert running(tree, "many") == 3
    gate.open()
    assert tree.client.wait(run_id).status == "completed"


def test_scale_down_waits_with_claims(spawn: Spawn, gate: Gate, connection: Any) -> None:
    tree = spawn("flows.zoo:many", max_concurrency=3)
    tree.scale_worker("many", max_concurrency=1)
    run_id = tree.client.start_flow("many", [gate.request] * 2 + [{"do": "echo", "value": 1}])
    gate.wait_started(1)
    started = "select count(*) from pgflow.step_tasks where status = 'started'"
    wait_for(lambda: running(tree, "many") == 1, "the worker to be busy")
    assert connection.execute(started).fetchone() == (1,)
    gate.open()
    assert tree.client.wait(run_id).status == "completed"


def test_limits_outlive_the_worker(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one", worker_options={"one": {"batch_size": 7}})
    tree.scale_worker("one", max_concurrency=4)
    worker = pid_of(tree, "worker:one")
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: pid_of(tree, "worker:one") != worker, "another worker")
    wait_for(lambda: tree.check_worker("one")["max_concurrency"] == 4, "its limits")
    assert tree.check_worker("one")["batch_size"] == 7


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("scale", "one"), 2, "give --max-concurrency, --batch-size, or both"),
        (("scale", "one", "--batch-size", "0"), 2, "0 is not in the range 1<=x<=10000"),
        (("scale", "two", "--batch-size", "2"), 1, "Error: no worker serves 'two' here; served: one\n"),
        (("stop-worker", "two"), 1, "Error: no worker serves 'two' here; served: one\n"),
        (("start-worker", "flows.nothing"), 1, "there is no module 'flows.nothing'"),
        (("start-worker", "flows/zoo.py"), 1, "'flows/zoo.py' is a file name; write the module's name: flows.zoo\n"),
        (("start-worker", "no such"), 1, "'no such' is not a flow target; write module or module:attribute\n"),
        (("tree", "--name", "two"), 69, "Error: no tree named 'two' runs; running: shop\n"),
    ],
)
def test_mistakes_are_named(spawn: Spawn, pgflow: Run, arguments: tuple[str, ...], status: int, text: str) -> None:
    spawn("flows.zoo:one", name="shop")
    done = pgflow(*arguments)
    assert done.returncode == status
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_handle_checks_what_it_is_given(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one")
    with pytest.raises(ConfigurationError, match="scale_worker needs max_concurrency, batch_size, or both"):
        tree.scale_worker("one")
    with pytest.raises(ConfigurationError, match="'max_concurrency' is 0; it has to be a whole number from 1"):
        tree.scale_worker("one", max_concurrency=0)
    with pytest.raises(ConfigurationError, match="flows holds 7"):
        tree.start_worker(7)  # type: ignore[arg-type]
    with pytest.raises(PgflowError, match="no worker serves 'two' here; served: one"):
        tree.check_worker("two")
    with pytest.raises(PgflowError, match="no worker serves 'two'"):
        tree.stop_worker("two")


# Workers that come and go


def test_a_stopped_worker_drains_and_stays_down_until_it_is_started(spawn: Spawn, gate: Gate, pgflow: Run) -> None:
    tree = spawn("flows.zoo:patient", "flows.zoo:one")
    run_id = tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    gate.open()
    done = pgflow("stop-worker", "patient")
    assert (done.returncode, done.stdout) == (0, "patient: stopped\n")
    assert tree.client.get_run_with_states(run_id).steps[0].status == "completed"
    assert tree.count_children()["active"] == 1
    assert pgflow("stop-worker", "patient").stdout == "patient: was down already\n"
    with pytest.raises(PgflowError, match="the worker of 'patient' is not running"):
        tree.check_worker("patient")
    # The starter runs again with whatever comes before it; it brings up what should run, and nothing else.
    recovery = pid_of(tree, "recovery")
    os.kill(recovery, signal.SIGKILL)
    wait_for(lambda: pid_of(tree, "recovery") != recovery, "another recovery")
    wait_for(lambda: _starter_is_done(tree), "the starter to have run again")
    assert tree.count_children()["active"] == 1
    tree.scale_worker("patient", batch_size=2)
    assert tree.start_worker("patient", max_concurrency=5)["started"] == ["patient"]
    assert tree.start_worker("patient") == {"started": [], "running": ["patient"], "target": "flows.zoo:patient"}
    limits = tree.check_worker("patient")
    assert (limits["max_concurrency"], limits["batch_size"]) == (5, 2)
    assert tree.client.wait(run_id).status == "completed"


def _starter_is_done(tree: Supervisor) -> bool:
    starter = next(child for child in tree.which_children() if child["id"] == "starter")
    return bool(starter["state"] == "undefined" and starter["restarts"] == 0)


def test_a_worker_that_crashes_while_it_is_stopped_is_stopped_all_the_same(spawn: Spawn, gate: Gate) -> None:
    tree = spawn("flows.zoo:patient", kill_grace=0.2)
    tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    with pytest.raises(PgflowError, match="has not answered 'stop_worker' within 0 s"):
        tree.stop_worker("patient", timeout=0)
    wait_for(lambda: tree.check_worker("patient")["state"] == "draining", "the drain")
    os.kill(pid_of(tree, "worker:patient"), signal.SIGKILL)
    tree.stop_worker("patient")
    assert tree.count_children()["active"] == 0
    gate.open()
    assert tree.start_worker("patient")["started"] == ["patient"]


def test_a_flow_can_be_added_and_is_kept(spawn: Spawn, pgflow: Run) -> None:
    tree = spawn("flows.zoo:one")
    done = pgflow("start-worker", "flows.zoo:greet", "--max-concurrency", "2")
    assert (done.returncode, done.stdout) == (0, "greet: started\n")
    assert tree.client.start_flow_sync("greet", "you").output == {"greet": "hello you"}
    assert pgflow("start-worker", "flows.zoo:greet").stdout == "greet: runs already\n"
    assert tree.start_worker("GREET")["running"] == ["greet"]
    # All workers go with their supervisor, and all come back: also the one that the boot knew nothing of.
    (before,) = [pid_of(tree, "worker:greet")]
    for _ in range(11):
        worker = pid_of(tree, "worker:one")
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda w=worker: pid_of(tree, "worker:one") != w, "another worker")  # type: ignore[misc]
    wait_for(lambda: pid_of(tree, "worker:greet") != before, "the added worker to be back")
    assert wait_for(lambda: _report(tree, "greet"), "its report")["max_concurrency"] == 2


def _report(tree: Supervisor, slug: str) -> dict[str, Any] | None:
    try:
        return tree.check_worker(slug)
    except PgflowError:
        return None


def test_a_flow_that_cannot_be_added_changes_nothing(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "rival.py").write_text(
        "from pgflow_otp import Flow\nflow = Flow('ONE')\n@flow.step('a')\ndef a(input, ctx): return 1\n"
    )
    tree = spawn("flows.zoo:one")
    before = tree.status()
    with pytest.raises(PgflowError, match="there is no module 'rival'"):
        tree.start_worker("rival")
    after = tree.status()
    assert after["modules"] == before["modules"]
    wait_for(lambda: len(tree.status()["children"]) == len(before["children"]), "the starter to be forgotten")


# The socket


def test_what_is_no_question_is_answered_and_does_no_harm(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one")
    path = find_tree(tree.name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(PATIENCE)
        caller.connect(str(path))
        answers = caller.makefile("rb")
        for line in (b"hello", b"[1]", b'{"ask": 5}', b'{"id": 1}', b"\xff\xfe", b""):
            caller.sendall(line + b"\n")
            assert "a question is a JSON object" in json.loads(answers.readline())["error"]
        caller.sendall(b'{"ask": "format_disk", "id": 7}\n{"ask": "count_children", "id": "x"}\n')
        unknown = json.loads(answers.readline())
        assert unknown["id"] == 7
        assert unknown["error"].startswith("unknown question 'format_disk'; known: check_worker, count_children,")
        counted = json.loads(answers.readline())
        assert (counted["id"], counted["ok"]["active"]) == ("x", 1)
        caller.sendall(b'{"ask": "scale_worker", "slug": "one", "max_concurrency": "many"}\n')
        assert "'max_concurrency' is 'many'; it has to be a whole number" in json.loads(answers.readline())["error"]
        with pytest.raises(ConnectionError):  # noqa: PT012 - the end may be noticed at any of them
            while True:
                caller.sendall(b"x" * 100_000)
        answers.close()
    assert tree.status()["state"] == "running"


def test_callers_that_never_read_or_never_end_do_no_harm(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one")
    path = str(find_tree(tree.name))
    callers = []
    for _ in range(40):
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(path)
        callers.append(caller)
    callers[0].setblocking(False)
    try:
        while True:
            callers[0].send(b'{"ask": "status"}\n' * 100)
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        pass
    assert tree.status()["state"] == "running"
    for caller in callers:
        caller.close()
    wait_for(lambda: _answers(tree), "callers to be let in again")


def _answers(tree: Supervisor) -> bool:
    try:
        with call(tree) as client:
            return bool(client.ask("status")["state"] == "running")
    except PgflowError:
        return False


def test_a_second_tree_of_the_same_name_is_refused(
    spawn: Spawn, pgflow: Run, database: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tree = spawn("flows.zoo:one", name="shop")
    refused = pgflow("start", "--flows", "flows.zoo:one", "--name", "shop", "--dsn", database)
    text = (
        f"a tree named 'shop' runs already (pid {tree.pid}); give this one another --name, "
        "or stop that one: pgflow-otp stop --name shop"
    )
    assert (refused.returncode, refused.stderr) == (69, f"Error: {text}\n")
    second = Supervisor.spawn("flows.zoo:one", dsn=database, name="shop")
    with pytest.raises(TreeStartError, match=r"status 69: a tree named 'shop' runs already \(pid \d+\)"):
        second.await_ready()
    assert second.stop() == 69
    assert text in capfd.readouterr().err
    assert tree.status()["state"] == "running"


def test_what_a_killed_tree_left_is_taken_away(spawn: Spawn, runtime_directory: Path) -> None:
    spawn("flows.zoo:one", name="first")
    for tree in [spawn("flows.zoo:one", name=name) for name in ("shop", "mail")]:
        os.kill(tree.pid, signal.SIGKILL)
        tree.join()
    assert {p.name for p in runtime_directory.glob("*.sock")} == {"first.sock", "shop.sock", "mail.sock"}
    assert find_tree(None).stem == "first"
    spawn("flows.zoo:one", name="shop")
    assert {p.name for p in runtime_directory.iterdir()} == {"first.sock", "first.lock", "shop.sock", "shop.lock"}


def test_a_tree_that_ends_takes_its_files_along(spawn: Spawn, runtime_directory: Path) -> None:
    tree = spawn("flows.zoo:one")
    assert len(list(runtime_directory.iterdir())) == 2
    tree.stop()
    assert list(runtime_directory.iterdir()) == []


def test_without_a_name_the_tree_has_to_be_clear(spawn: Spawn, pgflow: Run, runtime_directory: Path) -> None:
    none = pgflow("tree")
    assert none.returncode == 69
    assert none.stderr == f"Error: no tree of this user runs on this host (looked in {runtime_directory})\n"
    spawn("flows.zoo:one", name="shop")
    assert "[shop]" in pgflow("tree").stdout
    spawn("flows.zoo:one", name="mail")
    several = pgflow("tree")
    assert several.returncode == 69
    assert several.stderr == "Error: several trees run: mail, shop; say which one with --name\n"
    spawn("flows.zoo:one", name="pgflow")
    assert "[pgflow]" in pgflow("tree").stdout


@pytest.mark.parametrize("fault", ["file", "stranger", "long"])
def test_without_a_place_for_its_socket_a_tree_works_all_the_same(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    place = tmp_path / ("long" * 30 if fault == "long" else "place")
    if fault == "file":
        place.touch()
    elif fault == "stranger":
        if os.getuid() != 0:
            pytest.skip("only root can give a directory away")
        place.mkdir()
        os.chown(place, 12345, 12345)
    monkeypatch.setenv("PGFLOW_RUNTIME_DIR", str(place))
    tree = spawn("flows.zoo:one")
    assert tree.client.start_flow_sync("one", {"do": "echo", "value": 1}).output == {"act": 1}
    tree.stop()
    said = {"file": "is no directory", "stranger": "belongs to user 12345", "long": "is too long"}[fault]
    assert said in capfd.readouterr().err


def test_a_directory_that_others_may_read_is_closed_to_them(spawn: Spawn, runtime_directory: Path) -> None:
    runtime_directory.chmod(0o777)
    spawn("flows.zoo:one")
    assert stat.S_IMODE(runtime_directory.stat().st_mode) == 0o700


def test_no_child_holds_the_name_of_a_dead_root(spawn: Spawn, gate: Gate, token: str) -> None:
    """A worker may live on for a moment to hand its tasks back; another tree must not have to wait for it."""
    tree = spawn("flows.zoo:patient", name="shop")
    tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    (worker,) = titled(token, "worker:patient")
    os.kill(worker, signal.SIGSTOP)
    os.kill(tree.pid, signal.SIGKILL)
    tree.join()
    try:
        again = spawn("flows.zoo:one", name="shop")
        assert again.status()["name"] == "shop"
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_gone(worker)
    gate.open()


# The end


def test_stop_waits_for_the_end(spawn: Spawn, gate: Gate, pgflow: Run) -> None:
    tree = spawn("flows.zoo:patient", name="shop")
    run_id = tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    early = pgflow("stop", "--timeout", "0.1")
    assert early.returncode == 1
    assert early.stderr == f"Error: the tree 'shop' (pid {tree.pid}) is still stopping after 0.1 s\n"
    assert json.loads(pgflow("tree", "--json").stdout)["state"] == "stopping"
    refused = pgflow("start-worker", "flows.zoo:one")
    assert (refused.returncode, "stopping" in refused.stderr) == (1, True)
    gate.open()
    done = pgflow("stop")
    assert (done.returncode, done.stdout) in (
        (0, f"the tree 'shop' (pid {tree.pid}) has ended\n"),
        (69, ""),  # It had ended before this was asked.
    )
    assert tree.join(PATIENCE) == 0
    assert tree.client.get_run_with_states(run_id).steps[0].status == "completed"


def test_stop_in_a_hurry_hands_the_tasks_back(spawn: Spawn, gate: Gate, pgflow: Run, connection: Any) -> None:
    tree = spawn("flows.zoo:patient", name="shop")
    tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    done = pgflow("stop", "--hurry", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"pid": tree.pid, "name": "shop"})
    assert tree.join(PATIENCE) == 0
    task = "select status, attempts_count from pgflow.step_tasks where step_slug = 'act'"
    assert connection.execute(task).fetchone() == ("queued", 0)


def test_start_is_found_by_its_name(command: list[str], pgflow: Run, database: str) -> None:
    tree = subprocess.Popen(
        [*command, "start", "--flows", "flows.zoo:one", "--dsn", database, "--name", "shop", "--log-level", "ERROR"],
        env={**os.environ, "PYTHONPATH": "tests"},
    )
    wait_for(lambda: "worker:one" in pgflow("tree", "--name", "shop").stdout, "the tree")
    assert pgflow("stop", "--name", "shop").returncode == 0
    assert tree.wait(PATIENCE) == 0


def test_a_tree_that_ends_tells_who_waits(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one", **QUICK)
    with call(tree) as client:
        os.kill(tree.pid, signal.SIGKILL)
        with pytest.raises(PgflowError, match=r"the tree '\S+' has ended"):
            client.ask("status")
    with pytest.raises(PgflowError, match="the tree was killed by SIGKILL"):
        tree.status()
    assert tree.join() == -signal.SIGKILL
