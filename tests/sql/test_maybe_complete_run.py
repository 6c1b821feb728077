"""pgflow.maybe_complete_run (sql-contract 2.10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.engine import Engine


def complete_by_hand(engine: Engine, **outputs: str) -> None:
    """Set steps completed behind the functions' back, so that only the run is left to end."""
    for step, output in outputs.items():
        engine.execute(
            "update pgflow.step_states set status = 'completed', remaining_tasks = 0, completed_at = now(), "
            "output = %s where step_slug = %s",
            output,
            step,
        )


def test_leaves_a_run_alone_while_steps_remain(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    before = engine.everything()
    engine.execute("select pgflow.maybe_complete_run(%s)", run)
    assert engine.everything() == before


def test_output_is_the_object_of_completed_leaves(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    engine.step("c", "a")
    run = engine.start()
    complete_by_hand(engine, a="1", b="2", c="null")
    engine.execute("update pgflow.runs set remaining_steps = 0")
    engine.events()
    engine.execute("select pgflow.maybe_complete_run(%s)", run)
    assert engine.run(run)["status"] == "completed"
    assert engine.run(run)["output"] == {"b": 2, "c": None}
    ((event, payload),) = engine.payloads()
    assert event == "run:completed"
    assert payload["output"] == {"b": 2, "c": None}
    assert payload["status"] == "completed"
    assert payload["flow_slug"] == "f"


def test_output_is_null_when_every_leaf_was_skipped(engine: Engine) -> None:
    engine.flow()
    engine.step("a", required_input_pattern={"z": 1})
    run = engine.start()
    assert engine.run(run)["status"] == "completed"
    assert engine.value("select output is null from pgflow.runs")


def test_says_it_once(engine: Engine) -> None:
    engine.flow()
    run = engine.start()
    assert engine.events() == ["run:started", "run:completed"]
    before = engine.everything()
    engine.execute("select pgflow.maybe_complete_run(%s)", run)
    assert engine.everything() == before


def test_an_unknown_run_is_no_error(engine: Engine) -> None:
    engine.execute("select pgflow.maybe_complete_run(gen_random_uuid())")
    assert engine.events() == []
