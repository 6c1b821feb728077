"""Declaring flows: what is accepted, and that every mistake is an error at import that names it."""

from __future__ import annotations

from typing import Any

import pytest

from pgflow_otp import Context, Cron, Flow, FlowDefinitionError, Job, job
from pgflow_otp.flow.shape import shape_of


def handler(value: Any) -> Any:
    return value


def test_a_flow_has_the_shape_the_database_compares() -> None:
    flow = Flow("process_order", max_attempts=3, base_delay=5, timeout=60)

    @flow.step()
    def validate(order: Any, ctx: Context) -> Any: ...

    @flow.step(depends_on=["validate"], if_={"validate": {"valid": True}}, when_unmet="skip_cascade")
    def charge(deps: Any) -> Any: ...

    @flow.map(array=charge, max_attempts=5, start_delay=2, when_exhausted="skip")
    async def notify(party: Any) -> Any: ...

    @flow.step("final", depends_on=[notify, "charge"], if_not={"charge": {}}, when_unmet="fail")
    def last(deps: Any) -> Any: ...

    undefined = {"defined": False}
    assert shape_of(flow) == {
        "options": {"maxAttempts": 3, "baseDelay": 5, "timeout": 60},
        "steps": [
            {
                "slug": "validate",
                "stepType": "single",
                "dependencies": [],
                "whenUnmet": "skip",
                "whenExhausted": "fail",
                "requiredInputPattern": undefined,
                "forbiddenInputPattern": undefined,
            },
            {
                "slug": "charge",
                "stepType": "single",
                "dependencies": ["validate"],
                "whenUnmet": "skip-cascade",
                "whenExhausted": "fail",
                "requiredInputPattern": {"defined": True, "value": {"validate": {"valid": True}}},
                "forbiddenInputPattern": undefined,
            },
            {
                "slug": "notify",
                "stepType": "map",
                "dependencies": ["charge"],
                "whenUnmet": "skip",
                "whenExhausted": "skip",
                "requiredInputPattern": undefined,
                "forbiddenInputPattern": undefined,
                "options": {"maxAttempts": 5, "startDelay": 2},
            },
            {
                "slug": "final",
                "stepType": "single",
                "dependencies": ["charge", "notify"],
                "whenUnmet": "fail",
                "whenExhausted": "fail",
                "requiredInputPattern": undefined,
                "forbiddenInputPattern": {"defined": True, "value": {"charge": {}}},
            },
        ],
    }


def test_options_that_are_not_stated_are_not_in_the_shape() -> None:
    flow = Flow("f")
    flow.step()(handler)
    assert "options" not in shape_of(flow)
    assert "options" not in shape_of(flow)["steps"][0]


def test_decorators_return_the_function_unchanged() -> None:
    flow = Flow("f")
    assert flow.step()(handler) is handler
    assert flow.map("m", array="handler")(handler) is handler
    assert flow.setup(print) is print


def test_a_job_is_a_flow_of_one_step_and_calling_it_calls_the_function() -> None:
    @job("send_email", timeout=60, cron=Cron("0 9 * * *", input={"type": "daily"}, timezone="Europe/Vienna"))
    def deliver(message: str) -> str:
        return message.upper()

    assert isinstance(deliver, Job)
    assert deliver.flow_type == "job"
    assert list(deliver.steps) == ["send_email"]
    assert deliver("x") == "X"
    assert deliver.cron is not None
    assert deliver.cron.input == {"type": "daily"}


@pytest.mark.parametrize(
    "slug",
    ["", "run", "1st", "_x", "x_", "a__b", "a-b", "a b", "ä", "x;drop", 'a"b', "x" * 48, None, 7],
)
def test_a_bad_flow_slug_is_refused(slug: Any) -> None:
    with pytest.raises(FlowDefinitionError, match="slug"):
        Flow(slug)


