"""pgflow._create_flow_from_shape in both queue modes (sql-contract 2.4, 3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine

CREATE = "select pgflow._create_flow_from_shape(%s, %s, %s)"
modes = pytest.mark.parametrize("mode", ["flow", "step"])

FULL = {
    "slug": "Full",
    "stepType": "map",
    "dependencies": ["Bare"],
    "whenUnmet": "fail",
    "whenExhausted": "skip-cascade",
    "requiredInputPattern": {"defined": True, "value": {"x": 1}},
    "forbiddenInputPattern": {"defined": False, "value": {"y": 1}},
    "options": {"maxAttempts": 0, "baseDelay": 1, "timeout": 2, "startDelay": 3},
}


def shape(*steps: dict[str, Any], **options: int) -> Jsonb:
    return Jsonb({"steps": list(steps), **({"options": options} if options else {})})


def queues(engine: Engine) -> list[str]:
    return [row["queue_name"] for row in engine.rows("select queue_name from pgmq.list_queues() order by 1")]


def steps(engine: Engine, flow: str) -> list[dict[str, Any]]:
    rows = engine.rows("select * from pgflow.steps where flow_slug = %s order by step_index", flow)
    for row in rows:
        del row["created_at"], row["flow_slug"]
    return rows


def expected_step(slug: str, index: int, queue: str, **changes: Any) -> dict[str, Any]:
    return {
        "step_slug": slug,
        "step_type": "single",
        "step_index": index,
        "deps_count": 0,
        "opt_max_attempts": None,
        "opt_base_delay": None,
        "opt_timeout": None,
        "opt_start_delay": None,
        "required_input_pattern": None,
        "forbidden_input_pattern": None,
        "when_unmet": "skip",
        "when_exhausted": "fail",
        "queue_name": queue,
        **changes,
    }


@pytest.mark.parametrize(
    ("mode", "routes", "made"),
    [
        ("flow", ("orders", "orders"), ["orders"]),
        ("step", ("orders__bare", "orders__full"), ["orders__bare", "orders__full"]),
    ],
)
def test_stores_what_the_shape_says_and_defaults_for_the_rest(
    engine: Engine, mode: str, routes: tuple[str, str], made: list[str]
) -> None:
    engine.execute(CREATE, "Orders", shape({"slug": "Bare"}, FULL), mode)
    assert steps(engine, "Orders") == [
        expected_step("Bare", 0, routes[0]),
        expected_step(
            "Full",
            1,
            routes[1],
            step_type="map",
            deps_count=1,
            opt_max_attempts=0,
            opt_base_delay=1,
            opt_timeout=2,
            opt_start_delay=3,
            required_input_pattern={"x": 1},
            when_unmet="fail",
            when_exhausted="skip-cascade",
        ),
    ]
    assert engine.rows("select flow_slug, dep_slug, step_slug from pgflow.deps") == [
        {"flow_slug": "Orders", "dep_slug": "Bare", "step_slug": "Full"}
    ]
    assert engine.value("select queue_mode from pgflow.flows") == mode
    assert queues(engine) == made


@modes
@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, (3, 5, 60)),
        ({"maxAttempts": 0, "baseDelay": 0, "timeout": 1}, (0, 0, 1)),
        ({"timeout": 9}, (3, 5, 9)),
    ],
)
def test_options_of_the_flow(engine: Engine, mode: str, options: dict[str, int], stored: tuple[int, int, int]) -> None:
    engine.execute(CREATE, "f", shape({"slug": "a"}, **options), mode)
    flow = engine.row("select * from pgflow.flows")
    assert (flow["opt_max_attempts"], flow["opt_base_delay"], flow["opt_timeout"]) == stored


def test_mode_is_flow_unless_given(engine: Engine) -> None:
    engine.execute("select pgflow._create_flow_from_shape('f', %s)", shape({"slug": "a"}))
    assert engine.value("select queue_mode from pgflow.flows") == "flow"


def test_a_flow_without_steps_has_its_queue(engine: Engine) -> None:
    engine.execute(CREATE, "f", shape(), "flow")
    assert queues(engine) == ["f"]
    assert steps(engine, "f") == []


def test_an_existing_row_of_the_flow_is_kept_in_step_mode(engine: Engine) -> None:
    engine.execute("insert into pgflow.flows (flow_slug, opt_timeout, queue_mode) values ('f', 7, 'step')")
    before = engine.row("select * from pgflow.flows")
    engine.execute(CREATE, "f", shape({"slug": "a"}, timeout=8), "step")
    assert engine.row("select * from pgflow.flows") == before
    assert [step["queue_name"] for step in steps(engine, "f")] == ["f__a"]


@modes
def test_a_dependency_named_twice_counts_once(engine: Engine, mode: str) -> None:
    both = {"slug": "m", "stepType": "map", "dependencies": ["a", "a"]}
    engine.execute(CREATE, "f", shape({"slug": "a"}, both), mode)
    assert steps(engine, "f")[1]["deps_count"] == 1


@modes
def test_a_map_with_two_dependencies_is_refused(engine: Engine, refused: Callable[..., Diagnostic], mode: str) -> None:
    bad = {"slug": "m", "stepType": "map", "dependencies": ["a", "b"]}
    said = refused(CREATE, "f", shape({"slug": "a"}, {"slug": "b"}, bad), mode)
    assert said.sqlstate == "P0001"
    assert said.message_primary == 'Map step "m" can have at most one dependency, but 2 were provided: a, b'


@modes
@pytest.mark.parametrize(
    ("step", "sqlstate", "constraint"),
    [
        ({"slug": "b", "dependencies": ["c"]}, "23503", "deps_flow_slug_dep_slug_fkey"),
        ({"slug": "b", "dependencies": ["b"]}, "23514", "deps_check"),
        ({"slug": "b", "stepType": "loop"}, "23514", "steps_step_type_check"),
        ({"slug": "b", "whenUnmet": "ignore"}, "23514", "when_unmet_is_valid"),
        ({"slug": "b", "options": {"timeout": 0}}, "23514", "opt_timeout_is_positive"),
        (
            {"slug": "b", "requiredInputPattern": {"defined": True, "value": [1]}},
            "23514",
            "required_input_pattern_is_object",
        ),
    ],
)
def test_what_the_tables_forbid_leaves_nothing(
    refused: Callable[..., Diagnostic], mode: str, step: dict[str, Any], sqlstate: str, constraint: str
) -> None:
    said = refused(CREATE, "f", shape({"slug": "a"}, step, {"slug": "c"}), mode)
    assert (said.sqlstate, said.constraint_name) == (sqlstate, constraint)


@pytest.mark.parametrize(
    ("flow", "slug", "mode", "message"),
    [
        ("f", "a", "pool", 'Unknown queue mode "pool".'),
        ("a__b", "a", "flow", 'Flow slug "a__b" is not valid.'),
        ("f", "run", "flow", 'Step slug "run" in flow "f" is not valid.'),
        ("f", "run", "step", 'Step slug "run" in flow "f" is not valid.'),
        ("f" * 45, "a", "step", f'Flow "{"f" * 45}" cannot use per-step queues.'),
    ],
)
def test_routes_are_derived_first(
    refused: Callable[..., Diagnostic], flow: str, slug: str, mode: str, message: str
) -> None:
    said = refused(CREATE, flow, shape({"slug": slug}), mode)
    assert (said.sqlstate, said.message_primary) == ("P0001", message)


def test_a_foreign_queue_blocks_a_flow(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    engine.execute("select pgmq.create('f')")
    said = refused(CREATE, "f", shape({"slug": "a"}), "flow")
    assert said.message_primary == 'cannot create flow "f": queue "f" is already in use by another owner'


def test_a_foreign_queue_blocks_a_flow_with_step_queues(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    engine.execute("select pgmq.create('f__b')")
    said = refused(CREATE, "f", shape({"slug": "a"}, {"slug": "b"}), "step")
    assert (
        said.message_primary
        == 'cannot create flow "f": queue "f__b" is already listed in PGMQ and not owned by this flow'
    )


def test_a_foreign_queue_of_the_default_name_does_not_matter_in_step_mode(engine: Engine) -> None:
    engine.execute("select pgmq.create('f')")
    engine.execute(CREATE, "f", shape({"slug": "a"}), "step")
    assert queues(engine) == ["f", "f__a"]


@modes
def test_a_flow_made_this_way_runs(engine: Engine, mode: str) -> None:
    engine.execute(CREATE, "f", shape({"slug": "a"}, {"slug": "b", "dependencies": ["a"]}), mode)
    run = engine.start()
    for step in ("a", "b"):
        queue = steps(engine, "f")["ab".index(step)]["queue_name"]
        selector = step if mode == "step" else None
        (task,) = engine.rows(
            "select * from pgflow.start_tasks('f', %s, %s, %s, %s)",
            engine.read(queue),
            engine.worker(),
            queue,
            selector,
        )
        assert task["step_slug"] == step
        engine.complete(run, step)
    assert engine.run(run)["status"] == "completed"
