"""The advisory lock that all who write definitions take first (sql-contract 2.2-2.4, 2.14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    from support.engine import Engine

LOCK = "select pg_advisory_xact_lock(1, hashtext('orders'))"
SHAPE = '{"steps": [{"slug": "a"}]}'

writers = pytest.mark.parametrize(
    "call",
    [
        "select pgflow.create_flow('Orders')",
        "select pgflow.add_step('Orders', 'a')",
        f"select pgflow._create_flow_from_shape('Orders', '{SHAPE}')",
        f"select pgflow.ensure_flow_compiled('Orders', '{SHAPE}')",
        f"select pgflow.ensure_flow_compiled('Orders', '{SHAPE}', 'flow')",
        "select pgflow.delete_flow_and_data('Orders')",
    ],
)


@writers
def test_is_waited_for_before_any_table_is_touched(engine: Engine, call: str) -> None:
    engine.flow("Orders")
    with engine.transaction() as holder:
        holder.execute(LOCK)
        thread, results = engine.in_another_session(lambda own: own.rows(call))
        engine.wait_blocked()
        # Whoever had so much as read one of them would be in the way here.
        holder.execute(
            "lock table pgflow.flows, pgflow.steps, pgflow.deps, pgflow.runs, pgmq.meta in access exclusive mode nowait"
        )
    thread.join()
    assert isinstance(results[0], list)


@writers
def test_is_kept_to_the_end_of_the_transaction(engine: Engine, call: str) -> None:
    engine.flow("Orders")
    free = "select pg_try_advisory_xact_lock(1, hashtext('orders'))"
    with engine.transaction() as writer:
        writer.execute(call)
        assert engine.value(free) is False
    assert engine.value(free) is True


@writers
def test_does_not_block_the_one_who_has_it(engine: Engine, call: str) -> None:
    engine.flow("Orders")
    with psycopg.connect(engine.dsn) as own:
        own.execute(LOCK.encode())
        own.execute("set local lock_timeout = '1ms'")
        own.execute(call.encode())


def test_is_one_per_flow(engine: Engine) -> None:
    with engine.transaction() as holder:
        holder.execute(LOCK)
        engine.execute("set lock_timeout = '1ms'")
        engine.flow("other")
