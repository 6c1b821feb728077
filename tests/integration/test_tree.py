"""The tree as a whole: deaths, drains, outages."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from integration.conftest import QUICK, pid_of
from support.processes import titled, wait_for, wait_gone

from pgflow_otp import ConfigurationError, Settings, Supervisor
from pgflow_otp.db import schema
from pgflow_otp.db.embedded import EmbeddedServer
from pgflow_otp.flow.target import Source
from pgflow_otp.runtime.boot import BootConfig
from pgflow_otp.runtime.tree import tree_spec, worker_spec

if TYPE_CHECKING:
    from pathlib import Path
    from uuid import UUID

    from integration.conftest import Gate, Spawn


def task(connection: psycopg.Connection[Any], run_id: UUID) -> dict[str, Any]:
    columns = ("status", "attempts_count", "requeued_count", "last_worker_id", "error_message")
    row = connection.execute(
        "select status, attempts_count, requeued_count, last_worker_id, error_message "
        "from pgflow.step_tasks where run_id = %s and step_slug = 'act'",
        (run_id,),
    ).fetchone()
    assert row
    return dict(zip(columns, row, strict=True))


def test_a_killed_worker_costs_its_task_no_attempt(
    spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any], token: str
) -> None:
    tree = spawn("flows.zoo:patient")
    run_id = tree.client.start_flow("patient", gate.request)
    handler, forkserver = gate.wait_started()[0]
    os.kill(pid_of(tree, "worker:patient"), signal.SIGKILL)
    wait_gone(handler)
    wait_gone(forkserver)
    gate.wait_started(2)
    gate.open()
    assert tree.client.wait(run_id).status == "completed"
    assert task(connection, run_id)["attempts_count"] == 1
    assert task(connection, run_id)["requeued_count"] == 1


def test_a_task_that_kills_its_worker_every_time_fails_and_spares_the_tree(
    spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    tree = spawn("flows.zoo:patient")
    run_id = tree.client.start_flow("patient", gate.request)
    for time_ in range(3):
        gate.wait_started(time_ + 1)
        os.kill(pid_of(tree, "worker:patient"), signal.SIGKILL)
    wait_for(lambda: tree.client.get_run(run_id).status == "failed", "the run to fail")
    assert task(connection, run_id)["error_message"] == (
        "The worker process died while this task ran, for the 3. time that the task was lost or stalled"
    )
    gate.open()
    assert tree.client.start_flow_sync("patient", {"do": "pid"}).status == "completed"


def test_a_killed_forkserver_is_replaced_and_costs_no_attempt(
    spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    tree = spawn("flows.zoo:patient")
    before = pid_of(tree, "worker:patient")
    run_id = tree.client.start_flow("patient", gate.request)
    handler, forkserver = gate.wait_started()[0]
    os.kill(forkserver, signal.SIGKILL)
    wait_gone(handler)
    gate.wait_started(2)
    gate.open()
    assert tree.client.wait(run_id).status == "completed"
    assert task(connection, run_id)["attempts_count"] == 1
    assert pid_of(tree, "worker:patient") == before


def test_a_killed_recovery_is_restarted_and_the_workers_stay(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:one")
    worker, recovery = pid_of(tree, "worker:one"), pid_of(tree, "recovery")
    os.kill(recovery, signal.SIGKILL)
    wait_for(lambda: pid_of(tree, "recovery") != recovery, "another recovery")
    assert pid_of(tree, "worker:one") == worker
    assert tree.client.start_flow_sync("one", {"do": "echo", "value": 1}).output == {"act": 1}


def test_a_killed_root_leaves_nobody_and_no_claimed_task(
    spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any], token: str
) -> None:
    tree = spawn("flows.zoo:patient")
    run_id = tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    os.kill(tree.pid, signal.SIGKILL)
    wait_for(lambda: not titled(token, "pgflow-otp:"), "the end of the whole tree")
    assert task(connection, run_id) == {
        "status": "queued",
        "attempts_count": 0,
        "requeued_count": 0,
        "last_worker_id": None,
        "error_message": None,
    }


def test_stopping_lets_running_tasks_finish(spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:patient")
    run_id = tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    tree.request_stop()
    gate.open()
    assert tree.stop() == 0
    assert task(connection, run_id)["status"] == "completed"
    row = connection.execute("select count(*) from pgflow.workers where stopped_at is null").fetchone()
    assert row == (0,)


def test_a_long_handler_can_see_that_it_should_end(
    spawn: Spawn, tmp_path: Path, connection: psycopg.Connection[Any]
) -> None:
    tree = spawn("flows.zoo:patient")
    started = tmp_path / "started"
    run_id = tree.client.start_flow("patient", {"do": "wait_for_shutdown", "started": str(started)})
    wait_for(started.exists, "the handler to begin")
    assert tree.stop() == 0
    assert task(connection, run_id)["status"] == "completed"


def test_what_does_not_finish_in_time_is_handed_back_and_goes_on_at_the_next_start(
    spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    tree = spawn("flows.zoo:patient", drain_timeout=0.2)
    run_id = tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    assert tree.stop() == 0
    assert task(connection, run_id)["status"] == "queued"
    assert task(connection, run_id)["attempts_count"] == 0
    gate.open()
    again = spawn("flows.zoo:patient")
    assert again.client.wait(run_id).status == "completed"


def test_stopping_twice_does_not_wait_and_still_hands_back(
    spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    tree = spawn("flows.zoo:patient")
    run_id = tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    tree.request_stop()
    tree.request_stop()
    assert tree.stop() == 0
    assert task(connection, run_id)["status"] == "queued"
    assert task(connection, run_id)["attempts_count"] == 0


def test_a_killed_root_releases_even_what_hangs_in_c(
    spawn: Spawn, connection: psycopg.Connection[Any], token: str
) -> None:
    tree = spawn("flows.zoo:patient", kill_grace=30)
    run_id = tree.client.start_flow("patient", {"do": "hang_c"})
    wait_for(lambda: task(connection, run_id)["status"] == "started", "the task to be claimed")
    wait_for(lambda: titled(token, "handler:patient/"), "the handler")
    os.kill(tree.pid, signal.SIGKILL)
    wait_for(lambda: not titled(token, "pgflow-otp:"), "the end of the whole tree")
    assert task(connection, run_id)["status"] == "queued"


def test_a_deprecated_worker_drains_and_another_takes_over(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:one", heartbeat_interval=0.1)
    tree.client.start_flow_sync("one", {"do": "pid"})
    before = pid_of(tree, "worker:one")
    connection.execute("update pgflow.workers set deprecated_at = now()")
    wait_for(lambda: pid_of(tree, "worker:one") != before, "another worker")
    assert tree.client.start_flow_sync("one", {"do": "echo", "value": 1}).output == {"act": 1}


def test_a_stalled_task_is_requeued(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:one")
    tree.stop()
    row = connection.execute("select run_id from pgflow.start_flow('one', %s)", (json.dumps({"do": "pid"}),)).fetchone()
    assert row
    connection.execute(
        "insert into pgflow.workers (worker_id, queue_name, function_name) values (gen_random_uuid(), 'one', 'other')"
    )
    connection.execute(
        "select pgflow.start_tasks('one', array(select msg_id from pgmq.read('one', 5, 5)), worker_id, 'one') "
        "from pgflow.workers where function_name = 'other'"
    )
    connection.execute(
        "update pgflow.step_tasks "
        "set queued_at = queued_at - interval '1 hour', started_at = started_at - interval '1 hour'"
    )
    again = spawn("flows.zoo:one")
    assert again.client.wait(row[0]).status == "completed"
    assert task(connection, row[0])["requeued_count"] == 1


def test_an_outcome_of_an_overtaken_attempt_is_refused(
    spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    tree = spawn("flows.zoo:patient", max_concurrency=1)
    run_id = tree.client.start_flow("patient", gate.request)
    gate.wait_started()
    # As if another worker had got the task after this one was thought dead.
    connection.execute(
        "update pgflow.step_tasks set started_at = clock_timestamp(), last_worker_id = null where run_id = %s",
        (run_id,),
    )
    gate.open()
    second = tree.client.start_flow("patient", {"do": "pid"})
    assert tree.client.wait(second).status == "completed"
    assert task(connection, run_id)["status"] == "started"


def test_one_bad_module_does_not_block_the_others(database: str) -> None:
    with Supervisor.spawn(["flows.nothing", "flows.zoo:one"], dsn=database, **QUICK) as tree:
        tree.await_ready(30)
        states = {m["target"]: m["status"] for m in tree.status()["modules"]}
        assert states == {"flows.nothing": "failed_permanent", "flows.zoo:one": "succeeded"}
        assert tree.client.start_flow_sync("one", {"do": "echo", "value": 1}).output == {"act": 1}


def test_nothing_to_serve_ends_the_tree_with_78(database: str) -> None:
    tree = Supervisor.spawn(["flows.nothing"], dsn=database)
    with pytest.raises(ConfigurationError, match=r"no module 'flows.nothing'"):
        tree.await_ready(30)
    assert tree.stop() == 78


def test_a_changed_shape_is_refused_with_the_differences(database: str, connection: psycopg.Connection[Any]) -> None:
    connection.execute("select pgflow.create_flow('one')")
    connection.execute("select pgflow.add_step('one', 'other')")
    tree = Supervisor.spawn(["flows.zoo:one"], dsn=database)
    with pytest.raises(ConfigurationError, match="slug differs 'act' vs 'other'"):
        tree.await_ready(30)
    assert tree.stop() == 78


def test_the_tree_waits_for_a_database_that_is_down_and_survives_its_crash(tmp_path: Path, gate: Gate) -> None:
    server = EmbeddedServer(tmp_path / "pg")
    with psycopg.connect(server.acquire(), autocommit=True) as connection:
        schema.install(connection)
    server.stop()
    try:
        with Supervisor.spawn(["flows.zoo:patient"], dsn=server.dsn(), **QUICK) as tree:
            with pytest.raises(TimeoutError, match="cannot connect"):
                tree.await_ready(2)
            server.acquire()
            tree.await_ready(60)
            run_id = tree.client.start_flow("patient", gate.request)
            gate.wait_started()
            server._control("stop", "-m", "immediate")
            gate.open()
            server.acquire()
            assert tree.client.wait(run_id).status == "completed"
            children = {c["id"]: c["restarts"] for c in tree.which_children()}
            assert children == {"workers": 0, "recovery": 0, "starter": 0}
    finally:
        server.release()


def test_an_answer_that_came_in_time_counts_however_late_it_is_read(spawn: Spawn, gate: Gate) -> None:
    """Statement 190: everything but the handler is stopped, past the deadline; then results come before deadlines."""
    tree = spawn("flows.zoo:one", max_concurrency=1)
    run_id = tree.client.start_flow("one", gate.request)
    began = time.monotonic()
    _, forkserver = gate.wait_started()[0]
    stopped = [pid_of(tree, "worker:one"), forkserver, tree.pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    gate.open()
    wait_for(lambda: time.monotonic() > began + 2 * 2, "twice its timeout to go by, while it answers")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert tree.client.wait(run_id).status == "completed"


def test_a_process_that_waits_in_the_database_goes_with_its_parent(
    database: str, connection: psycopg.Connection[Any]
) -> None:
    """Statement 151: it cannot look at its lifeline; the kernel ends it."""
    blocked = "select 1 from pg_stat_activity where application_name like '%starter%' and wait_event_type = 'Lock'"
    with connection.transaction(), psycopg.connect(database, autocommit=True) as other:
        connection.execute("lock table pgflow.flows in access exclusive mode")
        tree = Supervisor.spawn("flows.zoo:one", dsn=database)
        wait_for(lambda: other.execute(blocked).fetchone(), "the starter to wait for the lock")
        starter = pid_of(tree, "starter")
        os.kill(tree.pid, signal.SIGKILL)
        wait_gone(starter)
    assert tree.join() == -signal.SIGKILL


def test_the_session_of_a_killed_worker_ends_while_its_handler_is_still_there(
    spawn: Spawn, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    """Statement 173: no handler holds the worker's connection, so the server lets go of its locks at once."""
    tree = spawn("flows.zoo:patient")
    tree.client.start_flow("patient", gate.request)
    handler, forkserver = gate.wait_started()[0]
    links = {
        os.readlink(f"/proc/{pid}/fd/{fd}") for pid in (handler, forkserver) for fd in os.listdir(f"/proc/{pid}/fd")
    }
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    with open("/proc/net/unix") as unix, open("/proc/net/tcp") as tcp:
        servers = {row.split()[6] for row in unix if ".s.PGSQL." in row} | {
            row.split()[9] for row in tcp if "01" in row
        }
    assert not inodes & servers
    worker = pid_of(tree, "worker:patient")
    alive = "select 1 from pg_stat_activity where pid = any(%s)"
    sessions = "select pid from pg_stat_activity where application_name like '%worker:patient%'"
    pids = [row[0] for row in connection.execute(sessions)]
    assert pids
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: connection.execute(alive, (pids,)).fetchone() is None, "the end of its session")
    gate.open()


def test_a_worker_has_time_for_its_drain_and_its_supervisor_for_all_of_them() -> None:
    """Statement 97."""
    settings = Settings(drain_timeout=100, kill_grace=7)
    config = BootConfig(("shop",), Source(()), "dbname=x", settings)
    worker = worker_spec("shop", "shop", config)
    assert isinstance(worker.shutdown, int)
    assert worker.shutdown > (100 + 7) * 1000
    assert next(c for c in tree_spec(config).children if c.id == "workers").shutdown == "infinity"
