"""pgflow.cascade_resolve_conditions (sql-contract 2.10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.engine import NOTHING, Engine

if TYPE_CHECKING:
    import uuid

NEVER = {"never": 1}


def resolve(engine: Engine, run: uuid.UUID) -> bool:
    result = engine.value("select pgflow.cascade_resolve_conditions(%s)", run)
    assert isinstance(result, bool)
    return result


def make_ready(engine: Engine, *steps: str) -> None:
    """Let steps be ready behind the functions' back, so that only their conditions are left to judge."""
    engine.execute("update pgflow.step_states set remaining_deps = 0 where step_slug = any(%s)", list(steps))


def completed_by_hand(engine: Engine, step: str) -> None:
    engine.execute(
        "update pgflow.step_states set status = 'completed', remaining_tasks = 0, completed_at = now(), output = '1' "
        "where step_slug = %s",
        step,
    )


# What it returns


def test_is_true_for_an_unknown_run(engine: Engine) -> None:
    assert resolve(engine, engine.value("select gen_random_uuid()")) is True


@pytest.mark.parametrize(("status", "answer"), [("failed", False), ("completed", True)])
def test_leaves_a_run_that_has_ended_alone(engine: Engine, status: str, answer: bool) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", required_input_pattern=NEVER)
    engine.step("c", "a", required_input_pattern=NEVER, when_unmet="skip-cascade")
    engine.step("d", "a", required_input_pattern=NEVER, when_unmet="fail")
    run = engine.start()
    make_ready(engine, "b", "c", "d")
    engine.execute(f"update pgflow.runs set status = %s, {status}_at = now()", status)
    before = engine.everything()
    assert resolve(engine, run) is answer
    assert engine.everything() == before


