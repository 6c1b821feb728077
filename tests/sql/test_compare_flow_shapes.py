"""pgflow._compare_flow_shapes (sql-contract 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from support.engine import Engine


def step(slug: str, **changes: Any) -> dict[str, Any]:
    return {
        "slug": slug,
        "stepType": "single",
        "dependencies": [],
        "whenUnmet": "skip",
        "whenExhausted": "fail",
        "requiredInputPattern": {"defined": False},
        "forbiddenInputPattern": {"defined": False},
        **changes,
    }


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in step("a").items() if name != key}


def compare(engine: Engine, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> Any:
    shapes = Jsonb({"steps": first}), Jsonb({"steps": second})
    return engine.value("select pgflow._compare_flow_shapes(%s, %s)", *shapes)


def test_equal_shapes_give_an_empty_array(engine: Engine) -> None:
    assert compare(engine, [], []) == []
    both = [
        step("a", whenUnmet="fail"),
        step("b", dependencies=["a"], requiredInputPattern={"defined": True, "value": {}}),
    ]
    assert compare(engine, both, both) == []


@pytest.mark.parametrize(
    ("first", "second", "differences"),
    [
        ([], [step("a")], ["Step count differs: 0 vs 1", "Step at index 0: missing in first shape (second has 'a')"]),
        ([step("a")], [], ["Step count differs: 1 vs 0", "Step at index 0: missing in second shape (first has 'a')"]),
        (
            [step("a")],
            [step("x"), step("b"), step("c")],
            [
                "Step count differs: 1 vs 3",
                "Step at index 0: slug differs 'a' vs 'x'",
                "Step at index 1: missing in first shape (second has 'b')",
                "Step at index 2: missing in first shape (second has 'c')",
            ],
        ),
        (
            [step("a"), step("b")],
            [step("b"), step("a")],
            ["Step at index 0: slug differs 'a' vs 'b'", "Step at index 1: slug differs 'b' vs 'a'"],
        ),
    ],
)
def test_count_comes_first_and_steps_are_compared_by_position(
    engine: Engine, first: list[dict[str, Any]], second: list[dict[str, Any]], differences: list[str]
) -> None:
    assert compare(engine, first, second) == differences


PATTERN = {"defined": True, "value": {"x": [1]}}


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ({"stepType": "single"}, {"stepType": "map"}, "type differs 'single' vs 'map'"),
        ({"dependencies": ["b", "a"]}, {"dependencies": ["c"]}, "dependencies differ [a, b] vs [c]"),
        ({"dependencies": []}, {"dependencies": ["d", "c"]}, "dependencies differ [] vs [c, d]"),
        ({"whenUnmet": "skip"}, {"whenUnmet": "fail"}, "whenUnmet differs 'skip' vs 'fail'"),
        ({"whenExhausted": "fail"}, {"whenExhausted": "skip"}, "whenExhausted differs 'fail' vs 'skip'"),
        (
            {},
            {"requiredInputPattern": PATTERN},
            """requiredInputPattern differs '{"defined": false}' vs '{"value": {"x": [1]}, "defined": true}'""",
        ),
        (
            {"forbiddenInputPattern": PATTERN},
            {"forbiddenInputPattern": {"defined": True, "value": {}}},
            "forbiddenInputPattern differs "
            """'{"value": {"x": [1]}, "defined": true}' vs '{"value": {}, "defined": true}'""",
        ),
    ],
)
def test_names_what_differs_and_both_values(
    engine: Engine, first: dict[str, Any], second: dict[str, Any], difference: str
) -> None:
    same = step("same")
    differences = compare(engine, [same, step("a", **first)], [same, step("a", **second)])
    assert differences == [f"Step at index 1: {difference}"]


def test_differences_of_a_step_have_a_fixed_order(engine: Engine) -> None:
    other = step(
        "z",
        stepType="map",
        dependencies=["y"],
        whenUnmet="fail",
        whenExhausted="skip",
        requiredInputPattern=PATTERN,
        forbiddenInputPattern=PATTERN,
    )
    differences = compare(engine, [step("a"), step("b")], [other, step("c")])
    assert [difference.split(" differ")[0] for difference in differences] == [
        "Step at index 0: slug",
        "Step at index 0: type",
        "Step at index 0: dependencies",
        "Step at index 0: whenUnmet",
        "Step at index 0: whenExhausted",
        "Step at index 0: requiredInputPattern",
        "Step at index 0: forbiddenInputPattern",
        "Step at index 1: slug",
    ]


def test_order_of_dependencies_is_no_difference(engine: Engine) -> None:
    assert compare(engine, [step("c", dependencies=["b", "a"])], [step("c", dependencies=["a", "b"])]) == []


def test_options_are_never_compared(engine: Engine) -> None:
    first = Jsonb({"steps": [step("a", options={"timeout": 1})], "options": {"maxAttempts": 1}})
    second = Jsonb({"steps": [step("a", options={"timeout": 2})], "options": {"maxAttempts": 2}})
    assert engine.value("select pgflow._compare_flow_shapes(%s, %s)", first, second) == []


@pytest.mark.parametrize("key", ["slug", "stepType", "whenUnmet", "whenExhausted"])
def test_a_scalar_missing_on_one_side_is_no_difference(engine: Engine, key: str) -> None:
    assert compare(engine, [without(key)], [step("a")]) == []
    assert compare(engine, [step("a")], [without(key)]) == []


@pytest.mark.parametrize("key", ["requiredInputPattern", "forbiddenInputPattern"])
def test_a_pattern_missing_on_one_side_is_a_difference(engine: Engine, key: str) -> None:
    for first, second in ((without(key), step("a")), (step("a"), without(key))):
        (difference,) = compare(engine, [first], [second])
        assert difference.startswith(f"Step at index 0: {key} differs '")
    assert compare(engine, [without(key)], [without(key)]) == []
