"""pgflow._cascade_force_skip_steps (sql-contract 2.10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine


def skip(engine: Engine, run: uuid.UUID, step: str, reason: str = "condition_unmet") -> int:
    count = engine.value("select pgflow._cascade_force_skip_steps(%s, %s, %s)", run, step, reason)
    assert isinstance(count, int)
    return count


def test_an_unknown_run_is_refused(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    before = engine.everything()
    unknown = engine.value("select gen_random_uuid()")
    with pytest.raises(psycopg.errors.RaiseException) as raised:
        skip(engine, unknown, "a")
    assert raised.value.sqlstate == "P0001"
    assert raised.value.diag.message_primary == f"Run not found: {unknown}"
    assert engine.everything() == before


@pytest.mark.parametrize("reason", ["condition_unmet", "handler_failed", "dependency_skipped"])
def test_skips_the_step_for_the_reason_given(engine: Engine, reason: str) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    before = engine.state(run, "a")
    with engine.transaction() as own:
        assert skip(own, run, "a", reason) == 1
        at = own.value("select now()")
    assert engine.state(run, "a") == {
        **before,
        "status": "skipped",
        "skip_reason": reason,
        "skipped_at": at,
        "remaining_tasks": None,
    }


def test_skips_all_that_depends_on_it(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.step("c", "b")
    engine.step("both", "a", "c")
    engine.step("m", "c", step_type="map")
    engine.step("last", "both", "m")
    engine.step("beside", "a")
    run = engine.start()
    deps = {step: engine.state(run, step)["remaining_deps"] for step in engine.statuses(run)}
    engine.events()
    assert skip(engine, run, "b", "handler_failed") == 5
    assert engine.statuses(run) == {
        "a": "started",
        "b": "skipped",
        "beside": "created",
        "both": "skipped",
        "c": "skipped",
        "last": "skipped",
        "m": "skipped",
    }
    assert {step: engine.state(run, step)["skip_reason"] for step in deps} == {
        "a": None,
        "b": "handler_failed",
        "beside": None,
        "both": "dependency_skipped",
        "c": "dependency_skipped",
        "last": "dependency_skipped",
        "m": "dependency_skipped",
    }
    assert engine.run(run)["remaining_steps"] == 2
    assert {engine.state(run, step)["skipped_at"] is None for step in ("b", "both", "c", "last", "m")} == {False}


def test_parents_are_announced_before_their_children(engine: Engine) -> None:
    parents = {"z": [], "y": ["z"], "x": ["y"], "w": ["z", "x"], "b": ["y"], "a": ["b", "w"]}
    engine.flow()
    for step, names in parents.items():
        engine.step(step, *names)
    run = engine.start()
    engine.events()
    assert skip(engine, run, "z") == 6
    events = engine.events()
    assert sorted(events) == sorted(f"step:{step}:skipped" for step in parents)
    place = {event.split(":")[1]: n for n, event in enumerate(events)}
    assert all(place[parent] < place[step] for step, names in parents.items() for parent in names)


def test_a_second_call_skips_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    run = engine.start()
    assert skip(engine, run, "a") == 2
    before = engine.everything()
    assert skip(engine, run, "a", "handler_failed") == 0
    assert skip(engine, run, "b", "handler_failed") == 0
    assert engine.everything() == before


def test_of_a_completed_step_only_the_descendants_are_skipped(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    engine.step("c", "b")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", 0, 1)
    before = engine.state(run, "a")
    engine.events()
    assert skip(engine, run, "a") == 2
    assert engine.state(run, "a") == before
    assert engine.statuses(run) == {"a": "completed", "b": "skipped", "c": "skipped"}
    assert [engine.state(run, step)["skip_reason"] for step in "bc"] == ["dependency_skipped"] * 2
    assert engine.events() == ["step:b:skipped", "step:c:skipped"]
    assert engine.run(run)["remaining_steps"] == 0


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_a_descendant_that_has_ended_stays(engine: Engine, status: str) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    engine.step("c", "b")
    run = engine.start()
    engine.execute(
        f"update pgflow.step_states set status = %s, remaining_tasks = 0, started_at = now(), {status}_at = now() "
        "where step_slug = 'b'",
        status,
    )
    before = engine.state(run, "b")
    assert skip(engine, run, "a") == 2
    assert engine.state(run, "b") == before
    assert engine.statuses(run) == {"a": "skipped", "b": status, "c": "skipped"}


def test_open_tasks_are_skipped_and_ended_ones_stay(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2, 3])
    engine.claim()
    engine.complete(run, "m", 0, "kept")
    engine.fail(run, "m", 1)  # Queued again.
    before = [engine.task(run, "m", index) for index in range(3)]
    assert [task["status"] for task in before] == ["completed", "queued", "started"]
    assert skip(engine, run, "m") == 1
    after = [engine.task(run, "m", index) for index in range(3)]
    assert after == [before[0], {**before[1], "status": "skipped"}, {**before[2], "status": "skipped"}]
    assert engine.live() == []
    assert sorted(message["msg_id"] for message in engine.archived()) == sorted(task["message_id"] for task in before)


@pytest.mark.parametrize(("start", "skipped"), [("a", "abcd"), ("b", "b"), ("c", "c"), ("d", "d")])
def test_archives_in_every_queue(engine: Engine, start: str, skipped: str) -> None:
    queues = {"a": "qa", "b": "qb", "c": "qc", "d": "f"}
    engine.flow()
    engine.step("a")
    for step in "bcd":
        engine.step(step, "a")
    for step in "abc":
        engine.execute("select pgmq.create(%s)", queues[step])
        engine.execute("update pgflow.steps set queue_name = %s where step_slug = %s", queues[step], step)
    run = engine.start()
    # Children that are started although their parent is not done: the tasks of one cascade are in several queues.
    engine.execute("update pgflow.step_states set remaining_deps = 0")
    engine.execute("select pgflow.start_ready_steps(%s)", run)
    assert all(len(engine.live(queue)) == 1 for queue in queues.values())
    assert skip(engine, run, start) == len(skipped)
    for step, queue in queues.items():
        ended = step in skipped
        assert engine.task(run, step)["status"] == ("skipped" if ended else "queued")
        assert (len(engine.live(queue)), len(engine.archived(queue))) == ((0, 1) if ended else (1, 0))


def test_messages_of_steps_skipped_earlier_are_not_touched(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    run = engine.start()
    engine.execute("update pgflow.step_states set remaining_deps = 0")
    engine.execute("select pgflow.start_ready_steps(%s)", run)
    engine.execute(
        "update pgflow.step_states set status = 'skipped', skip_reason = 'handler_failed', skipped_at = now(), "
        "remaining_tasks = null where step_slug = 'b'"
    )
    state, task = engine.state(run, "b"), engine.task(run, "b")
    assert skip(engine, run, "a") == 1
    assert engine.state(run, "b") == state
    assert engine.task(run, "b") == task
    assert [message["msg_id"] for message in engine.live()] == [task["message_id"]]


def test_leaves_other_runs_alone(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    run, other = engine.start(), engine.start()
    assert skip(engine, run, "a") == 2
    assert engine.statuses(other) == {"a": "started", "b": "created"}
    assert engine.run(other)["remaining_steps"] == 2
    assert [message["msg_id"] for message in engine.live()] == [engine.task(other, "a")["message_id"]]


def test_a_flow_with_steps_of_the_same_names_is_left_alone(engine: Engine) -> None:
    for flow, parents in ("f", ["a"]), ("g", []):
        engine.flow(flow)
        engine.step("a", flow=flow)
        engine.step("b", *parents, flow=flow)
    run = engine.start(flow="g")
    assert skip(engine, run, "a") == 1
    assert engine.statuses(run) == {"a": "skipped", "b": "started"}
