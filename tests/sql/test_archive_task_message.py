"""pgflow._archive_task_message (sql-contract 2.11)."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.engine import Engine

ARCHIVE = "select pgflow._archive_task_message(%s, %s, %s)"


def test_archives_the_message_of_that_task_only(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2, 3])
    engine.start([1, 2, 3])
    message = engine.task(run, "m", 1)["message_id"]
    before = engine.live()
    engine.execute(ARCHIVE, run, "m", 1)
    assert engine.live() == [m for m in before if m["msg_id"] != message]
    assert [(m["msg_id"], m["message"]) for m in engine.archived()] == [
        (message, {"flow_slug": "f", "run_id": str(run), "step_slug": "m", "task_index": 1})
    ]


def test_archives_in_the_queue_stored_with_the_task(engine: Engine) -> None:
    steps: list[dict[str, Any]] = [{"slug": slug, "stepType": "single", "dependencies": []} for slug in ("a", "b")]
    engine.execute("select pgflow.ensure_flow_compiled('f', %s::jsonb, 'step')", json.dumps({"steps": steps}))
    run = engine.start()
    assert engine.task(run, "a")["message_id"] == engine.task(run, "b")["message_id"]
    engine.execute(ARCHIVE, run, "b", 0)
    assert [len(engine.live(queue)) for queue in ("f__a", "f__b")] == [1, 0]
    assert [len(engine.archived(queue)) for queue in ("f__a", "f__b")] == [0, 1]


def test_changes_no_row_and_sends_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    before = engine.everything()
    engine.execute(ARCHIVE, run, "a", 0)
    assert engine.everything() | {"live": 0, "archived": 0} == before | {"live": 0, "archived": 0}


def test_a_second_call_finds_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.execute(ARCHIVE, run, "a", 0)
    before = engine.everything()
    engine.execute(ARCHIVE, run, "a", 0)
    assert engine.everything() == before


@pytest.mark.parametrize(("step", "index"), [("b", 0), ("a", 1), ("A", 0), (None, 0), ("a", None)])
def test_no_such_task_is_no_error(engine: Engine, step: str | None, index: int | None) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    before = engine.everything()
    engine.execute(ARCHIVE, run, step, index)
    engine.execute(ARCHIVE, uuid.uuid4(), "a", 0)
    assert engine.everything() == before


def test_a_task_without_message_is_no_error(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.execute("update pgflow.step_tasks set message_id = null")
    before = engine.everything()
    engine.execute(ARCHIVE, run, "a", 0)
    assert engine.everything() == before
