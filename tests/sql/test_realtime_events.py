"""Events (sql-contract 2.13): what each is called and carries, when it is sent and when not, and through what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.engine import NOTHING, Engine
from support.vectors import SETUP

from pgflow_otp.db import schema

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable

NEVER = {"never": 1}


def sent(engine: Engine, event: str) -> dict[str, Any]:
    """What the one event of this name carries."""
    (payload,) = [payload for name, payload in engine.payloads() if name == event]
    return payload


def moment(engine: Engine, query: str) -> Any:
    """A time as events carry it."""
    return engine.value(f"select to_jsonb({query})")


# The run


def test_run_started(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern=NEVER)
    engine.step("b")
    run = engine.start({"x": [1]})
    assert sent(engine, "run:started") == {
        "event_type": "run:started",
        "run_id": str(run),
        "flow_slug": "f",
        "status": "started",
        "input": {"x": [1]},
        "remaining_steps": 2,  # As it is before anything is skipped.
        "started_at": moment(engine, "(select started_at from pgflow.runs)"),
    }


@pytest.mark.parametrize("output", [NOTHING, 0, {"k": 1}], ids=["NULL", "0", "object"])
def test_run_completed(engine: Engine, output: Any) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", 0, output)
    assert sent(engine, "run:completed") == {
        "event_type": "run:completed",
        "run_id": str(run),
        "flow_slug": "f",
        "status": "completed",
        "output": {"a": None if output is NOTHING else output},
        "completed_at": moment(engine, "(select completed_at from pgflow.runs)"),
    }


def test_run_completed_without_output(engine: Engine) -> None:
    engine.flow()
    run = engine.start()
    assert sent(engine, "run:completed") == {
        "event_type": "run:completed",
        "run_id": str(run),
        "flow_slug": "f",
        "status": "completed",
        "output": None,
        "completed_at": moment(engine, "(select completed_at from pgflow.runs)"),
    }


def test_a_failure_of_a_task(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.events()
    engine.fail(run, "a", error="broken")
    at = moment(engine, "(select failed_at from pgflow.runs)")
    assert engine.payloads() == [
        (
            "step:a:failed",
            {
                "event_type": "step:failed",
                "run_id": str(run),
                "step_slug": "a",
                "status": "failed",
                "error_message": "broken",
                "failed_at": at,
            },
        ),
        (
            "run:failed",
            {
                "event_type": "run:failed",
                "run_id": str(run),
                "flow_slug": "f",
                "status": "failed",
                "error_message": "broken",
                "failed_at": at,
            },
        ),
    ]


def test_a_failure_by_a_condition(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern=NEVER, when_unmet="fail")
    run = engine.start()
    at = moment(engine, "(select failed_at from pgflow.runs)")
    assert engine.payloads()[1:] == [
        (
            "step:a:failed",
            {
                "event_type": "step:failed",
                "run_id": str(run),
                "step_slug": "a",
                "status": "failed",
                "error_message": "Condition not met",
                "failed_at": at,
            },
        ),
        (
            "run:failed",
            {
                "event_type": "run:failed",
                "run_id": str(run),
                "flow_slug": "f",
                "status": "failed",
                "error_message": "Condition not met",
                "failed_at": at,
            },
        ),
    ]


def test_a_failure_by_a_type_violation(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    run = engine.start()
    engine.claim()
    engine.events()
    engine.complete(run, "a", 0, {})
    at = moment(engine, "(select failed_at from pgflow.runs)")
    assert engine.payloads() == [
        (
            "run:failed",
            {
                "event_type": "run:failed",
                "run_id": str(run),
                "flow_slug": "f",
                "status": "failed",
                "failed_at": at,
            },
        ),
        (
            "step:a:failed",
            {
                "event_type": "step:failed",
                "run_id": str(run),
                "step_slug": "a",
                "status": "failed",
                "error_message": "[TYPE_VIOLATION] Map step m expects array input but dependency a produced object",
                "failed_at": at,
            },
        ),
    ]


# Steps


@pytest.mark.parametrize(("kind", "items"), [("single", 1), ("map", 3)])
def test_step_started(engine: Engine, kind: str, items: int) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", step_type=kind)
    run = engine.start()
    engine.claim()
    engine.events()
    engine.complete(run, "a", 0, [1, 2, 3])
    assert sent(engine, "step:b:started") == {
        "event_type": "step:started",
        "run_id": str(run),
        "step_slug": "b",
        "status": "started",
        "started_at": moment(engine, "(select started_at from pgflow.step_states where step_slug = 'b')"),
        "remaining_tasks": items,
        "remaining_deps": 0,
    }


@pytest.mark.parametrize("output", [NOTHING, None, False, {"k": [1]}], ids=["NULL", "null", "false", "object"])
def test_step_completed(engine: Engine, output: Any) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", 0, output)
    assert sent(engine, "step:a:completed") == {
        "event_type": "step:completed",
        "run_id": str(run),
        "step_slug": "a",
        "status": "completed",
        "output": None if output is NOTHING else output,
        "completed_at": moment(engine, "(select completed_at from pgflow.step_states)"),
    }


def test_a_map_is_completed_once_with_all_outputs(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2])
    engine.claim()
    engine.events()
    engine.complete(run, "m", 1, "second")
    assert engine.events() == []
    engine.complete(run, "m", 0, NOTHING)
    assert sent(engine, "step:m:completed")["output"] == [None, "second"]


@pytest.mark.parametrize(("kind", "output"), [("map", []), ("single", None)])
def test_step_completed_without_tasks(engine: Engine, kind: str, output: Any) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", step_type=kind)
    run = engine.start()
    engine.execute("update pgflow.step_states set remaining_deps = 0, initial_tasks = 0 where step_slug = 'b'")
    engine.execute("select pgflow.cascade_complete_taskless_steps(%s)", run)
    at = moment(engine, "(select completed_at from pgflow.step_states where step_slug = 'b')")
    assert sent(engine, "step:b:completed") == {
        "event_type": "step:completed",
        "run_id": str(run),
        "step_slug": "b",
        "status": "completed",
        "started_at": at,
        "completed_at": at,
        "remaining_tasks": 0,
        "remaining_deps": 0,
        "output": output,
    }


def by_condition(engine: Engine) -> uuid.UUID:
    engine.step("a", required_input_pattern=NEVER)
    return engine.start()


def by_cascade_of_a_condition(engine: Engine) -> uuid.UUID:
    engine.step("a", required_input_pattern=NEVER, when_unmet="skip-cascade")
    return engine.start()


def by_cascade_of_a_parent(engine: Engine) -> uuid.UUID:
    engine.step("p", when_exhausted="skip-cascade")
    engine.step("a", "p")
    run = engine.start()
    engine.claim()
    engine.fail(run, "p")
    return run


@pytest.mark.parametrize(
    ("skip", "reason"),
    [
        (by_condition, "condition_unmet"),
        (by_cascade_of_a_condition, "condition_unmet"),
        (by_cascade_of_a_parent, "dependency_skipped"),
    ],
)
def test_step_skipped(engine: Engine, skip: Callable[[Engine], uuid.UUID], reason: str) -> None:
    engine.flow(max_attempts=1)
    run = skip(engine)
    assert sent(engine, "step:a:skipped") == {
        "event_type": "step:skipped",
        "run_id": str(run),
        "flow_slug": "f",
        "step_slug": "a",
        "status": "skipped",
        "skip_reason": reason,
        "skipped_at": moment(engine, "(select skipped_at from pgflow.step_states where step_slug = 'a')"),
    }


@pytest.mark.parametrize("mode", ["skip", "skip-cascade"])
def test_step_skipped_by_its_handler(engine: Engine, mode: str) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted=mode)
    run = engine.start()
    engine.claim()
    engine.fail(run, "a", error="broken")
    assert sent(engine, "step:a:skipped") == {
        "event_type": "step:skipped",
        "run_id": str(run),
        "step_slug": "a",
        "status": "skipped",
        "skip_reason": "handler_failed",
        "error_message": "broken",
        "skipped_at": moment(engine, "(select skipped_at from pgflow.step_states)"),
    }


def test_event_type_never_names_the_step(engine: Engine) -> None:
    engine.flow()
    engine.step("a_b", required_input_pattern=NEVER)
    engine.step("m", "a_b", step_type="map")
    engine.step("Last", "m")
    run = engine.start()
    engine.claim()
    engine.complete(run, "Last", 0, 1)
    assert [(event, payload["event_type"], payload["status"]) for event, payload in engine.payloads()] == [
        ("run:started", "run:started", "started"),
        ("step:a_b:skipped", "step:skipped", "skipped"),
        ("step:m:completed", "step:completed", "completed"),
        ("step:Last:started", "step:started", "started"),
        ("step:Last:completed", "step:completed", "completed"),
        ("run:completed", "run:completed", "completed"),
    ]


def test_are_sent_to_the_topic_of_the_run_and_not_privately(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    first, second = engine.start(), engine.start()
    found = engine.rows("select topic, private, event from realtime.messages order by id")
    assert found == [
        {"topic": f"pgflow:run:{run}", "private": False, "event": event}
        for run in (first, second)
        for event in ("run:started", "step:a:started")
    ]


# When none is sent


def test_definitions_send_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.worker()
    assert engine.events() == []


def test_a_claim_sends_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    engine.events()
    assert len(engine.claim()) == 1
    assert engine.events() == []


def test_a_retry_sends_nothing(engine: Engine) -> None:
    engine.flow(max_attempts=2)
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.events()
    engine.fail(run, "a")
    assert engine.task(run, "a")["status"] == "queued"
    assert engine.events() == []
    assert len(engine.claim()) == 1
    assert engine.events() == []
    engine.complete(run, "a", 0, 1)
    assert engine.events() == ["step:a:completed", "run:completed"]


def test_a_requeue_sends_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    engine.claim()
    engine.events()
    engine.age(1_000)
    assert engine.value("select pgflow.requeue_stalled_tasks()") == 1
    assert engine.events() == []


@pytest.mark.parametrize("mode", ["fail", "skip", "skip-cascade"])
def test_late_callbacks_send_nothing(engine: Engine, mode: str) -> None:
    engine.flow(max_attempts=1)
    engine.step("m", step_type="map", when_exhausted=mode)
    engine.step("beside")
    run = engine.start([1, 2, 3])
    engine.claim()
    engine.fail(run, "m", 0)
    engine.events()
    for index in range(3):
        engine.complete(run, "m", index, 1)
        engine.fail(run, "m", index)
    assert engine.events() == []


def test_callbacks_after_the_end_of_the_run_send_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", 0, 1)
    engine.events()
    engine.complete(run, "a", 0, 1)
    engine.fail(run, "a")
    engine.execute("select pgflow.maybe_complete_run(%s)", run)
    engine.execute("select pgflow.start_ready_steps(%s)", run)
    assert engine.events() == []


def test_a_rolled_back_call_sends_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    with engine.transaction() as own:
        own.start()
        assert own.events() == ["run:started", "step:a:started"]
        own.connection.rollback()
    assert engine.events() == []


def test_an_error_of_the_receiver_undoes_the_call(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.execute("alter table realtime.messages add constraint refuses check (event <> 'run:completed')")
    before = engine.everything()
    with pytest.raises(psycopg.errors.CheckViolation) as raised:
        engine.complete(run, "a", 0, 1)
    assert raised.value.diag.constraint_name == "refuses"
    assert engine.everything() == before


# Through what they are sent

DEFINITION = "select pg_get_functiondef('realtime.send(jsonb,text,text,boolean)'::regprocedure)"


def run_one(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.claim()
    engine.complete(run, "a", 0, 1)
    assert engine.run(run)["status"] == "completed"


@pytest.mark.parametrize(
    "present",
    [
        "select 1",
        "create schema realtime",
        "create schema realtime; "
        "create function realtime.send(payload jsonb, event text) returns void language sql as 'select null::void'",
    ],
    ids=["nothing", "the schema", "another send"],
)
def test_without_realtime_a_stand_in_does_nothing(empty_database: str, present: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        engine = Engine(empty_database, connection)
        engine.execute(present)
        schema.install(connection)
        described = engine.row(
            "select proargnames, prorettype::regtype::text as result, pg_get_function_arguments(oid) as arguments "
            "from pg_proc where oid = 'realtime.send(jsonb,text,text,boolean)'::regprocedure"
        )
        assert described == {
            "proargnames": ["payload", "event", "topic", "private"],
            "result": "void",
            "arguments": "payload jsonb, event text, topic text, private boolean DEFAULT false",
        }
        run_one(engine)
        engine.execute("select realtime.send('{}', 'event', 'topic')")
        assert engine.value("select count(*) from pg_class where relnamespace = 'realtime'::regnamespace") == 0


def test_a_send_that_is_there_is_kept_and_used(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        engine = Engine(empty_database, connection)
        engine.execute(SETUP)
        before = engine.value(DEFINITION)
        schema.install(connection)
        assert engine.value(DEFINITION) == before
        schema.install(connection)
        assert engine.value(DEFINITION) == before
        run_one(engine)
        assert engine.events() == ["run:started", "step:a:started", "step:a:completed", "run:completed"]


def test_a_send_that_replaces_the_stand_in_later_is_used(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        engine = Engine(empty_database, connection)
        schema.install(connection)
        engine.execute("drop schema realtime cascade")
        engine.execute(SETUP)
        run_one(engine)
        assert engine.events() == ["run:started", "step:a:started", "step:a:completed", "run:completed"]
