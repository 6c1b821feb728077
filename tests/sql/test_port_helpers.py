"""The smaller helpers that a sibling runtime's client calls (sql-contract 4)."""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import errors
from support.engine import NOTHING

if TYPE_CHECKING:
    from support.engine import Engine


@pytest.mark.parametrize(("slug", "exists"), [("MyFlow", True), ("myflow", False), ("other", False), ("", False)])
def test_flow_exists_goes_by_the_exact_slug(engine: Engine, slug: str, exists: bool) -> None:
    engine.flow("MyFlow")
    assert engine.value("select pgflow.flow_exists(%s)", slug) is exists


def test_flow_exists_is_false_for_null(engine: Engine) -> None:
    engine.flow()
    assert engine.value("select pgflow.flow_exists(null)") is False


@pytest.mark.parametrize("value", [{"x": [1]}, [1, 2], "text", None, False])
def test_get_flow_input_is_the_input_of_that_run(engine: Engine, value: Any) -> None:
    engine.flow()
    run = engine.start(value)
    engine.start("another")
    assert json.loads(engine.value("select pgflow.get_flow_input(%s)::text", run)) == value


def test_get_flow_input_of_an_unknown_run_is_null(engine: Engine) -> None:
    engine.flow()
    engine.start()
    assert engine.value("select pgflow.get_flow_input(%s) is null", uuid.uuid4()) is True


@pytest.mark.parametrize("output", [{"x": 1}, [1], "text", None, False])
def test_get_step_output_is_the_output_of_that_step(engine: Engine, output: Any) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", output=output)
    engine.complete(run, "b", output="another")
    assert json.loads(engine.value("select pgflow.get_step_output(%s, 'a')::text", run)) == output


def test_get_step_output_of_a_map_is_the_array_of_all_outputs(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2])
    engine.claim()
    query = "select pgflow.get_step_output(%s, 'm')"
    engine.complete(run, "m", 1, NOTHING)
    assert engine.value(query, run) is None
    engine.complete(run, "m", 0, "x")
    assert engine.value(query, run) == ["x", None]


@pytest.mark.parametrize("step", ["a", "A", "unknown"])
def test_get_step_output_is_null_without_output_or_step(engine: Engine, step: str) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    assert engine.value("select pgflow.get_step_output(%s, %s) is null", run, step) is True
    assert engine.value("select pgflow.get_step_output(%s, %s) is null", uuid.uuid4(), step) is True


@pytest.mark.parametrize(("view", "version"), [("pgflow_version", 2), ("extensions_version", 6)])
def test_a_version_view_says_its_level_in_its_comment(engine: Engine, view: str, version: int) -> None:
    comment = engine.value("select obj_description(%s::regclass, 'pg_class')", f"pgflow.{view}")
    assert comment == f"PgFlow version={version}"
    found = re.search(r"version=(\d+)", comment)
    assert found
    assert int(found[1]) == version


@pytest.mark.parametrize("view", ["pgflow_version", "extensions_version"])
def test_a_version_view_has_one_dummy_column(engine: Engine, view: str) -> None:
    cursor = engine.execute(f"select * from pgflow.{view}")
    assert cursor.description
    assert [column.name for column in cursor.description] == ["placeholder"]


def test_flow_type_is_flow_until_a_worker_says_job(engine: Engine) -> None:
    engine.flow()
    query = "select flow_type from pgflow.flows"
    assert engine.value(query) == "flow"
    engine.execute("update pgflow.flows set flow_type = 'job' where flow_slug = 'f'")
    assert engine.value(query) == "job"


@pytest.mark.parametrize(
    ("value", "error", "name"),
    [("cron", errors.CheckViolation, "flow_type_is_valid"), (None, errors.NotNullViolation, None)],
)
def test_any_other_flow_type_is_refused(
    engine: Engine, value: str | None, error: type[errors.IntegrityError], name: str | None
) -> None:
    engine.flow()
    before = engine.everything()
    with pytest.raises(error) as raised:
        engine.execute("update pgflow.flows set flow_type = %s", value)
    assert raised.value.diag.constraint_name == name
    assert engine.everything() == before
