"""pgflow.get_run_with_states (sql-contract 2.5)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.engine import Engine


def get(engine: Engine, run: uuid.UUID) -> Any:
    return engine.value("select pgflow.get_run_with_states(%s)", run)


def test_is_the_rows_of_the_run_and_its_states(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    engine.step("c", required_input_pattern={"never": 1})
    run = engine.start({"x": [1]})
    engine.start()
    engine.claim()
    engine.complete(run, "a", 0, {"y": None})
    before = engine.everything()
    found = get(engine, run)
    assert engine.everything() == before
    assert set(found) == {"run", "steps"}
    assert found["run"] == engine.value("select to_jsonb(r) from pgflow.runs r where run_id = %s", run)
    assert set(found["run"]) == set(engine.run(run))
    assert found["run"]["input"] == {"x": [1]}
    query = "select jsonb_object_agg(step_slug, to_jsonb(s)) from pgflow.step_states s where run_id = %s"
    assert len(found["steps"]) == 3
    assert {state["step_slug"]: state for state in found["steps"]} == engine.value(query, run)
    assert all(set(state) == set(engine.state(run, "a")) for state in found["steps"])


def test_steps_is_empty_for_a_flow_without_any(engine: Engine) -> None:
    engine.flow()
    found = get(engine, engine.start())
    assert found["steps"] == []
    assert found["run"]["status"] == "completed"
    assert found["run"]["output"] is None


def test_is_null_for_an_unknown_run(engine: Engine) -> None:
    assert engine.value("select pgflow.get_run_with_states(gen_random_uuid()) is null") is True
    assert engine.value("select pgflow.get_run_with_states(null) is null") is True


def test_runs_with_the_rights_of_its_owner(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    role = f"pgflow_test_{uuid.uuid4().hex[:8]}"
    with engine.transaction() as own:
        own.execute(f"create role {role}")
        own.execute(f"grant usage on schema pgflow to {role}")
        own.execute(f"set local role {role}")
        assert get(own, run)["run"]["run_id"] == str(run)
        own.connection.rollback()
