"""pgflow_otp.cancel_run and pgflow_otp.retry_run."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    from support.engine import Engine


@pytest.fixture
def worker(engine: Engine) -> uuid.UUID:
    """A worker, and flow `f`: a; a map m of a's output; z after it. One attempt each."""
    engine.flow(max_attempts=1)
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.step("z", "m")
    return engine.worker()


def fail_in_the_map(engine: Engine, worker: uuid.UUID, items: int = 3) -> uuid.UUID:
    """A run whose map has one item completed, one failed, and the others cancelled."""
    run = engine.start()
    engine.claim(worker)
    engine.complete(run, "a", 0, [{"n": n} for n in range(items)])
    engine.claim(worker, quantity=2)
    engine.complete(run, "m", 0, "kept")
    engine.fail(run, "m", 1, "broken")
    assert engine.run(run)["status"] == "failed"
    engine.events()
    return run


# Cancel


def test_cancelling_fails_the_run_and_cancels_its_open_tasks(engine: Engine, worker: uuid.UUID) -> None:
    run = engine.start()
    engine.claim(worker)
    engine.complete(run, "a", 0, [1, 2])
    engine.claim(worker, quantity=1)
    engine.events()
    engine.execute("select pgflow_otp.cancel_run(%s, 'wrong order')", run)
    assert engine.run(run)["status"] == "failed"
    assert engine.run(run)["failed_at"] is not None
    assert engine.statuses(run) == {"a": "completed", "m": "started", "z": "created"}
    assert [engine.task(run, "m", index)["status"] for index in (0, 1)] == ["cancelled", "cancelled"]
    assert engine.live() == []
    ((event, payload),) = engine.payloads()
    assert event == "run:failed"
    assert payload["error_message"] == "Run cancelled: wrong order"
    action = engine.row("select * from pgflow_otp.run_actions")
    assert (action["run_id"], action["action"], action["reason"]) == (run, "cancelled", "wrong order")
    assert action["done_by"] == engine.value("select current_user")


def test_a_late_answer_to_a_cancelled_run_changes_nothing(engine: Engine, worker: uuid.UUID) -> None:
    run = engine.start()
    engine.claim(worker)
    engine.execute("select pgflow_otp.cancel_run(%s)", run)
    before = engine.everything()
    assert engine.complete(run, "a", 0, [1])[0]["status"] == "cancelled"
    assert engine.fail(run, "a")[0]["status"] == "cancelled"
    assert engine.everything() == before


def test_cancelling_waits_for_a_callback_in_flight(engine: Engine, worker: uuid.UUID) -> None:
    run = engine.start()
    engine.claim(worker)
    with engine.transaction() as callback:
        callback.complete(run, "a", 0, [1])
        thread, results = engine.in_another_session(
            lambda own: own.execute("select pgflow_otp.cancel_run(%s)", run).rowcount
        )
        engine.wait_blocked()
    thread.join()
    assert results == [1]
    assert engine.task(run, "m")["status"] == "cancelled"
    assert engine.live() == []


@pytest.mark.parametrize("function", ["cancel_run", "retry_run"])
def test_an_unknown_run_is_named(engine: Engine, function: str) -> None:
    unknown = uuid.uuid4()
    with pytest.raises(psycopg.errors.NoDataFound, match=f"run {unknown} does not exist"):
        engine.execute(f"select pgflow_otp.{function}(%s)", unknown)


@pytest.mark.parametrize(
    ("function", "status", "wanted"),
    [
        ("cancel_run", "completed", "only a started run can be cancelled"),
        ("cancel_run", "failed", "only a started run can be cancelled"),
        ("retry_run", "completed", "only a failed run can be retried"),
        ("retry_run", "started", "only a failed run can be retried"),
    ],
)
def test_a_run_in_another_state_is_refused_unchanged(
    engine: Engine, worker: uuid.UUID, function: str, status: str, wanted: str
) -> None:
    run = engine.start()
    if status == "failed":
        engine.claim(worker)
        engine.fail(run, "a")
    elif status == "completed":
        engine.flow("empty")
        run = engine.start(flow="empty")
    before = engine.everything()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as refused:
        engine.execute(f"select pgflow_otp.{function}(%s)", run)
    assert f"run {run} is {status}: {wanted}" in str(refused.value)
    assert engine.everything() == before


# Retry


