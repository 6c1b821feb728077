"""What workers and recovery call: claims, outcomes, releases; with two sessions where it is about locks."""

from __future__ import annotations

import json
import threading
import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

Connection = psycopg.Connection[Any]


@pytest.fixture
def worker(connection: Connection) -> uuid.UUID:
    return register(connection)


@pytest.fixture
def run_id(connection: Connection) -> uuid.UUID:
    """A run of a map of three, each item with three attempts."""
    connection.execute("select pgflow.create_flow('f', 3, 0, 20)")
    connection.execute("select pgflow.add_step('f', 'm', step_type => 'map', timeout => 7)")
    return start(connection, [1, 2, 3])


def register(connection: Connection, name: str = "python:x") -> uuid.UUID:
    worker_id = uuid.uuid4()
    connection.execute("select pgflow.register_worker(%s, 'f', %s)", (worker_id, name))
    return worker_id


def start(connection: Connection, value: Any) -> uuid.UUID:
    row = connection.execute("select run_id from pgflow.start_flow('f', %s)", (json.dumps(value),)).fetchone()
    assert row
    return uuid.UUID(str(row[0]))


def claim(connection: Connection, worker: uuid.UUID, quantity: int = 10) -> list[Any]:
    query = "select * from pgflow_otp.claim_tasks('f', 'f', %s, 5, %s) order by task_index"
    return connection.execute(query, (worker, quantity)).fetchall()


def settle(connection: Connection, worker: uuid.UUID, task: Any, outcome: str, **values: Any) -> str:
    row = connection.execute(
        "select pgflow_otp.settle_task(%s, %s, %s, %s, %s, %s, %s, %s)",
        (
            task[0], task[1], task[2], worker, task[5], outcome,
            json.dumps(values["output"]) if "output" in values else None, values.get("error"),
        ),
    ).fetchone()  # fmt: skip
    assert row
    return str(row[0])


def task_row(connection: Connection, index: int = 0) -> dict[str, Any]:
    cursor = connection.execute("select * from pgflow.step_tasks where task_index = %s", (index,))
    row = cursor.fetchone()
    assert row
    assert cursor.description
    return dict(zip([c.name for c in cursor.description], row, strict=True))


def visible_in(connection: Connection, index: int = 0) -> float | None:
    """Seconds until the message of a task becomes visible; None when it is archived."""
    row = connection.execute(
        "select extract(epoch from q.vt - clock_timestamp()) from pgmq.q_f q "
        "join pgflow.step_tasks t on t.message_id = q.msg_id where t.task_index = %s",
        (index,),
    ).fetchone()
    return float(row[0]) if row else None


def in_thread(dsn: str, work: Callable[[Connection], Any]) -> tuple[threading.Thread, list[Any]]:
    """Do something in a session of its own, at the same time; its result, or error, ends up in the list."""
    results: list[Any] = []

    def run() -> None:
        with psycopg.connect(dsn, autocommit=True) as own:
            try:
                results.append(work(own))
            except psycopg.Error as error:
                results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def wait_blocked(connection: Connection) -> None:
    """Wait until some session of this database waits for a lock."""
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"

    def blocked() -> bool:
        row = connection.execute(query).fetchone()
        return bool(row and row[0])

    wait_for(blocked, "a session to wait for a lock")


def test_a_claim_tells_all_a_worker_needs(connection: Connection, worker: uuid.UUID, run_id: uuid.UUID) -> None:
    claimed = claim(connection, worker, 2)
    assert [c[:5] + c[6:] for c in claimed] == [
        (run_id, "m", 0, 1, 3, 7, 1, None),
        (run_id, "m", 1, 1, 3, 7, 2, None),
    ]
    assert claimed[0][5] == task_row(connection)["started_at"]
    assert 7 < (visible_in(connection) or 0) <= 9
    assert [c[2] for c in claim(connection, worker)] == [2]
    assert claim(connection, worker) == []


