"""pgflow.poll_for_tasks (sql-contract 2.12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.engine import Engine


@pytest.mark.parametrize(
    "call",
    [
        "pgflow.poll_for_tasks('f', 5, 10)",
        "pgflow.poll_for_tasks('f', 5, 10, 1)",
        "pgflow.poll_for_tasks(queue_name => 'f', vt => 5, qty => 10, max_poll_seconds => 1, poll_interval_ms => 50)",
        "pgflow.poll_for_tasks('nowhere', 5, 10)",
    ],
)
def test_says_that_it_is_deprecated_and_takes_nothing(engine: Engine, call: str) -> None:
    engine.flow()
    engine.step("a")
    engine.start()
    before = engine.everything()
    notices: list[tuple[str | None, str]] = []
    engine.connection.add_notice_handler(lambda n: notices.append((n.severity_nonlocalized, n.message_primary or "")))
    assert engine.rows(f"select * from {call}") == []
    ((severity, message),) = notices
    assert severity == "NOTICE"
    assert "deprecated" in message.lower()
    assert engine.everything() == before


def test_its_rows_would_have_the_fields_of_a_task_record(engine: Engine) -> None:
    query = "select pg_get_function_result('pgflow.poll_for_tasks(text,int,int,int,int)'::regprocedure)"
    assert engine.value(query) == "SETOF pgflow.step_task_record"
