"""pgflow.start_tasks, both forms: the claim (sql-contract 2.7)."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import errors
from support.engine import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.engine import Engine


def select_step(
    engine: Engine, messages: list[int] | None, queue: str | None, step: str | None, flow: str = "f"
) -> list[dict[str, Any]]:
    """The form with five arguments."""
    query = "select * from pgflow.start_tasks(%s, %s::bigint[], %s, %s, %s)"
    return engine.rows(query, flow, messages, engine.worker(), queue, step)


def step_mode(engine: Engine) -> uuid.UUID:
    """A run of two independent steps, each with a queue of its own."""
    steps: list[dict[str, Any]] = [{"slug": slug, "stepType": "single", "dependencies": []} for slug in ("a", "b")]
    engine.execute("select pgflow.ensure_flow_compiled('f', %s::jsonb, 'step')", json.dumps({"steps": steps}))
    return engine.start()


def hides(engine: Engine, seconds: int, work: Callable[[], Any], run: uuid.UUID, step: str, index: int = 0) -> bool:
    """Whether a call hides the message of a task for exactly so long, as from some moment during the call."""
    before = engine.value("select clock_timestamp()")
    work()
    after = engine.value("select clock_timestamp()")
    task = engine.task(run, step, index)
    (vt,) = [m["vt"] for m in engine.live(task["queue_name"]) if m["msg_id"] == task["message_id"]]
    return bool(before + timedelta(seconds=seconds) <= vt <= after + timedelta(seconds=seconds))


# What is claimed


def test_claims_a_queued_task_for_the_worker(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    before, worker = engine.task(run, "a"), engine.worker()
    engine.claim(worker)
    after = engine.task(run, "a")
    assert after["started_at"] >= after["queued_at"]
    changes = {"status": "started", "attempts_count": 1, "last_worker_id": worker, "started_at": after["started_at"]}
    assert after == before | changes


def test_a_record_has_eight_fields_in_this_order(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start({"x": 1})
    (task,) = engine.claim()
    assert list(task.items()) == [
        ("flow_slug", "f"),
        ("run_id", run),
        ("step_slug", "a"),
        ("input", {}),
        ("msg_id", engine.task(run, "a")["message_id"]),
        ("task_index", 0),
        ("flow_input", {"x": 1}),
        ("attempts_count", 1),
    ]


def test_claims_only_the_messages_that_are_named(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2, 3])
    chosen = engine.task(run, "m", 1)["message_id"]
    others = [m for m in engine.live() if m["msg_id"] != chosen]
    assert [t["task_index"] for t in engine.start_tasks([chosen], engine.worker())] == [1]
    assert [engine.task(run, "m", i)["status"] for i in range(3)] == ["queued", "started", "queued"]
    assert [m for m in engine.live() if m["msg_id"] != chosen] == others


def test_claims_tasks_of_several_runs_and_steps_at_once(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    runs = {engine.start(), engine.start()}
    assert {(t["run_id"], t["step_slug"]) for t in engine.claim()} == {(r, s) for r in runs for s in "ab"}


def test_a_message_named_twice_is_one_task(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    assert len(engine.start_tasks(engine.read() * 2, engine.worker())) == 1
    assert engine.task(run, "a")["attempts_count"] == 1


def test_the_flow_keeps_its_case_and_the_queue_is_lowercase(engine: Engine) -> None:
    engine.flow("MyFlow")
    engine.step("a", flow="MyFlow")
    engine.start(flow="MyFlow")
    assert [t["flow_slug"] for t in engine.claim(flow="MyFlow")] == ["MyFlow"]


def test_a_claim_changes_neither_run_nor_step_and_sends_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    before = engine.run(run), engine.state(run, "a")
    engine.events()
    engine.claim()
    assert (engine.run(run), engine.state(run, "a")) == before
    assert engine.events() == []


@pytest.mark.parametrize(
    ("flow", "messages", "queue"),
    [
        pytest.param("f", [999], "f", id="unknown message"),
        pytest.param("f", [], "f", id="no message"),
        pytest.param("f", None, "f", id="messages NULL"),
        pytest.param("f", [1], None, id="queue NULL"),
        pytest.param("f", [1], "nowhere", id="queue that does not exist"),
        pytest.param("f", [1], "g", id="queue of another flow"),
        pytest.param("f", [1], "F", id="queue not in lowercase"),
        pytest.param("g", [1], "f", id="another flow"),
        pytest.param("F", [1], "f", id="flow in another case"),
        pytest.param("unknown", [1], "f", id="unknown flow"),
    ],
)
def test_what_names_no_task_is_an_empty_claim(
    engine: Engine, flow: str, messages: list[int] | None, queue: str | None
) -> None:
    for name in "fg":
        engine.flow(name)
    engine.step("a")
    run = engine.start()
    assert engine.task(run, "a")["message_id"] == 1
    worker = engine.worker()
    before = engine.everything()
    assert engine.start_tasks(messages, worker, flow, queue) == []
    assert engine.everything() == before


def test_an_unknown_flow_is_no_error_whatever_the_selector(engine: Engine) -> None:
    assert select_step(engine, [1], "f", "a") == []
    assert select_step(engine, [1], "f", None) == []


def test_the_same_message_id_in_two_queues_never_crosses(engine: Engine) -> None:
    runs = {}
    for name in "fg":
        engine.flow(name)
        engine.step("a", flow=name)
        runs[name] = engine.start(flow=name)
    assert engine.task(runs["f"], "a")["message_id"] == engine.task(runs["g"], "a")["message_id"] == 1
    assert [t["run_id"] for t in engine.start_tasks([1], engine.worker(), "g", "g")] == [runs["g"]]
    assert engine.task(runs["f"], "a")["status"] == "queued"


def test_a_started_task_is_not_claimed_twice(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    messages, worker = engine.read(), engine.worker()
    assert len(engine.start_tasks(messages, worker)) == 1
    before = engine.everything()
    assert engine.start_tasks(messages, worker) == []
    assert engine.everything() == before


@pytest.mark.parametrize("status", ["completed", "failed", "skipped", "cancelled"])
def test_a_final_task_is_not_claimed(engine: Engine, status: str) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    messages, worker = engine.read(), engine.worker()
    engine.execute("update pgflow.step_tasks set status = %s", status)
    before = engine.everything()
    assert engine.start_tasks(messages, worker) == []
    assert engine.everything() == before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("update pgflow.runs set status = 'failed', failed_at = now()", id="run failed"),
        pytest.param("update pgflow.runs set status = 'completed', completed_at = now()", id="run completed"),
        pytest.param("update pgflow.step_states set status = 'created', remaining_tasks = null", id="step created"),
        pytest.param("update pgflow.step_states set status = 'failed'", id="step failed"),
        pytest.param("update pgflow.step_states set status = 'completed', remaining_tasks = 0", id="step completed"),
        pytest.param(
            "update pgflow.step_states set status = 'skipped', remaining_tasks = null, skip_reason = 'handler_failed'",
            id="step skipped",
        ),
    ],
)
def test_a_queued_task_whose_run_or_step_is_not_started_is_left_alone(engine: Engine, change: str) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    messages, worker = engine.read(), engine.worker()
    engine.execute(change)
    before = engine.everything()
    assert engine.start_tasks(messages, worker) == []
    assert engine.everything() == before


def test_a_claimable_message_is_claimed_beside_others_that_are_not(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2])
    messages = engine.read()
    engine.start_tasks([engine.task(run, "m", 0)["message_id"]], engine.worker())
    assert [t["task_index"] for t in engine.start_tasks([*messages, 999], engine.worker())] == [1]
    assert engine.task(run, "m", 0)["attempts_count"] == 1


def test_an_unregistered_worker_claims_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    messages = engine.read()
    before = engine.everything()
    with pytest.raises(errors.ForeignKeyViolation) as raised:
        engine.start_tasks(messages, uuid.uuid4())
    assert raised.value.diag.constraint_name == "step_tasks_last_worker_id_fkey"
    assert engine.everything() == before


# Visibility


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 42), (7, 9)])
def test_hides_the_message_for_the_timeout_of_step_or_flow_and_two_seconds(
    engine: Engine, timeout: int | None, seconds: int
) -> None:
    engine.flow(timeout=40)
    engine.step("a", timeout=timeout)
    run = engine.start()
    assert hides(engine, seconds, engine.claim, run, "a")


def test_each_task_of_a_batch_gets_the_visibility_of_its_own_step(engine: Engine) -> None:
    engine.flow(timeout=40)
    engine.step("a", timeout=7)
    engine.step("b")
    run = engine.start()
    assert hides(engine, 9, engine.claim, run, "a")
    difference = "select max(vt) - min(vt) from pgmq.q_f"
    assert timedelta(seconds=32) <= engine.value(difference) < timedelta(seconds=34)
    assert engine.task(run, "b")["status"] == "started"


def test_a_claim_whose_message_vanished_fails_as_a_whole(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2, 3])
    messages, worker = engine.read(), engine.worker()
    engine.execute("delete from pgmq.q_f where msg_id = %s", messages[1])
    before = engine.everything()
    with pytest.raises(errors.InvalidTextRepresentation) as raised:
        engine.start_tasks(messages, worker)
    assert raised.value.diag.message_primary == (
        'invalid input syntax for type integer: "start_tasks(): visibility updated 2 of 3 claimed messages"'
    )
    assert engine.everything() == before
    assert {(engine.task(run, "m", i)["attempts_count"], engine.task(run, "m", i)["started_at"]) for i in range(3)} == {
        (0, None)
    }


def test_a_missing_queue_table_undoes_the_claim(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    messages, worker = engine.read(), engine.worker()
    engine.execute("drop table pgmq.q_f")
    before = engine.task(run, "a")
    with pytest.raises(errors.UndefinedTable) as raised:
        engine.start_tasks(messages, worker)
    assert raised.value.diag.message_primary == 'relation "pgmq.q_f" does not exist'
    assert engine.task(run, "a") == before


# What a record carries


@pytest.mark.parametrize("item", [0, "x", None, False, [1, [2]], {"a": {"b": None}}])
def test_a_root_map_gets_the_raw_element_of_the_run_input(engine: Engine, item: Any) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start(["first", item])
    engine.claim()
    engine.execute("update pgflow.step_tasks set status = 'queued', started_at = null where task_index = 1")
    query = "select input::text from pgflow.start_tasks('f', %s::bigint[], %s, 'f')"
    text = engine.value(query, [engine.task(run, "m", 1)["message_id"]], engine.worker())
    assert json.loads(text) == item


def test_a_dependent_map_gets_the_raw_element_of_its_dependency(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", output=["x", {"y": 1}])
    assert {t["task_index"]: t["input"] for t in engine.claim()} == {0: "x", 1: {"y": 1}}


def test_a_map_of_a_map_gets_an_element_of_its_outputs(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("n", "m", step_type="map")
    run = engine.start([1, 2])
    engine.claim()
    for index in (1, 0):
        engine.complete(run, "m", index, index * 10)
    assert {t["task_index"]: t["input"] for t in engine.claim()} == {0: 0, 1: 10}


def test_a_single_step_gets_the_outputs_of_its_direct_dependencies(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", step_type="map")
    engine.step("z", "a", "m")
    engine.step("y", "z")
    run = engine.start([1, 2])
    engine.claim()
    engine.complete(run, "a", output={"k": [1]})
    engine.complete(run, "m", 1, output="two")
    engine.complete(run, "m", 0, output="one")
    (task,) = engine.claim()
    assert (task["step_slug"], task["input"]) == ("z", {"a": {"k": [1]}, "m": ["one", "two"]})
    engine.complete(run, "z", output=3)
    assert [t["input"] for t in engine.claim()] == [{"z": 3}]


@pytest.mark.parametrize("output", [NOTHING, None])
def test_a_completed_dependency_without_output_is_a_json_null(engine: Engine, output: Any) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", output=output)
    assert [t["input"] for t in engine.claim()] == [{"a": None}]


def test_a_skipped_dependency_is_left_out(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("s", required_input_pattern={"z": 1})
    engine.step("b", "a", "s")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", output=1)
    assert [t["input"] for t in engine.claim()] == [{"a": 1}]


def test_input_is_an_empty_object_when_all_dependencies_were_skipped(engine: Engine) -> None:
    engine.flow()
    engine.step("s", required_input_pattern={"z": 1})
    engine.step("b", "s")
    engine.start()
    assert [(t["step_slug"], t["input"]) for t in engine.claim()] == [("b", {})]


@pytest.mark.parametrize("value", [{"x": 1}, [1], "text", None])
def test_flow_input_is_the_input_of_the_run_for_a_root_single_step(engine: Engine, value: Any) -> None:
    engine.flow()
    engine.step("a")
    engine.start(value)
    query = "select flow_input::text from pgflow.start_tasks('f', %s::bigint[], %s, 'f')"
    assert json.loads(engine.value(query, engine.read(), engine.worker())) == value


def test_flow_input_is_null_for_maps_and_for_dependent_steps(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("n", "m", step_type="map")
    engine.step("b", "m")
    run = engine.start([1])
    (root,) = engine.claim()
    engine.complete(run, "m", output=1)
    flow_inputs = {t["step_slug"]: t["flow_input"] for t in [root, *engine.claim()]}
    assert flow_inputs == {"m": None, "n": None, "b": None}


def test_each_run_of_a_batch_gets_its_own_input(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("a")
    runs = {engine.start([n, n + 1]): n for n in (10, 20)}
    for task in engine.claim():
        n = runs[task["run_id"]]
        if task["step_slug"] == "m":
            assert task["input"] == n + task["task_index"]
        else:
            assert (task["input"], task["flow_input"]) == ({}, [n, n + 1])


def test_attempts_are_counted_from_one_and_told_after_the_increment(engine: Engine) -> None:
    engine.flow(max_attempts=3)
    engine.step("a")
    run = engine.start()
    for attempt in (1, 2, 3):
        assert [t["attempts_count"] for t in engine.claim()] == [attempt]
        assert engine.task(run, "a")["attempts_count"] == attempt
        engine.fail(run, "a")


# The selector


def test_claims_the_selected_step_of_its_own_queue(engine: Engine) -> None:
    run = step_mode(engine)
    assert engine.task(run, "a")["message_id"] == engine.task(run, "b")["message_id"] == 1
    assert [(t["step_slug"], t["msg_id"]) for t in select_step(engine, engine.read("f__a"), "f__a", "a")] == [("a", 1)]
    assert engine.task(run, "b")["status"] == "queued"


@pytest.mark.parametrize(
    ("queue", "step", "message"),
    [
        ("f__a", None, 'Flow "f" uses per-step queues: an exact step_slug is required to claim tasks.'),
        ("f__a", "b", 'Step "b" does not route to queue "f__a" in flow "f".'),
        ("f__a", "A", 'Step "A" does not route to queue "f__a" in flow "f".'),
        ("F__a", "a", 'Step "a" does not route to queue "F__a" in flow "f".'),
        ("f", "a", 'Step "a" does not route to queue "f" in flow "f".'),
        ("f__a", "c", 'Step "c" does not route to queue "f__a" in flow "f".'),
    ],
)
def test_a_selector_that_is_no_route_is_refused(engine: Engine, queue: str, step: str | None, message: str) -> None:
    step_mode(engine)
    before = engine.everything() | {"workers": None}
    with pytest.raises(errors.RaiseException) as raised:
        select_step(engine, [1], queue, step)
    assert raised.value.diag.message_primary == message
    assert engine.everything() | {"workers": None} == before


def test_the_form_without_selector_is_refused_where_steps_have_queues(engine: Engine) -> None:
    step_mode(engine)
    worker = engine.worker()
    before = engine.everything()
    with pytest.raises(errors.RaiseException) as raised:
        engine.start_tasks([1], worker, queue="f__a")
    assert raised.value.diag.message_primary == (
        'Flow "f" uses per-step queues: an exact step_slug is required to claim tasks.'
    )
    assert engine.everything() == before


def test_a_selector_is_refused_where_steps_share_the_queue(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    before = engine.everything() | {"workers": None}
    with pytest.raises(errors.RaiseException) as raised:
        select_step(engine, [1], "f", "a")
    assert raised.value.diag.message_primary == (
        'Flow "f" uses the default flow queue: a step selector is not allowed.'
    )
    assert engine.everything() | {"workers": None} == before


def test_a_null_selector_claims_as_the_form_without_one(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start({"x": 1})
    (task,) = select_step(engine, engine.read(), "f", None)
    assert (task["run_id"], task["step_slug"], task["flow_input"]) == (run, "a", {"x": 1})


def test_arguments_go_by_their_names(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    values = (engine.read(), engine.worker())
    query = (
        "select task_index from pgflow.start_tasks(flow_slug => 'f', msg_ids => %s::bigint[], worker_id => %s, "
        "queue_name => 'f', step_slug => null)"
    )
    assert engine.value(query, *values) == 0


def test_a_claim_without_a_queue_does_not_resolve(engine: Engine) -> None:
    with pytest.raises(psycopg.errors.UndefinedFunction) as raised:
        engine.execute("select pgflow.start_tasks('f', array[1]::bigint[], gen_random_uuid())")
    assert raised.value.diag.message_primary == ("function pgflow.start_tasks(unknown, bigint[], uuid) does not exist")
