"""pgflow.create_flow (sql-contract 2.2, 3.2)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine

STEP_MODE = """select pgflow.ensure_flow_compiled('f', '{"steps": [{"slug": "a"}]}', 'step')"""


def queues(engine: Engine) -> list[str]:
    return [row["queue_name"] for row in engine.rows("select queue_name from pgmq.list_queues() order by 1")]


def test_returns_the_row_that_it_stores(engine: Engine) -> None:
    returned = engine.row("select * from pgflow.create_flow('Orders', 7, 0, 90)")
    assert returned == engine.row("select * from pgflow.flows")
    del returned["created_at"]
    assert returned == {
        "flow_slug": "Orders",
        "opt_max_attempts": 7,
        "opt_base_delay": 0,
        "opt_timeout": 90,
        "queue_mode": "flow",
        "flow_type": "flow",
    }


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, (3, 5, 60)),
        ({"max_attempts": None, "base_delay": None, "timeout": None}, (3, 5, 60)),
        ({"max_attempts": 0}, (0, 5, 60)),
        ({"base_delay": 0}, (3, 0, 60)),
        ({"timeout": 1}, (3, 5, 1)),
    ],
)
def test_an_option_not_given_has_its_default(
    engine: Engine, options: dict[str, Any], stored: tuple[int, int, int]
) -> None:
    named = "".join(f", {name} => %s" for name in options)
    row = engine.row(f"select * from pgflow.create_flow('f'{named})", *options.values())
    assert (row["opt_max_attempts"], row["opt_base_delay"], row["opt_timeout"]) == stored


def test_makes_a_queue_named_by_the_slug_in_lowercase(engine: Engine) -> None:
    engine.flow("Mixed_Case")
    assert queues(engine) == ["mixed_case"]
    engine.execute("select pgmq.send('mixed_case', '{}')")
    assert len(engine.read("mixed_case")) == 1


def test_an_existing_flow_is_returned_as_it_is(engine: Engine) -> None:
    first = engine.row("select * from pgflow.create_flow('F', 1, 2, 3)")
    before = engine.everything()
    assert engine.row("select * from pgflow.create_flow('F', 9, 9, 9)") == first
    assert engine.everything() == before


def test_a_lost_queue_is_made_again(engine: Engine) -> None:
    engine.flow()
    engine.execute("select pgmq.drop_queue('f')")
    engine.flow()
    assert queues(engine) == ["f"]


def test_a_queue_listed_in_another_spelling_is_reused(engine: Engine) -> None:
    engine.flow("Orders")
    engine.execute("update pgmq.meta set queue_name = 'Orders'")
    engine.flow("Orders")
    assert queues(engine) == ["Orders"]


def test_a_flow_with_step_queues_gets_no_default_queue(engine: Engine) -> None:
    engine.execute(STEP_MODE)
    before = engine.everything()
    assert engine.row("select * from pgflow.create_flow('f')")["queue_mode"] == "step"
    assert engine.everything() == before
    assert queues(engine) == ["f__a"]


@pytest.mark.parametrize("queue", ["taken", "TAKEN"])
@pytest.mark.parametrize("slug", ["taken", "Taken"])
def test_a_queue_of_another_owner_blocks_the_flow(
    engine: Engine, refused: Callable[..., Diagnostic], queue: str, slug: str
) -> None:
    engine.execute("select pgmq.create(%s)", queue)
    said = refused("select pgflow.create_flow(%s)", slug)
    assert said.sqlstate == "23505"
    assert said.message_primary == f'cannot create flow "{slug}": queue "taken" is already in use by another owner'


def test_slugs_may_not_differ_in_case_only(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    engine.flow("Orders")
    said = refused("select pgflow.create_flow('orders')")
    assert said.sqlstate == "23505"
    assert said.message_primary == 'duplicate key value violates unique constraint "idx_flows_normalized_slug"'


@pytest.mark.parametrize(
    ("arguments", "constraint"),
    [
        ("''", "slug_is_valid"),
        ("'a-b'", "slug_is_valid"),
        ("'a__b'", "slug_is_valid"),
        ("'run'", "slug_is_valid"),
        ("'f', max_attempts => -1", "opt_max_attempts_is_nonnegative"),
        ("'f', base_delay => -1", "opt_base_delay_is_nonnegative"),
        ("'f', timeout => 0", "opt_timeout_is_positive"),
        ("'f', timeout => -1", "opt_timeout_is_positive"),
    ],
)
def test_what_the_table_forbids_is_refused(refused: Callable[..., Diagnostic], arguments: str, constraint: str) -> None:
    said = refused(f"select pgflow.create_flow({arguments})")
    assert (said.sqlstate, said.constraint_name) == ("23514", constraint)


def test_a_slug_too_long_for_a_queue_is_refused_by_pgmq(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    engine.flow("f" * 47)
    said = refused("select pgflow.create_flow(%s)", "g" * 48)
    # The number depends on the release of pgmq.
    assert re.fullmatch(r"queue name is too long, maximum length is 4[78] characters", said.message_primary or "")
    assert queues(engine) == ["f" * 47]


def test_there_is_no_fifth_argument(refused: Callable[..., Diagnostic]) -> None:
    said = refused("select pgflow.create_flow('f', '1', '2', '3', 'single')")
    assert said.sqlstate == "42883"
    assert (
        said.message_primary
        == "function pgflow.create_flow(unknown, unknown, unknown, unknown, unknown) does not exist"
    )
