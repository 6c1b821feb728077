"""What a message says, and when it is visible or archived (sql-contract 3.1, 3.3)."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable

    from support.engine import Engine


def message_of(engine: Engine, run: uuid.UUID, step: str, index: int = 0) -> dict[str, Any]:
    """The live message of a task."""
    task = engine.task(run, step, index)
    (message,) = [m for m in engine.live(task["queue_name"]) if m["msg_id"] == task["message_id"]]
    return message


def places(engine: Engine, run: uuid.UUID) -> dict[str, str]:
    """For each task of a run whether its message is live or archived, by step and index."""
    found = {}
    for kind, messages in {"live": engine.live(), "archived": engine.archived()}.items():
        for message in messages:
            body = message["message"]
            if body["run_id"] == str(run):
                found[f"{body['step_slug']}{body['task_index']}"] = kind
    return found


def hides(engine: Engine, seconds: int, work: Callable[[], Any], run: uuid.UUID, step: str) -> bool:
    """Whether a call hides the message of a task for exactly so long, as from some moment during the call."""
    before = engine.value("select clock_timestamp()")
    work()
    after = engine.value("select clock_timestamp()")
    vt = message_of(engine, run, step)["vt"]
    return bool(before + timedelta(seconds=seconds) <= vt <= after + timedelta(seconds=seconds))


# The body


def test_a_message_has_four_keys_and_no_headers(engine: Engine) -> None:
    engine.flow("MyFlow")
    engine.step("Step_1", flow="MyFlow")
    run = engine.start({"big": "input"}, "MyFlow")
    (message,) = engine.live("myflow")
    assert message["message"] == {"flow_slug": "MyFlow", "run_id": str(run), "step_slug": "Step_1", "task_index": 0}
    assert message["headers"] is None
    assert type(message["message"]["task_index"]) is int


def test_there_is_one_message_per_task_numbered_from_zero(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start(["x", "y", "z"])
    assert sorted(m["message"]["task_index"] for m in engine.live()) == [0, 1, 2]
    for index in range(3):
        assert message_of(engine, run, "m", index)["message"] == {
            "flow_slug": "f", "run_id": str(run), "step_slug": "m", "task_index": index
        }  # fmt: skip


def test_every_task_of_a_large_map_is_paired_with_its_own_message(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.start(list(range(500)))
    assert engine.value(
        "select count(*) from pgflow.step_tasks t join pgmq.q_f q on q.msg_id = t.message_id "
        "where (q.message ->> 'task_index')::int = t.task_index"
    ) == 500  # fmt: skip


def test_ids_restart_in_each_queue(engine: Engine) -> None:
    for flow in ("f", "g"):
        engine.flow(flow)
        engine.step("a", flow=flow)
        engine.start(flow=flow)
    tasks = engine.rows("select queue_name, message_id from pgflow.step_tasks order by 1")
    assert tasks == [{"queue_name": "f", "message_id": 1}, {"queue_name": "g", "message_id": 1}]


def test_a_retry_and_a_requeue_reuse_the_message(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    fixed = ("msg_id", "enqueued_at", "message", "headers")
    first = {key: message_of(engine, run, "a")[key] for key in fixed}
    engine.claim()
    engine.fail(run, "a")
    engine.claim()
    engine.age(1000)
    engine.execute("select pgflow.requeue_stalled_tasks()")
    (message,) = engine.live()
    assert {key: message[key] for key in fixed} == first
    assert message["read_ct"] == 2


# Visibility


@pytest.mark.parametrize(("delay", "seconds"), [(None, 0), (0, 0), (30, 30)])
def test_a_root_step_is_visible_after_its_start_delay(engine: Engine, delay: int | None, seconds: int) -> None:
    engine.flow()
    engine.step("a", start_delay=delay)
    before = engine.value("select clock_timestamp()")
    run = engine.start()
    after = engine.value("select clock_timestamp()")
    offset = timedelta(seconds=seconds)
    assert before + offset <= message_of(engine, run, "a")["vt"] <= after + offset
    assert len(engine.claim()) == (0 if delay else 1)


def test_a_dependent_step_is_visible_after_its_start_delay(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", start_delay=30)
    run = engine.start()
    engine.claim()
    assert hides(engine, 30, lambda: engine.complete(run, "a", output=1), run, "b")


def test_every_message_of_a_delayed_map_is_delayed(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map", start_delay=30)
    engine.start([1, 2, 3])
    assert len(engine.live()) == 3
    assert engine.read() == []


def test_a_read_hides_a_message_and_counts(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    assert hides(engine, 5, engine.read, run, "a")
    assert message_of(engine, run, "a")["read_ct"] == 1


def test_a_claim_hides_it_for_the_timeout_and_two_seconds(engine: Engine) -> None:
    engine.flow(timeout=60)
    engine.step("a")
    run = engine.start()
    assert hides(engine, 62, engine.claim, run, "a")
    assert message_of(engine, run, "a")["read_ct"] == 1


def test_a_failure_with_retries_left_hides_it_for_the_delay(engine: Engine) -> None:
    engine.flow(base_delay=7)
    engine.step("a")
    run = engine.start()
    engine.claim()
    assert hides(engine, 14, lambda: engine.fail(run, "a"), run, "a")
    assert engine.archived() == []


def test_a_requeue_shows_it_at_once(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.age(1000)
    assert hides(engine, 0, lambda: engine.execute("select pgflow.requeue_stalled_tasks()"), run, "a")


def test_a_message_that_reappears_is_not_claimable_until_its_task_is_requeued(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.execute("select pgmq.set_vt('f', 1, 0)")
    assert engine.claim() == []
    assert places(engine, run) == {"a0": "live"}
    engine.execute("select pgmq.set_vt('f', 1, 0)")
    engine.age(1000)
    engine.execute("select pgflow.requeue_stalled_tasks()")
    assert len(engine.claim()) == 1


def test_a_message_that_is_no_task_is_left_alone(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    engine.execute("select pgmq.send('f', '{\"stranger\": true}')")
    messages, worker = engine.read(), engine.worker()
    (stranger,) = [m for m in engine.live() if "stranger" in m["message"]]
    assert len(engine.start_tasks(messages, worker)) == 1
    assert stranger in engine.live()
    assert engine.archived() == []


# Archiving


def test_a_completion_archives(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2])
    engine.claim()
    engine.complete(run, "m", 0, 1)
    assert places(engine, run) == {"m0": "archived", "m1": "live"}


def test_a_final_failure_archives_with_everything_open_in_the_run(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    engine.step("b")
    engine.step("c", start_delay=60)
    run = engine.start()
    other = engine.start()
    engine.claim(quantity=2)
    engine.fail(run, "a")
    assert places(engine, run) == {"a0": "archived", "b0": "archived", "c0": "archived"}
    assert places(engine, other) == {"a0": "live", "b0": "live", "c0": "live"}


def test_a_type_violation_archives_with_everything_open_in_the_run(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", output=1)
    assert places(engine, run) == {"a0": "archived", "b0": "archived"}


def test_a_condition_that_fails_the_run_archives_everything_open(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.step("c", "a", required_input_pattern={"a": 2}, when_unmet="fail")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", output=1)
    assert places(engine, run) == {"a0": "archived", "b0": "archived"}


@pytest.mark.parametrize("when_exhausted", ["skip", "skip-cascade"])
def test_a_step_skipped_by_its_handler_archives_its_own(engine: Engine, when_exhausted: str) -> None:
    engine.flow(max_attempts=1)
    engine.step("m", step_type="map", when_exhausted=when_exhausted)
    engine.step("b")
    run = engine.start([1, 2])
    engine.claim()
    engine.fail(run, "m", 0)
    assert places(engine, run) == {"m0": "archived", "m1": "archived", "b0": "live"}


def test_a_step_skipped_by_force_archives_its_own(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("b")
    run = engine.start([1, 2])
    engine.claim(quantity=1)
    engine.execute("select pgflow._cascade_force_skip_steps(%s, 'm', 'handler_failed')", run)
    assert places(engine, run) == {"m0": "archived", "m1": "archived", "b0": "live"}


@pytest.mark.parametrize("outcome", ["complete", "fail"])
def test_a_late_callback_on_a_terminal_step_archives_its_own_message(engine: Engine, outcome: str) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    run = engine.start()
    engine.claim()
    engine.execute(
        "update pgflow.step_states set status = 'skipped', remaining_tasks = null, skip_reason = 'handler_failed' "
        "where step_slug = 'a'"
    )
    getattr(engine, outcome)(run, "a")
    assert places(engine, run) == {"a0": "archived", "b0": "live"}


def test_giving_up_archives_and_the_task_stays_started(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.execute("update pgflow.step_tasks set requeued_count = 3")
    engine.age(1000)
    engine.execute("select pgflow.requeue_stalled_tasks()")
    assert places(engine, run) == {"a0": "archived"}
    assert engine.task(run, "a")["status"] == "started"


def test_the_normal_path_archives_every_message_and_deletes_none(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("z", "m")
    run = engine.start([1, 2])
    while tasks := engine.claim():
        for task in tasks:
            if task["attempts_count"] == 1:
                engine.fail(run, task["step_slug"], task["task_index"])
            else:
                engine.complete(run, task["step_slug"], task["task_index"], 1)
    assert engine.run(run)["status"] == "completed"
    assert places(engine, run) == {"m0": "archived", "m1": "archived", "z0": "archived"}
    assert [m["msg_id"] for m in engine.archived()] == [1, 2, 3]


@pytest.mark.parametrize("mode", ["flow", "step"])
def test_nothing_at_run_time_lists_the_queues(engine: Engine, mode: str) -> None:
    """Only provisioning and deletion may (sql-contract 2.4)."""
    steps = [
        {"slug": "a", "stepType": "single", "dependencies": []},
        {"slug": "b", "stepType": "single", "dependencies": ["a"]},
    ]
    engine.execute("select pgflow.ensure_flow_compiled('f', %s::jsonb, %s)", json.dumps({"steps": steps}), mode)
    engine.execute("update pgflow.flows set opt_base_delay = 0")
    engine.execute(
        "create or replace function pgmq.list_queues() returns setof pgmq.queue_record language plpgsql "
        "as $$ begin raise exception 'listed'; end $$"
    )

    def claim(step: str) -> int:
        queue, selector = (f"f__{step}", step) if mode == "step" else ("f", None)
        query = "select msg_id from pgflow.start_tasks('f', %s::bigint[], %s, %s, %s)"
        return len(engine.rows(query, engine.read(queue), engine.worker(), queue, selector))

    run = engine.start()
    assert claim("a") == 1
    engine.fail(run, "a")
    assert claim("a") == 1
    engine.age(1000)
    assert engine.value("select pgflow.requeue_stalled_tasks()") == 1
    assert claim("a") == 1
    engine.complete(run, "a", output=1)
    assert claim("b") == 1
    engine.complete(run, "b", output=2)
    assert engine.run(run)["status"] == "completed"
