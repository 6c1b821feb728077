"""pgflow.start_ready_steps (sql-contract 2.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine


def start_ready(engine: Engine, run: uuid.UUID) -> None:
    engine.execute("select pgflow.start_ready_steps(%s)", run)


def make_ready(engine: Engine, step: str, tasks: int | None = 1) -> None:
    """Let a step be ready behind the functions' back, so that it is left to be started."""
    query = "update pgflow.step_states set remaining_deps = 0, initial_tasks = %s where step_slug = %s"
    engine.execute(query, tasks, step)


def two_steps(engine: Engine, **options: Any) -> uuid.UUID:
    """A run with `a` started and `b`, which follows it, not."""
    engine.flow()
    engine.step("a")
    engine.step("b", "a", **options)
    run = engine.start()
    engine.events()
    return run


@pytest.mark.parametrize("status", ["failed", "completed"])
def test_does_nothing_for_a_run_that_has_ended(engine: Engine, status: str) -> None:
    run = two_steps(engine)
    make_ready(engine, "b")
    engine.execute(f"update pgflow.runs set status = %s, {status}_at = now()", status)
    before = engine.everything()
    start_ready(engine, run)
    assert engine.everything() == before


def test_an_unknown_run_is_no_error(engine: Engine) -> None:
    run = two_steps(engine)
    make_ready(engine, "b")
    before = engine.everything()
    start_ready(engine, engine.value("select gen_random_uuid()"))
    assert engine.everything() == before
    start_ready(engine, run)
    assert engine.everything() != before


@pytest.mark.parametrize(
    "not_ready",
    [
        "remaining_deps = 1",
        "initial_tasks = null",
        "initial_tasks = 0",
        "status = 'started', started_at = now(), remaining_tasks = 1",
        "status = 'completed', completed_at = now(), remaining_tasks = 0",
        "status = 'failed', failed_at = now()",
        "status = 'skipped', skipped_at = now(), skip_reason = 'dependency_skipped'",
    ],
)
def test_leaves_a_step_that_is_not_ready(engine: Engine, not_ready: str) -> None:
    run = two_steps(engine)
    make_ready(engine, "b")
    engine.execute(f"update pgflow.step_states set {not_ready} where step_slug = 'b'")
    before = engine.everything()
    start_ready(engine, run)
    assert engine.everything() == before


def test_sets_the_step_started(engine: Engine) -> None:
    run = two_steps(engine)
    make_ready(engine, "b", 3)
    before = engine.state(run, "b")
    with engine.transaction() as own:
        start_ready(own, run)
        at = own.value("select now()")
    assert engine.state(run, "b") == {**before, "status": "started", "started_at": at, "remaining_tasks": 3}
    assert engine.events() == ["step:b:started"]
    assert engine.run(run)["remaining_steps"] == 2


def test_starts_every_step_that_is_ready(engine: Engine) -> None:
    engine.flow()
    for step in ("a", "b", "c"):
        engine.step(step)
    run = engine.start()
    assert set(engine.statuses(run).values()) == {"started"}
    assert sorted(engine.events()) == ["run:started", "step:a:started", "step:b:started", "step:c:started"]
    assert sorted(message["message"]["step_slug"] for message in engine.live()) == ["a", "b", "c"]


def test_does_not_judge_conditions(engine: Engine) -> None:
    run = two_steps(engine, required_input_pattern={"never": 1}, when_unmet="fail")
    make_ready(engine, "b")
    start_ready(engine, run)
    assert engine.statuses(run) == {"a": "started", "b": "started"}


def test_a_second_call_starts_nothing(engine: Engine) -> None:
    run = two_steps(engine)
    make_ready(engine, "b")
    start_ready(engine, run)
    before = engine.everything()
    start_ready(engine, run)
    assert engine.everything() == before


def test_leaves_other_runs_alone(engine: Engine) -> None:
    run = two_steps(engine)
    other = engine.start()
    make_ready(engine, "b")
    start_ready(engine, run)
    assert engine.statuses(run) == {"a": "started", "b": "started"}
    assert engine.statuses(other) == {"a": "started", "b": "created"}