@pytest.mark.parametrize("column", ["stopped_at", "deprecated_at"])
def test_a_worker_that_has_to_leave_claims_nothing(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, column: str
) -> None:
    connection.execute(f"update pgflow.workers set {column} = now()".encode())
    assert claim(connection, worker) == []
    connection.execute(f"update pgflow.workers set {column} = null".encode())
    assert len(claim(connection, worker)) == 3


def test_an_unknown_worker_claims_nothing(connection: Connection, run_id: uuid.UUID) -> None:
    assert claim(connection, uuid.uuid4()) == []


def test_a_claim_waits_for_nobody(connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, database: str) -> None:
    with psycopg.connect(database) as other:
        other.execute("select from pgflow.step_tasks where task_index = 1 for update")
        assert [c[2] for c in claim(connection, worker)] == [0, 2]


@pytest.mark.parametrize(
    ("outcome", "status", "attempts"),
    [
        ("completed", "completed", 1),
        ("failed", "queued", 1),
        ("failed_for_good", "failed", 1),
        ("released", "queued", 0),
    ],
)
def test_each_outcome(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, outcome: str, status: str, attempts: int
) -> None:
    task = claim(connection, worker, 1)[0]
    assert settle(connection, worker, task, outcome, output=5, error="why") == status
    row = task_row(connection)
    assert (row["status"], row["attempts_count"]) == (status, attempts)
    if outcome == "released":
        assert (visible_in(connection) or 0) <= 0
        assert row["last_worker_id"] is None
    elif status == "queued":
        assert row["error_message"] == "why"
    else:
        assert visible_in(connection) is None


def test_an_outcome_nobody_knows_is_refused(connection: Connection, worker: uuid.UUID, run_id: uuid.UUID) -> None:
    task = claim(connection, worker, 1)[0]
    with pytest.raises(psycopg.errors.RaiseException, match='unknown outcome "lost"'):
        settle(connection, worker, task, "lost")
    assert task_row(connection)["status"] == "started"


def test_the_outcome_of_an_overtaken_claim_changes_nothing(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID
) -> None:
    first = claim(connection, worker, 1)[0]
    settle(connection, worker, first, "released")
    other = register(connection)
    second = claim(connection, other, 1)[0]
    assert second[2] == first[2]
    assert second[3] == first[3]  # The same attempt number: only the claim tells them apart.
    assert settle(connection, worker, first, "completed", output=1) == "overtaken"
    assert task_row(connection)["status"] == "started"
    assert settle(connection, other, second, "completed", output=2) == "completed"
    assert settle(connection, other, second, "completed", output=3) == "completed"
    assert task_row(connection)["output"] == 2


def test_a_task_that_crashes_its_process_three_times_fails(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID
) -> None:
    for status in ("queued", "queued", "failed"):
        task = next(c for c in claim(connection, worker) if c[2] == 0)
        assert settle(connection, worker, task, "crashed", error="crashed too often") == status
    assert task_row(connection)["error_message"] == "crashed too often"
    assert connection.execute("select status from pgflow.runs").fetchone() == ("failed",)


def test_releasing_a_worker_gives_back_its_attempts(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID
) -> None:
    claim(connection, worker)
    assert connection.execute("select * from pgflow_otp.release_worker(%s)", (worker,)).fetchone() == (3, 0, 0)
    row = task_row(connection)
    assert (row["status"], row["attempts_count"], row["requeued_count"]) == ("queued", 0, 1)
    assert (visible_in(connection) or 0) <= 0
    assert claim(connection, worker) == []
    assert len(claim(connection, register(connection))) == 3


def test_rows_that_somebody_holds_are_released_later(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, database: str
) -> None:
    claim(connection, worker)
    with psycopg.connect(database) as other:
        other.execute("select from pgflow.step_tasks where task_index = 1 for update")
        assert connection.execute("select * from pgflow_otp.release_worker(%s)", (worker,)).fetchone() == (2, 0, 1)
    assert connection.execute("select * from pgflow_otp.release_worker(%s)", (worker,)).fetchone() == (1, 0, 0)


