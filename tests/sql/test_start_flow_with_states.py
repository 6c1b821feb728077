"""pgflow.start_flow_with_states (sql-contract 2.5)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.engine import NOTHING, as_json

if TYPE_CHECKING:
    from support.engine import Engine


def start(engine: Engine, value: Any, flow: str = "f", run_id: uuid.UUID | None = None) -> Any:
    return engine.value("select pgflow.start_flow_with_states(%s, %s, %s)", flow, as_json(value), run_id)


def test_starts_a_run_and_returns_it_with_its_states(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("skipped", required_input_pattern={"never": 1})
    engine.step("b", "a")
    given = uuid.uuid4()
    returned = start(engine, {"x": 1}, run_id=given)
    assert returned == engine.value("select pgflow.get_run_with_states(%s)", given)
    assert returned["run"]["run_id"] == str(given)
    assert returned["run"]["remaining_steps"] == 2
    assert {state["step_slug"]: state["status"] for state in returned["steps"]} == {
        "a": "started",
        "b": "created",
        "skipped": "skipped",
    }
    assert engine.events() == ["run:started", "step:skipped:skipped", "step:a:started"]
    assert len(engine.live()) == 1


def test_the_run_id_may_be_left_out(engine: Engine) -> None:
    engine.flow()
    returned = engine.value("select pgflow.start_flow_with_states(flow_slug => 'f', input => '{}')")
    assert returned["run"]["status"] == "completed"
    assert returned["steps"] == []


def test_returns_a_run_that_failed_at_once(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern={"never": 1}, when_unmet="fail")
    returned = start(engine, {})
    assert returned["run"]["status"] == "failed"
    assert [state["error_message"] for state in returned["steps"]] == ["Condition not met"]


@pytest.mark.parametrize(
    ("flow", "value", "sqlstate"),
    [("f", NOTHING, "P0001"), ("f", {}, "P0001"), ("g", NOTHING, "23502"), ("unknown", {}, "23503")],
)
def test_refuses_what_start_flow_refuses(engine: Engine, flow: str, value: Any, sqlstate: str) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.flow("g")
    before = engine.everything()
    with pytest.raises(psycopg.Error) as raised:
        start(engine, value, flow)
    assert raised.value.sqlstate == sqlstate
    assert engine.everything() == before


def test_a_run_id_is_used_once(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    before = engine.everything()
    with pytest.raises(psycopg.errors.UniqueViolation) as raised:
        start(engine, {}, run_id=run)
    assert raised.value.diag.constraint_name == "runs_pkey"
    assert engine.everything() == before


def test_runs_with_the_rights_of_its_owner(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    role = f"pgflow_test_{uuid.uuid4().hex[:8]}"
    with engine.transaction() as own:
        own.execute(f"create role {role}")
        own.execute(f"grant usage on schema pgflow to {role}")
        own.execute(f"set local role {role}")
        assert start(own, {})["run"]["status"] == "started"
        own.connection.rollback()
