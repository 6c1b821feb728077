"""pgflow.delete_run (sql-contract 4.3, 4.6)."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.engine import Engine

DELETE = "select pgflow.delete_run(%s)"


def started(engine: Engine, worker: uuid.UUID | None = None) -> uuid.UUID:
    """A run with a live and an archived message."""
    run = engine.start([1, 2])
    engine.claim(worker)
    engine.complete(run, "m", 0, 1)
    return run


def test_removes_the_run_and_nothing_of_another(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    worker = engine.worker()
    kept = started(engine, worker)
    before = engine.everything()
    run = started(engine, worker)
    engine.events()
    assert engine.value(DELETE, run) is True
    after = engine.everything()
    assert after | {"sent": 0} == before | {"sent": 0}
    assert [row["run_id"] for row in after["runs"]] == [kept]
    assert engine.events() == []


@pytest.mark.parametrize("status", ["started", "completed", "failed"])
def test_removes_a_run_in_whatever_state(engine: Engine, status: str) -> None:
    engine.flow(max_attempts=1)
    engine.step("m", step_type="map")
    engine.step("z", "m")
    run = started(engine)
    if status == "failed":
        engine.fail(run, "m", 1)
    if status == "completed":
        engine.complete(run, "m", 1, 2)
        engine.claim()
        engine.complete(run, "z", output=3)
    assert engine.run(run)["status"] == status
    assert engine.value(DELETE, run) is True
    after = engine.everything()
    assert after["runs"] == after["step_states"] == after["step_tasks"] == []
    assert (after["live"], after["archived"]) == ({"f": []}, {"f": []})


def test_removes_its_messages_from_each_queue_by_its_own_ids(engine: Engine) -> None:
    steps: list[dict[str, Any]] = [{"slug": slug, "stepType": "single", "dependencies": []} for slug in ("a", "b")]
    engine.execute("select pgflow.ensure_flow_compiled('f', %s::jsonb, 'step')", json.dumps({"steps": steps}))
    first, second = engine.start(), engine.start()
    engine.execute("update pgflow.step_tasks set message_id = null where run_id = %s and step_slug = 'b'", first)
    assert engine.value(DELETE, first) is True
    assert [m["message"]["run_id"] for m in engine.live("f__a")] == [str(second)]
    assert [m["message"]["run_id"] for m in engine.live("f__b")] == [str(first), str(second)]


def test_an_unknown_run_is_false(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    started(engine)
    before = engine.everything()
    assert engine.value(DELETE, uuid.uuid4()) is False
    assert engine.everything() == before


def test_a_deleted_run_is_gone_at_the_second_call(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = started(engine)
    assert [engine.value(DELETE, run), engine.value(DELETE, run)] == [True, False]
