"""pgflow.register_worker (sql-contract 4)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import errors

if TYPE_CHECKING:
    from support.engine import Engine

REGISTER = "select pgflow.register_worker(%s, %s, %s)"


def stored(engine: Engine, worker: uuid.UUID) -> dict[str, Any]:
    return engine.row("select * from pgflow.workers where worker_id = %s", worker)


def test_inserts_a_worker_that_begins_with_its_first_heartbeat(engine: Engine) -> None:
    worker = uuid.uuid4()
    with engine.transaction() as own:
        own.execute(REGISTER, worker, "q", "elixir:Mine")
        now = own.value("select now()")
    assert stored(engine, worker) == {
        "worker_id": worker,
        "queue_name": "q",
        "function_name": "elixir:Mine",
        "started_at": now,
        "deprecated_at": None,
        "stopped_at": None,
        "last_heartbeat_at": now,
        "pgflow_version": None,
    }


@pytest.mark.parametrize("column", ["deprecated_at", "stopped_at"])
def test_a_second_call_only_refreshes_the_heartbeat(engine: Engine, column: str) -> None:
    worker = engine.worker("first", "q")
    engine.execute(f"update pgflow.workers set {column} = now()")
    engine.age(1000)
    before = stored(engine, worker)
    with engine.transaction() as own:
        own.execute(REGISTER, worker, "other", "second")
        now = own.value("select now()")
    assert before[column] is not None
    assert stored(engine, worker) == before | {"last_heartbeat_at": now}


def test_leaves_other_workers_alone(engine: Engine) -> None:
    other = engine.worker()
    before = stored(engine, other)
    engine.worker()
    assert stored(engine, other) == before


def test_the_queue_is_free_text_and_need_not_exist(engine: Engine) -> None:
    assert stored(engine, engine.worker(queue="No Such Queue!"))["queue_name"] == "No Such Queue!"


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ((None, "q", "f"), "worker_id"),
        ((uuid.UUID(int=1), None, "f"), "queue_name"),
        ((uuid.UUID(int=1), "q", None), "function_name"),
    ],
)
def test_null_is_refused(engine: Engine, values: tuple[Any, ...], column: str) -> None:
    before = engine.everything()
    with pytest.raises(errors.NotNullViolation) as raised:
        engine.execute(REGISTER, *values)
    assert raised.value.diag.column_name == column
    assert engine.everything() == before
