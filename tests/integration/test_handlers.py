"""Whatever a handler does ends as one outcome of one attempt, and disturbs nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.processes import is_alive, wait_for, wait_gone

from pgflow_otp import RunFailed

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg
    from integration.conftest import Spawn


def error_of(connection: psycopg.Connection[Any], run_id: Any) -> str:
    row = connection.execute(
        "select error_message from pgflow.step_tasks where run_id = %s and status = 'failed'", (run_id,)
    ).fetchone()
    assert row
    return str(row[0])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"do": "segv"}, "killed by SIGSEGV (signal 11"),
        ({"do": "abort"}, "killed by SIGABRT (signal 6"),
        ({"do": "kill_self"}, "killed by SIGKILL (signal 9, possibly out of memory"),
        ({"do": "os_exit", "status": 42}, "exited with status 42 before giving a result"),
        ({"do": "os_exit", "status": 0}, "exited with status 0 before giving a result"),
        ({"do": "sys_exit"}, "sys.exit('enough')"),
        ({"do": "hang_py"}, "Task timed out after 2s"),
        ({"do": "hang_c"}, "Task timed out after 2s"),
        ({"do": "stop_self"}, "Task timed out after 2s"),
        ({"do": "ignore_term"}, "Task timed out after 2s"),
        ({"do": "swallow"}, "Task timed out after 2s"),
        ({"do": "alloc"}, "MemoryError"),
        ({"do": "raise", "text": "a\x01b " + "x" * 50_000}, "ValueError: a\x01b xxx"),
        ({"do": "raise_broken"}, "Broken: <its message cannot be read: ValueError>"),
        ({"do": "raise_demanding"}, "Demanding: needs two arguments"),
        ({"do": "interrupt"}, "KeyboardInterrupt"),
        ({"do": "close_fds"}, "exited with status 74"),
        ({"do": "nan"}, "not JSON encodable: output['ratio'] is nan"),
        ({"do": "set"}, "not JSON encodable: output['items'][0] is a set"),
        ({"do": "nul"}, "not JSON encodable: output is a string with a NUL"),
        ({"do": "big", "size": 2**21}, "output has 2.0 MiB, more than max_payload_mb (1)"),
    ],
    ids=lambda value: value["do"] if isinstance(value, dict) else "",
)
def test_a_bad_end_fails_the_attempt_with_its_reason_and_the_next_task_runs(
    request_: dict[str, Any], words: str, spawn: Spawn, connection: psycopg.Connection[Any]
) -> None:
    tree = spawn("flows.zoo:one", max_payload_mb=1, max_concurrency=1)
    with pytest.raises(RunFailed) as caught:
        tree.client.start_flow_sync("one", request_)
    assert words in error_of(connection, caught.value.run.run_id)  # type: ignore[attr-defined]
    assert tree.client.start_flow_sync("one", {"do": "echo", "value": 1}).output == {"act": 1}


def test_an_exception_is_stored_with_the_users_own_frames(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:one")
    with pytest.raises(RunFailed, match="ValueError: out of stock"):
        tree.client.start_flow_sync("one", {"do": "raise", "text": "out of stock"})
    row = connection.execute("select error_message from pgflow.step_tasks where status = 'failed'").fetchone()
    assert row
    assert "flows/zoo.py" in row[0]
    assert 'raise ValueError(request["text"])' in row[0]
    assert "pgflow_otp/" not in row[0]


def test_one_bad_item_of_a_map_disturbs_no_other(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:many", max_concurrency=4)
    started = [{"do": "sleep", "seconds": 0.5}, {"do": "segv"}, {"do": "sleep", "seconds": 0.5}]
    run_id = tree.client.start_flow("many", started)
    with pytest.raises(RunFailed):
        tree.client.wait(run_id)
    rows = connection.execute(
        "select task_index, status, attempts_count from pgflow.step_tasks where run_id = %s order by 1", (run_id,)
    ).fetchall()
    assert rows[1] == (1, "failed", 1)
    assert {rows[0][1], rows[2][1]} <= {"completed", "cancelled"}


@pytest.mark.parametrize(
    "value", [None, False, True, 0, 0.5, "", "123", "null", [], {}, 2**70, "😀 ä", {"a": [1, None, {"b": []}]}]
)
def test_any_json_value_passes_unchanged_in_both_directions(value: Any, spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one")
    output = tree.client.start_flow_sync("one", {"do": "echo", "value": value}).output["act"]
    assert output == value
    assert type(output) is type(value)


def test_a_process_is_used_again_and_recycled_after_its_tasks(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:many", max_concurrency=1, max_tasks_per_process=2)
    output = tree.client.start_flow_sync("many", [{"do": "pid"}] * 6).output["act"]
    assert [output.count(pid) for pid in dict.fromkeys(output)] == [2, 2, 2]


def test_an_idle_process_is_retired(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one", idle_timeout=0.2)
    pid = tree.client.start_flow_sync("one", {"do": "pid"}).output["act"]
    wait_gone(pid)
    assert tree.client.start_flow_sync("one", {"do": "pid"}).output["act"] != pid


def test_a_handlers_own_subprocess_dies_with_it(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one", idle_timeout=0.2)
    grandchild = tree.client.start_flow_sync("one", {"do": "grandchild"}).output["act"]
    assert is_alive(grandchild)
    wait_gone(grandchild)


def test_a_thread_left_running_does_not_keep_the_process(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one")
    assert tree.client.start_flow_sync("one", {"do": "thread"}).output == {"act": "done"}
    assert tree.stop() == 0


def test_setup_runs_once_in_each_handler_process(spawn: Spawn) -> None:
    tree = spawn("flows.with_setup", max_concurrency=2)
    output = tree.client.start_flow_sync("prepared", list(range(8))).output["work"]
    assert all(seen["setups"] == 1 and seen["same"] for seen in output)


def test_while_no_handler_can_be_set_up_nothing_is_claimed_until_one_can(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], connection: Any
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    monkeypatch.setenv("PGFLOW_TEST_BREAK_SETUP", str(broken))
    tree = spawn("flows.with_setup")
    run_id = tree.client.start_flow("prepared", [1, 2, 3])
    said = ""

    def told() -> str:
        nonlocal said
        said += capfd.readouterr().err
        return said

    why = "no tasks are taken until a handler process comes up: setup of the handler process failed: RuntimeError"
    wait_for(lambda: why in told(), "the reason in the log")
    rows = "select distinct status, attempts_count from pgflow.step_tasks"
    wait_for(lambda: connection.execute(rows).fetchall() == [("queued", 0)], "the tasks to be back in the queue")
    broken.unlink()
    assert [seen["setups"] for seen in tree.client.wait(run_id).output["work"]] == [1, 1, 1]
    assert told().count(why) == 1
    assert "a handler process has come up; tasks are taken again" in told()


def test_the_context_tells_about_the_task(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:many")
    request = {"do": "context"}
    run = tree.client.start_flow_sync("many", [request])
    assert run.output["act"] == [
        {
            "run_id": str(run.run_id),
            "flow": "many",
            "step": "act",
            "index": 0,
            "attempt": 1,
            "flow_input": [request],
            "in_time": True,
            "shutdown": False,
            "rows": [1],
        }
    ]


def test_a_handler_has_its_channel_and_what_its_module_opened_and_nothing_else(spawn: Spawn) -> None:
    tree = spawn("flows.opens")
    seen = tree.client.start_flow_sync("opens", None).output["look"]
    assert seen["first"].startswith('"""A flow whose module')
    assert seen["sockets"] == 1
    own = ("socket:", "/dev/null", "/proc/", "pipe:", "/dev/", "anon_inode:[pidfd]")
    assert [link for link in seen["links"] if not link.startswith(own) and not link.endswith("opens.py")] == []


def test_as_many_handlers_run_at_once_as_max_concurrency_says(spawn: Spawn, tmp_path: Path) -> None:
    tree = spawn("flows.zoo:many", max_concurrency=6)
    started, go = tmp_path / "started", tmp_path / "go"
    request = {"do": "wait_for_file", "started": str(started), "go": str(go)}
    run_id = tree.client.start_flow("many", [request] * 9)
    wait_for(lambda: started.exists() and len(started.read_text().splitlines()) == 6, "six handlers at once")
    go.touch()
    assert tree.client.wait(run_id).output == {"act": ["done"] * 9}
    pids = {line.split()[0] for line in started.read_text().splitlines()}
    assert len(pids) == 6
