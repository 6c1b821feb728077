"""Locking rules with two sessions (sql-contract 2.14)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable

    from support.engine import Engine

OUTCOMES = ["complete", "fail"]

#: Ways in which open tasks end without their worker: what is called on a run that `siblings` made.
ENDINGS: dict[str, Callable[[Engine, uuid.UUID], Any]] = {
    "run fails": lambda own, run: own.fail(run, "x"),
    "step is skipped by its handler": lambda own, run: own.fail(run, "skips", 0),
    "step is skipped by force": lambda own, run: own.execute(
        "select pgflow._cascade_force_skip_steps(%s, 'skips', 'handler_failed')", run
    ),
    "type violation": lambda own, run: own.complete(run, "x", output=1),
    "condition fails the run": lambda own, run: own.complete(run, "c", output=1),
}


def pair(engine: Engine) -> uuid.UUID:
    """A claimed run of two steps with a single attempt each."""
    engine.flow(max_attempts=1)
    engine.step("a")
    engine.step("b")
    run = engine.start()
    engine.claim()
    return run


def siblings(engine: Engine) -> uuid.UUID:
    """A claimed run whose tasks any of ENDINGS ends; item 1 of map `skips` is ended by all of them."""
    engine.flow(max_attempts=1)
    engine.step("skips", step_type="map", when_exhausted="skip")
    engine.step("x")
    engine.step("m", "x", step_type="map")
    engine.step("c")
    engine.step("d", "c", required_input_pattern={"c": 2}, when_unmet="fail")
    run = engine.start([1, 2])
    engine.claim()
    return run


def settle(engine: Engine, outcome: str, run: uuid.UUID, step: str, index: int = 0) -> list[dict[str, Any]]:
    if outcome == "complete":
        return engine.complete(run, step, index, index)
    return engine.fail(run, step, index)


def free_messages(engine: Engine, queue: str = "f") -> list[int]:
    """Live messages that no session has changed or locked."""
    query = f"select msg_id from pgmq.q_{queue} order by msg_id for update skip locked"
    return [row["msg_id"] for row in engine.rows(query)]


def free_tasks(engine: Engine) -> int:
    return len(engine.rows("select from pgflow.step_tasks for update skip locked"))


def impatient(engine: Engine) -> None:
    """Waiting for any lock becomes an error, where a call must not wait."""
    engine.execute("set lock_timeout = '5s'")


# Rules 1 and 3: one run, one outcome at a time


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_waits_for_the_row_of_its_run(engine: Engine, outcome: str) -> None:
    run = pair(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.runs where run_id = %s for update", run)
        thread, results = engine.in_another_session(lambda own: settle(own, outcome, run, "a"))
        engine.wait_blocked()
        assert free_tasks(engine) == 2
        assert free_messages(engine) == [1, 2]
    thread.join()
    assert [row["status"] for row in results[0]] == ["completed" if outcome == "complete" else "failed"]


def test_completions_of_one_map_at_once_are_all_counted(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("z", "m")
    run = engine.start([1, 2, 3])
    engine.claim()
    with engine.transaction() as other:
        other.complete(run, "m", 0, 0)
        one, _ = engine.in_another_session(lambda own: own.complete(run, "m", 1, 1))
        two, _ = engine.in_another_session(lambda own: own.complete(run, "m", 2, 2))
        engine.wait_blocked(2)
    one.join()
    two.join()
    state = engine.state(run, "m")
    assert (state["status"], state["remaining_tasks"], state["output"]) == ("completed", 0, [0, 1, 2])
    assert engine.statuses(run)["z"] == "started"


def test_parents_that_complete_at_once_start_their_child_once(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.step("c", "a", "b")
    run = engine.start()
    engine.claim()
    with engine.transaction() as other:
        other.complete(run, "a", output=1)
        thread, _ = engine.in_another_session(lambda own: own.complete(run, "b", output=2))
        engine.wait_blocked()
    thread.join()
    assert [t["input"] for t in engine.claim()] == [{"a": 1, "b": 2}]
    assert engine.state(run, "c")["remaining_deps"] == 0
    assert engine.run(run)["remaining_steps"] == 1


def test_the_same_outcome_reported_twice_at_once_counts_once(engine: Engine) -> None:
    run = pair(engine)
    with engine.transaction() as other:
        other.complete(run, "a", output="first")
        thread, results = engine.in_another_session(lambda own: own.complete(run, "a", output="second"))
        engine.wait_blocked()
    thread.join()
    assert [(row["status"], row["output"]) for row in results[0]] == [("completed", "first")]
    assert engine.run(run)["remaining_steps"] == 1
    assert engine.events().count("step:a:completed") == 1


def test_two_failures_at_once_fail_the_run_once(engine: Engine) -> None:
    run = pair(engine)
    engine.events()
    with engine.transaction() as other:
        other.fail(run, "a", error="first")
        thread, results = engine.in_another_session(lambda own: own.fail(run, "b", error="second"))
        engine.wait_blocked()
    thread.join()
    assert [(row["status"], row["error_message"]) for row in results[0]] == [("cancelled", None)]
    assert engine.run(run)["failed_at"] == engine.task(run, "a")["failed_at"]
    assert engine.events() == ["step:a:failed", "run:failed"]


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_whose_run_failed_while_it_waited_only_archives(engine: Engine, outcome: str) -> None:
    run = pair(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.runs where run_id = %s for update", run)
        before = engine.task(run, "a"), engine.state(run, "a")
        engine.events()
        thread, results = engine.in_another_session(lambda own: settle(own, outcome, run, "a"))
        engine.wait_blocked()
        other.execute("update pgflow.runs set status = 'failed', failed_at = now()")
    thread.join()
    assert results == [[before[0]]]
    assert (engine.task(run, "a"), engine.state(run, "a")) == before
    assert [m["msg_id"] for m in engine.archived()] == [before[0]["message_id"]]
    assert engine.events() == []


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_whose_step_was_skipped_while_it_waited_only_archives(engine: Engine, outcome: str) -> None:
    run = pair(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.runs where run_id = %s for update", run)
        before, remaining = engine.task(run, "a"), engine.run(run)["remaining_steps"]
        engine.events()
        thread, results = engine.in_another_session(lambda own: settle(own, outcome, run, "a"))
        engine.wait_blocked()
        other.execute(
            "update pgflow.step_states set status = 'skipped', remaining_tasks = null, skip_reason = 'handler_failed' "
            "where step_slug = 'a'"
        )
    thread.join()
    assert results == [[before]]
    assert engine.task(run, "a") == before
    assert engine.run(run)["remaining_steps"] == remaining
    assert [m["msg_id"] for m in engine.archived()] == [before["message_id"]]
    assert engine.events() == []


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_takes_the_run_before_the_step(engine: Engine, outcome: str) -> None:
    run = pair(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.step_states where step_slug = 'a' for update")
        thread, results = engine.in_another_session(lambda own: settle(own, outcome, run, "a"))
        engine.wait_blocked()
        assert engine.rows("select from pgflow.runs for update skip locked") == []
        assert free_tasks(engine) == 2
        assert free_messages(engine) == [1, 2]
    thread.join()
    assert len(results[0]) == 1


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_outcomes_of_different_runs_do_not_wait_for_each_other(engine: Engine, outcome: str) -> None:
    run = pair(engine)
    other_run = engine.start()
    engine.claim()
    impatient(engine)
    with engine.transaction() as other:
        other.complete(run, "a", output=1)
        assert [row["run_id"] for row in settle(engine, outcome, other_run, "a")] == [other_run]


# Rule 2: tasks before messages


@pytest.mark.parametrize("ending", ENDINGS)
def test_tasks_end_before_any_message_is_archived(engine: Engine, ending: str) -> None:
    run = siblings(engine)
    messages = free_messages(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.step_tasks where step_slug = 'skips' and task_index = 1 for update")
        thread, results = engine.in_another_session(lambda own: ENDINGS[ending](own, run) and None)
        engine.wait_blocked()
        assert free_messages(engine) == messages
    thread.join()
    assert results == [None]
    assert engine.task(run, "skips", 1)["status"] in {"skipped", "cancelled"}


def test_a_claim_updates_its_task_before_its_message(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    messages, worker = engine.read(), engine.worker()
    with engine.transaction() as other:
        other.execute("select from pgmq.q_f for update")
        thread, results = engine.in_another_session(lambda own: own.start_tasks(messages, worker))
        engine.wait_blocked()
        assert free_tasks(engine) == 0
    thread.join()
    assert len(results[0]) == 1


@pytest.mark.parametrize("count", [0, 3])
def test_recovery_updates_its_tasks_before_their_messages(engine: Engine, count: int) -> None:
    pair(engine)
    engine.execute("update pgflow.step_tasks set requeued_count = %s", count)
    engine.age(1000)
    with engine.transaction() as other:
        other.execute("select from pgmq.q_f where msg_id = 1 for update")
        thread, results = engine.in_another_session(lambda own: own.value("select pgflow.requeue_stalled_tasks()"))
        engine.wait_blocked()
        assert free_tasks(engine) == 0
    thread.join()
    assert results == [2 if count == 0 else 0]


# Rule 4: claims


def test_a_claim_does_not_wait_for_the_row_of_a_run(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    messages, worker = engine.read(), engine.worker()
    impatient(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.runs for update")
        other.execute("select from pgflow.step_states for update")
        assert len(engine.start_tasks(messages, worker)) == 1


def test_a_claim_passes_over_a_task_that_another_session_holds(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2, 3])
    messages, worker = engine.read(), engine.worker()
    impatient(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.step_tasks where task_index = 1 for update")
        assert [t["task_index"] for t in engine.start_tasks(messages, worker)] == [0, 2]
    assert engine.task(run, "m", 1)["attempts_count"] == 0
    assert [t["task_index"] for t in engine.start_tasks(messages, worker)] == [1]


def test_of_two_claims_at_once_one_gets_the_task(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    messages, first, second = engine.read(), engine.worker(), engine.worker()
    with engine.transaction() as other:
        assert len(other.start_tasks(messages, first)) == 1
        thread, results = engine.in_another_session(lambda own: own.start_tasks(messages, second))
    thread.join()
    assert results == [[]]
    task = engine.task(run, "a")
    assert (task["attempts_count"], task["last_worker_id"]) == (1, first)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_claim_during_the_end_of_its_task_returns_nothing(engine: Engine, ending: str) -> None:
    run = siblings(engine)
    engine.execute("update pgflow.step_tasks set status = 'queued', started_at = null where task_index = 1")
    before, worker = engine.task(run, "skips", 1), engine.worker()
    with engine.transaction() as other:
        ENDINGS[ending](other, run)
        thread, results = engine.in_another_session(lambda own: own.start_tasks([before["message_id"]], worker))
    thread.join()
    assert results == [[]]
    after = engine.task(run, "skips", 1)
    assert after["status"] in {"skipped", "cancelled"}
    assert after == before | {"status": after["status"]}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_end_that_waits_for_a_claim_ends_the_claimed_task(engine: Engine, ending: str) -> None:
    run = siblings(engine)
    engine.execute("update pgflow.step_tasks set status = 'queued', started_at = null where task_index = 1")
    message, worker = engine.task(run, "skips", 1)["message_id"], engine.worker()
    with engine.transaction() as other:
        assert len(other.start_tasks([message], worker)) == 1
        thread, results = engine.in_another_session(lambda own: ENDINGS[ending](own, run) and None)
        engine.wait_blocked()
    thread.join()
    assert results == [None]
    task = engine.task(run, "skips", 1)
    assert task["status"] in {"skipped", "cancelled"}
    assert task["last_worker_id"] == worker
    assert message in {m["msg_id"] for m in engine.archived()}
    assert message not in {m["msg_id"] for m in engine.live()}


# Rule 6: recovery


def test_recovery_never_waits_for_a_task(engine: Engine) -> None:
    pair(engine)
    engine.age(1000)
    impatient(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.step_tasks where step_slug = 'a' for update")
        assert engine.value("select pgflow.requeue_stalled_tasks()") == 1
        assert engine.row("select * from pgflow.recover_stalled_tasks(0)") == {"recovered_count": 0, "vt_batches": 0}
    assert engine.value("select pgflow.requeue_stalled_tasks()") == 1


def test_recovery_locks_tasks_only(engine: Engine) -> None:
    pair(engine)
    engine.age(1000)
    impatient(engine)
    with engine.transaction() as other:
        for table in ("runs", "step_states", "steps", "flows"):
            other.execute(f"select from pgflow.{table} for update")
        assert engine.value("select pgflow.requeue_stalled_tasks()") == 2


def test_recovery_leaves_a_task_that_is_being_completed(engine: Engine) -> None:
    run = pair(engine)
    engine.age(1000)
    with engine.transaction() as other:
        other.complete(run, "a", output=1)
        assert engine.value("select pgflow.requeue_stalled_tasks()") == 1
    assert engine.task(run, "a")["status"] == "completed"
    assert engine.task(run, "b")["status"] == "queued"


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_that_waits_for_a_requeue_does_not_undo_it(engine: Engine, outcome: str) -> None:
    run = pair(engine)
    engine.age(1000)
    with engine.transaction() as other:
        assert other.value("select pgflow.requeue_stalled_tasks()") == 2
        thread, results = engine.in_another_session(lambda own: settle(own, outcome, run, "a"))
        engine.wait_blocked()
    thread.join()
    task = engine.task(run, "a")
    assert results == [[task]]
    assert (task["status"], task["requeued_count"], task["error_message"]) == ("queued", 1, None)
    assert engine.statuses(run) == {"a": "started", "b": "started"}
    assert [m["msg_id"] for m in engine.live()] == [1, 2]


def test_an_escalation_that_waits_for_a_completion_leaves_its_task(engine: Engine) -> None:
    run = pair(engine)
    engine.execute("update pgflow.step_tasks set requeued_count = 3")
    engine.age(1000)
    engine.execute("select pgflow.requeue_stalled_tasks()")
    engine.execute("update pgflow.step_tasks set permanently_stalled_at = null where step_slug = 'b'")
    with engine.transaction() as other:
        other.complete(run, "a", output=1)
        escalate = "select pgflow.escalate_permanently_stalled()"
        thread, results = engine.in_another_session(lambda own: own.value(escalate))
        engine.wait_blocked()
    thread.join()
    assert results == [0]
    assert engine.statuses(run) == {"a": "completed", "b": "started"}
    assert engine.run(run)["status"] == "started"


# Rule 1: definitions

NO_PATTERN = {"defined": False}
STEP = {"slug": "a", "stepType": "single", "dependencies": []}
SHAPE = json.dumps({"steps": [{**STEP, "requiredInputPattern": NO_PATTERN, "forbiddenInputPattern": NO_PATTERN}]})
WRITERS = {
    "create_flow": "select pgflow.create_flow('MyFlow')",
    "ensure_flow_compiled": f"select pgflow.ensure_flow_compiled('MyFlow', '{SHAPE}'::jsonb)",
    "ensure_flow_compiled with mode": f"select pgflow.ensure_flow_compiled('MyFlow', '{SHAPE}'::jsonb, 'step')",
    "_create_flow_from_shape": f"select pgflow._create_flow_from_shape('MyFlow', '{SHAPE}'::jsonb)",
    "delete_flow_and_data": "select pgflow.delete_flow_and_data('MyFlow')",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_definition_writer_waits_for_the_lock_of_its_slug_before_it_touches_a_table(
    engine: Engine, writer: str
) -> None:
    with engine.transaction() as other:
        other.execute("select pg_advisory_xact_lock(1, hashtext('myflow'))")
        thread, results = engine.in_another_session(lambda own: own.rows(WRITERS[writer]) and None)
        engine.wait_blocked()
        assert engine.rows(
            "select c.relname, l.mode from pg_locks l join pg_class c on c.oid = l.relation "
            "where l.database = (select oid from pg_database where datname = current_database()) "
            "and c.relnamespace in ('pgflow'::regnamespace, 'pgmq'::regnamespace)"
        ) == []  # fmt: skip
    thread.join()
    assert results == [None]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_definition_writer_keeps_the_lock_until_its_transaction_ends(engine: Engine, writer: str) -> None:
    query = "select pg_try_advisory_xact_lock(1, hashtext('myflow'))"
    with engine.transaction() as other:
        other.execute(WRITERS[writer])
        assert engine.value(query) is False
        assert engine.value("select pg_try_advisory_xact_lock(1, hashtext('other'))") is True
    assert engine.value(query) is True


def test_of_two_compilations_at_once_one_compiles_and_the_other_verifies(engine: Engine) -> None:
    query = f"select pgflow.ensure_flow_compiled('f', '{SHAPE}'::jsonb)"
    with engine.transaction() as other:
        assert other.value(query)["status"] == "compiled"
        thread, results = engine.in_another_session(lambda own: own.value(query))
        engine.wait_blocked()
    thread.join()
    assert [result["status"] for result in results] == ["verified"]
    assert len(engine.rows("select from pgflow.steps")) == 1


def test_compilations_of_different_flows_do_not_wait_for_each_other(engine: Engine) -> None:
    impatient(engine)
    with engine.transaction() as other:
        other.execute("select pgflow.ensure_flow_compiled('f', %s::jsonb)", SHAPE)
        assert engine.value("select pgflow.ensure_flow_compiled('g', %s::jsonb)", SHAPE)["status"] == "compiled"


# Deletion of a run


def test_deleting_a_run_takes_its_row_first(engine: Engine) -> None:
    run = pair(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.runs for update")
        thread, results = engine.in_another_session(lambda own: own.value("select pgflow.delete_run(%s)", run))
        engine.wait_blocked()
        assert free_tasks(engine) == 2
        assert free_messages(engine) == [1, 2]
    thread.join()
    assert results == [True]


def test_deleting_a_run_waits_for_an_outcome_in_flight(engine: Engine) -> None:
    run = pair(engine)
    with engine.transaction() as other:
        other.complete(run, "a", output=1)
        thread, results = engine.in_another_session(lambda own: own.value("select pgflow.delete_run(%s)", run))
        engine.wait_blocked()
    thread.join()
    assert results == [True]
    assert engine.rows("select from pgflow.step_tasks") == engine.live() == engine.archived() == []


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_that_waited_for_the_deletion_of_its_run_is_an_empty_set(engine: Engine, outcome: str) -> None:
    run = pair(engine)
    with engine.transaction() as other:
        assert other.value("select pgflow.delete_run(%s)", run) is True
        thread, results = engine.in_another_session(lambda own: settle(own, outcome, run, "a"))
        engine.wait_blocked()
    thread.join()
    assert results == [[]]
    assert engine.rows("select from pgflow.runs") == []
