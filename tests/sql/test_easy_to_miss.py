"""What is easy to miss (sql-contract 6.6 and 7.1), as far as no file of a single function claims it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine


def two_queues(engine: Engine) -> uuid.UUID:
    """A run whose steps `a` and `b` have the same message id in queues `f` and `other`."""
    engine.flow(base_delay=1_000)
    engine.step("a")
    engine.step("b")
    engine.execute("select pgmq.create('other')")
    engine.execute("update pgflow.steps set queue_name = 'other' where step_slug = 'b'")
    run = engine.start()
    assert engine.task(run, "a")["message_id"] == engine.task(run, "b")["message_id"] == 1
    return run


# The same message id in two queues


def test_a_claim_takes_the_task_of_its_queue_only(engine: Engine) -> None:
    run = two_queues(engine)
    before, message = engine.task(run, "a"), engine.live()
    (record,) = engine.start_tasks([1], engine.worker(), queue="other")
    assert record["step_slug"] == "b"
    assert engine.task(run, "a") == before
    assert engine.live() == message


def test_a_retry_hides_the_message_in_its_queue_only(engine: Engine) -> None:
    run = two_queues(engine)
    engine.start_tasks([1], engine.worker(), queue="other")
    message = engine.live()
    engine.fail(run, "b")
    assert 1_900 < (engine.visible_in(run, "b") or 0) <= 2_000
    assert engine.live() == message


def test_a_requeue_shows_the_message_in_its_queue_only(engine: Engine) -> None:
    run = two_queues(engine)
    engine.read(visibility=1_000)
    engine.read("other", visibility=1_000)
    engine.start_tasks([1], engine.worker(), queue="other")
    message = engine.live()
    engine.age(1_000)
    assert engine.value("select pgflow.requeue_stalled_tasks()") == 1
    assert (engine.visible_in(run, "b") or 0) <= 0
    assert engine.live() == message


@pytest.mark.parametrize("mode", ["skip", "skip-cascade"])
def test_a_skip_archives_the_message_in_its_queue_only(engine: Engine, mode: str) -> None:
    run = two_queues(engine)
    engine.execute("update pgflow.steps set when_exhausted = %s, opt_max_attempts = 1 where step_slug = 'b'", mode)
    engine.start_tasks([1], engine.worker(), queue="other")
    message = engine.live()
    engine.fail(run, "b")
    assert engine.statuses(run) == {"a": "started", "b": "skipped"}
    assert (len(engine.live("other")), len(engine.archived("other"))) == (0, 1)
    assert (engine.live(), engine.archived()) == (message, [])


# Maps


def test_a_map_completed_in_part_never_starts_its_child(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("n", "m", step_type="map")
    engine.step("z", "m")
    run = engine.start([1, 2, 3])
    engine.claim()
    for index in (0, 2):
        engine.complete(run, "m", index, index)
        before = engine.everything()
        engine.execute("select pgflow.start_ready_steps(%s)", run)
        assert engine.everything() == before
    assert engine.statuses(run) == {"m": "started", "n": "created", "z": "created"}


# Failed runs


def test_a_failed_run_keeps_its_remaining_steps(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    for step in ("a", "b", "c", "d"):
        engine.step(step)
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", 0, 1)
    engine.fail(run, "b")
    ended = engine.run(run)
    assert (ended["status"], ended["remaining_steps"]) == ("failed", 3)
    for step in ("c", "d"):
        engine.complete(run, step, 0, 1)
        engine.fail(run, step)
    assert engine.run(run) == ended


def test_a_run_fails_at_the_moment_its_culprit_fails(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    engine.step("b")
    run = engine.start()
    engine.claim()
    engine.fail(run, "a")
    engine.fail(run, "b")
    assert engine.run(run)["failed_at"] == engine.task(run, "a")["failed_at"] is not None


def test_a_type_violation_leaves_the_children_created_and_without_tasks(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.step("n", "a", step_type="map")
    engine.step("z", "a")
    run = engine.start()
    engine.claim()
    before = {step: engine.state(run, step) for step in "mnz"}
    engine.complete(run, "a", 0, "no array")
    assert {step: engine.state(run, step) for step in "mnz"} == before
    assert engine.value("select count(*) from pgflow.step_tasks where step_slug <> 'a'") == 0
    assert engine.live() == []


# Skipped parents


def test_a_step_may_run_only_because_another_was_skipped(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted="skip")
    engine.step("otherwise", "a", forbidden_input_pattern={"a": {}})
    engine.step("then", "a", required_input_pattern={"a": {}})
    failed, succeeded = engine.start(), engine.start()
    engine.claim()
    engine.fail(failed, "a")
    engine.complete(succeeded, "a", 0, {"k": 1})
    assert engine.statuses(failed) == {"a": "skipped", "otherwise": "started", "then": "skipped"}
    assert engine.statuses(succeeded) == {"a": "completed", "otherwise": "skipped", "then": "started"}


def test_a_step_starts_with_both_parents_skipped_and_an_empty_input(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern={"never": 1})
    engine.step("b", required_input_pattern={"never": 1})
    engine.step("c", "a", "b")
    engine.start({"x": 1})
    (record,) = engine.claim()
    assert (record["step_slug"], record["input"], record["flow_input"]) == ("c", {}, None)


# Limits


def test_too_long_a_chain_of_empty_maps_leaves_no_run(engine: Engine) -> None:
    engine.flow()
    engine.step("m0", step_type="map")
    for n in range(1, 50):
        engine.step(f"m{n}", f"m{n - 1}", step_type="map")
    before = engine.everything()
    with pytest.raises(psycopg.errors.RaiseException) as raised:
        engine.start([])
    assert raised.value.diag.message_primary == "Cascade loop exceeded safety limit of 50 iterations"
    assert engine.everything() == before


def test_too_long_a_chain_of_empty_maps_leaves_the_task_to_be_completed_as_it_is(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    for n in range(50):
        engine.step(f"m{n}", f"m{n - 1}" if n else "a", step_type="map")
    run = engine.start()
    engine.claim()
    before = engine.everything()
    with pytest.raises(psycopg.errors.RaiseException) as raised:
        engine.complete(run, "a", 0, [])
    assert raised.value.diag.message_primary == "Cascade loop exceeded safety limit of 50 iterations"
    assert engine.everything() == before


# Retries


def test_a_retry_keeps_the_message_and_doubles_the_delay(engine: Engine) -> None:
    engine.flow(max_attempts=5, base_delay=1_000)
    engine.step("a")
    run = engine.start()
    worker = engine.worker()
    (message,) = engine.live()
    for attempt in (1, 2, 3, 4):
        assert len(engine.start_tasks([message["msg_id"]], worker)) == 1
        engine.fail(run, "a")
        delay = 1_000 * 2**attempt
        assert delay - 100 < (engine.visible_in(run, "a") or 0) <= delay
        assert engine.task(run, "a")["message_id"] == message["msg_id"]
        (kept,) = engine.live()
        assert (kept["msg_id"], kept["message"]) == (message["msg_id"], message["message"])
        assert kept["enqueued_at"] == message["enqueued_at"]
    assert engine.archived() == []


# Order


def test_a_parent_is_broadcast_before_its_children_without_tasks(engine: Engine) -> None:
    engine.flow()
    engine.step("z")
    engine.step("b", "z", step_type="map")
    engine.step("a", "b", step_type="map")
    run = engine.start()
    engine.claim()
    engine.complete(run, "z", 0, [])
    rows = engine.rows("select event from realtime.messages where event like '%%completed' order by inserted_at")
    assert [row["event"] for row in rows] == [
        "step:z:completed",
        "step:b:completed",
        "step:a:completed",
        "run:completed",
    ]


# Queues are found by name


def test_the_life_of_a_task_never_lists_the_queues(engine: Engine) -> None:
    engine.flow(max_attempts=3)
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.execute(
        "create or replace function pgmq.list_queues() returns setof pgmq.queue_record language plpgsql as "
        "$$ begin raise exception 'listed'; end $$"
    )
    with pytest.raises(psycopg.errors.RaiseException):
        engine.execute("select pgmq.list_queues()")
    run = engine.start()
    engine.claim()
    engine.fail(run, "a")
    engine.claim()
    engine.age(1_000)
    assert engine.value("select pgflow.requeue_stalled_tasks()") == 1
    engine.claim()
    engine.complete(run, "a", 0, [1])
    engine.claim()
    engine.complete(run, "m", 0, 2)
    assert engine.run(run)["status"] == "completed"


# Dependencies


def test_a_dependency_named_twice_counts_once(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", "a")
    run = engine.start()
    assert engine.state(run, "b")["remaining_deps"] == 1
    engine.claim()
    engine.complete(run, "a", 0, 1)
    assert engine.statuses(run) == {"a": "completed", "b": "started"}
