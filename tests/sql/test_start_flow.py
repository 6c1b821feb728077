"""pgflow.start_flow (sql-contract 2.5)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.engine import NOTHING, as_json

if TYPE_CHECKING:
    from support.engine import Engine


def start(engine: Engine, value: Any, flow: str = "f", run_id: uuid.UUID | None = None) -> dict[str, Any]:
    return engine.row("select * from pgflow.start_flow(%s, %s, %s)", flow, as_json(value), run_id)


def test_inserts_the_run_and_returns_its_row(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    with engine.transaction() as own:
        returned = start(own, {"x": 1})
        at = own.value("select now()")
    assert returned == engine.run(returned["run_id"])
    assert returned == {
        "run_id": returned["run_id"],
        "flow_slug": "f",
        "status": "started",
        "input": {"x": 1},
        "output": None,
        "remaining_steps": 2,
        "started_at": at,
        "completed_at": None,
        "failed_at": None,
    }


def test_inserts_a_state_for_each_step(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.step("root", step_type="map")
    engine.step("z", "a", "m", "root")
    run = engine.start([1, 2, 3])
    columns = ("status", "remaining_deps", "initial_tasks", "remaining_tasks")
    assert {step: tuple(engine.state(run, step)[c] for c in columns) for step in engine.statuses(run)} == {
        "a": ("started", 0, 1, 1),
        "m": ("created", 1, None, None),
        "root": ("started", 0, 3, 3),
        "z": ("created", 3, 1, None),
    }
    assert {engine.state(run, step)["flow_slug"] for step in engine.statuses(run)} == {"f"}


def test_only_the_steps_of_its_flow_take_part(engine: Engine) -> None:
    for flow, steps in ("f", ["a", "b"]), ("g", ["a", "c"]):
        engine.flow(flow)
        for step in steps:
            engine.step(step, flow=flow)
    run = engine.start(flow="g")
    assert engine.statuses(run) == {"a": "started", "c": "started"}
    assert engine.run(run)["remaining_steps"] == 2
    assert (len(engine.live("f")), len(engine.live("g"))) == (0, 2)


def test_runs_have_the_id_given_or_one_of_their_own(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    given = uuid.uuid4()
    ids = {start(engine, {})["run_id"], start(engine, {})["run_id"], start(engine, {}, run_id=given)["run_id"]}
    assert len(ids) == 3
    assert given in ids


def test_the_run_id_may_be_left_out(engine: Engine) -> None:
    engine.flow()
    assert engine.row("select * from pgflow.start_flow(flow_slug => 'f', input => '{}')")["status"] == "completed"


@pytest.mark.parametrize("value", [None, {}, [], 0, False, "", "text", {"k": [1, None, {"deep": True}]}], ids=repr)
def test_keeps_the_input(engine: Engine, value: Any) -> None:
    engine.flow()
    engine.step("a")
    assert start(engine, value)["input"] == value


# Refused


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (NOTHING, "Flow f has root map steps but input is NULL"),
        (None, "Flow f has root map steps but input is not an array (got null)"),
        ({}, "Flow f has root map steps but input is not an array (got object)"),
        ("[]", "Flow f has root map steps but input is not an array (got string)"),
        (1, "Flow f has root map steps but input is not an array (got number)"),
        (True, "Flow f has root map steps but input is not an array (got boolean)"),
    ],
)
def test_a_root_map_needs_an_array(engine: Engine, value: Any, message: str) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", step_type="map")
    before = engine.everything()
    with pytest.raises(psycopg.errors.RaiseException) as raised:
        start(engine, value)
    assert raised.value.sqlstate == "P0001"
    assert raised.value.diag.message_primary == message
    assert engine.everything() == before


def test_without_a_root_map_null_violates_not_null(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    before = engine.everything()
    with pytest.raises(psycopg.errors.NotNullViolation) as raised:
        start(engine, NOTHING)
    assert raised.value.sqlstate == "23502"
    assert (raised.value.diag.table_name, raised.value.diag.column_name) == ("runs", "input")
    assert engine.everything() == before


@pytest.mark.parametrize("slug", ["unknown", "F"])
def test_an_unknown_flow_violates_the_foreign_key(engine: Engine, slug: str) -> None:
    engine.flow()
    engine.step("a")
    before = engine.everything()
    with pytest.raises(psycopg.errors.ForeignKeyViolation) as raised:
        start(engine, {}, slug)
    assert raised.value.sqlstate == "23503"
    assert raised.value.diag.constraint_name == "runs_flow_slug_fkey"
    assert engine.everything() == before


def test_a_run_id_is_used_once(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    given = start(engine, {})["run_id"]
    before = engine.everything()
    with pytest.raises(psycopg.errors.UniqueViolation) as raised:
        start(engine, {}, run_id=given)
    assert raised.value.sqlstate == "23505"
    assert raised.value.diag.constraint_name == "runs_pkey"
    assert engine.everything() == before


def test_an_error_at_the_end_leaves_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.execute("update pgflow.steps set queue_name = 'missing' where step_slug = 'b'")
    before = engine.everything()
    with pytest.raises(psycopg.errors.UndefinedTable):
        start(engine, {})
    assert engine.everything() == before


# What follows in the same call


def test_starts_what_is_ready(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    run = engine.start()
    assert engine.statuses(run) == {"a": "started", "b": "created"}
    assert engine.events() == ["run:started", "step:a:started"]
    assert [message["message"]["step_slug"] for message in engine.live()] == ["a"]


def test_resolves_conditions_then_completes_then_starts(engine: Engine) -> None:
    engine.flow()
    engine.step("z_skipped", required_input_pattern={"never": 1})
    engine.step("empty", "z_skipped", step_type="map")
    engine.step("a", "empty")
    returned = start(engine, {})
    assert engine.events() == [
        "run:started",
        "step:z_skipped:skipped",
        "step:empty:completed",
        "step:a:started",
    ]
    assert (returned["status"], returned["remaining_steps"]) == ("started", 1)


def test_returns_the_failed_run_and_stops(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("empty", step_type="map")
    engine.step("b", required_input_pattern={"never": 1}, when_unmet="fail")
    returned = start(engine, [])
    assert returned == engine.run(returned["run_id"])
    assert (returned["status"], returned["remaining_steps"]) == ("failed", 3)
    assert returned["failed_at"] == returned["started_at"]
    assert engine.statuses(returned["run_id"]) == {"a": "created", "b": "failed", "empty": "created"}
    assert engine.events() == ["run:started", "step:b:failed", "run:failed"]
    assert engine.live() == engine.archived() == []
    assert engine.value("select count(*) from pgflow.step_tasks") == 0


def test_returns_the_completed_run(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    returned = start(engine, [])
    assert (returned["status"], returned["remaining_steps"], returned["output"]) == ("completed", 0, {"m": []})
    assert engine.events() == ["run:started", "step:m:completed", "run:completed"]
    assert engine.live() == []


def test_a_flow_without_steps_completes_at_once(engine: Engine) -> None:
    engine.flow()
    returned = start(engine, {"x": 1})
    assert (returned["status"], returned["remaining_steps"]) == ("completed", 0)
    assert returned["completed_at"] == returned["started_at"]
    assert engine.value("select output is null from pgflow.runs") is True
    assert engine.events() == ["run:started", "run:completed"]


def test_is_seen_by_nobody_before_its_commit(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    before = engine.everything()
    with engine.transaction() as own:
        run = own.start()
        assert engine.everything() == before
    assert engine.statuses(run) == {"a": "started"}
    assert len(engine.live()) == 1
