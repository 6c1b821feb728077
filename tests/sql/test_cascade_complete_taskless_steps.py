"""pgflow.cascade_complete_taskless_steps (sql-contract 2.10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine


def cascade(engine: Engine, run: uuid.UUID) -> int:
    count = engine.value("select pgflow.cascade_complete_taskless_steps(%s)", run)
    assert isinstance(count, int)
    return count


def empty(engine: Engine, *steps: str) -> None:
    """Let steps be ready and without tasks behind the functions' back, so that only the cascade is left to run."""
    query = "update pgflow.step_states set remaining_deps = 0, initial_tasks = 0 where step_slug = any(%s)"
    engine.execute(query, list(steps))


def chain_of_maps(engine: Engine, length: int) -> None:
    """Maps `m0`, `m1` and so on, each after the one before, behind the single step `a`."""
    engine.flow()
    engine.step("a")
    for n in range(length):
        engine.step(f"m{n}", f"m{n - 1}" if n else "a", step_type="map")


def test_is_zero_when_there_is_nothing_to_complete(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("ready", "a")
    engine.step("unknown", "a", step_type="map")
    engine.step("waiting", "a", step_type="map")
    engine.step("skipped", "a")
    run = engine.start()
    engine.execute("update pgflow.step_states set remaining_deps = 0 where step_slug in ('ready', 'unknown')")
    engine.execute("update pgflow.step_states set initial_tasks = 0 where step_slug in ('waiting', 'skipped')")
    engine.execute(
        "update pgflow.step_states set status = 'skipped', skipped_at = now(), skip_reason = 'dependency_skipped', "
        "remaining_deps = 0 where step_slug = 'skipped'"
    )
    before = engine.everything()
    assert cascade(engine, run) == 0
    assert engine.everything() == before


def test_is_zero_for_an_unknown_run(engine: Engine) -> None:
    assert cascade(engine, engine.value("select gen_random_uuid()")) == 0


def test_is_zero_for_a_failed_run_whose_dependents_still_wait(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.step("n", "m", step_type="map")
    run = engine.start()
    engine.claim()
    engine.fail(run, "a")
    before = engine.everything()
    assert cascade(engine, run) == 0
    assert engine.everything() == before


@pytest.mark.parametrize(("kind", "output"), [("map", []), ("single", None)])
def test_completes_a_ready_step_without_tasks(engine: Engine, kind: str, output: object) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a", step_type=kind)
    run = engine.start()
    empty(engine, "b")
    before = engine.state(run, "b")
    engine.events()
    with engine.transaction() as own:
        assert cascade(own, run) == 1
        at = own.value("select now()")
    assert engine.state(run, "b") == {
        **before,
        "status": "completed",
        "started_at": at,
        "completed_at": at,
        "remaining_tasks": 0,
        "output": output,
    }
    assert engine.value("select output is null from pgflow.step_states where step_slug = 'b'") is (kind == "single")
    assert engine.run(run)["remaining_steps"] == 1
    assert engine.events() == ["step:b:completed"]


def test_counts_down_the_parents_of_one_round(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("m", "a", step_type="map")
    engine.step("n", "a", step_type="map")
    engine.step("both", "m", "n")
    engine.step("one", "m", "a")
    engine.step("other", "a")
    run = engine.start()
    empty(engine, "m", "n")
    assert cascade(engine, run) == 2
    assert {step: engine.state(run, step)["remaining_deps"] for step in ("both", "one", "other")} == {
        "both": 0,
        "one": 1,
        "other": 1,
    }
    assert {step: engine.state(run, step)["initial_tasks"] for step in ("both", "one", "other")} == {
        "both": 1,
        "one": 1,
        "other": 1,
    }
    assert engine.run(run)["remaining_steps"] == 4


def test_the_child_map_of_an_empty_map_is_empty_too(engine: Engine) -> None:
    chain_of_maps(engine, 3)
    run = engine.start()
    empty(engine, "m0")
    engine.events()
    assert cascade(engine, run) == 3
    assert engine.statuses(run) == {"a": "started", "m0": "completed", "m1": "completed", "m2": "completed"}
    assert [engine.state(run, f"m{n}")["output"] for n in range(3)] == [[], [], []]
    assert [engine.state(run, f"m{n}")["initial_tasks"] for n in range(3)] == [0, 0, 0]
    assert [engine.state(run, f"m{n}")["remaining_deps"] for n in range(3)] == [0, 0, 0]
    assert engine.run(run)["remaining_steps"] == 1
    assert engine.events() == [f"step:m{n}:completed" for n in range(3)]


def test_a_second_call_finds_nothing(engine: Engine) -> None:
    chain_of_maps(engine, 2)
    run = engine.start()
    empty(engine, "m0")
    assert cascade(engine, run) == 2
    before = engine.everything()
    assert cascade(engine, run) == 0
    assert engine.everything() == before


def test_starts_and_ends_nothing(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern={"never": 1}, when_unmet="skip-cascade")
    engine.step("b")
    engine.step("m", "b", step_type="map")
    engine.step("z", "m")
    run = engine.start()
    empty(engine, "m")
    engine.events()
    assert cascade(engine, run) == 1
    assert engine.statuses(run) == {"a": "skipped", "b": "started", "m": "completed", "z": "created"}
    assert engine.state(run, "z")["remaining_deps"] == 0
    assert len(engine.live()) == 1
    assert engine.run(run)["status"] == "started"
    assert engine.events() == ["step:m:completed"]


def test_does_not_end_the_run(engine: Engine) -> None:
    chain_of_maps(engine, 1)
    run = engine.start()
    empty(engine, "m0")
    engine.execute("update pgflow.runs set remaining_steps = 1")
    assert cascade(engine, run) == 1
    assert (engine.run(run)["status"], engine.run(run)["remaining_steps"]) == ("started", 0)


def test_leaves_other_runs_alone(engine: Engine) -> None:
    chain_of_maps(engine, 2)
    run, other = engine.start(), engine.start()
    empty(engine, "m0")
    assert cascade(engine, run) == 2
    assert engine.statuses(other) == {"a": "started", "m0": "created", "m1": "created"}
    assert engine.run(other)["remaining_steps"] == 3


def test_follows_a_chain_of_49_empty_maps(engine: Engine) -> None:
    chain_of_maps(engine, 49)
    run = engine.start()
    empty(engine, "m0")
    assert cascade(engine, run) == 49
    assert engine.run(run)["remaining_steps"] == 1


def test_gives_up_on_a_chain_of_50_empty_maps(engine: Engine) -> None:
    chain_of_maps(engine, 50)
    run = engine.start()
    empty(engine, "m0")
    before = engine.everything()
    with pytest.raises(psycopg.errors.RaiseException) as raised:
        cascade(engine, run)
    assert raised.value.sqlstate == "P0001"
    assert raised.value.diag.message_primary == "Cascade loop exceeded safety limit of 50 iterations"
    assert engine.everything() == before