def test_a_claim_in_flight_cannot_slip_in_behind_the_release(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, database: str
) -> None:
    with psycopg.connect(database) as dying:
        assert len(claim(dying, worker)) == 3
        query = "select * from pgflow_otp.release_worker(%s)"
        thread, results = in_thread(database, lambda own: own.execute(query, (worker,)).fetchone())
        wait_blocked(connection)
        dying.commit()
    thread.join()
    assert results == [(3, 0, 0)]


def test_a_claim_that_comes_after_the_release_has_begun_gets_nothing(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, database: str
) -> None:
    with psycopg.connect(database) as recovery:
        recovery.execute("select * from pgflow_otp.release_worker(%s)", (worker,))
        thread, results = in_thread(database, lambda own: claim(own, worker))
        wait_blocked(connection)
        recovery.commit()
    thread.join()
    assert results == [[]]


def test_a_worker_that_died_three_times_with_a_task_fails_it(connection: Connection, run_id: uuid.UUID) -> None:
    for time_ in range(3):
        worker = register(connection)
        assert len(claim(connection, worker)) == 3
        released = connection.execute(
            "select released, crashed from pgflow_otp.release_worker(%s)", (worker,)
        ).fetchone()
        assert released == ((3, 0) if time_ < 2 else (0, 3))
    assert connection.execute("select pgflow_otp.fail_crashed_tasks(%s)", (worker,)).fetchone() == (1,)
    statuses = connection.execute("select status from pgflow.step_tasks order by task_index").fetchall()
    assert statuses == [("failed",), ("cancelled",), ("cancelled",)]
    assert task_row(connection)["attempts_count"] == 1


def test_a_heartbeat_says_whether_to_go_on(connection: Connection, worker: uuid.UUID) -> None:
    def beat(worker_id: uuid.UUID) -> Any:
        return connection.execute("select pgflow_otp.heartbeat(%s)", (worker_id,)).fetchone()

    assert beat(worker) == (True,)
    connection.execute("update pgflow.workers set deprecated_at = now()")
    assert beat(worker) == (False,)
    assert beat(uuid.uuid4()) == (False,)


def test_silent_workers_are_those_of_ours_that_hold_tasks(connection: Connection, run_id: uuid.UUID) -> None:
    ours, idle, other = register(connection), register(connection), register(connection, "elixir:Mod")
    claim(connection, ours, 1)
    claim(connection, other, 1)
    assert idle
    connection.execute("update pgflow.workers set last_heartbeat_at = now() - interval '2 minutes'")
    assert connection.execute("select pgflow_otp.silent_workers(60)").fetchall() == [(ours,)]
    assert connection.execute("select pgflow_otp.silent_workers(600)").fetchall() == []


def age(connection: Connection, seconds: int) -> None:
    connection.execute(
        "update pgflow.step_tasks set queued_at = queued_at - make_interval(secs => %s), "
        "started_at = started_at - make_interval(secs => %s)",
        (seconds, seconds),
    )


@pytest.mark.parametrize(("seconds", "requeued"), [(16, 0), (18, 3)])
def test_stalled_means_past_the_steps_own_timeout_and_the_threshold(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, seconds: int, requeued: int
) -> None:
    """The step's timeout is 7, the flow's 20."""
    claim(connection, worker)
    age(connection, seconds)
    assert connection.execute("select * from pgflow.recover_stalled_tasks(10)").fetchone() == (requeued, requeued)
    assert task_row(connection)["attempts_count"] == 1


def test_what_stalls_for_the_fourth_time_is_given_up_archived_and_failed(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID
) -> None:
    for _ in range(3):
        claim(connection, worker)
        age(connection, 1000)
        connection.execute("select * from pgflow.recover_stalled_tasks(10)")
    claim(connection, worker)
    age(connection, 1000)
    assert connection.execute("select pgflow.requeue_stalled_tasks()").fetchone() == (0,)
    assert visible_in(connection) is None
    assert task_row(connection)["status"] == "started"
    assert connection.execute("select pgflow.escalate_permanently_stalled()").fetchone() == (1,)
    assert "stalled" in task_row(connection)["error_message"]
    assert connection.execute("select status from pgflow.runs").fetchone() == ("failed",)


