"""pgflow.delete_flow_and_data (sql-contract 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine

DELETE = "select pgflow.delete_flow_and_data(%s)"


def queues(engine: Engine) -> list[str]:
    return [row["queue_name"] for row in engine.rows("select queue_name from pgmq.list_queues() order by 1")]


def queue_tables(engine: Engine) -> list[str]:
    query = "select relname from pg_class where relnamespace = 'pgmq'::regnamespace and relkind = 'r'"
    return sorted(row["relname"] for row in engine.rows(query) if row["relname"][:2] in {"q_", "a_"})


def with_step_queues(engine: Engine, flow: str = "f") -> None:
    shape = '{"steps": [{"slug": "a"}, {"slug": "b"}]}'
    engine.execute("select pgflow.ensure_flow_compiled(%s, %s::jsonb, 'step')", flow, shape)


def busy_flow(engine: Engine, flow: str) -> None:
    """A run with a finished, a started and a waiting task, messages in queue and archive."""
    engine.flow(flow)
    engine.step("a", flow=flow)
    engine.step("b", flow=flow)
    engine.step("c", "a", flow=flow)
    run = engine.start(flow=flow)
    engine.claim(flow=flow)
    engine.complete(run, "a")


def test_nothing_of_the_flow_and_everything_else_remains(engine: Engine) -> None:
    busy_flow(engine, "Keep")
    engine.execute("select pgmq.create('unrelated')")
    engine.execute("select pgflow.track_worker_function('fn')")
    before = engine.everything()
    tables = queue_tables(engine)
    busy_flow(engine, "Gone")
    assert "a_gone" in queue_tables(engine)
    workers, sent = (engine.everything()[key] for key in ("workers", "sent"))
    engine.execute(DELETE, "Gone")
    assert engine.everything() == before | {"workers": workers, "sent": sent}
    assert queue_tables(engine) == tables


@pytest.mark.parametrize("slug", ["missing", "f", "unrelated"])
def test_a_missing_or_differently_spelled_flow_is_a_no_op(engine: Engine, slug: str) -> None:
    busy_flow(engine, "F")
    engine.execute("select pgmq.create('unrelated')")
    before = engine.everything()
    engine.execute(DELETE, slug)
    assert engine.everything() == before


def test_a_flow_without_steps_loses_its_queue(engine: Engine) -> None:
    engine.flow()
    engine.execute(DELETE, "f")
    assert queues(engine) == []
    assert engine.rows("select * from pgflow.flows") == []


def test_queues_are_all_routes_and_the_default_queue(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.execute("select pgmq.create(q) from unnest('{moved,other}'::text[]) q")
    engine.execute("update pgflow.steps set queue_name = 'moved'")
    engine.execute(DELETE, "f")
    assert queues(engine) == ["other"]


def test_step_queues_go_but_not_a_foreign_queue_of_the_default_name(engine: Engine) -> None:
    with_step_queues(engine)
    with_step_queues(engine, "g")
    engine.execute("select pgmq.create('f')")
    engine.execute(DELETE, "f")
    assert queues(engine) == ["f", "g__a", "g__b"]
    assert queue_tables(engine) == ["a_f", "a_g__a", "a_g__b", "q_f", "q_g__a", "q_g__b"]


def test_a_queue_listed_in_another_spelling_is_found(engine: Engine) -> None:
    engine.flow("Orders")
    engine.step("a", flow="Orders")
    engine.execute("update pgmq.meta set queue_name = 'Orders'")
    engine.execute(DELETE, "Orders")
    assert queues(engine) == []
    assert queue_tables(engine) == []


def test_a_queue_listed_in_several_spellings_is_refused(engine: Engine, refused: Callable[..., Diagnostic]) -> None:
    busy_flow(engine, "f")
    engine.execute("select pgmq.create('F')")
    said = refused(DELETE, "f")
    assert said.sqlstate == "42P09"
    assert (said.message_primary or "").startswith('queue name "f" is ambiguous: it matches listed queues {')


def test_the_flow_may_be_made_anew(engine: Engine) -> None:
    busy_flow(engine, "f")
    engine.execute(DELETE, "f")
    engine.flow()
    engine.step("only")
    run = engine.start()
    assert [task["step_slug"] for task in engine.claim()] == ["only"]
    engine.complete(run, "only")
    assert engine.run(run)["status"] == "completed"
