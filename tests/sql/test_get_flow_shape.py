"""pgflow._get_flow_shape (sql-contract 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.engine import Engine


@pytest.mark.parametrize("slug", ["unknown", "ORDERS", "orders"])
def test_without_steps_the_list_is_empty(engine: Engine, slug: str) -> None:
    engine.flow("orders")
    engine.flow("others")
    engine.step("a", flow="others")
    assert engine.value("select pgflow._get_flow_shape(%s)", slug) == {"steps": []}


def test_describes_each_step_in_definition_order_without_options(engine: Engine) -> None:
    engine.flow(max_attempts=9)
    engine.step("z", max_attempts=1, base_delay=2, timeout=3, start_delay=4)
    engine.step("b", required_input_pattern={"x": [1, None]}, when_unmet="fail", when_exhausted="skip-cascade")
    engine.step("a", "z", "b", forbidden_input_pattern={})
    engine.step("m", "a", step_type="map")
    engine.flow("g")
    engine.step("b", flow="g")
    engine.step("a", "b", flow="g")
    undefined = {"defined": False}
    assert engine.value("select pgflow._get_flow_shape('f')") == {
        "steps": [
            {
                "slug": "z",
                "stepType": "single",
                "dependencies": [],
                "whenUnmet": "skip",
                "whenExhausted": "fail",
                "requiredInputPattern": undefined,
                "forbiddenInputPattern": undefined,
            },
            {
                "slug": "b",
                "stepType": "single",
                "dependencies": [],
                "whenUnmet": "fail",
                "whenExhausted": "skip-cascade",
                "requiredInputPattern": {"defined": True, "value": {"x": [1, None]}},
                "forbiddenInputPattern": undefined,
            },
            {
                "slug": "a",
                "stepType": "single",
                "dependencies": ["b", "z"],
                "whenUnmet": "skip",
                "whenExhausted": "fail",
                "requiredInputPattern": undefined,
                "forbiddenInputPattern": {"defined": True, "value": {}},
            },
            {
                "slug": "m",
                "stepType": "map",
                "dependencies": ["a"],
                "whenUnmet": "skip",
                "whenExhausted": "fail",
                "requiredInputPattern": undefined,
                "forbiddenInputPattern": undefined,
            },
        ]
    }


def test_order_is_that_of_step_index(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.execute("update pgflow.steps set step_index = 5 where step_slug = 'a'")
    shape = engine.value("select pgflow._get_flow_shape('f')")
    assert [step["slug"] for step in shape["steps"]] == ["b", "a"]
