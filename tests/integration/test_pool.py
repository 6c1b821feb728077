"""The pool of handler processes: what is known of a failure, limits, escapees, floods, and attempts nobody wants."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from integration.conftest import QUICK, pid_of
from support.processes import is_alive, titled, wait_for, wait_gone

from pgflow_otp import ConfigurationError, RunFailed, Supervisor

if TYPE_CHECKING:
    import psycopg
    from integration.conftest import Gate, Spawn


class Log:
    """What the trees of a test have written so far."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self._said = ""

    def text(self) -> str:
        self._said += self._capture.readouterr().err
        return self._said

    def wait(self, words: str) -> str:
        """Wait until a line holds these words; return it."""
        return wait_for(
            lambda: next((line for line in self.text().splitlines() if words in line), None), f"'{words}' in the log"
        )


@pytest.fixture
def log(capfd: pytest.CaptureFixture[str]) -> Log:
    return Log(capfd)


def error_of(connection: psycopg.Connection[Any]) -> str:
    row = connection.execute("select error_message from pgflow.step_tasks where status = 'failed'").fetchone()
    assert row
    return str(row[0])


def fail(tree: Supervisor, request: Any, flow: str = "one") -> None:
    with pytest.raises(RunFailed):
        tree.client.start_flow_sync(flow, request)


# What is known of a failure


def test_what_a_handler_prints_is_in_the_log_with_its_task(spawn: Spawn, log: Log) -> None:
    tree = spawn("flows.zoo:one")
    run = tree.client.start_flow_sync("one", {"do": "print", "lines": 2, "text": "{of} <em>many</em> äöü"})
    line = log.wait("line 1 {of} <em>many</em> äöü")
    assert "OUTPUT" in line
    assert "handler:one/1" in line
    for field in (f"run={run.run_id}", "step=act", "index=0", "attempt=1"):
        assert field in line


def test_a_handlers_log_records_keep_their_level(spawn: Spawn, log: Log) -> None:
    tree = spawn("flows.zoo:one")
    tree.client.start_flow_sync("one", {"do": "log", "text": "{a} strange thing"})
    line = log.wait("something odd: {a} strange thing")
    assert "WARNING handler:one/1" in line
    assert "step=act" in line


