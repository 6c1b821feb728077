"""pgflow.recover_stalled_tasks (sql-contract 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.engine import Engine

RECOVER = "select * from pgflow.recover_stalled_tasks(%s)"


def started(engine: Engine, *flows: str) -> None:
    for flow in flows:
        engine.flow(flow, timeout=40)
        engine.step("m", flow=flow, step_type="map")
        engine.start([1, 2], flow=flow)
        engine.claim(flow=flow)


@pytest.mark.parametrize("buffer", [0, 0.5, 60, 300])
@pytest.mark.parametrize(("timeout", "seconds"), [(None, 40), (7, 7)])
def test_overdue_is_the_timeout_and_the_given_buffer(
    engine: Engine, timeout: int | None, seconds: int, buffer: float
) -> None:
    engine.flow(timeout=40)
    engine.step("a", timeout=timeout)
    engine.start()
    engine.claim()
    with engine.transaction() as own:  # Within one transaction now() stands still.
        move = (
            "update pgflow.step_tasks set queued_at = now() - interval '1 hour', "
            "started_at = now() - make_interval(secs => %s)"
        )
        own.execute(move, seconds + buffer)
        assert own.row(RECOVER, buffer) == {"recovered_count": 0, "vt_batches": 0}
        own.execute(move, seconds + buffer + 0.001)
        assert own.row(RECOVER, buffer) == {"recovered_count": 1, "vt_batches": 1}


def test_counts_tasks_and_messages_over_all_queues(engine: Engine) -> None:
    started(engine, "f", "g")
    engine.age(1000)
    assert engine.row(RECOVER, 60) == {"recovered_count": 4, "vt_batches": 4}
    assert [len(engine.read(queue)) for queue in "fg"] == [2, 2]
    tasks = engine.rows("select distinct status, requeued_count, started_at, last_worker_id from pgflow.step_tasks")
    assert tasks == [{"status": "queued", "requeued_count": 1, "started_at": None, "last_worker_id": None}]


def test_a_message_that_is_gone_is_not_counted_as_visible(engine: Engine) -> None:
    started(engine, "f")
    engine.age(1000)
    engine.execute("delete from pgmq.q_f where msg_id = 1")
    assert engine.row(RECOVER, 60) == {"recovered_count": 2, "vt_batches": 1}


def test_gives_up_after_three_requeues_and_archives(engine: Engine) -> None:
    started(engine, "f")
    for _ in range(3):
        engine.age(1000)
        assert engine.row(RECOVER, 60)["recovered_count"] == 2
        assert len(engine.claim()) == 2
    engine.age(1000)
    assert engine.row(RECOVER, 60) == {"recovered_count": 0, "vt_batches": 0}
    tasks = engine.rows(
        "select distinct status, requeued_count, permanently_stalled_at is null as fine from pgflow.step_tasks"
    )
    assert tasks == [{"status": "started", "requeued_count": 3, "fine": False}]
    assert engine.live() == []
    assert len(engine.archived()) == 2


@pytest.mark.parametrize(
    "change",
    [
        "update pgflow.step_tasks set permanently_stalled_at = now()",
        "update pgflow.runs set status = 'failed', failed_at = now()",
        "update pgflow.step_states set status = 'failed', failed_at = now()",
    ],
)
def test_what_is_not_running_is_left_alone(engine: Engine, change: str) -> None:
    started(engine, "f")
    engine.age(1000)
    engine.execute(change)
    before = engine.everything()
    assert engine.row(RECOVER, 0) == {"recovered_count": 0, "vt_batches": 0}
    assert engine.everything() == before
