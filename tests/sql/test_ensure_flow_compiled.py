"""pgflow.ensure_flow_compiled, both overloads (sql-contract 2.4, 3.4, corrections 4 and 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine

COMPILE = "select pgflow.ensure_flow_compiled(%s, %s, %s, %s)"
COMPILED: dict[str, Any] = {"status": "compiled", "differences": [], "mismatchKind": None}
VERIFIED: dict[str, Any] = {"status": "verified", "differences": [], "mismatchKind": None}
modes = pytest.mark.parametrize("mode", ["flow", "step"])


def step(slug: str, *dependencies: str, **changes: Any) -> dict[str, Any]:
    return {
        "slug": slug,
        "stepType": "single",
        "dependencies": list(dependencies),
        "whenUnmet": "skip",
        "whenExhausted": "fail",
        "requiredInputPattern": {"defined": False},
        "forbiddenInputPattern": {"defined": False},
        **changes,
    }


def shape(*steps: dict[str, Any], **options: int) -> Jsonb:
    return Jsonb({"steps": list(steps), "options": options})


A_B = shape(step("a"), step("b", "a"))
A_C = shape(step("a"), step("c", "a"))


def compile_flow(
    engine: Engine, given: Jsonb = A_B, mode: str = "flow", routes: Jsonb | None = None, flow: str = "f"
) -> Any:
    return engine.value(COMPILE, flow, given, mode, routes)


def be_local(engine: Engine) -> None:
    secret = "super-secret-jwt-token-with-at-least-32-characters-long"
    engine.execute("select set_config('app.settings.jwt_secret', %s, false)", secret)


def queues(engine: Engine) -> list[str]:
    return [row["queue_name"] for row in engine.rows("select queue_name from pgmq.list_queues() order by 1")]


@pytest.mark.parametrize(
    "arguments",
    [
        "%s, %s",
        "flow_slug => %s, shape => %s",
        "%s, %s, 'flow'",
        "flow_slug => %s, shape => %s, queue_mode => 'flow'",
        "%s, %s, 'flow', null",
        "flow_slug => %s, shape => %s, queue_mode => 'flow', route_map => null",
    ],
)
def test_a_missing_flow_is_created_and_then_verified(engine: Engine, arguments: str) -> None:
    call = f"select pgflow.ensure_flow_compiled({arguments})"
    assert engine.value(call, "Orders", A_B) == COMPILED
    assert engine.value("select queue_mode from pgflow.flows where flow_slug = 'Orders'") == "flow"
    assert engine.value("select pgflow._get_flow_shape('Orders')") == {"steps": A_B.obj["steps"]}
    assert queues(engine) == ["orders"]
    before = engine.everything()
    assert engine.value(call, "Orders", A_B) == VERIFIED
    assert engine.everything() == before


def test_step_queues_are_created_and_then_verified(engine: Engine) -> None:
    assert compile_flow(engine, mode="step") == COMPILED
    assert queues(engine) == ["f__a", "f__b"]
    before = engine.everything()
    assert compile_flow(engine, mode="step") == VERIFIED
    assert engine.everything() == before


def test_a_flow_declared_step_by_step_is_verified(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    assert compile_flow(engine) == VERIFIED


def test_options_are_applied_at_creation_only(engine: Engine) -> None:
    first = shape(step("a", options={"timeout": 1}), maxAttempts=1)
    assert compile_flow(engine, first) == COMPILED
    before = engine.everything()
    assert compile_flow(engine, shape(step("a", options={"timeout": 2}), maxAttempts=2)) == VERIFIED
    assert engine.everything() == before
    assert engine.value("select opt_max_attempts from pgflow.flows") == 1
    assert engine.value("select opt_timeout from pgflow.steps") == 1


def test_the_slug_is_case_exact(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    compile_flow(engine)
    said = refused(COMPILE, "F", A_B, "flow", None)
    assert (said.sqlstate, said.constraint_name) == ("23505", "idx_flows_normalized_slug")


@modes
@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"stepType": "map"}, "type differs 'map' vs 'single'"),
        ({"dependencies": []}, "dependencies differ [] vs [a]"),
        ({"whenUnmet": "fail"}, "whenUnmet differs 'fail' vs 'skip'"),
        ({"whenExhausted": "skip"}, "whenExhausted differs 'skip' vs 'fail'"),
        (
            {"requiredInputPattern": {"defined": True, "value": {}}},
            """requiredInputPattern differs '{"value": {}, "defined": true}' vs '{"defined": false}'""",
        ),
    ],
)
def test_a_changed_step_is_a_mismatch_that_changes_nothing(
    engine: Engine, mode: str, changed: dict[str, Any], difference: str
) -> None:
    compile_flow(engine, mode=mode)
    before = engine.everything()
    assert compile_flow(engine, shape(step("a"), step("b", "a") | changed), mode) == {
        "status": "mismatch",
        "differences": [f"Step at index 1: {difference}"],
        "mismatchKind": "shape",
    }
    assert engine.everything() == before


@pytest.mark.parametrize(
    ("mode", "given", "differences"),
    [
        (
            "flow",
            shape(step("a")),
            [
                "Step count differs: 1 vs 2",
                "Step at index 1: missing in first shape (second has 'b')",
                "Step routes differ: database has [a -> f, b -> f], worker expects [a -> f]",
            ],
        ),
        (
            "step",
            A_C,
            [
                "Step at index 1: slug differs 'c' vs 'b'",
                "Step routes differ: database has [a -> f__a, b -> f__b], worker expects [a -> f__a, c -> f__c]",
            ],
        ),
    ],
)
def test_other_step_slugs_are_a_difference_of_routes_too(
    engine: Engine, mode: str, given: Jsonb, differences: list[str]
) -> None:
    compile_flow(engine, mode=mode)
    before = engine.everything()
    found = compile_flow(engine, given, mode)
    assert found == {"status": "mismatch", "differences": differences, "mismatchKind": "shape"}
    assert engine.everything() == before


@pytest.mark.parametrize(
    ("stored", "asked", "differences"),
    [
        (
            "flow",
            "step",
            [
                "Queue mode differs: database has 'flow', worker expects 'step'",
                "Step routes differ: database has [a -> f, b -> f], worker expects [a -> f__a, b -> f__b]",
            ],
        ),
        (
            "step",
            "flow",
            [
                "Queue mode differs: database has 'step', worker expects 'flow'",
                "Step routes differ: database has [a -> f__a, b -> f__b], worker expects [a -> f, b -> f]",
            ],
        ),
    ],
)
def test_another_queue_mode_is_a_mismatch_of_routing(
    engine: Engine, stored: str, asked: str, differences: list[str]
) -> None:
    compile_flow(engine, mode=stored)
    before = engine.everything()
    found = compile_flow(engine, mode=asked)
    assert found == {"status": "mismatch", "differences": differences, "mismatchKind": "routing"}
    assert engine.everything() == before


@pytest.mark.parametrize(
    ("mode", "found", "expected"),
    [("flow", "a -> f, b -> moved", "a -> f, b -> f"), ("step", "a -> f__a, b -> moved", "a -> f__a, b -> f__b")],
)
def test_a_route_changed_by_hand_is_a_mismatch_of_routing(engine: Engine, mode: str, found: str, expected: str) -> None:
    compile_flow(engine, mode=mode)
    engine.execute("update pgflow.steps set queue_name = 'moved' where step_slug = 'b'")
    before = engine.everything()
    assert compile_flow(engine, mode=mode) == {
        "status": "mismatch",
        "differences": [f"Step routes differ: database has [{found}], worker expects [{expected}]"],
        "mismatchKind": "routing",
    }
    assert engine.everything() == before


def test_differences_of_shape_come_before_those_of_routing(engine: Engine) -> None:
    compile_flow(engine)
    assert compile_flow(engine, A_C, "step") == {
        "status": "mismatch",
        "differences": [
            "Step at index 1: slug differs 'c' vs 'b'",
            "Queue mode differs: database has 'flow', worker expects 'step'",
            "Step routes differ: database has [a -> f, b -> f], worker expects [a -> f__a, c -> f__c]",
        ],
        "mismatchKind": "shape",
    }


# On a local database


@pytest.mark.parametrize(
    ("mode", "differences", "left"),
    [
        (
            "flow",
            [
                "Step at index 1: slug differs 'c' vs 'b'",
                "Step routes differ: database has [a -> f, b -> f], worker expects [a -> f, c -> f]",
            ],
            ["f"],
        ),
        (
            "step",
            [
                "Step at index 1: slug differs 'c' vs 'b'",
                "Queue mode differs: database has 'flow', worker expects 'step'",
                "Step routes differ: database has [a -> f, b -> f], worker expects [a -> f__a, c -> f__c]",
            ],
            ["f__a", "f__c"],
        ),
    ],
)
def test_a_local_database_replaces_flow_and_runs(
    engine: Engine, mode: str, differences: list[str], left: list[str]
) -> None:
    compile_flow(engine)
    engine.start()
    be_local(engine)
    assert compile_flow(engine, A_C, mode) == {
        "status": "recompiled",
        "differences": differences,
        "mismatchKind": None,
    }
    assert engine.value("select pgflow._get_flow_shape('f')") == {"steps": A_C.obj["steps"]}
    assert engine.value("select queue_mode from pgflow.flows") == mode
    assert queues(engine) == left
    stored = engine.everything()
    assert stored["runs"] == stored["step_states"] == stored["step_tasks"] == []
    assert not any(stored["live"].values())
    assert compile_flow(engine, A_C, mode) == VERIFIED


def test_a_local_database_replaces_nothing_without_a_difference(engine: Engine) -> None:
    compile_flow(engine)
    engine.start()
    be_local(engine)
    before = engine.everything()
    assert compile_flow(engine) == VERIFIED
    assert engine.everything() == before


@pytest.mark.parametrize(
    ("given", "mode", "sqlstate", "message"),
    [
        (shape(step("a"), step("b", "zzz")), "flow", "23503", "deps_flow_slug_dep_slug_fkey"),
        (A_C, "step", "P0001", 'queue "f__c" is already listed in PGMQ and not owned by this flow'),
    ],
)
def test_a_failing_replacement_leaves_the_old_flow(
    engine: Engine, refused: Callable[..., Diagnostic], given: Jsonb, mode: str, sqlstate: str, message: str
) -> None:
    compile_flow(engine)
    engine.start()
    engine.execute("select pgmq.create('f__c')")
    be_local(engine)
    said = refused(COMPILE, "f", given, mode, None)
    assert said.sqlstate == sqlstate
    assert message in (said.message_primary or "")


# Route maps


@pytest.mark.parametrize(("mode", "routes"), [("flow", ["f", "f"]), ("step", ["f__a", "f__b"])])
def test_the_derived_route_map_may_be_given(engine: Engine, mode: str, routes: list[str]) -> None:
    given = Jsonb([{"stepSlug": slug, "queueName": queue} for slug, queue in zip("ab", routes, strict=True)])
    assert compile_flow(engine, mode=mode, routes=given) == COMPILED
    assert compile_flow(engine, mode=mode, routes=given) == VERIFIED


@pytest.mark.parametrize("stored", [None, A_C])
@pytest.mark.parametrize(
    ("routes", "sqlstate", "message"),
    [
        ([], "P0001", 'supplied route map for flow "f" has 0 entries but 2 step(s) was derived'),
        (
            [{"stepSlug": "a", "queueName": "f__a"}],
            "P0001",
            'supplied route map for flow "f" has 1 entries but 2 step(s) was derived',
        ),
        (
            [{"stepSlug": "b", "queueName": "f__b"}, {"stepSlug": "a", "queueName": "f__a"}],
            "P0001",
            'supplied route map for flow "f" disagrees with the derived route at position 1',
        ),
        (
            [{"stepSlug": "a", "queueName": "f__a"}, {"stepSlug": "b", "queueName": "f"}],
            "P0001",
            'supplied route map for flow "f" disagrees with the derived route at position 2',
        ),
        (None, "22023", "cannot get array length of a scalar"),
        ({"a": "f__a"}, "22023", "cannot get array length of a non-array"),
    ],
)
def test_another_route_map_is_refused_whatever_is_stored(
    engine: Engine, refused: Callable[..., Diagnostic], stored: Jsonb | None, routes: Any, sqlstate: str, message: str
) -> None:
    if stored:
        compile_flow(engine, stored)
    said = refused(COMPILE, "f", A_B, "step", Jsonb(routes))
    assert (said.sqlstate, said.message_primary) == (sqlstate, message)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("given", "mode", "message"),
    [
        (A_B, "pool", 'Unknown queue mode "pool".'),
        (shape(), "step", 'Flow "f" cannot use per-step queues: it has no steps.'),
        (shape(step("run")), "flow", 'Step slug "run" in flow "f" is not valid.'),
        (shape(step("x"), step("X")), "flow", 'Steps "x" and "X" in flow "f" conflict case-insensitively.'),
    ],
)
def test_routes_are_derived_before_the_stored_flow_is_looked_at(
    engine: Engine, refused: Callable[..., Diagnostic], stored: bool, given: Jsonb, mode: str, message: str
) -> None:
    if stored:
        compile_flow(engine)
    be_local(engine)
    said = refused(COMPILE, "f", given, mode, None)
    assert (said.sqlstate, said.message_primary) == ("P0001", message)


# Verifying step queues


def test_a_lost_step_queue_is_found(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    compile_flow(engine, mode="step")
    engine.execute("select pgmq.drop_queue('f__b')")
    said = refused(COMPILE, "f", A_B, "step", None)
    assert (said.sqlstate, said.message_primary) == (
        "P0001",
        'queue "f__b" owned by flow "f" is not listed in PGMQ',
    )


def test_a_step_queue_that_another_flow_uses_is_found(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    compile_flow(engine, mode="step")
    compile_flow(engine, flow="g")
    engine.execute("update pgflow.steps set queue_name = 'f__b' where flow_slug = 'g' and step_slug = 'a'")
    said = refused(COMPILE, "f", A_B, "step", None)
    assert (said.sqlstate, said.message_primary) == (
        "P0001",
        'cannot create flow "f": queue "f__b" is already used by another flow ("g")',
    )


# Two sessions


@pytest.mark.parametrize(
    ("first_ends", "second_says"), [("commit", VERIFIED), ("rollback", COMPILED)], ids=["commit", "rollback"]
)
@modes
def test_callers_for_one_flow_come_one_after_the_other(
    engine: Engine, mode: str, first_ends: str, second_says: dict[str, Any]
) -> None:
    with psycopg.connect(engine.dsn) as first:
        row = first.execute(COMPILE.encode(), ("f", A_B, mode, None)).fetchone()
        assert row == (COMPILED,)
        thread, results = engine.in_another_session(lambda own: compile_flow(own, mode=mode))
        engine.wait_blocked()
        first.execute(first_ends.encode())
        thread.join()
    assert results == [second_says]