def test_two_calls_at_once_start_a_step_once(engine: Engine) -> None:
    run = two_steps(engine)
    make_ready(engine, "b", 2)
    with engine.transaction() as other:
        start_ready(other, run)
        thread, results = engine.in_another_session(lambda own: start_ready(own, run))
        engine.wait_blocked()
    thread.join()
    assert results == [None]
    assert engine.events() == ["step:b:started"]
    assert len(engine.live()) == 3
    assert engine.value("select count(*) from pgflow.step_tasks where step_slug = 'b'") == 2


# Tasks and messages


def test_makes_a_queued_task_for_each_item(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    with engine.transaction() as own:
        run = own.start(["x", "y", "z"])
        at = own.value("select now()")
    messages = {message["message"]["task_index"]: message["msg_id"] for message in engine.live()}
    for index in range(3):
        assert engine.task(run, "m", index) == {
            "flow_slug": "f",
            "run_id": run,
            "step_slug": "m",
            "message_id": messages[index],
            "task_index": index,
            "status": "queued",
            "attempts_count": 0,
            "error_message": None,
            "output": None,
            "queued_at": at,
            "started_at": None,
            "completed_at": None,
            "failed_at": None,
            "last_worker_id": None,
            "requeued_count": 0,
            "last_requeued_at": None,
            "permanently_stalled_at": None,
            "queue_name": "f",
        }
    assert engine.value("select count(*) from pgflow.step_tasks") == 3


def test_each_task_has_the_message_that_names_it(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("n", step_type="map")
    engine.step("a")
    run = engine.start(list(range(150)))
    sent = {message["msg_id"]: message for message in engine.live()}
    tasks = engine.rows("select * from pgflow.step_tasks order by step_slug, task_index")
    assert len(tasks) == len(sent) == 301
    for task in tasks:
        assert sent[task["message_id"]]["message"] == {
            "flow_slug": "f",
            "run_id": str(run),
            "step_slug": task["step_slug"],
            "task_index": task["task_index"],
        }
        assert sent[task["message_id"]]["headers"] is None
    for step in ("m", "n"):
        ids = [task["message_id"] for task in tasks if task["step_slug"] == step]
        assert ids == sorted(ids)
        assert [task["task_index"] for task in tasks if task["step_slug"] == step] == list(range(150))


def test_sends_to_the_queue_of_the_step(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("a")
    engine.execute("select pgmq.create('other')")
    engine.execute("update pgflow.steps set queue_name = 'other' where step_slug = 'm'")
    run = engine.start([1, 2])
    assert [message["message"]["step_slug"] for message in engine.live()] == ["a"]
    assert [message["message"]["step_slug"] for message in engine.live("other")] == ["m", "m"]
    assert engine.task(run, "a")["queue_name"] == "f"
    for index, message in enumerate(engine.live("other")):
        task = engine.task(run, "m", index)
        assert (task["queue_name"], task["message_id"]) == ("other", message["msg_id"])
        assert message["message"]["task_index"] == index


def test_a_flow_in_mixed_case_has_its_queue_in_lower_case(engine: Engine) -> None:
    engine.flow("OrderFlow")
    engine.step("PackIt", flow="OrderFlow")
    run = engine.start(flow="OrderFlow")
    (message,) = engine.live("orderflow")
    assert message["message"]["flow_slug"] == "OrderFlow"
    assert message["message"]["step_slug"] == "PackIt"
    assert engine.task(run, "PackIt")["queue_name"] == "orderflow"


def test_messages_are_visible_at_once(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.start([1, 2])
    assert len(engine.read()) == 2


def test_start_delay_hides_the_messages_of_a_root(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map", start_delay=1_000)
    engine.step("a")
    run = engine.start([1, 2])
    assert engine.read() == [engine.task(run, "a")["message_id"]]
    for index in range(2):
        assert 900 < (engine.visible_in(run, "m", index) or 0) <= 1_000
        assert engine.task(run, "m", index)["status"] == "queued"


def test_start_delay_counts_from_the_start_of_a_dependent_step(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", start_delay=1_000)
    run = engine.start()
    engine.claim()
    engine.age(500)
    engine.complete(run, "a", 0, 1)
    assert engine.state(run, "b")["status"] == "started"
    assert 900 < (engine.visible_in(run, "b") or 0) <= 1_000
    assert engine.read() == []