def test_judges_only_ready_steps_with_a_pattern(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("without", "a")
    engine.step("waiting", "a", required_input_pattern=NEVER, when_unmet="fail")
    engine.step("started", "a", required_input_pattern=NEVER, when_unmet="fail")
    engine.step("completed", "a", required_input_pattern=NEVER, when_unmet="fail")
    run = engine.start()
    make_ready(engine, "without", "started", "completed")
    completed_by_hand(engine, "completed")
    engine.execute(
        "update pgflow.step_states set status = 'started', started_at = now(), remaining_tasks = 1 "
        "where step_slug = 'started'"
    )
    before = engine.everything()
    assert resolve(engine, run) is True
    assert engine.everything() == before


# What meets a condition


@pytest.mark.parametrize(
    ("required", "forbidden", "given", "met"),
    [
        ({"a": 1}, None, {"a": 1, "b": 2}, True),
        ({"a": 1}, None, {"a": 2}, False),
        ({"a": 1}, None, {}, False),
        ({"a": {"b": 1}}, None, {"a": {"b": 1, "c": 2}}, True),
        ({"a": [2]}, None, {"a": [1, 2, 3]}, True),
        ({"a": None}, None, {"a": None}, True),
        ({"a": None}, None, {}, False),
        ({}, None, {}, True),
        ({}, None, 5, False),
        ({"a": 1}, None, [{"a": 1}], False),
        ({"a": 1}, None, None, False),
        (None, {"a": 1}, {"a": 1, "b": 2}, False),
        (None, {"a": 1}, {"a": 2}, True),
        (None, {"a": {}}, {}, True),
        (None, {"a": {}}, {"a": {"b": 1}}, False),
        (None, {"a": 1}, [{"a": 1}], True),
        (None, {}, {}, False),
        ({"a": 1}, {"b": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, {"a": 1, "b": 1}, False),
        ({"a": 1}, {"b": 1}, {}, False),
        ({"a": 1}, {"b": 1}, {"b": 1}, False),
    ],
)
def test_is_met_by_containing_the_required_and_not_the_forbidden(
    engine: Engine, required: Any, forbidden: Any, given: Any, met: bool
) -> None:
    patterns = {"required_input_pattern": required, "forbidden_input_pattern": forbidden}
    engine.flow()
    engine.step("a", **{name: value for name, value in patterns.items() if value is not None})
    run = engine.start(given)
    assert engine.statuses(run) == {"a": "started" if met else "skipped"}


@pytest.mark.parametrize(("pattern", "status"), [("required", "skipped"), ("forbidden", "started")])
def test_roots_beside_a_root_map_are_judged_by_the_array(engine: Engine, pattern: str, status: str) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    options: dict[str, Any] = {f"{pattern}_input_pattern": {"x": 1}}
    engine.step("a", **options)
    run = engine.start([{"x": 1}])
    assert engine.statuses(run) == {"a": status, "m": "started"}


@pytest.mark.parametrize(("pattern", "status"), [("required", "skipped"), ("forbidden", "started")])
def test_a_root_map_is_judged_by_the_array(engine: Engine, pattern: str, status: str) -> None:
    engine.flow()
    options: dict[str, Any] = {f"{pattern}_input_pattern": {"x": 1}}
    engine.step("m", step_type="map", **options)
    assert engine.statuses(engine.start([{"x": 1}])) == {"m": status}


@pytest.mark.parametrize(
    ("output", "pattern", "status"),
    [
        ({"ok": True, "n": 1}, {"a": {"ok": True}}, "started"),
        ({"ok": False}, {"a": {"ok": True}}, "skipped"),
        (NOTHING, {"a": None}, "started"),
        (None, {"a": None}, "started"),
        (1, {"x": 1}, "skipped"),
        (1, {"a": 1, "b": {}}, "skipped"),
    ],
)
def test_other_steps_are_judged_by_their_dependencies(engine: Engine, output: Any, pattern: Any, status: str) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b")
    engine.step("c", "a", required_input_pattern=pattern)
    run = engine.start({"x": 1})
    engine.claim()
    engine.complete(run, "b", 0, {})
    engine.complete(run, "a", 0, output)
    assert engine.state(run, "c")["status"] == status


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"required_input_pattern": {"b": {}}}, "started"),
        ({"required_input_pattern": {"a": {}}}, "skipped"),
        ({"required_input_pattern": {"a": None}}, "skipped"),
        ({"forbidden_input_pattern": {"a": {}}}, "started"),
        ({"forbidden_input_pattern": {"b": {}}}, "skipped"),
    ],
)
def test_a_skipped_dependency_is_absent(engine: Engine, options: dict[str, Any], status: str) -> None:
    engine.flow()
    engine.step("a", required_input_pattern=NEVER)
    engine.step("b")
    engine.step("c", "a", "b", **options)
    run = engine.start()
    engine.claim()
    engine.complete(run, "b", 0, {})
    assert engine.state(run, "c")["status"] == status


@pytest.mark.parametrize(("pattern", "status"), [({}, "started"), ({"x": 1}, "skipped")])
def test_with_all_dependencies_skipped_an_empty_object_is_judged(engine: Engine, pattern: Any, status: str) -> None:
    engine.flow()
    engine.step("a", required_input_pattern=NEVER)
    engine.step("b", "a", required_input_pattern=pattern)
    assert engine.statuses(engine.start({"x": 1})) == {"a": "skipped", "b": status}


# Fail


