"""pgflow._listed_queue_name (sql-contract 2.4), and who may look at pgmq's list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine


@pytest.mark.parametrize(
    ("asked", "found"), [("nowhere", "nowhere"), ("NoWhere", "NoWhere"), ("MIXED", "Mixed"), ("Mixed", "Mixed")]
)
def test_gives_the_listed_spelling_or_else_what_was_asked(engine: Engine, asked: str, found: str) -> None:
    engine.execute("select pgmq.create('Mixed')")
    engine.execute("select pgmq.create('mixed_2')")
    assert engine.value("select pgflow._listed_queue_name(%s)", asked) == found


@pytest.mark.parametrize("asked", ["twin", "Twin", "TWIN"])
def test_several_spellings_are_ambiguous(engine: Engine, refused: Callable[..., Diagnostic], asked: str) -> None:
    engine.execute("select pgmq.create('twin')")
    engine.execute("select pgmq.create('Twin')")
    said = refused("select pgflow._listed_queue_name(%s)", asked)
    assert said.sqlstate == "42P09"
    # Their order is the database's collation's affair.
    assert said.message_primary in {
        f'queue name "{asked}" is ambiguous: it matches listed queues {listed}'
        for listed in ("{Twin,twin}", "{twin,Twin}")
    }


def test_nothing_lists_queues_at_run_time(engine: Engine) -> None:
    engine.flow(max_attempts=2)
    engine.step("a")
    engine.step("b", "a")
    engine.step("c", "b", max_attempts=1, when_exhausted="skip")
    engine.step("d")
    engine.execute(
        "create or replace function pgmq.list_queues() returns setof pgmq.queue_record language plpgsql "
        "as $$ begin raise exception 'list_queues was called'; end $$"
    )
    run = engine.start()
    engine.claim()
    engine.fail(run, "a")
    assert engine.task(run, "a")["status"] == "queued"
    engine.age(100)
    assert engine.value("select pgflow.requeue_stalled_tasks()") == 1
    assert len(engine.claim()) == 2
    engine.complete(run, "a")
    engine.complete(run, "d")
    for step in ("b", "c"):
        assert [task["step_slug"] for task in engine.claim()] == [step]
        if step == "b":
            engine.complete(run, step)
    engine.fail(run, "c")
    assert engine.statuses(run) == {"a": "completed", "b": "completed", "c": "skipped", "d": "completed"}
    assert engine.run(run)["status"] == "completed"
