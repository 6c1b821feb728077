"""Checking a schema: every fault is found, all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgflow_otp.db.checks import find_faults

if TYPE_CHECKING:
    from collections.abc import Sequence

FAULTS = {
    "drop table pgflow.worker_functions": "table pgflow.worker_functions does not exist",
    "drop schema pgmq cascade": "pgmq is not installed",
    "comment on view pgflow.pgflow_version is 'PgFlow version=1'": "says version 1; 2 is needed",
    "comment on view pgflow.extensions_version is null": "view pgflow.extensions_version carries no version",
    "delete from pgflow_otp.migrations": "schema pgflow_otp is not installed",
    "drop function pgflow.start_tasks(text, bigint[], uuid, text)": "start_tasks(text,bigint[],uuid,text) does not",
    "create function pgflow.start_tasks(text, bigint[], uuid) returns int language sql as 'select 1'": "still exists",
    "drop function pgflow_otp.claim_tasks": "function pgflow_otp.claim_tasks(text,text,uuid,",
    "drop function pgflow_otp._run_output": "function or view pgflow_otp._run_output does not exist",
    "drop view pgflow.step_progress": "function or view pgflow.step_progress does not exist",
    "alter type pgflow.step_task_record drop attribute attempts_count cascade": "type pgflow.step_task_record is (",
    "alter table pgflow.step_tasks drop constraint valid_status": "does not allow queued, started, completed",
    "alter table pgflow.steps alter queue_name drop not null": "queue_name of pgflow.steps may be NULL",
    "alter table pgflow.step_tasks drop constraint queue_name_is_valid": "queue_name_is_valid of pgflow.step_tasks",
}


def words(connection: psycopg.Connection[Any]) -> Sequence[str]:
    return [fault.what for fault in find_faults(connection)]


def test_a_schema_of_ours_has_no_fault(connection: psycopg.Connection[Any]) -> None:
    assert find_faults(connection) == []


@pytest.mark.parametrize("damage", FAULTS)
def test_a_fault_is_named_with_its_remedy(connection: psycopg.Connection[Any], damage: str) -> None:
    connection.execute(damage.encode())
    faults = find_faults(connection)
    assert [fault for fault in faults if FAULTS[damage] in fault.what], faults
    assert all(fault.remedy for fault in faults)


def test_all_faults_are_listed_at_once(connection: psycopg.Connection[Any]) -> None:
    connection.execute("drop table pgflow.worker_functions")
    connection.execute("delete from pgflow_otp.migrations")
    assert len(words(connection)) == 2


def test_nothing_at_all_is_one_fault(empty_database: str) -> None:
    with psycopg.connect(empty_database) as connection:
        assert words(connection) == ["schema pgflow does not exist"]
