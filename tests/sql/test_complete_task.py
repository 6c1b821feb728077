"""pgflow.complete_task (sql-contract 2.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engine import NOTHING, Engine

if TYPE_CHECKING:
    import uuid

#: What SQL calls "JSON null" and "no value" are different outputs.
OUTPUTS = [NOTHING, None, False, 0, "", "text", 1.5, [], {}, [1, None, {"k": [2]}], {"k": None}]

BY_HAND = {
    "created": "update pgflow.step_states set status = 'created', remaining_tasks = null, started_at = null",
    "completed": "update pgflow.step_states set status = 'completed', remaining_tasks = 0, completed_at = now()",
    "failed": "update pgflow.step_states set status = 'failed', failed_at = now()",
    "skipped": "update pgflow.step_states set status = 'skipped', remaining_tasks = null, skipped_at = now(), "
    "skip_reason = 'dependency_skipped'",
}
FAIL_THE_RUN = "update pgflow.runs set status = 'failed', failed_at = now()"


def route(engine: Engine, step: str, queue: str) -> None:
    """Give a step a queue of its own."""
    engine.execute("select pgmq.create(%s)", queue)
    engine.execute("update pgflow.steps set queue_name = %s where step_slug = %s", queue, step)


def claimed(engine: Engine, **options: Any) -> uuid.UUID:
    """A run whose only root `a` is claimed."""
    engine.flow(**options)
    engine.step("a")
    run = engine.start()
    engine.claim()
    return run


def a_map(engine: Engine, items: int) -> uuid.UUID:
    """A run whose root map `m` has all its tasks claimed; `z` follows it."""
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("z", "m")
    run = engine.start(list(range(items)))
    engine.claim()
    engine.events()
    return run


# Guards


def test_an_unknown_task_is_an_empty_set(engine: Engine) -> None:
    run = claimed(engine)
    before = engine.everything()
    assert engine.complete(run, "a", 1, 1) == []
    assert engine.complete(run, "nope", 0, 1) == []
    assert engine.complete(engine.value("select gen_random_uuid()"), "a", 0, 1) == []
    assert engine.everything() == before


def test_an_unknown_index_is_no_type_violation(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.claim()
    before = engine.everything()
    assert engine.complete(run, "a", 1, "no array") == []
    assert engine.everything() == before


def test_of_a_failed_run_returns_the_row_and_does_not_archive(engine: Engine) -> None:
    run = claimed(engine)
    engine.execute(FAIL_THE_RUN)
    before = engine.everything()
    assert engine.complete(run, "a", 0, 1) == [engine.task(run, "a")]
    assert engine.everything() == before
    assert len(engine.live()) == 1


def test_does_not_wait_for_the_lock_of_a_failed_run(engine: Engine) -> None:
    run = claimed(engine)
    engine.execute(FAIL_THE_RUN)
    engine.execute("set lock_timeout = '5s'")
    with engine.transaction() as other:
        other.execute("select * from pgflow.runs for update")
        assert [task["status"] for task in engine.complete(run, "a", 0, 1)] == ["started"]


def test_a_run_that_fails_meanwhile_is_seen_under_its_lock(engine: Engine) -> None:
    run = claimed(engine)
    task = engine.task(run, "a")
    engine.events()
    with engine.transaction() as other:
        other.execute(FAIL_THE_RUN)
        thread, results = engine.in_another_session(lambda own: own.complete(run, "a", 0, 1))
        engine.wait_blocked()
    thread.join()
    assert results == [[task]]
    assert engine.task(run, "a") == task
    assert engine.state(run, "a")["status"] == "started"
    assert engine.events() == []
    assert engine.live() == []
    assert [message["msg_id"] for message in engine.archived()] == [task["message_id"]]


def test_a_step_that_is_skipped_meanwhile_is_seen_under_its_lock(engine: Engine) -> None:
    run = claimed(engine)
    task = engine.task(run, "a")
    with engine.transaction() as other:
        other.execute(BY_HAND["skipped"])
        thread, results = engine.in_another_session(lambda own: own.complete(run, "a", 0, 1))
        engine.wait_blocked()
    thread.join()
    assert results == [[task]]
    assert engine.statuses(run) == {"a": "skipped"}
    assert engine.live() == []


@pytest.mark.parametrize("status", BY_HAND)
def test_of_a_step_that_is_not_started_only_archives(engine: Engine, status: str) -> None:
    run = claimed(engine)
    engine.execute(BY_HAND[status])
    task = engine.task(run, "a")
    before = engine.everything()
    assert engine.complete(run, "a", 0, 1) == [task]
    after = engine.everything()
    assert [message["msg_id"] for message in engine.archived()] == [task["message_id"]]
    assert engine.live() == []
    assert {**after, "live": 0, "archived": 0} == {**before, "live": 0, "archived": 0}


def test_a_late_callback_of_a_step_that_feeds_a_map_is_no_type_violation(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.claim()
    engine.execute(BY_HAND["skipped"] + " where step_slug = 'a'")
    assert engine.complete(run, "a", 0, "no array") == [engine.task(run, "a")]
    assert engine.run(run)["status"] == "started"
    assert engine.task(run, "a")["status"] == "started"


# Type violations


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (NOTHING, "null"),
        (None, "null"),
        ({}, "object"),
        ("[]", "string"),
        (1, "number"),
        (True, "boolean"),
    ],
)
def test_a_map_child_needs_an_array(engine: Engine, output: Any, kind: str) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.claim()
    engine.events()
    (returned,) = engine.complete(run, "a", 0, output)
    task, state, ended = engine.task(run, "a"), engine.state(run, "a"), engine.run(run)
    assert returned == task
    assert task["status"] == "failed"
    assert task["failed_at"] == ended["failed_at"] == state["failed_at"] is not None
    assert task["completed_at"] is None
    assert task["error_message"] == f"[TYPE_VIOLATION] Produced {kind} instead of array"
    assert task["output"] == (None if output is NOTHING else output)
    assert engine.value("select output is null from pgflow.step_tasks") is (output is NOTHING)
    assert state["status"] == "failed"
    assert state["error_message"] == (
        f"[TYPE_VIOLATION] Map step m expects array input but dependency a produced {kind}"
    )
    assert ended["status"] == "failed"
    assert ended["remaining_steps"] == 2
    assert engine.events() == ["run:failed", "step:a:failed"]
    assert engine.live() == []
    assert [message["msg_id"] for message in engine.archived()] == [task["message_id"]]


def test_a_type_violation_cancels_what_is_open_in_every_queue(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.step("b")
    engine.step("c")
    engine.step("d")
    route(engine, "c", "other")
    run = engine.start()
    engine.claim()
    engine.complete(run, "d", 0, 1)
    before = {step: engine.task(run, step) for step in ("b", "c", "d")}
    assert before["b"]["status"] == "started"
    assert before["c"]["status"] == "queued"
    engine.events()
    engine.complete(run, "a", 0, "no array")
    assert engine.task(run, "b") == {**before["b"], "status": "cancelled"}
    assert engine.task(run, "c") == {**before["c"], "status": "cancelled"}
    assert engine.task(run, "d") == before["d"]
    assert engine.statuses(run) == {"a": "failed", "b": "started", "c": "started", "d": "completed", "m": "created"}
    assert engine.live() == engine.live("other") == []
    assert len(engine.archived()) == 3
    assert len(engine.archived("other")) == 1
    assert engine.events() == ["run:failed", "step:a:failed"]


def test_a_type_violation_leaves_other_runs_alone(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    first, second = engine.start(), engine.start()
    engine.claim()
    engine.complete(first, "a", 0, "no array")
    assert engine.run(second)["status"] == "started"
    assert engine.task(second, "a")["status"] == "started"
    assert [message["msg_id"] for message in engine.live()] == [engine.task(second, "a")["message_id"]]


@pytest.mark.parametrize("mode", ["skip", "skip-cascade"])
def test_no_policy_softens_a_type_violation(engine: Engine, mode: str) -> None:
    engine.flow()
    engine.step("a", when_exhausted=mode, max_attempts=5)
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", 0, {})
    assert engine.run(run)["status"] == "failed"
    assert engine.statuses(run) == {"a": "failed", "m": "created"}


def test_a_type_violation_fails_a_task_that_nobody_claimed(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.complete(run, "a", 0, {})
    assert engine.task(run, "a")["status"] == "failed"
    assert engine.task(run, "a")["attempts_count"] == 0
    assert engine.run(run)["status"] == "failed"


def test_the_items_of_a_map_may_be_anything_for_a_map_child(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("n", "m", step_type="map")
    run = engine.start([1])
    engine.claim()
    engine.complete(run, "m", 0, {"no": "array"})
    assert engine.statuses(run) == {"m": "completed", "n": "started"}


def test_a_map_child_of_known_size_needs_no_array(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.execute("update pgflow.step_states set initial_tasks = 2 where step_slug = 'm'")
    engine.claim()
    engine.complete(run, "a", 0, {})
    assert engine.statuses(run) == {"a": "completed", "m": "started"}
    assert engine.state(run, "m")["remaining_tasks"] == 2


# The task and its step


def test_completes_the_task_and_returns_its_row(engine: Engine) -> None:
    run = claimed(engine)
    before = engine.task(run, "a")
    (returned,) = engine.complete(run, "a", 0, {"k": 1})
    task = engine.task(run, "a")
    assert returned == task
    assert task == {**before, "status": "completed", "output": {"k": 1}, "completed_at": task["completed_at"]}
    assert task["completed_at"] == engine.state(run, "a")["completed_at"] is not None


def test_status_is_the_sixth_column(engine: Engine) -> None:
    run = claimed(engine)
    row = engine.execute("select * from pgflow.complete_task(%s, 'a', 0, '1')", run).fetchone()
    assert row
    assert row[5] == "completed"


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda value: "NULL" if value is NOTHING else repr(value))
def test_output_of_a_single_step_is_that_of_its_task(engine: Engine, output: Any) -> None:
    run = claimed(engine)
    engine.complete(run, "a", 0, output)
    expected = None if output is NOTHING else output
    assert engine.task(run, "a")["output"] == expected
    assert engine.state(run, "a")["output"] == expected
    for table in ("step_tasks", "step_states"):
        assert engine.value(f"select output is null from pgflow.{table}") is (output is NOTHING)
    assert engine.run(run)["output"] == {"a": expected}


def test_a_map_is_started_until_its_last_task(engine: Engine) -> None:
    run = a_map(engine, 3)
    for index, left in (2, 2), (0, 1):
        engine.complete(run, "m", index, index)
        state = engine.state(run, "m")
        assert (state["status"], state["remaining_tasks"], state["output"]) == ("started", left, None)
        assert engine.state(run, "z")["remaining_deps"] == 1
        assert engine.run(run)["remaining_steps"] == 2
        assert engine.events() == []
    engine.complete(run, "m", 1, 1)
    state = engine.state(run, "m")
    assert (state["status"], state["remaining_tasks"], state["initial_tasks"]) == ("completed", 0, 3)
    assert state["completed_at"] == engine.task(run, "m", 1)["completed_at"]
    assert engine.run(run)["remaining_steps"] == 1
    assert engine.events() == ["step:m:completed", "step:z:started"]


def test_output_of_a_map_is_in_the_order_of_its_items(engine: Engine) -> None:
    run = a_map(engine, 12)
    for index in (11, 3, 0, 7, 1, 10, 2, 9, 4, 8, 6, 5):
        engine.complete(run, "m", index, {"item": index})
    assert engine.state(run, "m")["output"] == [{"item": index} for index in range(12)]


def test_no_output_of_an_item_is_a_json_null_of_its_map(engine: Engine) -> None:
    run = a_map(engine, 4)
    for index, output in enumerate([NOTHING, None, [], False]):
        engine.complete(run, "m", index, output)
    assert engine.state(run, "m")["output"] == [None, None, [], False]
    assert engine.value("select count(*) from pgflow.step_tasks where step_slug = 'm' and output is null") == 1


def test_a_step_counts_down_each_child_by_one(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.step("c", "a")
    engine.step("d", "a", "b")
    engine.step("e", "b")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", 0, 1)
    assert {step: engine.state(run, step)["remaining_deps"] for step in "cde"} == {"c": 0, "d": 1, "e": 1}
    assert engine.statuses(run) == {"a": "completed", "b": "started", "c": "started", "d": "created", "e": "created"}
    assert engine.run(run)["remaining_steps"] == 4
    engine.complete(run, "b", 0, 1)
    assert {step: engine.state(run, step)["status"] for step in "de"} == {"d": "started", "e": "started"}


def test_the_counter_of_a_skipped_child_moves_too(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    engine.step("b", when_exhausted="skip-cascade")
    engine.step("c", "a", "b")
    run = engine.start()
    engine.claim()
    engine.fail(run, "b")
    before = engine.state(run, "c")
    engine.complete(run, "a", 0, 1)
    assert engine.state(run, "c") == {**before, "status": "skipped", "remaining_deps": before["remaining_deps"] - 1}


@pytest.mark.parametrize("items", [1, 3])
def test_a_map_child_has_an_item_for_each_element(engine: Engine, items: int) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.claim()
    assert engine.state(run, "m")["initial_tasks"] is None
    engine.complete(run, "a", 0, [None] * items)
    state = engine.state(run, "m")
    assert (state["status"], state["initial_tasks"], state["remaining_tasks"]) == ("started", items, items)
    assert len(engine.live()) == items


def test_a_map_child_of_a_map_has_an_item_for_each_task(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("n", "m", step_type="map")
    engine.step("o", "m", step_type="map")
    run = engine.start([1, 2, 3])
    engine.claim()
    for index in range(3):
        assert engine.state(run, "n")["initial_tasks"] is None
        engine.complete(run, "m", index, [1, 2, 3, 4, 5])
    for step in ("n", "o"):
        state = engine.state(run, step)
        assert (state["status"], state["initial_tasks"], state["remaining_tasks"]) == ("started", 3, 3)


# What follows


def test_is_announced_before_what_follows(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("skipped", "a", required_input_pattern={"a": {"never": 1}})
    engine.step("empty", "a", step_type="map")
    engine.step("z", "empty")
    run = engine.start()
    engine.claim()
    engine.events()
    engine.complete(run, "a", 0, [])
    assert engine.events() == [
        "step:a:completed",
        "step:skipped:skipped",
        "step:empty:completed",
        "step:z:started",
    ]
    assert engine.run(run)["remaining_steps"] == 1


def test_a_condition_that_fails_the_run_ends_the_call(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", required_input_pattern={"a": {"never": 1}}, when_unmet="fail")
    engine.step("c", "a")
    engine.step("empty", "a", step_type="map")
    run = engine.start()
    engine.claim()
    engine.events()
    (returned,) = engine.complete(run, "a", 0, [])
    assert returned == engine.task(run, "a")
    assert returned["status"] == "completed"
    assert engine.statuses(run) == {"a": "completed", "b": "failed", "c": "created", "empty": "created"}
    assert engine.run(run)["status"] == "failed"
    assert engine.run(run)["remaining_steps"] == 3
    assert engine.events() == ["step:a:completed", "step:b:failed", "run:failed"]
    assert engine.live() == []
    assert [message["msg_id"] for message in engine.archived()] == [returned["message_id"]]


def test_archives_only_the_message_of_its_task(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    first, second = engine.start(), engine.start()
    engine.claim()
    task = engine.task(first, "a")
    engine.complete(first, "a", 0, 1)
    assert [message["msg_id"] for message in engine.archived()] == [task["message_id"]]
    left = {engine.task(first, "b")["message_id"], *(engine.task(second, step)["message_id"] for step in "ab")}
    assert {message["msg_id"] for message in engine.live()} == left


def test_archives_in_the_queue_that_the_task_was_sent_to(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    route(engine, "b", "other")
    run = engine.start()
    engine.start_tasks(engine.read("other"), engine.worker(), queue="other")
    assert engine.task(run, "a")["message_id"] == engine.task(run, "b")["message_id"]
    engine.execute("update pgflow.steps set queue_name = 'f'")
    engine.complete(run, "b", 0, 1)
    assert (len(engine.live()), len(engine.archived())) == (1, 0)
    assert (len(engine.live("other")), len(engine.archived("other"))) == (0, 1)


def test_the_last_step_completes_the_run(engine: Engine) -> None:
    run = claimed(engine)
    engine.events()
    engine.complete(run, "a", 0, 1)
    ended = engine.run(run)
    assert (ended["status"], ended["remaining_steps"], ended["output"]) == ("completed", 0, {"a": 1})
    assert engine.events() == ["step:a:completed", "run:completed"]


def test_the_run_may_end_through_skips_and_steps_without_tasks(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("skipped", "a", forbidden_input_pattern={"a": {}})
    engine.step("empty", "skipped", step_type="map")
    run = engine.start()
    engine.claim()
    engine.events()
    engine.complete(run, "a", 0, {"k": 1})
    assert engine.statuses(run) == {"a": "completed", "empty": "completed", "skipped": "skipped"}
    ended = engine.run(run)
    assert (ended["status"], ended["remaining_steps"], ended["output"]) == ("completed", 0, {"empty": []})
    assert engine.events() == ["step:a:completed", "step:skipped:skipped", "step:empty:completed", "run:completed"]


def test_other_runs_and_flows_with_steps_of_the_same_names_are_left_alone(engine: Engine) -> None:
    for flow, parents in ("f", ["a"]), ("g", []):
        engine.flow(flow)
        engine.step("a", flow=flow)
        engine.step("b", flow=flow)
        engine.step("c", *parents, "b", flow=flow, step_type="map" if not parents else "single")
    run, other = engine.start(flow="g"), engine.start()
    second = engine.start(flow="g")
    engine.claim(flow="g")
    before = {name: (engine.run(name), [engine.state(name, step) for step in "abc"]) for name in (other, second)}
    engine.complete(run, "a", 0, "no array, but no map follows")
    assert engine.state(run, "c")["remaining_deps"] == 1
    engine.complete(run, "b", 0, [1, 2])
    assert engine.state(run, "c")["remaining_tasks"] == 2
    assert {
        name: (engine.run(name), [engine.state(name, step) for step in "abc"]) for name in (other, second)
    } == before


# Repeated calls


def test_a_second_completion_changes_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    run = engine.start()
    engine.claim()
    (first,) = engine.complete(run, "a", 0, 1)
    before = engine.everything()
    assert engine.complete(run, "a", 0, 2) == [first]
    assert engine.everything() == before


def test_a_second_completion_of_an_item_is_not_counted(engine: Engine) -> None:
    run = a_map(engine, 2)
    (first,) = engine.complete(run, "m", 0, 1)
    before = engine.everything()
    assert engine.complete(run, "m", 0, 2) == [first]
    assert engine.everything() == before
    assert engine.state(run, "m")["remaining_tasks"] == 1


@pytest.mark.parametrize("status", ["queued", "failed", "skipped", "cancelled"])
def test_a_task_that_is_not_started_stays_as_it_is(engine: Engine, status: str) -> None:
    run = a_map(engine, 2)
    engine.execute("update pgflow.step_tasks set status = %s where task_index = 0", status)
    before = engine.everything()
    assert engine.complete(run, "m", 0, 2) == [engine.task(run, "m", 0)]
    assert engine.everything() == before


def test_of_a_completed_run_changes_nothing(engine: Engine) -> None:
    run = claimed(engine)
    engine.complete(run, "a", 0, 1)
    before = engine.everything()
    assert engine.complete(run, "a", 0, 2) == [engine.task(run, "a")]
    assert engine.everything() == before


# Two at once


def test_two_items_at_once_are_both_counted(engine: Engine) -> None:
    run = a_map(engine, 2)
    with engine.transaction() as other:
        other.complete(run, "m", 0, "first")
        thread, results = engine.in_another_session(lambda own: own.complete(run, "m", 1, "second"))
        engine.wait_blocked()
    thread.join()
    assert [task["status"] for task in results[0]] == ["completed"]
    assert engine.state(run, "m")["output"] == ["first", "second"]
    assert engine.statuses(run) == {"m": "completed", "z": "started"}
    assert engine.events() == ["step:m:completed", "step:z:started"]


def test_two_parents_at_once_start_their_child_once(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.step("c", "a", "b")
    run = engine.start()
    engine.claim()
    engine.events()
    with engine.transaction() as other:
        other.complete(run, "a", 0, 1)
        thread, _ = engine.in_another_session(lambda own: own.complete(run, "b", 0, 2))
        engine.wait_blocked()
    thread.join()
    assert engine.events() == ["step:a:completed", "step:b:completed", "step:c:started"]
    assert engine.run(run)["remaining_steps"] == 1
    assert len(engine.live()) == 1


def test_the_same_task_at_once_is_completed_by_the_first(engine: Engine) -> None:
    run = a_map(engine, 2)
    with engine.transaction() as other:
        other.complete(run, "m", 0, "first")
        thread, results = engine.in_another_session(lambda own: own.complete(run, "m", 0, "second"))
        engine.wait_blocked()
    thread.join()
    assert results == [[engine.task(run, "m", 0)]]
    assert engine.task(run, "m", 0)["output"] == "first"
    assert engine.state(run, "m")["remaining_tasks"] == 1


def test_runs_do_not_wait_for_each_other(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    first, second = engine.start(), engine.start()
    engine.claim()
    engine.execute("set lock_timeout = '5s'")
    with engine.transaction() as other:
        other.complete(first, "a", 0, 1)
        engine.complete(second, "a", 0, 2)
        assert engine.run(second)["status"] == "completed"
