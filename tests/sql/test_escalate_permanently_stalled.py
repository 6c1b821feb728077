"""pgflow.escalate_permanently_stalled (sql-contract 4.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine

ESCALATE = "select pgflow.escalate_permanently_stalled()"


def stalled(engine: Engine, when_exhausted: str = "fail", runs: int = 1) -> list[uuid.UUID]:
    """Runs whose step `a` recovery gave up on, with attempts left."""
    engine.flow(max_attempts=5)
    engine.step("a", when_exhausted=when_exhausted)
    engine.step("b", "a")
    started = [engine.start() for _ in range(runs)]
    engine.claim()
    engine.execute("update pgflow.step_tasks set requeued_count = 3")
    engine.age(1000)
    engine.execute("select pgflow.requeue_stalled_tasks()")
    engine.events()
    return started


def test_fails_a_task_with_attempts_left_and_its_run(engine: Engine) -> None:
    (run,) = stalled(engine)
    assert engine.value(ESCALATE) == 1
    task = engine.task(run, "a")
    assert task["status"] == "failed"
    assert task["error_message"]
    assert engine.statuses(run) == {"a": "failed", "b": "created"}
    assert engine.state(run, "a")["error_message"] == task["error_message"]
    assert engine.run(run)["status"] == "failed"
    assert engine.run(run)["failed_at"] == task["failed_at"]
    assert engine.events() == ["step:a:failed", "run:failed"]


def test_a_step_that_may_be_skipped_is_skipped_and_the_run_goes_on(engine: Engine) -> None:
    (run,) = stalled(engine, "skip")
    assert engine.value(ESCALATE) == 1
    assert engine.task(run, "a")["status"] == "failed"
    assert engine.statuses(run) == {"a": "skipped", "b": "started"}
    assert engine.state(run, "a")["skip_reason"] == "handler_failed"
    assert engine.events() == ["step:a:skipped", "step:b:started"]


def test_a_step_that_cascades_takes_its_descendants_along(engine: Engine) -> None:
    (run,) = stalled(engine, "skip-cascade")
    assert engine.value(ESCALATE) == 1
    assert engine.statuses(run) == {"a": "skipped", "b": "skipped"}
    assert engine.run(run)["status"] == "completed"
    assert engine.events() == ["step:a:skipped", "step:b:skipped", "run:completed"]


def test_counts_the_tasks_of_all_runs_and_does_it_once(engine: Engine) -> None:
    runs = stalled(engine, runs=3)
    assert engine.value(ESCALATE) == 3
    assert {engine.run(run)["status"] for run in runs} == {"failed"}
    before = engine.everything()
    assert engine.value(ESCALATE) == 0
    assert engine.everything() == before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("update pgflow.step_tasks set permanently_stalled_at = null", id="not given up"),
        pytest.param("update pgflow.step_tasks set status = 'queued', started_at = null", id="queued"),
        pytest.param("update pgflow.step_tasks set status = 'completed', completed_at = now()", id="completed"),
        pytest.param("update pgflow.step_tasks set status = 'cancelled'", id="cancelled"),
        pytest.param("update pgflow.runs set status = 'failed', failed_at = now()", id="run failed"),
        pytest.param("update pgflow.runs set status = 'completed', completed_at = now()", id="run completed"),
        pytest.param(
            "update pgflow.step_states set status = 'failed', failed_at = now() where step_slug = 'a'",
            id="step failed",
        ),
        pytest.param(
            "update pgflow.step_states set status = 'skipped', remaining_tasks = null, skip_reason = 'handler_failed' "
            "where step_slug = 'a'",
            id="step skipped",
        ),
    ],
)
def test_leaves_everything_else_alone(engine: Engine, change: str) -> None:
    stalled(engine)
    engine.execute(change)
    before = engine.everything()
    assert engine.value(ESCALATE) == 0
    assert engine.everything() == before


def test_an_empty_database_has_nothing_to_escalate(engine: Engine) -> None:
    assert engine.value(ESCALATE) == 0