def test_a_retried_run_keeps_what_is_finished_and_does_the_rest(engine: Engine, worker: uuid.UUID) -> None:
    run = fail_in_the_map(engine, worker)
    engine.execute("select pgflow_otp.retry_run(%s, 'mended')", run)
    assert engine.run(run)["status"] == "started"
    assert engine.run(run)["failed_at"] is None
    assert engine.statuses(run) == {"a": "completed", "m": "started", "z": "created"}
    assert engine.state(run, "m")["remaining_tasks"] == 2
    assert engine.events() == ["run:started", "step:m:started"]
    claimed = engine.claim(worker)
    assert [(task["task_index"], task["input"], task["attempts_count"]) for task in claimed] == [
        (1, {"n": 1}, 1),
        (2, {"n": 2}, 1),
    ]
    for index in (1, 2):
        engine.complete(run, "m", index, "new")
    assert engine.claim(worker)[0]["input"] == {"m": ["kept", "new", "new"]}
    engine.complete(run, "z", 0, "end")
    assert engine.run(run)["output"] == {"z": "end"}
    assert engine.live() == []
    assert engine.row("select action, reason from pgflow_otp.run_actions") == {"action": "retried", "reason": "mended"}


def test_a_retried_task_has_all_its_attempts_again(engine: Engine, worker: uuid.UUID) -> None:
    engine.execute("update pgflow.flows set opt_max_attempts = 2")
    run = engine.start()
    for _ in range(2):
        engine.claim(worker)
        engine.fail(run, "a")
    engine.execute("select pgflow_otp.retry_run(%s)", run)
    for attempt in (1, 2):
        assert engine.claim(worker)[0]["attempts_count"] == attempt
        engine.fail(run, "a")
    assert engine.run(run)["status"] == "failed"


def test_a_cancelled_run_can_be_retried(engine: Engine, worker: uuid.UUID) -> None:
    run = engine.start()
    engine.claim(worker)
    engine.execute("select pgflow_otp.cancel_run(%s)", run)
    engine.execute("select pgflow_otp.retry_run(%s)", run)
    (task,) = engine.claim(worker)
    assert (task["step_slug"], task["flow_input"]) == ("a", {})


def test_the_answer_of_an_attempt_from_before_is_fenced_off(engine: Engine, worker: uuid.UUID) -> None:
    run = engine.start()
    (old,) = engine.own_claim(worker)
    engine.execute("select pgflow_otp.cancel_run(%s)", run)
    engine.execute("select pgflow_otp.retry_run(%s)", run)
    assert engine.settle_one(worker, (old, "completed", [1])) == "overtaken"
    (new,) = engine.own_claim(worker)
    assert engine.settle_one(worker, (old, "completed", [1])) == "overtaken"
    assert engine.settle_one(worker, (new, "completed", [1])) == "completed"


def test_a_type_violation_can_be_retried(engine: Engine, worker: uuid.UUID) -> None:
    run = engine.start()
    engine.claim(worker)
    engine.complete(run, "a", 0, {"not": "an array"})
    engine.execute("select pgflow_otp.retry_run(%s)", run)
    assert engine.task(run, "a")["output"] is None
    engine.claim(worker)
    engine.complete(run, "a", 0, [5])
    assert [task["input"] for task in engine.claim(worker)] == [5]


def test_a_condition_that_failed_the_run_is_judged_again(engine: Engine) -> None:
    engine.flow()
    engine.step("c", required_input_pattern={"go": True}, when_unmet="fail")
    run = engine.start({"go": False})
    engine.execute("select pgflow_otp.retry_run(%s)", run)
    assert engine.run(run)["status"] == "failed"
    engine.execute("update pgflow.steps set required_input_pattern = '{\"go\": false}'")
    engine.execute("select pgflow_otp.retry_run(%s)", run)
    assert engine.statuses(run) == {"c": "started"}


def test_skipped_steps_stay_skipped(engine: Engine, worker: uuid.UUID) -> None:
    engine.flow("g", max_attempts=1)
    engine.step("s", flow="g", required_input_pattern={"z": 1}, when_unmet="skip")
    engine.step("t", "s", flow="g")
    run = engine.start(flow="g")
    engine.claim(flow="g")
    engine.fail(run, "t")
    engine.execute("select pgflow_otp.retry_run(%s)", run)
    assert engine.statuses(run) == {"s": "skipped", "t": "started"}
    engine.claim(flow="g")
    engine.complete(run, "t", 0, 1)
    assert engine.run(run)["status"] == "completed"


def test_items_of_a_large_map_are_beside_their_tasks_again(engine: Engine, worker: uuid.UUID) -> None:
    run = fail_in_the_map(engine, worker, items=100)
    assert engine.value("select count(*) from pgflow_otp.map_items") == 0
    engine.execute("select pgflow_otp.retry_run(%s)", run)
    claimed = engine.claim(worker)
    assert [task["input"] for task in claimed] == [{"n": n} for n in range(1, 100)]
    for task in claimed:
        engine.complete(run, "m", task["task_index"], 1)
    assert engine.value("select count(*) from pgflow_otp.map_items") == 0
