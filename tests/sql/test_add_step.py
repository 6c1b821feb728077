"""pgflow.add_step (sql-contract 2.3); a dependency named twice counts once (sql/README.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine


def parents(engine: Engine, step: str, flow: str = "f") -> list[str]:
    query = "select dep_slug from pgflow.deps where flow_slug = %s and step_slug = %s order by 1"
    return [row["dep_slug"] for row in engine.rows(query, flow, step)]


def test_defaults(engine: Engine) -> None:
    engine.flow("Orders")
    returned = engine.row("select * from pgflow.add_step('Orders', 'Charge')")
    assert returned == engine.row("select * from pgflow.steps")
    del returned["created_at"]
    assert returned == {
        "flow_slug": "Orders",
        "step_slug": "Charge",
        "step_type": "single",
        "step_index": 0,
        "deps_count": 0,
        "opt_max_attempts": None,
        "opt_base_delay": None,
        "opt_timeout": None,
        "opt_start_delay": None,
        "required_input_pattern": None,
        "forbidden_input_pattern": None,
        "when_unmet": "skip",
        "when_exhausted": "fail",
        "queue_name": "orders",
    }
    assert engine.rows("select * from pgflow.deps") == []


def test_every_option_is_stored(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    returned = engine.step(
        "b",
        "a",
        max_attempts=0,
        base_delay=2,
        timeout=3,
        start_delay=4,
        step_type="map",
        required_input_pattern={"x": [1]},
        forbidden_input_pattern={},
        when_unmet="skip-cascade",
        when_exhausted="skip",
    )
    assert returned == engine.row("select * from pgflow.steps where step_slug = 'b'")
    del returned["created_at"]
    assert returned == {
        "flow_slug": "f",
        "step_slug": "b",
        "step_type": "map",
        "step_index": 1,
        "deps_count": 1,
        "opt_max_attempts": 0,
        "opt_base_delay": 2,
        "opt_timeout": 3,
        "opt_start_delay": 4,
        "required_input_pattern": {"x": [1]},
        "forbidden_input_pattern": {},
        "when_unmet": "skip-cascade",
        "when_exhausted": "skip",
        "queue_name": "f",
    }


def test_index_is_one_more_than_the_highest_of_the_flow(engine: Engine) -> None:
    engine.flow()
    engine.flow("g")
    assert [engine.step(slug)["step_index"] for slug in "abc"] == [0, 1, 2]
    assert engine.step("a", flow="g")["step_index"] == 0
    engine.execute("update pgflow.steps set step_index = 9 where step_slug = 'b'")
    assert engine.step("d")["step_index"] == 10


@pytest.mark.parametrize(
    ("given", "stored"), [(None, []), ([], []), (["a"], ["a"]), (["b", "a"], ["a", "b"]), (["a", "b", "a"], ["a", "b"])]
)
def test_each_dependency_is_a_row_and_counts_once(engine: Engine, given: list[str] | None, stored: list[str]) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    row = engine.row("select * from pgflow.add_step('f', 'c', %s::text[])", given)
    assert row["deps_count"] == len(stored)
    assert parents(engine, "c") == stored


def test_a_step_with_a_dependency_named_twice_starts(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", "a")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a")
    assert engine.statuses(run) == {"a": "completed", "b": "started"}


def test_type_null_means_single(engine: Engine) -> None:
    engine.flow()
    assert engine.step("a", step_type=None)["step_type"] == "single"


@pytest.mark.parametrize("dependencies", [[], ["a"], ["a", "a"]])
def test_a_map_may_have_one_dependency(engine: Engine, dependencies: list[str]) -> None:
    engine.flow()
    engine.step("a")
    assert engine.step("m", *dependencies, step_type="map")["deps_count"] == len(set(dependencies))


@pytest.mark.parametrize(
    ("dependencies", "listed"), [(["b", "a"], "2 were provided: b, a"), (["a", "b", "c"], "3 were provided: a, b, c")]
)
def test_a_map_with_more_dependencies_is_refused(
    engine: Engine, refused: Callable[..., Diagnostic], dependencies: list[str], listed: str
) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.step("c")
    said = refused("select pgflow.add_step('f', 'm', %s::text[], step_type => 'map')", dependencies)
    assert said.sqlstate == "P0001"
    assert said.message_primary == f'Map step "m" can have at most one dependency, but {listed}'


@pytest.mark.parametrize("step", ["a", "new"])
def test_a_flow_with_step_queues_takes_no_further_steps(
    engine: Engine, refused: Callable[..., Diagnostic], step: str
) -> None:
    engine.execute("""select pgflow.ensure_flow_compiled('f', '{"steps": [{"slug": "a"}]}', 'step')""")
    said = refused("select pgflow.add_step('f', %s)", step)
    assert said.sqlstate == "P0001"
    assert said.message_primary == 'Flow "f" uses per-step queues: steps cannot be added incrementally.'


def test_dependencies_of_a_map_are_judged_before_the_queue_mode(
    refused: Callable[..., Diagnostic], engine: Engine
) -> None:
    engine.execute("""select pgflow.ensure_flow_compiled('f', '{"steps": [{"slug": "a"}]}', 'step')""")
    said = refused("select pgflow.add_step('f', 'm', '{a,b}', step_type => 'map')")
    assert said.message_primary == 'Map step "m" can have at most one dependency, but 2 were provided: a, b'


def test_an_existing_step_is_returned_as_it_is(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", timeout=7)
    engine.execute("update pgflow.steps set queue_name = 'elsewhere' where step_slug = 'b'")
    before = engine.everything()
    again = engine.step("b", "a", timeout=8, max_attempts=1, step_type="map", when_unmet="fail", start_delay=5)
    assert again == engine.row("select * from pgflow.steps where step_slug = 'b'")
    assert again["opt_timeout"] == 7
    assert again["queue_name"] == "elsewhere"
    assert engine.everything() == before


def test_a_repeated_step_takes_no_index(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("a")
    assert engine.step("b")["step_index"] == 1


@pytest.mark.parametrize(
    ("flow", "dependencies", "constraint"),
    [
        ("missing", [], "steps_flow_slug_fkey"),
        ("F", [], "steps_flow_slug_fkey"),
        ("f", ["missing"], "deps_flow_slug_dep_slug_fkey"),
        ("f", ["a", "missing"], "deps_flow_slug_dep_slug_fkey"),
        ("f", ["A"], "deps_flow_slug_dep_slug_fkey"),
        ("f", ["of_g"], "deps_flow_slug_dep_slug_fkey"),
    ],
)
def test_flow_and_dependencies_have_to_exist(
    engine: Engine, refused: Callable[..., Diagnostic], flow: str, dependencies: list[str], constraint: str
) -> None:
    engine.flow()
    engine.step("a")
    engine.flow("g")
    engine.step("of_g", flow="g")
    said = refused("select pgflow.add_step(%s, 'new', %s::text[])", flow, dependencies)
    assert (said.sqlstate, said.constraint_name) == ("23503", constraint)


@pytest.mark.parametrize("dependencies", [["new"], ["a", "new"]])
def test_a_step_cannot_depend_on_itself(
    engine: Engine, refused: Callable[..., Diagnostic], dependencies: list[str]
) -> None:
    engine.flow()
    engine.step("a")
    said = refused("select pgflow.add_step('f', 'new', %s::text[])", dependencies)
    assert (said.sqlstate, said.constraint_name) == ("23514", "deps_check")


@pytest.mark.parametrize(
    ("slug", "options", "constraint"),
    [
        ("", "", "steps_step_slug_check"),
        ("1st", "", "steps_step_slug_check"),
        ("run", "", "steps_step_slug_check"),
        ("a__b", "", "steps_step_slug_check"),
        ("s", "step_type => 'loop'", "steps_step_type_check"),
        ("s", "when_unmet => 'ignore'", "when_unmet_is_valid"),
        ("s", "when_exhausted => 'retry'", "when_exhausted_is_valid"),
        ("s", "max_attempts => -1", "opt_max_attempts_is_nonnegative"),
        ("s", "base_delay => -1", "opt_base_delay_is_nonnegative"),
        ("s", "start_delay => -1", "opt_start_delay_is_nonnegative"),
        ("s", "timeout => 0", "opt_timeout_is_positive"),
        ("s", "required_input_pattern => '[1]'", "required_input_pattern_is_object"),
        ("s", "required_input_pattern => 'null'", "required_input_pattern_is_object"),
        ("s", "forbidden_input_pattern => '\"x\"'", "forbidden_input_pattern_is_object"),
    ],
)
def test_what_the_table_forbids_is_refused(
    engine: Engine, refused: Callable[..., Diagnostic], slug: str, options: str, constraint: str
) -> None:
    engine.flow()
    said = refused(f"select pgflow.add_step('f', '{slug}'{options and ', ' + options})")
    assert (said.sqlstate, said.constraint_name) == ("23514", constraint)


def test_steps_of_a_flow_may_not_differ_in_case_only(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    engine.flow()
    engine.step("charge")
    said = refused("select pgflow.add_step('f', 'Charge')")
    assert (said.sqlstate, said.constraint_name) == ("23505", "idx_steps_normalized_slug")
    engine.flow("g")
    assert engine.step("Charge", flow="g")["step_slug"] == "Charge"