def test_an_unmet_fail_fails_the_run(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", required_input_pattern=NEVER, when_unmet="fail")
    run = engine.start()
    make_ready(engine, "b")
    before = engine.run(run)
    engine.events()
    with engine.transaction() as own:
        assert resolve(own, run) is False
        at = own.value("select now()")
    state = engine.state(run, "b")
    assert (state["status"], state["error_message"]) == ("failed", "Condition not met")
    assert (state["failed_at"], state["completed_at"], state["skipped_at"]) == (at, None, None)
    assert engine.run(run) == {**before, "status": "failed", "failed_at": at}
    assert engine.events() == ["step:b:failed", "run:failed"]


def test_of_several_unmet_fails_the_one_defined_first_fails(engine: Engine) -> None:
    engine.flow()
    engine.step("z", required_input_pattern=NEVER, when_unmet="fail")
    engine.step("a", required_input_pattern=NEVER, when_unmet="fail")
    engine.step("m", required_input_pattern=NEVER, when_unmet="fail")
    run = engine.start()
    assert engine.statuses(run) == {"a": "created", "m": "created", "z": "failed"}
    assert engine.events() == ["run:started", "step:z:failed", "run:failed"]


def test_a_fail_comes_before_any_skip(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern=NEVER)
    engine.step("b", required_input_pattern=NEVER, when_unmet="skip-cascade")
    engine.step("c", required_input_pattern=NEVER, when_unmet="fail")
    run = engine.start()
    assert engine.statuses(run) == {"a": "created", "b": "created", "c": "failed"}
    assert engine.run(run)["remaining_steps"] == 3
    assert engine.events() == ["run:started", "step:c:failed", "run:failed"]


def test_a_fail_in_a_later_round_keeps_the_skips_before_it(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern=NEVER)
    engine.step("b", "a", required_input_pattern=NEVER, when_unmet="fail")
    run = engine.start()
    assert engine.statuses(run) == {"a": "skipped", "b": "failed"}
    assert engine.run(run)["remaining_steps"] == 1
    assert engine.events() == ["run:started", "step:a:skipped", "step:b:failed", "run:failed"]


def test_a_fail_cancels_what_is_open_in_every_queue(engine: Engine) -> None:
    engine.flow()
    for step in ("a", "b", "c"):
        engine.step(step)
    engine.step("d", "a", required_input_pattern=NEVER, when_unmet="fail")
    engine.execute("select pgmq.create('other')")
    engine.execute("update pgflow.steps set queue_name = 'other' where step_slug = 'c'")
    run, another = engine.start(), engine.start()
    (task,) = engine.claim(quantity=1)
    if task["run_id"] != run:
        run, another = another, run
    before = {step: engine.task(run, step) for step in ("a", "b", "c")}
    assert {row["status"] for row in before.values()} == {"started", "queued"}
    engine.execute("update pgflow.step_states set remaining_deps = 0 where step_slug = 'd' and run_id = %s", run)
    assert resolve(engine, run) is False
    for step, row in before.items():
        assert engine.task(run, step) == {**row, "status": "cancelled"}
    assert engine.statuses(run) == {"a": "started", "b": "started", "c": "started", "d": "failed"}
    kept = {engine.task(another, step)["message_id"] for step in ("a", "b")}
    assert {message["msg_id"] for message in engine.live()} == kept
    assert [message["msg_id"] for message in engine.live("other")] == [engine.task(another, "c")["message_id"]]
    assert (len(engine.archived()), len(engine.archived("other"))) == (2, 1)


def test_a_run_that_fails_meanwhile_is_not_failed_again(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", required_input_pattern=NEVER, when_unmet="fail")
    run = engine.start()
    make_ready(engine, "b")
    engine.events()
    with engine.transaction() as other:
        other.execute("update pgflow.runs set status = 'failed', failed_at = now()")
        thread, results = engine.in_another_session(lambda own: resolve(own, run))
        engine.wait_blocked()
        failed = other.run(run)
    thread.join()
    assert results == [False]
    assert engine.run(run) == failed
    assert engine.statuses(run) == {"a": "started", "b": "created"}
    assert engine.task(run, "a")["status"] == "queued"
    assert engine.events() == []


# Skip


def test_an_unmet_skip_skips_the_step(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", required_input_pattern=NEVER)
    run = engine.start()
    make_ready(engine, "b")
    before, of_run = engine.state(run, "b"), engine.run(run)
    engine.events()
    with engine.transaction() as own:
        assert resolve(own, run) is True
        at = own.value("select now()")
    assert engine.state(run, "b") == {
        **before,
        "status": "skipped",
        "skip_reason": "condition_unmet",
        "skipped_at": at,
        "remaining_tasks": None,
    }
    assert engine.run(run) == {**of_run, "remaining_steps": 1}
    assert engine.events() == ["step:b:skipped"]


def test_a_skip_satisfies_its_children(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", required_input_pattern=NEVER)
    engine.step("c", "a", required_input_pattern=NEVER)
    engine.step("both", "b", "c")
    engine.step("one", "b", "a")
    engine.step("items", "b", step_type="map")
    run = engine.start()
    make_ready(engine, "b", "c")
    assert resolve(engine, run) is True
    children = {step: engine.state(run, step) for step in ("both", "one", "items")}
    assert {step: state["remaining_deps"] for step, state in children.items()} == {"both": 0, "one": 1, "items": 0}
    assert {step: state["initial_tasks"] for step, state in children.items()} == {"both": 1, "one": 1, "items": 0}
    assert engine.run(run)["remaining_steps"] == 4


def test_judges_again_what_a_skip_made_ready(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern=NEVER)
    engine.step("b", "a", required_input_pattern={"a": {}})
    engine.step("c", "b", required_input_pattern={"b": {}}, when_unmet="skip-cascade")
    engine.step("d", "c")
    run = engine.start()
    assert engine.statuses(run) == dict.fromkeys("abcd", "skipped")
    assert [engine.state(run, step)["skip_reason"] for step in "abcd"] == ["condition_unmet"] * 3 + [
        "dependency_skipped"
    ]
    assert engine.run(run)["remaining_steps"] == 0
    assert engine.events() == [
        "run:started",
        *(f"step:{step}:skipped" for step in "abcd"),
        "run:completed",
    ]


def chain_of_conditions(engine: Engine, length: int) -> None:
    engine.flow()
    for n in range(length):
        engine.step(f"s{n}", *([f"s{n - 1}"] if n else []), required_input_pattern=NEVER)


def test_follows_a_chain_of_49_skips(engine: Engine) -> None:
    chain_of_conditions(engine, 49)
    run = engine.start()
    assert set(engine.statuses(run).values()) == {"skipped"}
    assert engine.run(run)["status"] == "completed"


def test_gives_up_after_50_rounds(engine: Engine) -> None:
    chain_of_conditions(engine, 51)
    before = engine.everything()
    with pytest.raises(psycopg.errors.RaiseException) as raised:
        engine.start()
    assert raised.value.sqlstate == "P0001"
    assert raised.value.diag.message_primary == "cascade_resolve_conditions exceeded safety limit of 50 iterations"
    assert engine.everything() == before


# Skip-cascade


def test_an_unmet_skip_cascade_skips_all_that_depends_on_it(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", required_input_pattern=NEVER, when_unmet="skip-cascade")
    engine.step("c", "b", "a")
    engine.step("m", "b", step_type="map")
    engine.step("d", "c")
    run = engine.start()
    make_ready(engine, "b")
    engine.events()
    assert resolve(engine, run) is True
    assert engine.statuses(run) == {"a": "started", "b": "skipped", "c": "skipped", "d": "skipped", "m": "skipped"}
    reasons = {step: engine.state(run, step)["skip_reason"] for step in "bcdm"}
    assert reasons == {"b": "condition_unmet", **dict.fromkeys("cdm", "dependency_skipped")}
    assert engine.run(run)["remaining_steps"] == 1
    events = engine.events()
    assert sorted(events) == [f"step:{step}:skipped" for step in "bcdm"]
    assert events[0] == "step:b:skipped"
    assert events.index("step:c:skipped") < events.index("step:d:skipped")


def test_two_cascades_skip_a_common_child_once(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern=NEVER, when_unmet="skip-cascade")
    engine.step("b", required_input_pattern=NEVER, when_unmet="skip-cascade")
    engine.step("c", "a", "b")
    engine.step("d")
    run = engine.start()
    assert engine.statuses(run) == {"a": "skipped", "b": "skipped", "c": "skipped", "d": "started"}
    assert engine.run(run)["remaining_steps"] == 1
    assert engine.events().count("step:c:skipped") == 1


def test_a_cascade_skips_the_child_of_a_skip_too(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern=NEVER)
    engine.step("b", required_input_pattern=NEVER, when_unmet="skip-cascade")
    engine.step("c", "a", "b")
    run = engine.start()
    assert engine.statuses(run) == dict.fromkeys("abc", "skipped")
    assert engine.state(run, "c")["skip_reason"] == "dependency_skipped"
    assert engine.run(run)["remaining_steps"] == 0


# What it leaves to its callers


def test_starts_completes_and_ends_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", required_input_pattern=NEVER)
    engine.step("c", "b")
    engine.step("m", "b", step_type="map")
    run = engine.start()
    make_ready(engine, "b")
    engine.events()
    assert resolve(engine, run) is True
    assert engine.statuses(run) == {"a": "started", "b": "skipped", "c": "created", "m": "created"}
    assert (engine.state(run, "c")["remaining_deps"], engine.state(run, "m")["initial_tasks"]) == (0, 0)
    assert engine.events() == ["step:b:skipped"]
    assert len(engine.live()) == 1


def test_does_not_end_the_run(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", required_input_pattern=NEVER)
    run = engine.start()
    completed_by_hand(engine, "a")
    make_ready(engine, "b")
    engine.execute("update pgflow.runs set remaining_steps = 1")
    assert resolve(engine, run) is True
    assert (engine.run(run)["status"], engine.run(run)["remaining_steps"]) == ("started", 0)


def test_flows_with_steps_of_the_same_names_are_told_apart(engine: Engine) -> None:
    for flow, pattern in ("f", {"x": 1}), ("g", {"y": 1}):
        engine.flow(flow)
        engine.step("a", flow=flow, required_input_pattern=pattern)
        engine.step("b", *(["a"] if flow == "f" else []), flow=flow)
        engine.step("c", "b", flow=flow)
    run = engine.start({"x": 1}, flow="g")
    assert engine.statuses(run) == {"a": "skipped", "b": "started", "c": "created"}
    assert engine.state(run, "c")["remaining_deps"] == 1


# Again after steps without tasks (sql-contract 7.1.3, mended)


@pytest.mark.parametrize("mode", ["skip", "skip-cascade"])
def test_a_step_after_an_empty_map_is_judged_at_the_start(engine: Engine, mode: str) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("unmet", "m", required_input_pattern={"m": [1]}, when_unmet=mode)
    engine.step("met", "m", required_input_pattern={"m": []})
    run = engine.start([])
    assert engine.statuses(run) == {"m": "completed", "met": "started", "unmet": "skipped"}
    assert engine.run(run)["remaining_steps"] == 1


def test_a_map_after_an_empty_map_is_judged_before_it_completes(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    engine.step("n", "m", step_type="map", required_input_pattern={"m": [1]})
    run = engine.start([])
    assert engine.statuses(run) == {"m": "completed", "n": "skipped"}


def test_a_step_after_an_empty_map_is_judged_after_a_completion(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.step("unmet", "m", required_input_pattern={"m": [1]}, when_unmet="fail")
    engine.step("z", "m")
    run = engine.start()
    engine.claim()
    engine.events()
    (task,) = engine.complete(run, "a", 0, [])
    assert task["status"] == "completed"
    assert engine.statuses(run) == {"a": "completed", "m": "completed", "unmet": "failed", "z": "created"}
    assert engine.run(run)["status"] == "failed"
    assert engine.events() == ["step:a:completed", "step:m:completed", "step:unmet:failed", "run:failed"]
    assert engine.live() == []


def test_a_step_after_an_empty_map_is_judged_after_a_failure(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted="skip")
    engine.step("m", "a", step_type="map")
    engine.step("unmet", "m", required_input_pattern={"m": [1]})
    engine.step("z", "unmet", "m")
    run = engine.start()
    engine.claim()
    engine.fail(run, "a")
    assert engine.statuses(run) == {"a": "skipped", "m": "completed", "unmet": "skipped", "z": "started"}
