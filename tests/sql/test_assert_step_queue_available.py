"""pgflow._assert_step_queue_available (sql-contract 3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine

AVAILABLE = "select pgflow._assert_step_queue_available(%s, %s)"


def with_step_queue(engine: Engine, flow: str) -> None:
    engine.execute("""select pgflow.ensure_flow_compiled(%s, '{"steps": [{"slug": "a"}]}', 'step')""", flow)


def several_spellings(engine: Engine, lower: str) -> str:
    """List a queue in two spellings; gives them as the message shows them."""
    engine.execute("select pgmq.create(q) from unnest(array[%s, %s]) q", lower, lower.upper())
    listed: str = engine.value(
        "select array_agg(q order by q)::text from unnest(array[%s, %s]) q", lower, lower.upper()
    )
    return listed


def test_true_where_the_queue_has_to_be_made(engine: Engine) -> None:
    before = engine.everything()
    assert engine.value(AVAILABLE, "f", "f__a") is True
    assert engine.everything() == before


@pytest.mark.parametrize("spelling", ["f__a", "F__A"])
def test_false_where_this_flow_owns_it(engine: Engine, spelling: str) -> None:
    with_step_queue(engine, "f")
    engine.execute("update pgmq.meta set queue_name = %s", spelling)
    before = engine.everything()
    assert engine.value(AVAILABLE, "f", "f__a") is False
    assert engine.everything() == before


def test_the_default_name_of_a_flow_with_step_queues_is_free(engine: Engine) -> None:
    with_step_queue(engine, "g")
    assert engine.value(AVAILABLE, "f", "g") is True


def test_a_step_of_another_flow_uses_it(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    with_step_queue(engine, "Other")
    several_spellings(engine, "other__a")
    said = refused(AVAILABLE, "f", "other__a")
    assert said.sqlstate == "P0001"
    assert said.message_primary == 'cannot create flow "f": queue "other__a" is already used by another flow ("Other")'


def test_it_is_the_default_queue_of_another_flow(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    engine.flow("Other")
    several_spellings(engine, "other")
    said = refused(AVAILABLE, "f", "other")
    assert said.sqlstate == "P0001"
    assert said.message_primary == 'cannot create flow "f": queue "other" is already used by another flow ("Other")'


@pytest.mark.parametrize("owned", [False, True])
def test_it_is_listed_in_several_spellings(engine: Engine, refused: Callable[..., Diagnostic], owned: bool) -> None:
    if owned:
        with_step_queue(engine, "f")
    listed = several_spellings(engine, "f__a")
    said = refused(AVAILABLE, "f", "f__a")
    assert said.sqlstate == "P0001"
    assert said.message_primary == f'queue "f__a" matches multiple listed PGMQ queues ({listed})'


def test_this_flow_owns_it_but_it_is_lost(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    with_step_queue(engine, "f")
    engine.execute("select pgmq.drop_queue('f__a')")
    said = refused(AVAILABLE, "f", "f__a")
    assert said.sqlstate == "P0001"
    assert said.message_primary == 'queue "f__a" owned by flow "f" is not listed in PGMQ'


@pytest.mark.parametrize("spelling", ["f__a", "F__a"])
def test_it_is_listed_and_nobody_of_us_owns_it(
    engine: Engine, refused: Callable[..., Diagnostic], spelling: str
) -> None:
    engine.execute("select pgmq.create(%s)", spelling)
    said = refused(AVAILABLE, "f", "f__a")
    assert said.sqlstate == "P0001"
    assert (
        said.message_primary
        == 'cannot create flow "f": queue "f__a" is already listed in PGMQ and not owned by this flow'
    )


def test_another_spelling_of_this_flow_is_no_other_flow(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    with_step_queue(engine, "f")
    said = refused(AVAILABLE, "F", "f__a")
    assert (
        said.message_primary
        == 'cannot create flow "F": queue "f__a" is already listed in PGMQ and not owned by this flow'
    )
    engine.execute("select pgmq.drop_queue('f__a')")
    assert engine.value(AVAILABLE, "F", "f__a") is True
