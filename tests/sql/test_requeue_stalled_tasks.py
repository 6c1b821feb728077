"""pgflow.requeue_stalled_tasks (sql-contract 2.11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine

REQUEUE = "select pgflow.requeue_stalled_tasks()"


def started(engine: Engine, *flows: str, timeout: int = 60) -> list[uuid.UUID]:
    """One claimed run of step `a` for each flow."""
    runs = []
    for flow in flows or ("f",):
        engine.flow(flow, timeout=timeout)
        engine.step("a", flow=flow)
        runs.append(engine.start(flow=flow))
        engine.claim(flow=flow)
    engine.events()
    return runs


def give_up_next(engine: Engine, run: uuid.UUID) -> None:
    engine.execute("update pgflow.step_tasks set requeued_count = 3 where run_id = %s", run)


@pytest.mark.parametrize(("timeout", "limit"), [(None, 70), (7, 37), (100, 130)])
@pytest.mark.parametrize(("beyond", "requeued"), [(0, 0), (0.001, 1)])
def test_overdue_is_the_timeout_of_step_or_flow_and_thirty_seconds(
    engine: Engine, timeout: int | None, limit: int, beyond: float, requeued: int
) -> None:
    engine.flow(timeout=40)
    engine.step("a", timeout=timeout)
    engine.start()
    engine.claim()
    with engine.transaction() as own:  # Within one transaction now() stands still.
        own.execute(
            "update pgflow.step_tasks set queued_at = now() - interval '1 hour', "
            "started_at = now() - make_interval(secs => %s)",
            limit + beyond,
        )
        assert own.value(REQUEUE) == requeued


def test_a_stalled_task_is_queued_again(engine: Engine) -> None:
    (run,) = started(engine)
    engine.age(100)
    before = engine.task(run, "a")
    assert engine.value(REQUEUE) == 1
    after = engine.task(run, "a")
    assert after["last_requeued_at"] is not None
    assert after == before | {
        "status": "queued",
        "started_at": None,
        "last_worker_id": None,
        "requeued_count": 1,
        "last_requeued_at": after["last_requeued_at"],
    }


def test_a_requeue_costs_no_attempt_and_reuses_the_message(engine: Engine) -> None:
    (run,) = started(engine)
    message = engine.task(run, "a")["message_id"]
    engine.age(100)
    engine.execute(REQUEUE)
    assert engine.task(run, "a")["attempts_count"] == 1
    assert [(t["msg_id"], t["attempts_count"]) for t in engine.claim()] == [(message, 2)]


def test_the_message_of_a_requeued_task_is_visible_at_once(engine: Engine) -> None:
    (run,) = started(engine)
    before = engine.live()
    engine.age(100)
    assert engine.read() == []
    engine.execute(REQUEUE)
    assert engine.value("select vt <= clock_timestamp() from pgmq.q_f")
    assert [m | {"vt": None} for m in engine.live()] == [m | {"vt": None} for m in before]
    assert engine.read() == [engine.task(run, "a")["message_id"]]


def test_run_and_step_are_left_alone_and_nothing_is_sent(engine: Engine) -> None:
    (run,) = started(engine)
    engine.age(100)
    before = engine.run(run), engine.state(run, "a")
    engine.execute(REQUEUE)
    assert (engine.run(run), engine.state(run, "a")) == before
    assert engine.events() == []


def test_messages_of_several_queues_become_visible(engine: Engine) -> None:
    started(engine, "f", "g", "h")
    engine.age(100)
    assert engine.value(REQUEUE) == 3
    assert [len(engine.read(queue)) for queue in "fgh"] == [1, 1, 1]


def test_only_what_is_overdue_is_requeued(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2, 3])
    engine.claim()
    engine.execute("update pgflow.step_tasks set queued_at = queued_at - interval '1 hour'")
    engine.execute("update pgflow.step_tasks set started_at = queued_at where task_index = 1")
    assert engine.value(REQUEUE) == 1
    assert [engine.task(run, "m", i)["status"] for i in range(3)] == ["started", "queued", "started"]
    assert engine.read() == [engine.task(run, "m", 1)["message_id"]]


@pytest.mark.parametrize(
    "change",
    [
        "update pgflow.step_tasks set status = 'queued', started_at = null",
        "update pgflow.step_tasks set status = 'completed', completed_at = now()",
        "update pgflow.step_tasks set status = 'failed', failed_at = now()",
        "update pgflow.step_tasks set status = 'skipped'",
        "update pgflow.step_tasks set status = 'cancelled'",
        "update pgflow.step_tasks set permanently_stalled_at = now()",
        "update pgflow.runs set status = 'failed', failed_at = now()",
        "update pgflow.runs set status = 'completed', completed_at = now()",
        "update pgflow.step_states set status = 'completed', remaining_tasks = 0, completed_at = now()",
        "update pgflow.step_states set status = 'failed', failed_at = now()",
        "update pgflow.step_states set status = 'skipped', remaining_tasks = null, skip_reason = 'condition_unmet'",
    ],
)
@pytest.mark.parametrize("count", [0, 3])
def test_everything_else_is_left_alone(engine: Engine, change: str, count: int) -> None:
    (_,) = started(engine)
    engine.age(1000)
    engine.execute(change)
    engine.execute("update pgflow.step_tasks set requeued_count = %s", count)
    before = engine.everything()
    assert engine.value(REQUEUE) == 0
    assert engine.everything() == before


def test_a_task_is_requeued_three_times_and_then_given_up(engine: Engine) -> None:
    (run,) = started(engine)
    for count in (1, 2, 3):
        engine.age(100)
        assert engine.value(REQUEUE) == 1
        assert engine.task(run, "a")["requeued_count"] == count
        assert len(engine.claim()) == 1
    engine.age(100)
    before = engine.task(run, "a")
    assert engine.value(REQUEUE) == 0
    after = engine.task(run, "a")
    assert after["permanently_stalled_at"] is not None
    assert after == before | {"permanently_stalled_at": after["permanently_stalled_at"]}
    assert after["status"] == "started"


def test_the_message_of_a_task_given_up_is_archived_though_nothing_was_requeued(engine: Engine) -> None:
    """A deliberate difference: the sibling leaves it live, to be read again and again."""
    (run,) = started(engine)
    give_up_next(engine, run)
    engine.age(100)
    assert engine.value(REQUEUE) == 0
    assert engine.live() == []
    assert [m["msg_id"] for m in engine.archived()] == [engine.task(run, "a")["message_id"]]


def test_requeueing_and_giving_up_go_together_over_all_queues(engine: Engine) -> None:
    runs = started(engine, "f", "g", "h", "i")
    for run in runs[:2]:
        give_up_next(engine, run)
    engine.age(100)
    assert engine.value(REQUEUE) == 2
    assert [len(engine.live(queue)) for queue in "fghi"] == [0, 0, 1, 1]
    assert [len(engine.archived(queue)) for queue in "fghi"] == [1, 1, 0, 0]
    assert [len(engine.read(queue)) for queue in "hi"] == [1, 1]


def test_a_task_given_up_is_not_looked_at_again(engine: Engine) -> None:
    (run,) = started(engine)
    give_up_next(engine, run)
    engine.age(100)
    engine.execute(REQUEUE)
    engine.age(1000)
    before = engine.everything()
    assert engine.value(REQUEUE) == 0
    assert engine.everything() == before


def test_a_late_completion_of_a_task_given_up_still_counts(engine: Engine) -> None:
    (run,) = started(engine)
    give_up_next(engine, run)
    engine.age(100)
    engine.execute(REQUEUE)
    assert [row["status"] for row in engine.complete(run, "a", output=1)] == ["completed"]
    assert engine.run(run)["status"] == "completed"


def test_an_empty_database_has_nothing_to_requeue(engine: Engine) -> None:
    assert engine.value(REQUEUE) == 0
