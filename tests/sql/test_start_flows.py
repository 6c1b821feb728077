"""pgflow_otp.start_flows: many runs of a flow in one call."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

if TYPE_CHECKING:
    from support.engine import Engine


def start(engine: Engine, inputs: list[Any], run_ids: list[uuid.UUID | None] | None = None) -> list[uuid.UUID]:
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in inputs]
    query = "select pgflow_otp.start_flows('f', %s::text[], %s::uuid[]) as run_id"
    return [row["run_id"] for row in engine.rows(query, texts, run_ids)]


def test_starts_a_run_for_each_input_and_returns_their_ids_in_that_order(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    runs = start(engine, [{"n": n} for n in range(5)])
    assert [engine.run(run)["input"] for run in runs] == [{"n": n} for n in range(5)]
    for run in runs:
        assert engine.statuses(run) == {"a": "started", "b": "started"}
        assert engine.run(run)["remaining_steps"] == 2
    assert [(m["message"]["run_id"], m["message"]["step_slug"]) for m in engine.live()] == [
        (str(run), step) for run in runs for step in ("a", "b")
    ]
    assert sorted(engine.events()) == ["run:started"] * 5 + ["step:a:started"] * 5 + ["step:b:started"] * 5
    claimed = engine.claim()
    assert {(task["run_id"], task["flow_input"]["n"]) for task in claimed} == {(run, n) for n, run in enumerate(runs)}


def test_takes_the_ids_that_are_given_and_makes_the_others(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    mine = uuid.uuid4()
    first, second = start(engine, [1, 2], [None, mine])
    assert second == mine
    assert first != mine


def test_no_input_is_no_run(engine: Engine) -> None:
    engine.flow()
    assert start(engine, []) == []
    assert engine.rows("select * from pgflow.runs") == []


def test_conditions_and_empty_maps_go_their_way_in_each_run(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("z", "m")
    empty, full = start(engine, [[], [1, 2]])
    assert engine.statuses(empty) == {"m": "completed", "z": "started"}
    assert engine.statuses(full) == {"m": "started", "z": "created"}


def test_a_condition_is_judged_by_each_runs_input(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern={"go": True}, when_unmet="skip")
    engine.step("b", required_input_pattern={"go": True}, when_unmet="fail")
    good, bad = start(engine, [{"go": True}, {"go": False}])
    assert engine.statuses(good) == {"a": "started", "b": "started"}
    assert engine.run(bad)["status"] == "failed"


def test_a_flow_without_steps_is_completed_at_once(engine: Engine) -> None:
    engine.flow()
    assert {engine.run(run)["status"] for run in start(engine, [1, 2])} == {"completed"}


@pytest.mark.parametrize(
    ("inputs", "error", "message", "detail"),
    [
        ([[1], {"a": 1}], psycopg.errors.RaiseException, "is not an array (got object)", None),
        ([[1], None], psycopg.errors.RaiseException, "but input is NULL", None),
        (["[1]", "{"], psycopg.errors.InvalidTextRepresentation, "invalid input syntax", "input at position 2"),
        (['["\\u0000"]'], psycopg.errors.UntranslatableCharacter, "unsupported Unicode", "input at position 1"),
    ],
)
def test_one_bad_input_starts_none(
    engine: Engine, inputs: list[Any], error: type[psycopg.Error], message: str, detail: str | None
) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    before = engine.everything()
    with pytest.raises(error) as raised:
        start(engine, inputs)
    assert message in str(raised.value)
    assert raised.value.diag.message_detail == detail
    assert engine.everything() == before


def test_an_unknown_flow_and_a_repeated_id_are_the_tables_errors(engine: Engine) -> None:
    with pytest.raises(psycopg.errors.ForeignKeyViolation) as unknown:
        start(engine, [1])
    assert unknown.value.diag.constraint_name == "runs_flow_slug_fkey"
    engine.flow()
    engine.step("a")
    run = engine.start()
    with pytest.raises(psycopg.errors.UniqueViolation) as repeated:
        start(engine, [1, 2], [None, run])
    assert repeated.value.diag.constraint_name == "runs_pkey"
    assert engine.value("select count(*) from pgflow.runs") == 1


def test_as_many_ids_as_inputs_are_wanted(engine: Engine) -> None:
    engine.flow()
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="1 run ids for 2 inputs"):
        start(engine, [1, 2], [uuid.uuid4()])
