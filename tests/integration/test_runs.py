"""Runs from start to end: retries, conditions, dependencies, jobs, and the client's errors."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgflow_otp import (
    Client,
    ConfigurationError,
    DatabaseUnavailable,
    FlowNotFound,
    PayloadError,
    PgflowError,
    RunFailed,
    RunNotFound,
    SchemaError,
)

if TYPE_CHECKING:
    from integration.conftest import Spawn


def test_a_dependent_step_sees_outputs_and_the_runs_input(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:patient")
    request = {"do": "echo", "value": 5}
    run = tree.client.start_flow_sync("patient", request)
    assert run.output == {"after": {"saw": {"act": 5}, "input": request}}
    assert [(s.step_slug, s.status) for s in run.steps] == [("act", "completed"), ("after", "completed")]


def test_a_failed_attempt_is_tried_again(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:patient")
    run = tree.client.start_flow_sync("patient", {"do": "flaky", "succeeds_at": 3})
    assert run.status == "completed"
    row = connection.execute("select attempts_count from pgflow.step_tasks where step_slug = 'act'").fetchone()
    assert row == (3,)


def test_attempts_run_out(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:patient")
    with pytest.raises(RunFailed, match="step 'act' failed: ConnectionError: attempt 3 had no luck"):
        tree.client.start_flow_sync("patient", {"do": "flaky", "succeeds_at": 9})
    row = connection.execute("select attempts_count from pgflow.step_tasks where step_slug = 'act'").fetchone()
    assert row == (3,)


def test_what_is_no_use_to_retry_fails_at_once(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:patient")
    with pytest.raises(RunFailed, match="NonRetryable: no use to try again"):
        tree.client.start_flow_sync("patient", {"do": "never"})
    row = connection.execute("select status, attempts_count from pgflow.step_tasks").fetchone()
    assert row == ("failed", 1)


def test_an_empty_map_completes_without_a_task(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:many")
    assert tree.client.start_flow_sync("many", []).output == {"act": []}


def test_a_job_runs_and_is_marked_as_one(spawn: Spawn, connection: psycopg.Connection[Any]) -> None:
    tree = spawn("flows.zoo:greet")
    assert tree.client.start_flow_sync("greet", "Ada").output == {"greet": "hello Ada"}
    assert connection.execute("select flow_type from pgflow.flows where flow_slug = 'greet'").fetchone() == ("job",)


def test_several_flows_are_served_by_workers_of_their_own(spawn: Spawn) -> None:
    tree = spawn("flows.zoo")
    workers = next(c for c in tree.which_children() if c["id"] == "workers")["children"]
    slugs = ("one", "many", "patient", "limited", "forked", "greet")
    assert {w["id"] for w in workers} == {f"worker:{slug}" for slug in slugs}
    assert tree.client.start_flow_sync("greet", "Bob").output == {"greet": "hello Bob"}
    assert tree.client.start_flow_sync("many", [{"do": "echo", "value": 1}]).output == {"act": [1]}


def test_starting_inside_the_callers_transaction_follows_its_fate(spawn: Spawn, database: str) -> None:
    tree = spawn("flows.zoo:one")
    with psycopg.connect(database) as own:
        client = Client(connection=own)
        lost = client.start_flow("one", {"do": "echo", "value": 1})
        assert client.get_run(lost).status == "started"
        own.rollback()
        kept = client.start_flow("one", {"do": "echo", "value": 2})
        own.commit()
    with pytest.raises(RunNotFound):
        tree.client.get_run(lost)
    assert tree.client.wait(kept).output == {"act": 2}


def test_waiting_has_an_end(spawn: Spawn) -> None:
    tree = spawn("flows.zoo:patient")
    with pytest.raises(TimeoutError, match="it goes on"):
        tree.client.start_flow_sync("patient", {"do": "sleep", "seconds": 0.5}, timeout=0.05)


def test_every_mistake_of_a_client_has_its_own_error(spawn: Spawn, database: str) -> None:
    tree = spawn("flows.zoo:one", "flows.zoo:many")
    client = tree.client
    run_id = uuid.uuid4()
    client.start_flow("one", {"do": "pid"}, run_id=run_id)
    with pytest.raises(PgflowError, match=f"a run {run_id} already"):
        client.start_flow("one", {"do": "pid"}, run_id=run_id)
    with pytest.raises(FlowNotFound, match="flow 'nowhere' is not registered"):
        client.start_flow("nowhere", {})
    with pytest.raises(PayloadError, match=r"input\['x'\] is a set"):
        client.start_flow("one", {"x": {1}})
    with pytest.raises(PgflowError, match="input is not an array"):
        client.start_flow("many", {})
    with pytest.raises(RunNotFound):
        client.get_run(uuid.uuid4())
    with pytest.raises(RunNotFound, match="'abc'"):
        client.get_run_with_states("abc")
    with pytest.raises(ConfigurationError, match="has to be a Flow or its slug"):
        client.start_flow(7, {})  # type: ignore[arg-type]
    assert client.flow_exists("one")
    assert not client.flow_exists("One")


def test_a_database_without_the_schema_names_the_command(empty_database: str) -> None:
    with Client(empty_database) as client, pytest.raises(SchemaError, match="pgflow-otp setup"):
        client.start_flow("one", {})


def test_a_database_that_is_down_is_one_line_without_the_password() -> None:
    client = Client("postgresql://me:secret@127.0.0.1:1/db")
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1") as caught:
        client.flow_exists("x")
    assert "secret" not in str(caught.value)
