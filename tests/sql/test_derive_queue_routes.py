"""pgflow._derive_queue_routes (sql-contract 3.4).

No two valid slugs that differ in more than case resolve to one queue, so "both resolve to queue" cannot be provoked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine

DERIVE = "select pgflow._derive_queue_routes(%s, %s, %s)"
LONG = "f" * 45


def shape(*slugs: str) -> Jsonb:
    return Jsonb({"steps": [{"slug": slug} for slug in slugs]})


@pytest.mark.parametrize(
    ("flow", "slugs", "mode", "routes"),
    [
        ("Orders", ("b", "A"), "flow", [("b", "orders"), ("A", "orders")]),
        ("Orders", ("b", "A"), "step", [("b", "orders__b"), ("A", "orders__a")]),
        ("f", (), "flow", []),
        (LONG, ("a",), "flow", [("a", LONG)]),
        (
            "f" * 30,
            ("s" * 20, "short", "t" * 20),
            "step",
            [("s" * 20, "f" * 30 + "__0"), ("short", "f" * 30 + "__short"), ("t" * 20, "f" * 30 + "__2")],
        ),
    ],
)
def test_gives_each_step_its_queue_in_order(
    engine: Engine, flow: str, slugs: tuple[str, ...], mode: str, routes: list[tuple[str, str]]
) -> None:
    before = engine.everything()
    derived = engine.value(DERIVE, flow, shape(*slugs), mode)
    assert derived == [{"stepSlug": slug, "queueName": queue} for slug, queue in routes]
    assert engine.everything() == before


# Each also violates what is judged after it.
@pytest.mark.parametrize(
    ("flow", "slugs", "mode", "message"),
    [
        ("a__b", ("run", "x", "X"), "pool", 'Unknown queue mode "pool".'),
        ("a__b", (), "step", 'Flow "a__b" cannot use per-step queues: it has no steps.'),
        ("a__b", ("run", "x", "X"), "flow", 'Flow slug "a__b" is not valid.'),
        ("a__b", ("run", "x", "X"), "step", 'Flow slug "a__b" is not valid.'),
        (LONG, ("x", "X", "run"), "flow", f'Step slug "run" in flow "{LONG}" is not valid.'),
        (LONG, ("x", "X", "run"), "step", f'Step slug "run" in flow "{LONG}" is not valid.'),
        ("f", ("Same", "other", "same"), "flow", 'Steps "Same" and "same" in flow "f" conflict case-insensitively.'),
        ("f", ("Same", "other", "same"), "step", 'Steps "Same" and "same" in flow "f" conflict case-insensitively.'),
        ("f", ("same", "same"), "flow", 'Steps "same" and "same" in flow "f" conflict case-insensitively.'),
        (LONG, ("a", "A"), "step", f'Flow "{LONG}" cannot use per-step queues.'),
        (
            "f" * 44,
            (*(f"s{'abcdefghij'[n]}" for n in range(10)), "long"),
            "step",
            f'Cannot derive a queue for step "long" at index 10 in flow "{"f" * 44}".',
        ),
    ],
)
def test_refuses_in_this_order(
    refused: Callable[..., Diagnostic], flow: str, slugs: tuple[str, ...], mode: str, message: str
) -> None:
    said = refused(DERIVE, flow, shape(*slugs), mode)
    assert (said.sqlstate, said.message_primary) == ("P0001", message)
