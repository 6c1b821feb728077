"""pgflow.mark_worker_stopped (sql-contract 2.12)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.engine import Engine


def test_stamps_that_worker_by_the_clock(engine: Engine) -> None:
    worker = engine.worker()
    other = engine.worker()
    before = {row["worker_id"]: row for row in engine.rows("select * from pgflow.workers")}
    with engine.transaction() as own:
        own.execute("select now()")
        earlier = engine.value("select clock_timestamp()")
        own.execute("select pgflow.mark_worker_stopped(%s)", worker)
    later = engine.value("select clock_timestamp()")
    after = {row["worker_id"]: row for row in engine.rows("select * from pgflow.workers")}
    stopped_at = after[worker]["stopped_at"]
    assert earlier <= stopped_at <= later
    assert after == before | {worker: before[worker] | {"stopped_at": stopped_at}}
    assert after[other]["stopped_at"] is None


def test_leaves_its_tasks_alone(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    worker = engine.worker()
    engine.claim(worker)
    before = engine.task(run, "a")
    engine.execute("select pgflow.mark_worker_stopped(%s)", worker)
    assert engine.task(run, "a") == before


def test_an_unknown_worker_is_no_error(engine: Engine) -> None:
    engine.worker()
    before = engine.everything()
    engine.execute("select pgflow.mark_worker_stopped(%s)", uuid.uuid4())
    engine.execute("select pgflow.mark_worker_stopped(null)")
    assert engine.everything() == before
