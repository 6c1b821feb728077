"""The worked trace and its variants, row by row (sql-contract 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engine import NOTHING

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine


def states(engine: Engine, run: uuid.UUID, *columns: str) -> dict[str, tuple[Any, ...]]:
    return {step: tuple(engine.state(run, step)[column] for column in columns) for step in engine.statuses(run)}


def ids(messages: list[dict[str, Any]]) -> list[int]:
    return [message["msg_id"] for message in messages]


def record(run: uuid.UUID, step: str, index: int, message: int, given: Any, flow_input: Any = None) -> dict[str, Any]:
    """A first claim."""
    return {
        "flow_slug": "n",
        "run_id": run,
        "step_slug": step,
        "input": given,
        "msg_id": message,
        "task_index": index,
        "flow_input": flow_input,
        "attempts_count": 1,
    }


def flow_n(engine: Engine) -> None:
    engine.execute("select pgflow.create_flow('n')")
    engine.step("a", flow="n")
    engine.step("m", "a", flow="n", step_type="map")
    engine.step("z", "m", "a", flow="n")


def test_main_trace(engine: Engine) -> None:
    flow_n(engine)
    worker = engine.worker(queue="n")

    run = engine.start({"x": 1}, flow="n")
    assert (engine.run(run)["status"], engine.run(run)["remaining_steps"]) == ("started", 3)
    assert states(engine, run, "status", "initial_tasks", "remaining_tasks", "remaining_deps") == {
        "a": ("started", 1, 1, 0),
        "m": ("created", None, None, 1),
        "z": ("created", 1, None, 2),
    }
    (message,) = engine.live("n")
    assert message["msg_id"] == 1
    assert message["message"] == {"flow_slug": "n", "run_id": str(run), "step_slug": "a", "task_index": 0}
    assert engine.events() == ["run:started", "step:a:started"]

    assert engine.read("n") == [1]
    claim = engine.start_tasks([1], worker, "n", "n")
    assert claim == [record(run, "a", 0, 1, {}, {"x": 1})]
    assert 50 < (engine.visible_in(run, "a") or 0) <= 62
    assert engine.events() == []

    (task,) = engine.complete(run, "a", 0, [1, None, 3])
    assert (task["status"], task["output"]) == ("completed", [1, None, 3])
    assert states(engine, run, "status", "initial_tasks", "remaining_deps", "output") == {
        "a": ("completed", 1, 0, [1, None, 3]),
        "m": ("started", 3, 0, None),
        "z": ("created", 1, 1, None),
    }
    assert engine.run(run)["remaining_steps"] == 2
    assert ids(engine.archived("n")) == [1]
    assert {m["msg_id"]: (m["message"]["step_slug"], m["message"]["task_index"]) for m in engine.live("n")} == {
        2: ("m", 0),
        3: ("m", 1),
        4: ("m", 2),
    }
    assert engine.events() == ["step:a:completed", "step:m:started"]

    assert sorted(engine.read("n")) == [2, 3, 4]
    query = "select t.*, jsonb_typeof(input) as kind from pgflow.start_tasks('n', %s, %s, 'n') t order by task_index"
    assert engine.rows(query, [2, 3, 4], worker) == [
        {**record(run, "m", index, index + 2, item), "kind": kind}
        for index, (item, kind) in enumerate([(1, "number"), (None, "null"), (3, "number")])
    ]
    assert all(50 < (engine.visible_in(run, "m", index) or 0) <= 62 for index in range(3))

    for index, output in (0, NOTHING), (2, None):
        (task,) = engine.complete(run, "m", index, output)
        assert task["status"] == "completed"
    state = engine.state(run, "m")
    assert (state["status"], state["remaining_tasks"], state["output"]) == ("started", 1, None)
    assert ids(engine.archived("n")) == [1, 2, 4]
    assert engine.events() == []

    engine.complete(run, "m", 1, False)
    assert states(engine, run, "status", "remaining_deps", "remaining_tasks", "output") == {
        "a": ("completed", 0, 0, [1, None, 3]),
        "m": ("completed", 0, 0, [None, False, None]),
        "z": ("started", 0, 1, None),
    }
    assert engine.run(run)["remaining_steps"] == 1
    assert ids(engine.archived("n")) == [1, 2, 3, 4]
    assert ids(engine.live("n")) == [5]
    assert engine.events() == ["step:m:completed", "step:z:started"]

    assert engine.read("n") == [5]
    claim = engine.start_tasks([5], worker, "n", "n")
    assert claim == [record(run, "z", 0, 5, {"a": [1, None, 3], "m": [None, False, None]})]

    (last,) = engine.complete(run, "z", 0, NOTHING)
    ended = engine.run(run)
    assert (ended["status"], ended["output"], ended["remaining_steps"]) == ("completed", {"z": None}, 0)
    assert ids(engine.archived("n")) == [1, 2, 3, 4, 5]
    assert engine.live("n") == []
    assert engine.events() == ["step:z:completed", "run:completed"]

    before = engine.everything()
    assert engine.complete(run, "z", 0, 5) == [last]
    assert engine.fail(run, "z", 0, "x") == [last]
    assert engine.everything() == before


def test_variant_empty_array(engine: Engine) -> None:
    flow_n(engine)
    run = engine.start({}, flow="n")
    engine.claim(flow="n")
    engine.events()
    engine.complete(run, "a", 0, [])
    state = engine.state(run, "m")
    assert (state["status"], state["output"], state["initial_tasks"]) == ("completed", [], 0)
    assert state["started_at"] == state["completed_at"] is not None
    assert engine.value("select count(*) from pgflow.step_tasks where step_slug = 'm'") == 0
    assert engine.state(run, "z")["status"] == "started"
    assert engine.run(run)["remaining_steps"] == 1
    sent = engine.payloads()
    assert [event for event, _ in sent] == ["step:a:completed", "step:m:completed", "step:z:started"]
    assert (sent[1][1]["remaining_tasks"], sent[1][1]["remaining_deps"]) == (0, 0)
    (claim,) = engine.claim(flow="n")
    assert claim["input"] == {"a": [], "m": []}


def test_variant_skipped_parent(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern={"z": 1}, when_unmet="skip")
    engine.step("m", "a", step_type="map")
    engine.step("z", "m")
    run = engine.start({})
    assert states(engine, run, "status", "skip_reason", "initial_tasks", "output") == {
        "a": ("skipped", "condition_unmet", 1, None),
        "m": ("completed", None, 0, []),
        "z": ("started", None, 1, None),
    }
    assert engine.run(run)["remaining_steps"] == 1
    assert engine.events() == ["run:started", "step:a:skipped", "step:m:completed", "step:z:started"]
    (claim,) = engine.claim()
    assert (claim["step_slug"], claim["input"], claim["flow_input"]) == ("z", {"m": []}, None)


def test_variant_everything_skipped(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern={"z": 1}, when_unmet="skip")
    run = engine.start({})
    ended = engine.run(run)
    assert (ended["status"], ended["remaining_steps"]) == ("completed", 0)
    assert ended["completed_at"] == ended["started_at"]
    assert engine.value("select output is null from pgflow.runs") is True
    assert engine.events() == ["run:started", "step:a:skipped", "run:completed"]
    assert engine.live() == []


@pytest.mark.parametrize("late", ["complete", "fail"])
def test_variant_failure(engine: Engine, late: str) -> None:
    engine.flow(max_attempts=1)
    engine.step("s1")
    engine.step("s2")
    run = engine.start()
    engine.claim()
    engine.events()
    before = engine.task(run, "s1")
    (failed,) = engine.fail(run, "s2")
    assert (failed["status"], failed["error_message"]) == ("failed", "no luck")
    assert engine.statuses(run) == {"s1": "started", "s2": "failed"}
    assert engine.run(run)["status"] == "failed"
    assert engine.task(run, "s1") == {**before, "status": "cancelled"}
    assert engine.live() == []
    assert len(engine.archived()) == 2
    assert engine.events() == ["step:s2:failed", "run:failed"]

    settled = engine.everything()
    returned = engine.complete(run, "s1", 0, 1) if late == "complete" else engine.fail(run, "s1")
    assert returned == [{**before, "status": "cancelled"}]
    assert engine.everything() == settled
