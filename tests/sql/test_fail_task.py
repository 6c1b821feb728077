"""pgflow.fail_task (sql-contract 2.9)."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.engine import Engine

STEP_ENDS = {
    "created": "status = 'created', remaining_tasks = null",
    "completed": "status = 'completed', remaining_tasks = 0, completed_at = now()",
    "failed": "status = 'failed', failed_at = now()",
    "skipped": "status = 'skipped', remaining_tasks = null, skip_reason = 'condition_unmet', skipped_at = now()",
}


def hides(engine: Engine, seconds: int, work: Callable[[], Any], run: uuid.UUID, step: str) -> bool:
    """Whether a call hides the message of a task for exactly so long, as from some moment during the call."""
    before = engine.value("select clock_timestamp()")
    work()
    after = engine.value("select clock_timestamp()")
    (vt,) = [m["vt"] for m in engine.live() if m["msg_id"] == engine.task(run, step)["message_id"]]
    return bool(before + timedelta(seconds=seconds) <= vt <= after + timedelta(seconds=seconds))


def exhausting(engine: Engine, when_exhausted: str = "fail", kind: str = "single", value: Any = None) -> uuid.UUID:
    """A claimed run of step `a`, whose tasks have a single attempt, beside a step `other`."""
    engine.flow(max_attempts=1)
    engine.step("a", step_type=kind, when_exhausted=when_exhausted)
    engine.step("other")
    run = engine.start({} if value is None else value)
    engine.claim()
    engine.events()
    return run


def claim_step(engine: Engine, run: uuid.UUID, step: str, index: int = 0) -> None:
    message = engine.task(run, step, index)["message_id"]
    assert engine.start_tasks([message], engine.worker())


# Retries


def test_a_failure_with_attempts_left_queues_the_task_again(engine: Engine) -> None:
    engine.flow(max_attempts=2)
    engine.step("a")
    run = engine.start()
    engine.claim()
    before = engine.task(run, "a")
    assert before["last_worker_id"] is not None
    (returned,) = engine.fail(run, "a", error="no luck")
    changes = {"status": "queued", "started_at": None, "failed_at": None, "error_message": "no luck"}
    assert returned == engine.task(run, "a") == before | changes


def test_a_retry_changes_neither_run_nor_step_and_sends_nothing(engine: Engine) -> None:
    engine.flow(max_attempts=2)
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.events()
    before = engine.run(run), engine.state(run, "a")
    engine.fail(run, "a")
    assert (engine.run(run), engine.state(run, "a")) == before
    assert engine.events() == []


def test_a_retry_reuses_the_message(engine: Engine) -> None:
    engine.flow(max_attempts=2)
    engine.step("a")
    engine.start()
    (task,) = engine.claim()
    before = engine.live()
    engine.fail(task["run_id"], "a")
    (message,) = engine.live()
    assert message | {"vt": None} == before[0] | {"vt": None}
    assert [t["msg_id"] for t in engine.claim()] == [task["msg_id"]]


@pytest.mark.parametrize(("attempt", "delay"), [(1, 10), (2, 20), (3, 40)])
def test_the_delay_doubles_with_each_attempt(engine: Engine, attempt: int, delay: int) -> None:
    engine.flow(max_attempts=9, base_delay=5)
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.execute("update pgflow.step_tasks set attempts_count = %s", attempt)
    assert hides(engine, delay, lambda: engine.fail(run, "a"), run, "a")


@pytest.mark.parametrize(("base", "delay"), [(3, 6), (0, 0)])
def test_the_base_delay_of_the_step_goes_before_that_of_the_flow(engine: Engine, base: int, delay: int) -> None:
    engine.flow(base_delay=50)
    engine.step("a", base_delay=base)
    run = engine.start()
    engine.claim()
    assert hides(engine, delay, lambda: engine.fail(run, "a"), run, "a")


@pytest.mark.parametrize(
    ("flow_max", "step_max", "attempts"),
    [(3, None, 3), (1, None, 1), (0, None, 1), (3, 2, 2), (1, 3, 3), (3, 0, 1)],
)
def test_attempts_are_those_of_the_step_else_of_the_flow_and_at_least_one(
    engine: Engine, flow_max: int, step_max: int | None, attempts: int
) -> None:
    engine.flow(max_attempts=flow_max)
    engine.step("a", max_attempts=step_max)
    run = engine.start()
    statuses = []
    while engine.claim():
        statuses += [row["status"] for row in engine.fail(run, "a")]
    assert statuses == ["queued"] * (attempts - 1) + ["failed"]
    assert engine.task(run, "a")["attempts_count"] == attempts


# Exhausted: fail


def test_an_exhausted_task_fails_its_step_and_its_run(engine: Engine) -> None:
    run = exhausting(engine)
    task, state, stored = engine.task(run, "a"), engine.state(run, "a"), engine.run(run)
    (returned,) = engine.fail(run, "a", error="broken")
    moment = returned["failed_at"]
    assert moment is not None
    assert returned == task | {"status": "failed", "failed_at": moment, "error_message": "broken"}
    assert engine.task(run, "a") == returned
    assert engine.state(run, "a") == state | {"status": "failed", "failed_at": moment, "error_message": "broken"}
    assert engine.run(run) == stored | {"status": "failed", "failed_at": moment}


def test_a_failed_run_says_so_after_its_step(engine: Engine) -> None:
    run = exhausting(engine)
    engine.fail(run, "a", error="broken")
    (step, step_payload), (whole, run_payload) = engine.payloads()
    common = {"run_id": str(run), "status": "failed", "error_message": "broken"}
    assert step == "step:a:failed"
    assert step_payload.pop("failed_at")
    assert step_payload == common | {"event_type": "step:failed", "step_slug": "a"}
    assert whole == "run:failed"
    assert run_payload.pop("failed_at")
    assert run_payload == common | {"event_type": "run:failed", "flow_slug": "f"}


@pytest.mark.parametrize("status", ["queued", "started"])
def test_open_tasks_of_a_failed_run_are_cancelled_and_otherwise_kept(engine: Engine, status: str) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    engine.step("other")
    run = engine.start()
    claim_step(engine, run, "a")
    if status == "started":
        claim_step(engine, run, "other")
    task, state = engine.task(run, "other"), engine.state(run, "other")
    assert task["status"] == status
    engine.fail(run, "a")
    assert engine.task(run, "other") == task | {"status": "cancelled"}
    assert engine.state(run, "other") == state
    assert engine.live() == []
    assert len(engine.archived()) == 2


def test_siblings_in_a_failed_map_are_cancelled_unless_they_are_final(engine: Engine) -> None:
    run = exhausting(engine, kind="map", value=[1, 2, 3])
    engine.complete(run, "a", 1, "done")
    completed = engine.task(run, "a", 1)
    engine.fail(run, "a", 0)
    assert [engine.task(run, "a", i)["status"] for i in range(3)] == ["failed", "completed", "cancelled"]
    assert engine.task(run, "a", 1) == completed
    assert engine.state(run, "a")["output"] is None


def test_a_failed_run_leaves_other_runs_alone(engine: Engine) -> None:
    run = exhausting(engine)
    other = engine.start()
    before = engine.run(other), engine.task(other, "a"), engine.task(other, "other")
    engine.fail(run, "a")
    assert (engine.run(other), engine.task(other, "a"), engine.task(other, "other")) == before
    assert {m["message"]["run_id"] for m in engine.live()} == {str(other)}


@pytest.mark.parametrize("when_exhausted", ["fail", "skip", "skip-cascade"])
def test_messages_are_archived_from_every_queue_of_the_run(engine: Engine, when_exhausted: str) -> None:
    steps = [
        {"slug": "r", "stepType": "single", "dependencies": [], "whenExhausted": when_exhausted},
        {"slug": "s", "stepType": "single", "dependencies": []},
        {"slug": "t", "stepType": "single", "dependencies": []},
    ]
    options = {"maxAttempts": 1}
    shape = json.dumps({"steps": steps, "options": options})
    engine.execute("select pgflow.ensure_flow_compiled('f', %s::jsonb, 'step')", shape)
    run = engine.start()
    engine.execute("select pgflow.start_tasks('f', array[1]::bigint[], %s, 'f__r', 'r')", engine.worker(queue="f__r"))
    engine.fail(run, "r")
    live = {queue: len(engine.live(queue)) for queue in ("f__r", "f__s", "f__t")}
    archived = {queue: len(engine.archived(queue)) for queue in live}
    rest = 0 if when_exhausted == "fail" else 1
    assert live == {"f__r": 0, "f__s": rest, "f__t": rest}
    assert archived == {"f__r": 1, "f__s": 1 - rest, "f__t": 1 - rest}


# Exhausted: skip and skip-cascade


@pytest.mark.parametrize("when_exhausted", ["skip", "skip-cascade"])
def test_an_exhausted_task_can_skip_its_step(engine: Engine, when_exhausted: str) -> None:
    run = exhausting(engine, when_exhausted)
    task, state, stored = engine.task(run, "a"), engine.state(run, "a"), engine.run(run)
    (returned,) = engine.fail(run, "a", error="broken")
    assert returned["failed_at"] is not None
    assert returned == task | {"status": "failed", "failed_at": returned["failed_at"], "error_message": "broken"}
    after = engine.state(run, "a")
    assert after["skipped_at"] is not None
    assert after == state | {
        "status": "skipped",
        "skip_reason": "handler_failed",
        "skipped_at": after["skipped_at"],
        "error_message": "broken",
        "remaining_tasks": None,
    }
    assert engine.run(run) == stored | {"remaining_steps": 1}
    assert [m["msg_id"] for m in engine.archived()] == [task["message_id"]]


@pytest.mark.parametrize("when_exhausted", ["skip", "skip-cascade"])
def test_a_step_skipped_by_its_handler_says_so(engine: Engine, when_exhausted: str) -> None:
    run = exhausting(engine, when_exhausted)
    engine.fail(run, "a", error="broken")
    ((event, payload),) = engine.payloads()
    assert event == "step:a:skipped"
    assert payload.pop("skipped_at")
    assert payload == {
        "event_type": "step:skipped",
        "run_id": str(run),
        "step_slug": "a",
        "status": "skipped",
        "skip_reason": "handler_failed",
        "error_message": "broken",
    }


@pytest.mark.parametrize("when_exhausted", ["skip", "skip-cascade"])
def test_siblings_in_a_skipped_map_are_skipped_unless_they_are_final(engine: Engine, when_exhausted: str) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", step_type="map", when_exhausted=when_exhausted)
    engine.step("other")
    run = engine.start([1, 2, 3, 4])
    for index in (0, 1, 2):
        claim_step(engine, run, "a", index)
    engine.complete(run, "a", 1, "done")
    before = [engine.task(run, "a", i) for i in range(4)]
    engine.fail(run, "a", 0)
    assert [engine.task(run, "a", i) for i in (1, 2, 3)] == [
        before[1],
        before[2] | {"status": "skipped"},
        before[3] | {"status": "skipped"},
    ]
    assert engine.state(run, "a")["output"] is None
    assert [m["message"]["step_slug"] for m in engine.live()] == ["other"]
    assert len(engine.archived()) == 4


def test_a_late_failure_in_a_skipped_map_changes_nothing(engine: Engine) -> None:
    run = exhausting(engine, "skip", "map", [1, 2])
    engine.fail(run, "a", 0)
    before = engine.everything()
    (returned,) = engine.fail(run, "a", 1)
    assert returned["status"] == "skipped"
    assert engine.everything() == before


def test_children_of_a_skipped_step_start_without_its_output(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted="skip")
    engine.step("b", "a")
    run = engine.start()
    engine.claim()
    engine.events()
    engine.fail(run, "a")
    assert engine.events() == ["step:a:skipped", "step:b:started"]
    assert engine.state(run, "b")["remaining_deps"] == 0
    assert [(t["step_slug"], t["input"]) for t in engine.claim()] == [("b", {})]


def test_children_with_another_parent_wait_for_it(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted="skip")
    engine.step("other")
    engine.step("b", "a", "other")
    run = engine.start()
    engine.claim()
    engine.fail(run, "a")
    assert engine.statuses(run) == {"a": "skipped", "b": "created", "other": "started"}
    assert engine.state(run, "b")["remaining_deps"] == 1


def test_a_map_over_a_skipped_step_is_empty(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted="skip")
    engine.step("m", "a", step_type="map")
    engine.step("z", "m")
    run = engine.start()
    engine.claim()
    engine.events()
    engine.fail(run, "a")
    assert engine.events() == ["step:a:skipped", "step:m:completed", "step:z:started"]
    state = engine.state(run, "m")
    assert (state["status"], state["initial_tasks"], state["output"]) == ("completed", 0, [])
    assert engine.run(run)["remaining_steps"] == 1
    assert [t["input"] for t in engine.claim()] == [{"m": []}]


def test_conditions_of_children_are_judged_without_the_skipped_output(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted="skip")
    engine.step("needs", "a", required_input_pattern={"a": 1})
    engine.step("avoids", "a", forbidden_input_pattern={"a": {}})
    run = engine.start()
    engine.claim()
    engine.fail(run, "a")
    assert engine.statuses(run) == {"a": "skipped", "avoids": "started", "needs": "skipped"}
    assert engine.state(run, "needs")["skip_reason"] == "condition_unmet"


def test_a_child_whose_condition_fails_the_run_ends_the_call(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted="skip")
    engine.step("b", "a", required_input_pattern={"a": 1}, when_unmet="fail")
    engine.step("c", "a")
    run = engine.start()
    engine.claim()
    engine.events()
    (returned,) = engine.fail(run, "a")
    assert returned == engine.task(run, "a")
    assert returned["status"] == "failed"
    assert engine.statuses(run) == {"a": "skipped", "b": "failed", "c": "created"}
    assert engine.run(run)["status"] == "failed"
    assert engine.events() == ["step:a:skipped", "step:b:failed", "run:failed"]
    assert engine.live() == []
    assert len(engine.archived()) == 1


@pytest.mark.parametrize("when_exhausted", ["skip", "skip-cascade"])
def test_a_run_whose_last_step_is_skipped_completes(engine: Engine, when_exhausted: str) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted=when_exhausted)
    run = engine.start()
    engine.claim()
    engine.events()
    engine.fail(run, "a")
    stored = engine.run(run)
    assert (stored["status"], stored["output"], stored["remaining_steps"]) == ("completed", None, 0)
    assert engine.events() == ["step:a:skipped", "run:completed"]


def test_skip_cascade_skips_all_descendants_and_nothing_else(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted="skip-cascade")
    engine.step("other")
    engine.step("b", "a", "other")
    engine.step("c", "b")
    engine.step("d", "other")
    run = engine.start()
    engine.claim()
    engine.events()
    engine.fail(run, "a")
    assert engine.statuses(run) == {"a": "skipped", "b": "skipped", "c": "skipped", "d": "created", "other": "started"}
    reasons = {step: engine.state(run, step)["skip_reason"] for step in "abc"}
    assert reasons == {"a": "handler_failed", "b": "dependency_skipped", "c": "dependency_skipped"}
    assert engine.events() == ["step:a:skipped", "step:b:skipped", "step:c:skipped"]
    assert engine.run(run)["remaining_steps"] == 2


# Failures that come too late, or too early


@pytest.mark.parametrize("claimed", [True, False])
def test_on_a_failed_run_only_the_message_is_archived(engine: Engine, claimed: bool) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    run = engine.start()
    if claimed:
        engine.claim()
    engine.execute("update pgflow.runs set status = 'failed', failed_at = now()")
    before = engine.everything()
    (returned,) = engine.fail(run, "a")
    after = engine.everything()
    assert [returned] == before["step_tasks"]
    assert (len(engine.live()), len(engine.archived())) == (0, 1)
    assert after | {"live": 0, "archived": 0} == before | {"live": 0, "archived": 0}


@pytest.mark.parametrize("status", STEP_ENDS)
def test_on_a_step_that_is_not_started_only_the_message_is_archived(engine: Engine, status: str) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.execute(f"update pgflow.step_states set {STEP_ENDS[status]}")
    before = engine.everything()
    (returned,) = engine.fail(run, "a")
    after = engine.everything()
    assert [returned] == before["step_tasks"]
    assert (len(engine.live()), len(engine.archived())) == (0, 1)
    assert after | {"live": 0, "archived": 0} == before | {"live": 0, "archived": 0}


def test_a_second_failure_changes_nothing(engine: Engine) -> None:
    run = exhausting(engine)
    (first,) = engine.fail(run, "a", error="first")
    before = engine.everything()
    assert engine.fail(run, "a", error="second") == [first]
    assert engine.everything() == before


def test_a_cancelled_task_stays_cancelled(engine: Engine) -> None:
    run = exhausting(engine)
    engine.fail(run, "a")
    before = engine.everything()
    assert [row["status"] for row in engine.fail(run, "other")] == ["cancelled"]
    assert engine.everything() == before


def test_a_completed_task_stays_completed(engine: Engine) -> None:
    run = exhausting(engine, kind="map", value=[1, 2])
    engine.complete(run, "a", 0, "done")
    before = engine.everything()
    assert [(row["status"], row["output"]) for row in engine.fail(run, "a", 0)] == [("completed", "done")]
    assert engine.everything() == before


def test_a_failure_on_a_completed_run_changes_nothing(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", output=1)
    before = engine.everything()
    assert [row["status"] for row in engine.fail(run, "a")] == ["completed"]
    assert engine.everything() == before


def test_an_unclaimed_task_is_only_put_off(engine: Engine) -> None:
    engine.flow(max_attempts=1, base_delay=30)
    engine.step("a")
    run = engine.start()
    before = engine.everything()
    assert hides(engine, 30, lambda: engine.fail(run, "a"), run, "a")
    after = engine.everything()
    assert after | {"live": 0} == before | {"live": 0}


@pytest.mark.parametrize(
    ("run", "step", "index"), [(uuid.UUID(int=1), "a", 0), (None, "z", 0), (None, "a", 1), (None, "A", 0)]
)
def test_what_names_no_task_is_an_empty_set(engine: Engine, run: uuid.UUID | None, step: str, index: int) -> None:
    known = exhausting(engine)
    before = engine.everything()
    assert engine.fail(run or known, step, index) == []
    assert engine.everything() == before


def test_a_failure_after_recovery_gave_up_is_the_last(engine: Engine) -> None:
    """A deliberate difference: its message is archived, so nobody could claim the task again."""
    engine.flow(max_attempts=3)
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.execute("update pgflow.step_tasks set requeued_count = 3")
    engine.age(1000)
    engine.execute("select pgflow.requeue_stalled_tasks()")
    assert [row["status"] for row in engine.fail(run, "a")] == ["failed"]
    assert engine.run(run)["status"] == "failed"


def test_arguments_go_by_their_names(engine: Engine) -> None:
    run = exhausting(engine)
    engine.execute(
        "select pgflow.fail_task(run_id => %s::uuid, step_slug => 'a', task_index => 0, error_message => 'x')", run
    )
    assert engine.task(run, "a")["error_message"] == "x"


def test_status_is_the_sixth_column_of_the_row(engine: Engine) -> None:
    """Another runtime reads it by position."""
    run = exhausting(engine)
    row = engine.execute("select * from pgflow.fail_task(%s, 'a', 0, 'x')", run).fetchone()
    assert row
    assert row[5] == "failed"