def test_deleting_a_run_takes_its_messages_along(connection: Connection, worker: uuid.UUID, run_id: uuid.UUID) -> None:
    other = start(connection, [9])
    settle(connection, worker, claim(connection, worker, 1)[0], "completed", output=1)
    assert connection.execute("select pgflow.delete_run(%s)", (run_id,)).fetchone() == (True,)
    assert connection.execute("select pgflow.delete_run(%s)", (run_id,)).fetchone() == (False,)
    left = connection.execute(
        "select (select count(*) from pgmq.q_f), (select count(*) from pgmq.a_f), "
        "(select count(*) from pgflow.step_tasks)"
    ).fetchone()
    assert left == (1, 0, 1)
    assert connection.execute("select run_id from pgflow.runs").fetchall() == [(other,)]


def test_pruning_removes_what_ended_before_the_cutoff(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID
) -> None:
    for task in claim(connection, worker):
        settle(connection, worker, task, "completed", output=1)
    kept = start(connection, [1])
    connection.execute(
        "update pgflow.runs set started_at = started_at - interval '2 days', "
        "completed_at = completed_at - interval '2 days' "
        "where run_id = %s",
        (run_id,),
    )
    connection.execute("update pgmq.a_f set archived_at = archived_at - interval '2 days'")
    row = connection.execute("select * from pgflow.prune_data_older_than('1 day', null)").fetchone()
    assert row == (1, 1, 3, 0)
    assert connection.execute("select run_id from pgflow.runs").fetchall() == [(kept,)]
    assert connection.execute("select count(*) from pgmq.a_f").fetchone() == (0,)


def test_a_condition_is_judged_after_a_taskless_completion_too(connection: Connection) -> None:
    """A deliberate difference: the sibling would start the step whatever its condition says."""
    connection.execute("select pgflow.create_flow('f')")
    connection.execute("select pgflow.add_step('f', 'm', step_type => 'map')")
    connection.execute("select pgflow.add_step('f', 'c', array['m'], required_input_pattern => '{\"m\": [1]}')")
    start(connection, [])
    row = connection.execute("select status, skip_reason from pgflow.step_states where step_slug = 'c'").fetchone()
    assert row == ("skipped", "condition_unmet")
    assert connection.execute("select status from pgflow.runs").fetchone() == ("completed",)


def test_a_conditional_empty_map_is_judged_before_it_completes(connection: Connection) -> None:
    connection.execute("select pgflow.create_flow('f')")
    connection.execute("select pgflow.add_step('f', 'm', step_type => 'map')")
    connection.execute(
        "select pgflow.add_step('f', 'n', array['m'], step_type => 'map', forbidden_input_pattern => '{\"m\": []}')"
    )
    start(connection, [])
    row = connection.execute("select status, skip_reason from pgflow.step_states where step_slug = 'n'").fetchone()
    assert row == ("skipped", "condition_unmet")


def test_a_dependency_named_twice_counts_once(connection: Connection) -> None:
    """A deliberate difference: the sibling's step could never start."""
    connection.execute("select pgflow.create_flow('f')")
    connection.execute("select pgflow.add_step('f', 'a')")
    row = connection.execute("select deps_count from pgflow.add_step('f', 'b', array['a', 'a'])").fetchone()
    assert row == (1,)


@pytest.mark.parametrize("outcome", ["failed", "released", "crashed"])
def test_a_late_answer_for_a_task_that_was_given_up_does_not_leave_it_without_a_message(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, outcome: str
) -> None:
    connection.execute("update pgflow.step_tasks set requeued_count = 3 where task_index = 0")
    claim(connection, worker, 1)
    age(connection, 1000)
    connection.execute("select pgflow.requeue_stalled_tasks()")
    row = task_row(connection)
    assert row["permanently_stalled_at"] is not None
    task = (run_id, "m", 0, 1, 3, row["started_at"])
    assert settle(connection, worker, task, outcome, error="late") == "failed"
    assert connection.execute("select status from pgflow.runs").fetchone() == ("failed",)


