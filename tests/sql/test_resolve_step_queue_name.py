"""pgflow._resolve_step_queue_name (sql-contract 3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine

RESOLVE = "select pgflow._resolve_step_queue_name(%s, %s, %s)"
F30, F43, F44, F45 = ("f" * length for length in (30, 43, 44, 45))


@pytest.mark.parametrize(
    ("flow", "step", "index", "name"),
    [
        ("Orders", "Charge", 3, "orders__charge"),
        (F30, "S" * 15, 12, f"{F30}__{'s' * 15}"),
        (F44, "s", 100, f"{F44}__s"),
        (F30, "s" * 16, 12, f"{F30}__12"),
        (F30.upper(), "s" * 128, 0, f"{F30}__0"),
        (F43, "sss", 99, f"{F43}__99"),
        (F44, "ss", 9, f"{F44}__9"),
    ],
)
def test_is_readable_where_that_fits_and_else_by_index(
    engine: Engine, flow: str, step: str, index: int, name: str
) -> None:
    assert engine.value(RESOLVE, flow, step, index) == name


@pytest.mark.parametrize(("flow", "step", "index"), [(F45, "s", 0), (F45.upper(), "step", 12)])
def test_a_flow_too_long_for_any_step_is_refused(
    refused: Callable[..., Diagnostic], flow: str, step: str, index: int
) -> None:
    said = refused(RESOLVE, flow, step, index)
    assert said.sqlstate == "P0001"
    assert said.message_primary == f'Flow "{flow}" cannot use per-step queues.'
    assert f'"{F45}__0" is 48 characters; PGMQ allows at most 47.' in (said.message_detail or "")
    assert said.message_hint == "Shorten the concrete flow slug or use the default single queue."


@pytest.mark.parametrize(
    ("flow", "step", "index", "readable", "fallback"), [(F44, "ssss", 10, 50, 48), (F43.upper(), "Step", 1000, 49, 49)]
)
def test_a_step_that_fits_neither_way_is_refused(
    refused: Callable[..., Diagnostic], flow: str, step: str, index: int, readable: int, fallback: int
) -> None:
    said = refused(RESOLVE, flow, step, index)
    assert said.sqlstate == "P0001"
    assert said.message_primary == f'Cannot derive a queue for step "{step}" at index {index} in flow "{flow}".'
    assert (
        said.message_detail
        == f"The readable name is {readable} characters and the index fallback is {fallback}; PGMQ allows at most 47."
    )
    assert (said.message_hint or "").startswith("Shorten the concrete flow slug, shorten the step slug")
