"""View pgflow.step_progress (sql-contract 4.6 and Decisions)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine


def progress(engine: Engine, run: uuid.UUID, step: str) -> dict[str, Any]:
    return engine.row("select * from pgflow.step_progress where run_id = %s and step_slug = %s", run, step)


def counts(total: int, completed: int = 0, failed: int = 0, queued: int = 0, started: int = 0) -> dict[str, int]:
    return {
        "total_tasks": total,
        "completed_tasks": completed,
        "failed_tasks": failed,
        "queued_tasks": queued,
        "started_tasks": started,
    }


def test_its_columns_have_these_names_in_this_order(engine: Engine) -> None:
    cursor = engine.execute("select * from pgflow.step_progress")
    assert cursor.description
    assert [column.name for column in cursor.description] == [
        "run_id", "flow_slug", "step_slug", "status",
        "total_tasks", "completed_tasks", "failed_tasks", "queued_tasks", "started_tasks",
    ]  # fmt: skip


def test_counts_the_tasks_of_a_map_by_status(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start(list(range(10)))
    engine.start(list(range(3)))
    for status, indexes in {"completed": [0, 1, 2, 3], "failed": [4], "started": [5, 6, 7]}.items():
        engine.execute(
            "update pgflow.step_tasks set status = %s where run_id = %s and task_index = any (%s)", status, run, indexes
        )
    assert progress(engine, run, "m") == {
        "run_id": run,
        "flow_slug": "f",
        "step_slug": "m",
        "status": "started",
        **counts(10, completed=4, failed=1, queued=2, started=3),
    }


@pytest.mark.parametrize("status", ["skipped", "cancelled"])
def test_ended_tasks_count_in_the_total_only(engine: Engine, status: str) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2, 3])
    engine.execute("update pgflow.step_tasks set status = %s where task_index > 0", status)
    assert counts(3, queued=1).items() <= progress(engine, run, "m").items()


def test_follows_a_step_from_created_to_completed(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    run = engine.start()
    seen = [progress(engine, run, "b")]
    engine.claim()
    engine.complete(run, "a", output=1)
    seen.append(progress(engine, run, "b"))
    engine.claim()
    seen.append(progress(engine, run, "b"))
    engine.complete(run, "b", output=1)
    seen.append(progress(engine, run, "b"))
    assert [(s["status"], s["queued_tasks"], s["started_tasks"], s["completed_tasks"]) for s in seen] == [
        ("created", 0, 0, 0),
        ("started", 1, 0, 0),
        ("started", 0, 1, 0),
        ("completed", 0, 0, 1),
    ]
    assert seen[-1]["total_tasks"] == 1


def test_there_is_one_row_for_each_step_of_each_run(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("n", "m", step_type="map")
    engine.step("s", required_input_pattern={"never": 1})
    runs = {engine.start([1, 2]), engine.start([])}
    rows = engine.rows("select run_id, step_slug from pgflow.step_progress")
    assert len(rows) == 6
    assert {(row["run_id"], row["step_slug"]) for row in rows} == {(run, step) for run in runs for step in "mns"}


def test_steps_without_tasks_count_none(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([])
    assert {"status": "completed", **counts(0)}.items() <= progress(engine, run, "m").items()
