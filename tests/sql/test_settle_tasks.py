"""pgflow_otp.settle_tasks: many outcomes in one statement, as if they came one by one."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.engine import NOTHING

if TYPE_CHECKING:
    from support.engine import Engine


@pytest.fixture
def worker(engine: Engine) -> uuid.UUID:
    """A worker, and flow `f`: a single step a, a map m of its output, a single step z after the map."""
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.step("z", "m")
    return engine.worker()


def statuses(rows: list[dict[str, Any]]) -> list[str]:
    assert [row["place"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["status"] for row in rows]


def start_and_claim(engine: Engine, worker: uuid.UUID, runs: int) -> list[dict[str, Any]]:
    for _ in range(runs):
        engine.start()
    return engine.own_claim(worker)


def test_completes_tasks_of_many_runs_to_their_end(engine: Engine, worker: uuid.UUID) -> None:
    tasks = start_and_claim(engine, worker, 3)
    assert statuses(engine.settle(worker, [(task, "completed", [1, 2]) for task in tasks])) == ["completed"] * 3
    items = engine.own_claim(worker)
    assert sorted(task["input"] for task in items) == [1, 1, 1, 2, 2, 2]
    engine.events()
    settled = engine.settle(worker, [(task, "completed", task["input"] * 10) for task in items])
    assert statuses(settled) == ["completed"] * 6
    assert sorted(engine.events()) == ["step:m:completed"] * 3 + ["step:z:started"] * 3
    last = engine.own_claim(worker)
    assert [task["input"] for task in last] == [{"m": [10, 20]}] * 3
    engine.settle(worker, [(task, "completed", None) for task in last])
    assert [row["output"] for row in engine.rows("select * from pgflow.runs")] == [{"z": None}] * 3
    assert engine.live() == []
    assert len(engine.archived()) == 3 + 6 + 3


def test_nothing_is_settled_by_empty_arrays(engine: Engine, worker: uuid.UUID) -> None:
    before = engine.everything()
    assert engine.settle(worker, []) == []
    assert engine.everything() == before


def test_a_map_counts_items_that_end_in_one_batch(engine: Engine, worker: uuid.UUID) -> None:
    (task,) = start_and_claim(engine, worker, 1)
    engine.settle(worker, [(task, "completed", list(range(5)))])
    items = engine.own_claim(worker)
    engine.settle(worker, [(item, "completed", "first") for item in items[:3]])
    assert engine.state(task["run_id"], "m")["remaining_tasks"] == 2
    engine.settle(worker, [(item, "completed", NOTHING) for item in items[3:]])
    assert engine.state(task["run_id"], "m")["output"] == ["first"] * 3 + [None] * 2


def test_every_outcome_has_its_place_in_a_batch(engine: Engine, worker: uuid.UUID) -> None:
    tasks = start_and_claim(engine, worker, 6)
    said = [
        (tasks[0], "completed", []),
        (tasks[1], "failed", "no luck"),
        (tasks[2], "failed_for_good", "never"),
        (tasks[3], "released", None),
        (tasks[4], "crashed", "died"),
        (tasks[5], "failed", "no luck either"),
    ]
    assert statuses(engine.settle(worker, said)) == ["completed", "queued", "failed", "queued", "queued", "queued"]
    found = [engine.task(task["run_id"], "a") for task in tasks]
    assert [task["attempts_count"] for task in found] == [1, 1, 1, 0, 0, 1]
    assert [task["requeued_count"] for task in found] == [0, 0, 0, 0, 1, 0]
    assert [task["error_message"] for task in found] == [None, "no luck", "never", None, None, "no luck either"]


def test_failures_back_off_each_by_its_own_attempts(engine: Engine) -> None:
    engine.flow("slow", base_delay=10)
    engine.step("s", flow="slow", max_attempts=5)
    worker = engine.worker()
    runs = [engine.start(flow="slow") for _ in range(2)]
    (first, second) = sorted(engine.own_claim(worker, "slow"), key=lambda task: runs.index(task["run_id"]))
    engine.settle(worker, [(first, "failed", "once"), (second, "released", None)])
    engine.execute("update pgmq.q_slow set vt = now()")
    again = engine.own_claim(worker, "slow")
    assert [task["attempt"] for task in sorted(again, key=lambda task: runs.index(task["run_id"]))] == [2, 1]
    engine.settle(worker, [(task, "failed", "again") for task in again])
    waits = [engine.visible_in(run, "s") or 0 for run in runs]
    assert [round(wait, -1) for wait in waits] == [40, 20]


def test_the_last_attempt_fails_the_run(engine: Engine, worker: uuid.UUID) -> None:
    engine.execute("update pgflow.flows set opt_max_attempts = 1")
    tasks = start_and_claim(engine, worker, 2)
    engine.events()
    assert statuses(engine.settle(worker, [(task, "failed", "over") for task in tasks])) == ["failed", "failed"]
    assert {row["status"] for row in engine.rows("select status from pgflow.runs")} == {"failed"}
    assert sorted(engine.events()) == ["run:failed"] * 2 + ["step:a:failed"] * 2
    assert engine.live() == []


def test_an_output_that_is_no_array_fails_its_run_only(engine: Engine, worker: uuid.UUID) -> None:
    tasks = start_and_claim(engine, worker, 3)
    settled = engine.settle(worker, list(zip(tasks, ["completed"] * 3, [[1], {"a": 1}, [2]], strict=True)))
    assert statuses(settled) == ["completed", "failed", "completed"]
    assert engine.run(tasks[1]["run_id"])["status"] == "failed"
    assert engine.task(tasks[1]["run_id"], "a")["error_message"] == "[TYPE_VIOLATION] Produced object instead of array"


def test_a_failure_cancels_what_follows_it_in_the_batch(engine: Engine, worker: uuid.UUID) -> None:
    (task,) = start_and_claim(engine, worker, 1)
    engine.settle(worker, [(task, "completed", [1, 2, 3])])
    items = engine.own_claim(worker)
    said = [(items[0], "completed", 1), (items[1], "failed_for_good", "no"), (items[2], "completed", 3)]
    assert statuses(engine.settle(worker, said)) == ["completed", "failed", "cancelled"]
    assert engine.task(task["run_id"], "m", 2)["output"] is None


def test_only_the_holder_of_a_claim_settles_it(engine: Engine, worker: uuid.UUID) -> None:
    tasks = start_and_claim(engine, worker, 2)
    other = engine.worker()
    before = engine.everything()
    assert statuses(engine.settle(other, [(task, "completed", []) for task in tasks])) == ["overtaken"] * 2
    assert statuses(engine.settle(other, [(task, "failed", "no") for task in tasks])) == ["overtaken"] * 2
    assert engine.everything() == before
    engine.settle(worker, [(task, "released", None) for task in tasks])
    engine.own_claim(other)
    assert statuses(engine.settle(worker, [(task, "completed", []) for task in tasks])) == ["overtaken"] * 2


def test_an_answer_given_twice_counts_once(engine: Engine, worker: uuid.UUID) -> None:
    (task,) = start_and_claim(engine, worker, 1)
    assert statuses(engine.settle(worker, [(task, "completed", [1])] * 3)) == ["completed"] * 3
    assert engine.state(task["run_id"], "a")["remaining_tasks"] == 0
    assert engine.run(task["run_id"])["remaining_steps"] == 2
    before = engine.everything()
    assert statuses(engine.settle(worker, [(task, "completed", [2])])) == ["completed"]
    assert engine.everything() == before


def test_a_violation_given_twice_is_announced_once(engine: Engine, worker: uuid.UUID) -> None:
    (task,) = start_and_claim(engine, worker, 1)
    engine.events()
    assert statuses(engine.settle(worker, [(task, "completed", 1)] * 2)) == ["failed"] * 2
    assert engine.events() == ["run:failed", "step:a:failed"]


def test_an_unknown_task_is_gone(engine: Engine, worker: uuid.UUID) -> None:
    (task,) = start_and_claim(engine, worker, 1)
    said = [({**task, "run_id": uuid.uuid4()}, "completed", 1), ({**task, "task_index": 7}, "failed", "x")]
    assert statuses(engine.settle(worker, said)) == ["gone", "gone"]


BAD = {
    "an unstorable character": ("completed", '"a\\u0000b"', None, "22P05"),
    "no JSON": ("completed", "{", None, "22P02"),
    "a number beyond all limits": ("completed", "1e200000", None, "22003"),
    "an unknown outcome": ("done", None, None, "P0001"),
    "no outcome": (None, None, None, "P0001"),
}


@pytest.mark.parametrize("neighbours", [0, 1, 2])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_item_is_named_and_the_rest_is_settled(
    engine: Engine, worker: uuid.UUID, bad: str, neighbours: int
) -> None:
    outcome, output, error, code = BAD[bad]
    tasks = start_and_claim(engine, worker, 2 * neighbours + 1)
    good = neighbours * ["completed"]
    rows = engine.rows(
        "select * from pgflow_otp.settle_tasks(%s, %s, %s, %s, %s, %s, %s, %s)",
        worker,
        [task["run_id"] for task in tasks],
        [task["step_slug"] for task in tasks],
        [task["task_index"] for task in tasks],
        [task["started_at"] for task in tasks],
        [*good, outcome, *good],
        [*(neighbours * ["[]"]), output, *(neighbours * ["[]"])],
        [error] * len(tasks),
    )
    assert statuses(rows) == [*good, "refused", *good]
    assert rows[neighbours]["reason"].startswith(f"{code}: ")
    assert [row["reason"] for row in rows if row["status"] != "refused"] == [None] * (2 * neighbours)
    assert engine.task(tasks[neighbours]["run_id"], "a")["status"] == "started"


def test_arrays_of_different_lengths_are_refused(engine: Engine, worker: uuid.UUID) -> None:
    (task,) = start_and_claim(engine, worker, 1)
    before = engine.everything()
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="one element for each item"):
        engine.execute(
            "select * from pgflow_otp.settle_tasks(%s, array[%s], '{a,b}', '{0}', array[now()], '{x}', '{}', '{}')",
            worker,
            task["run_id"],
        )
    assert engine.everything() == before


def test_a_run_that_is_held_is_set_aside(engine: Engine, worker: uuid.UUID) -> None:
    tasks = start_and_claim(engine, worker, 3)
    with engine.transaction() as other:
        other.execute("select from pgflow.runs where run_id = %s for update", tasks[1]["run_id"])
        settled = engine.settle(worker, [(task, "completed", []) for task in tasks])
        assert statuses(settled) == ["completed", "busy", "completed"]
        assert engine.task(tasks[1]["run_id"], "a")["status"] == "started"
    assert statuses(engine.settle(worker, [(tasks[1], "completed", [])])) == ["completed"]


def test_a_run_is_waited_for_when_there_is_no_other(engine: Engine, worker: uuid.UUID) -> None:
    tasks = start_and_claim(engine, worker, 2)
    with engine.transaction() as other:
        other.execute("select from pgflow.runs for update")
        thread, results = engine.in_another_session(
            lambda own: own.settle(worker, [(task, "completed", []) for task in tasks])
        )
        engine.wait_blocked()
    thread.join()
    assert "completed" in statuses(results[0])
    assert set(statuses(results[0])) <= {"completed", "busy"}


def test_a_lock_timeout_settles_nothing_and_is_for_the_caller(engine: Engine, worker: uuid.UUID) -> None:
    (task,) = start_and_claim(engine, worker, 1)
    with engine.transaction() as other:
        other.execute("select from pgflow.runs for update")
        engine.execute("set lock_timeout = '20ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            engine.settle(worker, [(task, "completed", [])])
    assert statuses(engine.settle(worker, [(task, "completed", [])])) == ["completed"]


def test_a_task_that_is_held_by_another_is_no_reason_to_refuse(engine: Engine, worker: uuid.UUID) -> None:
    tasks = start_and_claim(engine, worker, 2)
    engine.execute("set lock_timeout = '20ms'")
    with engine.transaction() as other:
        other.execute("select from pgflow.step_tasks where run_id = %s for update", tasks[0]["run_id"])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            engine.settle(worker, [(task, "completed", []) for task in tasks])
    assert {engine.task(task["run_id"], "a")["status"] for task in tasks} == {"started"}