def test_a_failure_keeps_the_last_of_its_own_output(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:one", max_concurrency=1)
    tree.client.start_flow_sync("one", {"do": "print", "lines": 1, "text": "of another task"})
    fail(tree, {"do": "print", "lines": 3000, "text": "x" * 20, "then": {"do": "segv"}})
    error = error_of(connection)
    assert "killed by SIGSEGV (signal 11" in error
    assert "line 2999 xxxx" in error
    assert "of another task" not in error
    output = error.split("last output:\n")[1]
    assert 10_000 < len(output) < 40_000
    assert "in act" in error.split("last output:")[0]  # where in Python it was when it crashed


def test_what_is_written_without_a_newline_is_kept_too(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    fail(spawn("flows.zoo:one"), {"do": "write"})
    assert error_of(connection).startswith("ValueError: after writing\n")
    assert error_of(connection).endswith("last output:\n  no newline at the end")


@pytest.mark.parametrize("what", ["hang_py", "hang_c", "swallow", "ignore_term", "threads"])
def test_a_timeout_tells_where_it_hung(spawn: Spawn, connection: psycopg.Connection[Any], what: str) -> None:
    fail(spawn("flows.zoo:one"), {"do": what})
    first, stack = error_of(connection).split("\n", 1)
    assert first == "Task timed out after 2s"
    assert stack.startswith("stack at its end, innermost call first:\n")
    assert "in act" in stack
    assert "/pgflow_otp/" not in stack
    assert ("in sleep_in_thread" in stack) == (what == "threads")


def test_a_death_tells_memory_and_age(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    fail(spawn("flows.zoo:one"), {"do": "kill_self"})
    assert "killed by SIGKILL (signal 9, possibly out of memory; peak memory " in error_of(connection)
    assert "MiB, age 0." in error_of(connection)


# Limits


def test_memory_is_limited_and_the_limit_named(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:limited", max_concurrency=1)
    fail(tree, {"do": "allocate", "mib": 200}, "limited")
    assert error_of(connection).startswith("MemoryError")
    assert "limited to memory_mb (150 MiB)" in error_of(connection)
    assert tree.client.start_flow_sync("limited", {"do": "allocate", "mib": 50}).output == {"act": 50 * 2**20}


def test_a_limit_below_what_an_empty_process_needs_is_a_mistake_at_the_start(
    command: list[str], database: str, tmp_path: Path
) -> None:
    (tmp_path / "tight.py").write_text(
        "from pgflow_otp import Flow\nflow = Flow('tight')\n@flow.step('a', memory_mb=1)\ndef a(input, ctx): return 1\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, "run", "tight", "--dsn", database], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 78, done.stderr
    assert "Error: flow 'tight', step 'a': memory_mb is 1, but a handler process of this module needs" in done.stderr


def test_cpu_time_is_limited(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:limited")
    fail(tree, {"do": "burn"}, "limited")
    assert "used more CPU time than the step's cpu_seconds allow (killed by SIGXCPU" in error_of(connection)


def test_handlers_are_ended_before_workers_when_memory_runs_out(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one")
    handler, forkserver = tree.client.start_flow_sync("one", {"do": "score"}).output["act"]
    worker, root = (
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (pid_of(tree, "worker:one"), tree.pid)
    )
    assert handler == forkserver > worker > root


# Escapees


@pytest.mark.parametrize("end", ["timeout", "handler", "forkserver", "worker"])
def test_what_has_escaped_into_a_session_of_its_own_is_found(
    spawn: Spawn, tmp_path: Path, end: str, token: str
) -> None:
    tree = spawn("flows.zoo:patient" if end != "timeout" else "flows.zoo:one", kill_grace=0.2)
    path = tmp_path / "escaped"
    flow = "one" if end == "timeout" else "patient"
    tree.client.start_flow(flow, {"do": "escape", "path": str(path), "then": {"do": "hang_py"}})
    wait_for(path.exists, "the escape")
    escaped = int(path.read_text())
    if end != "timeout":
        (victim,) = (pid for pid in titled(token, f"{end}:") if pid != escaped)  # its title is its parent's
        path.unlink()
        os.kill(victim, signal.SIGKILL)
    wait_gone(escaped)
    # The attempt that is made again leaves another one; that goes with the tree.
    tree.request_stop()
    tree.request_stop()
    assert tree.stop() == 0
    wait_for(lambda: not path.exists() or not is_alive(int(path.read_text())), "the end of the second one")


# Floods


def test_a_flood_is_held_back_and_slows_nobody_else(spawn: Spawn, log: Log) -> None:
    tree = spawn("flows.zoo:many", max_concurrency=2)
    flood = {"do": "print", "lines": 60_000, "text": "y" * 40}
    run_id = tree.client.start_flow("many", [flood])
    wait_for(lambda: "line 0 yyy" in log.text(), "the flood to begin")
    assert tree.client.start_flow_sync("many", [{"do": "echo", "value": n} for n in range(20)]).status == "completed"
    assert tree.client.wait(run_id).status == "completed"
    log.wait("lines of output are left out here")


def test_a_log_that_nobody_reads_holds_up_nobody(database: str) -> None:
    tree = Supervisor.spawn("flows.zoo:many", dsn=database, stderr=subprocess.PIPE, **QUICK)
    try:
        tree.await_ready(30)
        flood = [{"do": "print", "lines": 2000, "text": "z" * 60}] * 4
        assert tree.client.start_flow_sync("many", flood, timeout=60).status == "completed"
        assert tree.client.start_flow_sync("many", [{"do": "echo", "value": 1}]).output == {"act": [1]}
        assert tree.status()["state"] == "running"
        assert tree.stop() == 0
    finally:
        assert tree.log is not None
        tree.log.close()


# Attempts nobody wants


def test_a_cancelled_run_ends_its_handlers(spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:patient", max_concurrency=1)
    run_id = tree.client.start_flow("patient", gate.request)
    handler, _ = gate.wait_started()[0]
    connection.execute("select pgflow_otp.cancel_run(%s)", (run_id,))
    wait_gone(handler)
    assert tree.client.start_flow_sync("patient", {"do": "pid"}).status == "completed"
    assert tree.client.get_run(run_id).status != "completed"


def test_a_failed_run_ends_what_runs_of_its_other_steps(spawn: Spawn, gate: Gate) -> None:
    tree = spawn("flows.zoo:forked")
    run_id = tree.client.start_flow("forked", {"waits": gate.request, "fails": {"do": "echo", "value": 1}})
    handler, _ = gate.wait_started()[0]
    fail(tree, {"waits": gate.request, "fails": {"do": "raise", "text": "no"}}, "forked")
    second = next(pid for pid, _ in gate.wait_started(2) if pid != handler)
    wait_gone(second)
    assert is_alive(handler)  # the other run's
    gate.open()
    assert tree.client.wait(run_id).status == "completed"


# The next task


def test_what_a_task_changes_for_its_process_does_not_reach_the_next(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one", max_concurrency=1)
    before = tree.client.start_flow_sync("one", {"do": "where"}).output
    tree.client.start_flow_sync("one", {"do": "surroundings"})
    assert tree.client.start_flow_sync("one", {"do": "where"}).output == before
    fail(tree, {"do": "hang_py"})  # SIGTERM means something again


@pytest.mark.parametrize(
    ("what", "output"),
    [
        ("multiprocessing", [1, 2, 3]),
        ("executor", [1, 2, 3]),
        ("waitpid", "done"),
        ("setsid", "leads its session already"),
    ],
)
def test_handlers_may_have_processes_of_their_own(spawn: Spawn, what: str, output: Any) -> None:
    tree = spawn("flows.zoo:one", max_concurrency=1)
    for _ in range(2):
        assert tree.client.start_flow_sync("one", {"do": what}).output == {"act": output}


def test_garbage_on_its_channel_is_the_handlers_failure(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:one", max_concurrency=1)
    fail(tree, {"do": "garbage"})
    assert "the handler process wrote garbage to its channel" in error_of(connection)
    assert tree.client.start_flow_sync("one", {"do": "echo", "value": 1}).output == {"act": 1}


def test_an_output_that_json_cannot_hold_is_not_tried_again(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    fail(spawn("flows.zoo:patient"), {"do": "set"}, "patient")
    assert connection.execute("select attempts_count from pgflow.step_tasks where status = 'failed'").fetchone() == (1,)


# A module that breaks


def test_a_module_that_breaks_stops_the_claims_until_it_is_mended(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log, token: str, connection: Any
) -> None:
    good = "from pgflow_otp import Flow\nflow = Flow('mended')\n@flow.step('a')\ndef a(input, ctx): return 1\n"
    module = tmp_path / "mended.py"
    module.write_text(good)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with Supervisor.spawn("mended", dsn=database, **QUICK) as tree:
        tree.await_ready(30)
        module.write_text("import no_such_thing\n" + good)
        (forkserver,) = wait_for(lambda: titled(token, "forkserver:mended"), "the forkserver")
        os.kill(forkserver, signal.SIGKILL)
        log.wait("no tasks are taken: importing mended failed: ModuleNotFoundError: No module named 'no_such_thing'")
        run_id = tree.client.start_flow("mended", None)
        rows = connection.execute("select distinct status, attempts_count from pgflow.step_tasks").fetchall()
        assert rows == [("queued", 0)]
        module.write_text(good)
        assert tree.client.wait(run_id).output == {"a": 1}
        assert connection.execute("select attempts_count from pgflow.step_tasks").fetchall() == [(1,)]


def test_a_configuration_error_is_what_the_host_gets(database: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "tighter.py").write_text(
        "from pgflow_otp import Flow\nflow = Flow('tighter')\n"
        "@flow.step('a', memory_mb=2)\ndef a(input, ctx): return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Supervisor.spawn("tighter", dsn=database) as tree, pytest.raises(ConfigurationError, match="memory_mb is 2"):
        tree.await_ready(30)