def test_the_longest_slug_is_accepted() -> None:
    assert Flow("x" * 47).slug == "x" * 47


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"max_attempts": "3"}, "max_attempts is '3'"),
        ({"max_attempts": True}, "max_attempts is True"),
        ({"base_delay": -1}, "base_delay is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": 1.5}, "timeout is 1.5"),
        ({"timeout": 2**31}, "timeout is 2147483648"),
        ({"cron": "every day"}, "has 2 fields"),
        ({"cron": "61 * * * *"}, "minute '61'"),
        ({"cron": "@often"}, "@often"),
        ({"cron": 5}, "cron schedule is 5"),
    ],
)
def test_a_bad_flow_option_names_the_flow_and_the_value(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FlowDefinitionError, match=r"flow 'f'") as caught:
        Flow("f", **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slug": "a-b"}, "'a-b' is not valid"),
        ({"slug": "first"}, "declared twice"),
        ({"slug": "First"}, "differs from step 'first' only in case"),
        ({"depends_on": ["later"]}, "'later', which is not declared before it; steps so far: 'first'"),
        ({"depends_on": ["s"]}, "depends on itself"),
        ({"depends_on": ["first", "first"]}, "names the dependency 'first' twice"),
        ({"depends_on": [print]}, "print, which is no step"),
        ({"depends_on": "first"}, "has to be a list"),
        ({"start_delay": -1}, "start_delay is -1"),
        ({"when_unmet": "skip"}, "neither if_ nor if_not"),
        ({"if_": {}, "when_unmet": "maybe"}, "when_unmet is 'maybe'"),
        ({"when_exhausted": "retry"}, "when_exhausted is 'retry'"),
        ({"if_": [1]}, "if_ is [1]"),
        ({"if_": None}, "if_ is None"),
        ({"if_not": {"a": {1, 2}}}, "the value at pattern.a is a set"),
        ({"if_not": {1: 2}}, "the key 1"),
        ({"if_": {"a": float("nan")}}, "not JSON"),
        ({"if_": {"a": "\x00"}}, "NUL"),
        ({"memory_mb": 0}, "memory_mb is 0"),
        ({"cpu_seconds": -1}, "cpu_seconds is -1"),
    ],
)
def test_a_bad_step_names_the_flow_the_step_and_the_value(options: dict[str, Any], words: str) -> None:
    flow = Flow("f")
    flow.step("first")(lambda value: value)
    slug = options.pop("slug", "s")
    with pytest.raises(FlowDefinitionError, match=rf"flow 'f', step '{slug}'") as caught:
        flow.step(slug, **options)(handler)
    assert words in str(caught.value)
    assert list(flow.steps) == ["first"]


def test_a_map_takes_its_items_from_one_step_only() -> None:
    flow = Flow("f")
    flow.step("a")(handler)
    with pytest.raises(FlowDefinitionError, match="from one step only"):
        flow.map(array=["a", "b"])(handler)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 1, "takes 0 arguments"),
        (lambda a, b, c: 1, "takes 3 arguments"),
        (7, "7 is not a function"),
    ],
)
def test_a_handler_takes_the_input_and_perhaps_the_context(function: Any, words: str) -> None:
    with pytest.raises(FlowDefinitionError, match=words):
        Flow("f").step("s")(function)


def test_a_keyword_that_nobody_passes_is_refused() -> None:
    def wants(value: Any, *, key: str) -> None: ...

    with pytest.raises(FlowDefinitionError, match="keyword argument 'key'"):
        Flow("f").step()(wants)


def test_a_second_argument_with_a_default_is_the_context_only_by_name() -> None:
    flow = Flow("f")

    @flow.step()
    def fetch(url: str, retries: int = 3) -> None: ...

    @flow.step()
    def other(url: str, ctx: Any = None) -> None: ...

    assert not flow.steps["fetch"].takes_context
    assert flow.steps["other"].takes_context


def test_forgotten_parentheses_are_explained() -> None:
    with pytest.raises(FlowDefinitionError, match="with parentheses"):
        Flow("f").step(handler)(handler)  # type: ignore[arg-type]
    with pytest.raises(FlowDefinitionError, match="with parentheses"):
        job(handler)  # type: ignore[arg-type]


def test_setup_is_declared_once_and_takes_nothing() -> None:
    flow = Flow("f")
    with pytest.raises(FlowDefinitionError, match="may not need arguments"):
        flow.setup(handler)
    flow.setup(print)
    with pytest.raises(FlowDefinitionError, match="declared twice"):
        flow.setup(print)


@pytest.mark.parametrize("schedule", ["* * * * *", "*/15 0-6 1,15 jan-mar mon-fri", "@hourly", "0 0 * * 7"])
def test_cron_schedules_that_are_accepted(schedule: str) -> None:
    assert Cron(schedule).input == {}


@pytest.mark.parametrize("schedule", ["* * * *", "*/0 * * * *", "5-1 * * * *", "* 24 * * *", "* * 0 * *", "a * * * *"])
def test_cron_schedules_that_are_refused(schedule: str) -> None:
    with pytest.raises(FlowDefinitionError, match="cron schedule"):
        Cron(schedule)


def test_a_cron_timezone_has_to_exist() -> None:
    with pytest.raises(FlowDefinitionError, match="Mars/Olympus"):
        Cron("@daily", timezone="Mars/Olympus")
