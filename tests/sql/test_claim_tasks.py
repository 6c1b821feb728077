"""pgflow_otp.claim_tasks: messages read and their tasks claimed in one trip."""

from __future__ import annotations

import json
import random
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql

if TYPE_CHECKING:
    from support.engine import Engine

STORED = "select task_index from pgflow_otp.map_items order by 1"


def mapped(engine: Engine, items: list[Any], **options: Any) -> uuid.UUID:
    """A run of one map, and its worker's claim not made yet."""
    engine.flow()
    engine.step("m", step_type="map", **options)
    return engine.start(items)


def stored(engine: Engine) -> list[int]:
    """Indexes of the tasks whose elements are kept beside them."""
    return [row["task_index"] for row in engine.rows(STORED)]


# What a claim gives


def test_a_root_step_gets_the_flow_input_and_a_dependent_step_its_dependencies(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    run = engine.start({"n": 1})
    worker = engine.worker()
    (first,) = engine.own_claim(worker)
    assert (first["run_id"], first["step_slug"], first["task_index"]) == (run, "a", 0)
    assert (first["input"], first["flow_input"]) == ({}, {"n": 1})
    engine.settle_one(worker, (first, "completed", [1]))
    (second,) = engine.own_claim(worker)
    assert (second["step_slug"], second["input"], second["flow_input"]) == ("b", {"a": [1]}, None)


def test_says_how_often_a_task_may_be_tried_and_how_long_it_may_take(engine: Engine) -> None:
    engine.flow(max_attempts=5, timeout=60)
    engine.step("a")
    engine.step("b", max_attempts=2, timeout=7)
    engine.start()
    worker = engine.worker()
    claimed = engine.own_claim(worker)
    assert [(t["step_slug"], t["attempt"], t["max_attempts"], t["timeout"]) for t in claimed] == [
        ("a", 1, 5, 60),
        ("b", 1, 2, 7),
    ]
    engine.settle(worker, [(task, "failed", "no luck") for task in claimed])
    assert [t["attempt"] for t in engine.own_claim(worker)] == [2, 2]


def test_marks_its_tasks_as_start_tasks_does(engine: Engine) -> None:
    run = mapped(engine, [1, 2])
    worker = engine.worker()
    (first,) = engine.own_claim(worker, quantity=1)
    task, other = engine.task(run, "m", 0), engine.task(run, "m", 1)
    assert (task["status"], task["attempts_count"], task["last_worker_id"]) == ("started", 1, worker)
    assert task["started_at"] == first["started_at"] >= task["queued_at"]
    assert (other["status"], other["attempts_count"], other["started_at"]) == ("queued", 0, None)
    assert [message["read_ct"] for message in engine.live()] == [1, 0]


@pytest.mark.parametrize("quantity", [0, -1])
def test_claims_nothing_when_nothing_is_asked_for(engine: Engine, quantity: int) -> None:
    mapped(engine, [1])
    worker = engine.worker()
    before = engine.everything()
    assert engine.own_claim(worker, quantity=quantity) == []
    assert engine.everything() == before


def test_an_unknown_flow_reads_nothing(engine: Engine) -> None:
    mapped(engine, [1])
    worker = engine.worker()
    before = engine.everything()
    assert engine.rows("select * from pgflow_otp.claim_tasks('g', 'f', %s, 5, 10)", worker) == []
    assert engine.everything() == before


def test_claims_from_the_queue_of_a_step(engine: Engine) -> None:
    shape = {
        "slug": "f",
        "steps": [{"slug": slug, "stepType": "single", "dependencies": []} for slug in ("a", "b")],
    }
    engine.value("select pgflow.ensure_flow_compiled('f', %s, 'step', null)", json.dumps(shape))
    engine.start()
    queue = engine.value("select queue_name from pgflow.steps where step_slug = 'b'")
    assert queue != "f"
    worker = engine.worker(queue=queue)
    query = "select step_slug from pgflow_otp.claim_tasks('f', %s, %s, 5, 10)"
    assert engine.rows(query, queue, worker) == [{"step_slug": "b"}]
    assert engine.rows(query, queue, worker) == []


# Which come first


def test_the_oldest_visible_message_comes_first_and_a_released_task_has_its_old_place(engine: Engine) -> None:
    mapped(engine, [0, 1, 2, 3])
    worker = engine.worker()
    engine.execute("update pgmq.q_f set vt = vt - interval '1 hour' * (10 - msg_id)")
    engine.execute("update pgflow.step_tasks set queued_at = queued_at - interval '1 hour' * (9 - task_index)")
    (first,) = engine.own_claim(worker, quantity=1)
    assert first["task_index"] == 0
    engine.settle_one(worker, (first, "released", None))
    assert [task["task_index"] for task in engine.own_claim(worker, quantity=2)] == [0, 1]


def test_a_backlog_that_is_not_visible_yet_is_not_read(engine: Engine) -> None:
    mapped(engine, list(range(10)))
    engine.execute("update pgmq.q_f set vt = now() + interval '1 hour' where msg_id < 10")
    worker = engine.worker()
    assert [task["task_index"] for task in engine.own_claim(worker)] == [9]
    assert [message["read_ct"] for message in engine.live()] == [0] * 9 + [1]


# How long messages stay hidden


def test_a_message_is_hidden_for_the_timeout_of_its_step_the_kill_grace_and_two_seconds(engine: Engine) -> None:
    engine.flow(timeout=300)
    engine.step("a")
    engine.step("b", timeout=7)
    run = engine.start()
    engine.own_claim(engine.worker(), p_kill_grace=10)
    for step, seconds in {"a": 312, "b": 19}.items():
        assert seconds - 5 < (engine.visible_in(run, step) or 0) <= seconds


def test_a_message_read_in_vain_is_hidden_for_the_visibility_given(engine: Engine) -> None:
    run = mapped(engine, [1])
    engine.execute("update pgflow.runs set status = 'failed', failed_at = now()")
    engine.execute("select pgmq.send('f', '{\"not\": \"a task\"}')")
    worker = engine.worker()
    engine.execute("update pgflow.step_tasks set status = 'failed', failed_at = now(), error_message = 'x'")
    assert engine.own_claim(worker) == []
    assert 0 < (engine.visible_in(run, "m") or 0) <= 5
    hidden = "select count(*) from pgmq.q_f where vt > clock_timestamp() and read_ct = 1"
    assert engine.value(hidden) == 2


def test_a_message_without_a_queued_task_costs_its_neighbours_nothing(engine: Engine) -> None:
    mapped(engine, [0, 1, 2])
    engine.execute("update pgflow.step_tasks set status = 'completed', completed_at = now() where task_index = 1")
    assert [task["task_index"] for task in engine.own_claim(engine.worker())] == [0, 2]


# Elements of maps


@pytest.mark.parametrize(
    ("items", "are_kept"),
    [
        (list(range(50)), False),
        (list(range(51)), True),
        (["x" * 1500], False),
        ([random.Random(1).randbytes(3_000).hex(), 1], True),
    ],
)
def test_many_or_large_elements_are_kept_beside_their_tasks(engine: Engine, items: list[Any], are_kept: bool) -> None:
    mapped(engine, items)
    assert stored(engine) == (list(range(len(items))) if are_kept else [])
    assert [task["input"] for task in engine.own_claim(engine.worker())] == items


def test_elements_go_with_their_tasks(engine: Engine) -> None:
    run = mapped(engine, list(range(60)), max_attempts=1)
    worker = engine.worker()
    tasks = engine.own_claim(worker)
    engine.settle(worker, [(task, "completed", 1) for task in tasks[:20]])
    engine.settle_one(worker, (tasks[20], "completed", 1))
    engine.complete(run, "m", 21, 1)
    assert stored(engine) == list(range(22, 60))
    engine.settle_one(worker, (tasks[59], "released", None))
    assert stored(engine) == list(range(22, 60))
    engine.settle_one(worker, (tasks[30], "failed", "no luck"))
    assert engine.run(run)["status"] == "failed"
    assert stored(engine) == []


@pytest.mark.parametrize("policy", ["skip", "skip-cascade"])
def test_elements_go_with_a_step_that_is_skipped(engine: Engine, policy: str) -> None:
    mapped(engine, list(range(60)), max_attempts=1, when_exhausted=policy)
    worker = engine.worker()
    tasks = engine.own_claim(worker)
    engine.settle_one(worker, (tasks[3], "failed", "no luck"))
    assert engine.run(tasks[3]["run_id"])["status"] == "completed"
    assert stored(engine) == []


def test_elements_of_a_dependency_are_kept(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.start()
    worker = engine.worker()
    items = [{"n": n} for n in range(60)]
    engine.settle(worker, [(task, "completed", items) for task in engine.own_claim(worker)])
    assert stored(engine) == list(range(60))
    assert [task["input"] for task in engine.own_claim(worker)] == items


def test_missing_elements_are_kept_at_the_first_claim(engine: Engine) -> None:
    """As when another runtime's functions have started the step."""
    run = mapped(engine, list(range(60)))
    engine.complete(run, "m", 5, 1)  # not claimed, so it changes nothing
    worker = engine.worker()
    (first,) = engine.own_claim(worker, quantity=1)
    engine.settle_one(worker, (first, "completed", 1))
    engine.execute("delete from pgflow_otp.map_items")
    (second,) = engine.own_claim(worker, quantity=1)
    assert second["input"] == 1
    assert stored(engine) == list(range(1, 60))
    assert [task["input"] for task in engine.own_claim(worker)] == list(range(2, 60))


def test_a_role_without_rights_on_them_works_with_the_array(engine: Engine) -> None:
    role = f"pgflow_test_{uuid.uuid4().hex[:8]}"
    name = sql.Identifier(role)
    engine.flow()
    engine.step("m", step_type="map")
    engine.connection.execute(sql.SQL("create role {}").format(name))
    for schema in ("pgflow", "pgmq", "realtime"):
        for what in ("usage on schema", "all on all tables in schema", "all on all routines in schema"):
            grant = sql.SQL("grant {} {} to {}").format(sql.SQL(what), sql.Identifier(schema), name)
            engine.connection.execute(grant)
    try:
        engine.connection.execute(sql.SQL("set role {}").format(name))
        run = engine.start(list(range(60)))
        worker = engine.worker()
        tasks = engine.own_claim(worker)
        assert [task["input"] for task in tasks] == list(range(60))
        engine.settle(worker, [(task, "completed", task["input"]) for task in tasks])
        assert engine.run(run)["output"] == {"m": list(range(60))}
        engine.execute("reset role")
        assert stored(engine) == []
    finally:
        engine.execute("reset role")
        engine.connection.execute(sql.SQL("drop owned by {}").format(name))
        engine.connection.execute(sql.SQL("drop role {}").format(name))


def test_pruning_removes_elements_of_runs_that_are_gone(engine: Engine) -> None:
    mapped(engine, list(range(60)))
    engine.execute("insert into pgflow_otp.map_items values (gen_random_uuid(), 'm', 0, '1')")
    assert len(stored(engine)) == 61
    engine.execute("select * from pgflow_otp.prune(make_interval(days => 1), null)")
    assert len(stored(engine)) == 60