def test_start_tasks_waits_for_nobody_either(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, database: str
) -> None:
    query = "select task_index from pgflow.start_tasks('f', array(select msg_id from pgmq.q_f), %s, 'f') order by 1"
    with psycopg.connect(database) as other:
        other.execute("select from pgflow.step_tasks where task_index = 0 for update")
        assert connection.execute(query, (worker,)).fetchall() == [(1,), (2,)]


def test_the_message_of_a_task_that_somebody_holds_stays_visible(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, database: str
) -> None:
    with psycopg.connect(database) as other:
        other.execute("select from pgflow.step_tasks where task_index = 1 for update")
        assert len(claim(connection, worker)) == 2
    assert [c[2] for c in claim(connection, worker)] == [1]


def test_rights_on_pgflow_pgmq_and_realtime_are_enough(connection: Connection, database: str) -> None:
    role = f"pgflow_test_{uuid.uuid4().hex[:8]}"
    connection.execute("select pgflow.create_flow('f')")
    connection.execute("select pgflow.add_step('f', 's')")
    statements = [f"create role {role} login"]
    for name in ("pgflow", "pgmq", "realtime"):
        statements += [
            f"grant usage on schema {name} to {role}",
            f"grant all on all tables in schema {name} to {role}",
            f"grant all on all routines in schema {name} to {role}",
        ]
    for statement in statements:
        connection.execute(statement.encode())
    try:
        connection.execute(f"set role {role}".encode())
        run_id = start(connection, {})
        worker = register(connection)
        task = claim(connection, worker)[0]
        assert settle(connection, worker, task, "completed", output=1) == "completed"
        assert task[0] == run_id
    finally:
        connection.execute("reset role")
        connection.execute(f"drop owned by {role}".encode())
        connection.execute(f"drop role {role}".encode())


@pytest.mark.parametrize("mode", ["flow", "step"])
def test_a_shape_that_names_a_dependency_twice_is_verified_again(connection: Connection, mode: str) -> None:
    none = {"defined": False}
    common = {"whenUnmet": "skip", "whenExhausted": "fail", "requiredInputPattern": none, "forbiddenInputPattern": none}
    shape = {
        "steps": [
            {"slug": "a", "stepType": "single", "dependencies": [], **common},
            {"slug": "b", "stepType": "map", "dependencies": ["a", "a"], **common},
        ]
    }
    for status in ("compiled", "verified"):
        row = connection.execute(
            "select pgflow.ensure_flow_compiled('g', %s, %s)", (json.dumps(shape), mode)
        ).fetchone()
        assert row
        assert row[0]["status"] == status


def test_deleting_a_flow_waits_for_a_callback_in_flight(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, database: str
) -> None:
    task = claim(connection, worker, 1)[0]
    with psycopg.connect(database) as callback:
        callback.execute("select from pgflow.runs for update")
        thread, results = in_thread(
            database, lambda own: own.execute("select pgflow.delete_flow_and_data('f')").rowcount
        )
        wait_blocked(connection)
        callback.execute("select pgflow.complete_task(%s, 'm', 0, '1')", (task[0],))
        callback.commit()
    thread.join()
    assert results == [1]
    assert connection.execute("select count(*) from pgflow.step_tasks").fetchone() == (0,)


def test_pruning_waits_for_a_run_that_is_being_deleted(
    connection: Connection, worker: uuid.UUID, run_id: uuid.UUID, database: str
) -> None:
    claim(connection, worker)
    connection.execute("update pgflow.workers set last_heartbeat_at = now() - interval '2 days'")
    with psycopg.connect(database) as other:
        other.execute("select from pgflow.runs for update")
        query = "select deleted_workers from pgflow.prune_data_older_than('1 day', null)"
        thread, results = in_thread(database, lambda own: own.execute(query).fetchone())
        wait_blocked(connection)
        other.execute("select pgflow.delete_run(%s)", (run_id,))
        other.commit()
    thread.join()
    assert results == [(1,)]
