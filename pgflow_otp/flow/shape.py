"""A flow as the JSON shape that the database compiles and compares (sql-contract 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgflow_otp.flow.definition import UNSET, Options

if TYPE_CHECKING:
    from pgflow_otp.flow.definition import StepDefinition
    from pgflow_otp.flow.dsl import Flow


def shape_of(flow: Flow) -> dict[str, Any]:
    """Return the shape: steps in order of declaration, options only where stated."""
    shape: dict[str, Any] = {"steps": [_step(step) for step in flow.steps.values()]}
    return _with_options(shape, flow.options)


def _step(step: StepDefinition) -> dict[str, Any]:
    shape = {
        "slug": step.slug,
        "stepType": step.step_type,
        "dependencies": sorted(step.depends_on),
        "whenUnmet": step.when_unmet,
        "whenExhausted": step.when_exhausted,
        "requiredInputPattern": _pattern(step.required_pattern),
        "forbiddenInputPattern": _pattern(step.forbidden_pattern),
    }
    return _with_options(shape, step.options)


def _pattern(pattern: Any) -> dict[str, Any]:
    return {"defined": False} if pattern is UNSET else {"defined": True, "value": pattern}


def _with_options(shape: dict[str, Any], options: Options) -> dict[str, Any]:
    stated = {
        "maxAttempts": options.max_attempts,
        "baseDelay": options.base_delay,
        "timeout": options.timeout,
        "startDelay": options.start_delay,
    }
    stated = {key: value for key, value in stated.items() if value is not None}
    return {**shape, "options": stated} if stated else shape
