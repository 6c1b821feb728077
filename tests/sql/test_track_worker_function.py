"""pgflow.track_worker_function (sql-contract 2.12)."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import errors

if TYPE_CHECKING:
    from support.engine import Engine


def stored(engine: Engine, name: str = "fn") -> dict[str, Any]:
    return engine.row("select * from pgflow.worker_functions where function_name = %s", name)


def test_inserts_a_function_with_defaults(engine: Engine) -> None:
    engine.execute("select pgflow.track_worker_function('fn')")
    row = stored(engine)
    assert row.pop("created_at")
    assert row.pop("updated_at")
    assert row == {
        "function_name": "fn",
        "enabled": True,
        "debounce": timedelta(seconds=6),
        "last_invoked_at": None,
        "start_mode": "http",
    }


@pytest.mark.parametrize("mode", ["http", "process"])
def test_stores_the_mode(engine: Engine, mode: str) -> None:
    engine.execute("select pgflow.track_worker_function('fn', %s)", mode)
    assert stored(engine)["start_mode"] == mode


@pytest.mark.parametrize(("first", "second"), [("http", "process"), ("process", "http"), ("http", "http")])
def test_a_second_call_sets_mode_and_time_of_update_only(engine: Engine, first: str, second: str) -> None:
    engine.execute("select pgflow.track_worker_function('fn', %s)", first)
    engine.execute(
        "update pgflow.worker_functions set enabled = false, debounce = '9 seconds', last_invoked_at = now(), "
        "created_at = now() - interval '1 day', updated_at = now() - interval '1 day'"
    )
    before = stored(engine)
    with engine.transaction() as own:
        own.execute("select now()")
        earlier = engine.value("select clock_timestamp()")
        own.execute("select pgflow.track_worker_function('fn', %s)", second)
    after = stored(engine)
    assert after["updated_at"] >= earlier
    assert after == before | {"start_mode": second, "updated_at": after["updated_at"]}


def test_a_second_call_without_mode_means_http(engine: Engine) -> None:
    engine.execute("select pgflow.track_worker_function('fn', 'process')")
    engine.execute("select pgflow.track_worker_function('fn')")
    assert stored(engine)["start_mode"] == "http"


def test_leaves_other_functions_alone(engine: Engine) -> None:
    engine.execute("select pgflow.track_worker_function('other', 'process')")
    before = stored(engine, "other")
    engine.execute("select pgflow.track_worker_function('fn')")
    assert stored(engine, "other") == before


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mode", ["", "HTTP", "cron"])
def test_any_other_mode_is_refused(engine: Engine, mode: str, known: bool) -> None:
    if known:
        engine.execute("select pgflow.track_worker_function('fn')")
    before = engine.everything()
    with pytest.raises(errors.CheckViolation) as raised:
        engine.execute("select pgflow.track_worker_function('fn', %s)", mode)
    assert raised.value.diag.constraint_name == "worker_functions_start_mode_check"
    assert engine.everything() == before


def test_arguments_go_by_their_names(engine: Engine) -> None:
    engine.execute("select pgflow.track_worker_function(function_name => 'fn', start_mode => 'process')")
    assert stored(engine)["start_mode"] == "process"
