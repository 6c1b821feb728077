"""Every constraint and unique index of the tables, violated once, and what they have to admit (sql-contract 1)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest
from support.engine import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine

RUN = uuid.UUID(int=1)
WORKER = uuid.UUID(int=2)
R, W, NOBODY = (f"'{known}'" for known in (RUN, WORKER, uuid.UUID(int=3)))

CHECK, FOREIGN_KEY, UNIQUE = "23514", "23503", "23505"

# What the updates below change: a is started with one task, b is created and waits for it.
A, B = (f"where step_slug = '{step}'" for step in "ab")

STEP = "insert into pgflow.steps (flow_slug, step_slug, step_index, queue_name) values"
STATE = "insert into pgflow.step_states (flow_slug, run_id, step_slug) values"
NEW_TASK = "insert into pgflow.step_tasks (flow_slug, run_id, step_slug, task_index, queue_name, message_id) values"

VIOLATIONS = {
    CHECK: [
        ("flows", "slug_is_valid", "insert into pgflow.flows (flow_slug) values ('a__b')"),
        ("flows", "opt_max_attempts_is_nonnegative", "update pgflow.flows set opt_max_attempts = -1"),
        ("flows", "opt_base_delay_is_nonnegative", "update pgflow.flows set opt_base_delay = -1"),
        ("flows", "opt_timeout_is_positive", "update pgflow.flows set opt_timeout = 0"),
        ("flows", "queue_mode_is_valid", "update pgflow.flows set queue_mode = 'pool'"),
        ("flows", "flow_type_is_valid", "update pgflow.flows set flow_type = 'cron'"),
        ("steps", "steps_step_slug_check", f"{STEP} ('f', '1', 9, 'f')"),
        ("steps", "steps_step_type_check", f"update pgflow.steps set step_type = 'loop' {A}"),
        ("steps", "steps_deps_count_check", f"update pgflow.steps set deps_count = -1 {A}"),
        ("steps", "opt_max_attempts_is_nonnegative", f"update pgflow.steps set opt_max_attempts = -1 {A}"),
        ("steps", "opt_base_delay_is_nonnegative", f"update pgflow.steps set opt_base_delay = -1 {A}"),
        ("steps", "opt_start_delay_is_nonnegative", f"update pgflow.steps set opt_start_delay = -1 {A}"),
        ("steps", "opt_timeout_is_positive", f"update pgflow.steps set opt_timeout = 0 {A}"),
        ("steps", "required_input_pattern_is_object", f"update pgflow.steps set required_input_pattern = '[1]' {A}"),
        ("steps", "forbidden_input_pattern_is_object", f"update pgflow.steps set forbidden_input_pattern = 'null' {A}"),
        ("steps", "when_unmet_is_valid", f"update pgflow.steps set when_unmet = 'ignore' {A}"),
        ("steps", "when_exhausted_is_valid", f"update pgflow.steps set when_exhausted = 'retry' {A}"),
        ("steps", "queue_name_is_valid", f"update pgflow.steps set queue_name = 'F' {A}"),
        ("deps", "deps_check", "insert into pgflow.deps (flow_slug, dep_slug, step_slug) values ('f', 'a', 'a')"),
        (
            "worker_functions",
            "worker_functions_debounce_check",
            "update pgflow.worker_functions set debounce = '0.9 s'",
        ),
        (
            "worker_functions",
            "worker_functions_start_mode_check",
            "update pgflow.worker_functions set start_mode = 'thread'",
        ),
        ("runs", "status_is_valid", "update pgflow.runs set status = 'cancelled'"),
        ("runs", "runs_remaining_steps_check", "update pgflow.runs set remaining_steps = -1"),
        (
            "runs",
            "completed_at_or_failed_at",
            "update pgflow.runs set completed_at = started_at, failed_at = started_at",
        ),
        (
            "runs",
            "completed_at_is_after_started_at",
            "update pgflow.runs set completed_at = started_at - '1 s'::interval",
        ),
        ("runs", "failed_at_is_after_started_at", "update pgflow.runs set failed_at = started_at - '1 s'::interval"),
        ("step_states", "status_is_valid", f"update pgflow.step_states set status = 'queued' {B}"),
        ("step_states", "status_and_remaining_tasks_match", f"update pgflow.step_states set status = 'completed' {A}"),
        ("step_states", "remaining_tasks_state_consistency", f"update pgflow.step_states set remaining_tasks = 1 {B}"),
        (
            "step_states",
            "remaining_tasks_state_consistency",
            f"update pgflow.step_states set status = 'skipped', skip_reason = 'x', remaining_tasks = 0 {B}",
        ),
        ("step_states", "initial_tasks_known_when_started", f"update pgflow.step_states set initial_tasks = null {A}"),
        ("step_states", "step_states_initial_tasks_check", f"update pgflow.step_states set initial_tasks = -1 {B}"),
        ("step_states", "step_states_remaining_deps_check", f"update pgflow.step_states set remaining_deps = -1 {B}"),
        ("step_states", "output_only_for_completed_or_null", f"update pgflow.step_states set output = 'null' {A}"),
        ("step_states", "skip_reason_matches_status", f"update pgflow.step_states set status = 'skipped' {B}"),
        ("step_states", "skip_reason_matches_status", f"update pgflow.step_states set skip_reason = 'x' {B}"),
        (
            "step_states",
            "completed_at_or_failed_at_or_skipped_at",
            f"update pgflow.step_states set completed_at = started_at, failed_at = started_at {A}",
        ),
        (
            "step_states",
            "completed_at_or_failed_at_or_skipped_at",
            f"update pgflow.step_states set completed_at = started_at, skipped_at = started_at {A}",
        ),
        (
            "step_states",
            "completed_at_or_failed_at_or_skipped_at",
            f"update pgflow.step_states set failed_at = started_at, skipped_at = started_at {A}",
        ),
        (
            "step_states",
            "started_at_is_after_created_at",
            f"update pgflow.step_states set started_at = created_at - '1 s'::interval {A}",
        ),
        (
            "step_states",
            "completed_at_is_after_started_at",
            f"update pgflow.step_states set completed_at = started_at - '1 s'::interval {A}",
        ),
        (
            "step_states",
            "failed_at_is_after_started_at",
            f"update pgflow.step_states set failed_at = started_at - '1 s'::interval {A}",
        ),
        (
            "step_states",
            "skipped_at_is_after_created_at",
            f"update pgflow.step_states set skipped_at = created_at - '1 s'::interval {B}",
        ),
        ("step_tasks", "valid_status", "update pgflow.step_tasks set status = 'created'"),
        ("step_tasks", "output_valid_only_for_completed", "update pgflow.step_tasks set output = '1'"),
        ("step_tasks", "attempts_count_nonnegative", "update pgflow.step_tasks set attempts_count = -1"),
        (
            "step_tasks",
            "completed_at_or_failed_at",
            "update pgflow.step_tasks set completed_at = queued_at, failed_at = queued_at",
        ),
        (
            "step_tasks",
            "completed_at_is_after_queued_at",
            "update pgflow.step_tasks set completed_at = queued_at - '1 s'::interval",
        ),
        (
            "step_tasks",
            "failed_at_is_after_queued_at",
            "update pgflow.step_tasks set failed_at = queued_at - '1 s'::interval",
        ),
        (
            "step_tasks",
            "started_at_is_after_queued_at",
            "update pgflow.step_tasks set started_at = queued_at - '1 s'::interval",
        ),
        (
            "step_tasks",
            "completed_at_is_after_started_at",
            "update pgflow.step_tasks set started_at = queued_at + '2 s'::interval, completed_at = queued_at",
        ),
        (
            "step_tasks",
            "failed_at_is_after_started_at",
            "update pgflow.step_tasks set started_at = queued_at + '2 s'::interval, failed_at = queued_at",
        ),
        ("step_tasks", "queue_name_is_valid", "update pgflow.step_tasks set queue_name = ''"),
    ],
    FOREIGN_KEY: [
        ("steps", "steps_flow_slug_fkey", f"{STEP} ('g', 's', 0, 'g')"),
        ("deps", "deps_flow_slug_fkey", "insert into pgflow.deps values ('g', 'a', 'b')"),
        ("deps", "deps_flow_slug_dep_slug_fkey", "insert into pgflow.deps values ('f', 'z', 'b')"),
        ("deps", "deps_flow_slug_step_slug_fkey", "insert into pgflow.deps values ('f', 'a', 'z')"),
        ("runs", "runs_flow_slug_fkey", "insert into pgflow.runs (flow_slug, input) values ('F', '{}')"),
        ("step_states", "step_states_flow_slug_fkey", f"{STATE} ('g', {R}, 'free')"),
        ("step_states", "step_states_run_id_fkey", f"{STATE} ('f', {NOBODY}, 'a')"),
        ("step_states", "step_states_flow_slug_step_slug_fkey", f"{STATE} ('f', {R}, 'z')"),
        ("step_tasks", "step_tasks_flow_slug_fkey", f"{NEW_TASK} ('g', {R}, 'a', 1, 'f', null)"),
        ("step_tasks", "step_tasks_run_id_fkey", f"{NEW_TASK} ('f', {NOBODY}, 'a', 1, 'f', null)"),
        ("step_tasks", "step_tasks_run_id_step_slug_fkey", f"{NEW_TASK} ('f', {R}, 'z', 1, 'f', null)"),
        ("step_tasks", "step_tasks_last_worker_id_fkey", f"update pgflow.step_tasks set last_worker_id = {NOBODY}"),
    ],
    UNIQUE: [
        ("flows", "flows_pkey", "insert into pgflow.flows (flow_slug) values ('f')"),
        ("flows", "idx_flows_normalized_slug", "insert into pgflow.flows (flow_slug) values ('F')"),
        ("steps", "steps_pkey", f"{STEP} ('f', 'a', 9, 'f')"),
        ("steps", "steps_flow_slug_step_index_key", f"{STEP} ('f', 'c', 0, 'f')"),
        ("steps", "idx_steps_normalized_slug", f"{STEP} ('f', 'A', 9, 'f')"),
        ("deps", "deps_pkey", "insert into pgflow.deps select * from pgflow.deps"),
        ("workers", "workers_pkey", "insert into pgflow.workers select * from pgflow.workers"),
        (
            "worker_functions",
            "worker_functions_pkey",
            "insert into pgflow.worker_functions select * from pgflow.worker_functions",
        ),
        ("runs", "runs_pkey", "insert into pgflow.runs select * from pgflow.runs"),
        ("step_states", "step_states_pkey", f"{STATE} ('f', {R}, 'a')"),
        ("step_tasks", "step_tasks_pkey", f"{NEW_TASK} ('f', {R}, 'a', 0, 'f', null)"),
        (
            "step_tasks",
            "idx_step_tasks_queue_message",
            f"{NEW_TASK} ('f', {R}, 'a', 1, 'f', (select message_id from pgflow.step_tasks))",
        ),
    ],
}

#: One row can only violate these together with the others named.
TOGETHER = {
    "flows_pkey": ["drop index pgflow.idx_flows_normalized_slug"],
    "steps_pkey": ["drop index pgflow.idx_steps_normalized_slug"],
    "deps_flow_slug_fkey": [
        "alter table pgflow.deps drop constraint deps_flow_slug_dep_slug_fkey, "
        "drop constraint deps_flow_slug_step_slug_fkey"
    ],
    "step_states_flow_slug_fkey": [
        "alter table pgflow.step_states drop constraint step_states_flow_slug_step_slug_fkey"
    ],
    "step_tasks_run_id_fkey": ["alter table pgflow.step_tasks drop constraint step_tasks_run_id_step_slug_fkey"],
}


@pytest.fixture
def filled(engine: Engine) -> Engine:
    """The engine with at least one row in every table."""
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    engine.step("free", "b")
    engine.start(run_id=RUN)
    engine.execute("delete from pgflow.step_states where step_slug = 'free'")
    engine.execute("select pgflow.register_worker(%s, 'f', 'fn'), pgflow.track_worker_function('fn')", WORKER)
    return engine


@pytest.mark.parametrize("table", TABLES)
def test_each_is_violated(filled: Engine, table: str) -> None:
    for sqlstate, violations in VIOLATIONS.items():
        for _, constraint, statement in (violation for violation in violations if violation[0] == table):
            with filled.connection.transaction(force_rollback=True):
                for preparation in TOGETHER.get(constraint, []):
                    filled.execute(preparation)
                with pytest.raises(psycopg.IntegrityError) as caught:
                    filled.execute(statement)
            said = caught.value.diag
            assert (said.sqlstate, said.table_name, said.constraint_name) == (sqlstate, table, constraint)


def test_there_is_no_constraint_but_these(engine: Engine) -> None:
    found = engine.rows(
        "select c.relname, k.conname from pg_constraint k join pg_class c on c.oid = k.conrelid "
        "where k.connamespace = 'pgflow'::regnamespace and k.contype in ('c', 'f', 'p', 'u') "
        "union "
        "select c.relname, i.indexrelid::regclass::name from pg_index i join pg_class c on c.oid = i.indrelid "
        "where c.relnamespace = 'pgflow'::regnamespace and i.indisunique "
        "and not exists (select from pg_constraint k where k.conindid = i.indexrelid)"
    )
    assert {(row["relname"], row["conname"].removeprefix("pgflow.")) for row in found} == {
        (table, constraint) for violations in VIOLATIONS.values() for table, constraint, _ in violations
    }


ADMITTED: list[tuple[str, list[str | int | None]]] = [
    ("update pgflow.flows set opt_max_attempts = %s", [0]),
    ("update pgflow.flows set opt_base_delay = %s", [0]),
    ("update pgflow.flows set opt_timeout = %s", [1]),
    ("update pgflow.flows set queue_mode = %s", ["flow", "step"]),
    ("update pgflow.flows set flow_type = %s", ["flow", "job"]),
    (f"update pgflow.steps set step_type = %s {A}", ["single", "map"]),
    (f"update pgflow.steps set opt_max_attempts = %s {A}", [None, 0]),
    (f"update pgflow.steps set opt_base_delay = %s {A}", [None, 0]),
    (f"update pgflow.steps set opt_start_delay = %s {A}", [None, 0]),
    (f"update pgflow.steps set opt_timeout = %s {A}", [None, 1]),
    (f"update pgflow.steps set required_input_pattern = %s {A}", [None, "{}"]),
    (f"update pgflow.steps set forbidden_input_pattern = %s {A}", [None, "{}"]),
    (f"update pgflow.steps set when_unmet = %s {A}", ["fail", "skip", "skip-cascade"]),
    (f"update pgflow.steps set when_exhausted = %s {A}", ["fail", "skip", "skip-cascade"]),
    ("update pgflow.worker_functions set debounce = %s::interval", ["1 second"]),
    ("update pgflow.worker_functions set start_mode = %s", ["http", "process"]),
    ("update pgflow.workers set queue_name = %s", ["", "Any Text"]),
    ("update pgflow.runs set status = %s", ["started", "failed", "completed"]),
    (f"update pgflow.step_states set status = %s {A}", ["failed", "started"]),
    (f"update pgflow.step_states set remaining_tasks = 0, status = %s {A}", ["completed"]),
    (f"update pgflow.step_states set skip_reason = 'x', status = %s {B}", ["skipped"]),
    (f"update pgflow.step_states set initial_tasks = %s {B}", [None, 0]),
    (
        "update pgflow.step_tasks set status = %s",
        ["queued", "started", "completed", "failed", "skipped", "cancelled"],
    ),
    ("update pgflow.step_tasks set output = '1', status = %s", ["completed", "failed"]),
    ("update pgflow.step_tasks set message_id = %s", [None]),
]

TIMES = [
    "update pgflow.runs set completed_at = started_at",
    "update pgflow.runs set failed_at = started_at",
    f"update pgflow.step_states set started_at = created_at, completed_at = created_at {A}",
    f"update pgflow.step_states set started_at = created_at, failed_at = created_at {A}",
    f"update pgflow.step_states set skipped_at = created_at {B}",
    "update pgflow.step_tasks set started_at = queued_at, completed_at = queued_at",
    "update pgflow.step_tasks set started_at = queued_at, failed_at = queued_at",
    "update pgflow.step_tasks set completed_at = queued_at",
]


def test_these_values_are_admitted(filled: Engine) -> None:
    for statement, values in ADMITTED:
        for value in values:
            with filled.connection.transaction(force_rollback=True):
                assert filled.execute(statement, value).rowcount == 1


def test_times_may_be_equal(filled: Engine) -> None:
    for statement in TIMES:
        with filled.connection.transaction(force_rollback=True):
            assert filled.execute(statement).rowcount == 1


def test_message_ids_may_repeat_in_another_queue_and_be_missing(filled: Engine) -> None:
    same = "(select message_id from pgflow.step_tasks where task_index = 0)"
    filled.execute(f"{NEW_TASK} ('f', {R}, 'a', 1, 'g', {same})")
    filled.execute(f"{NEW_TASK} ('f', {R}, 'a', 2, 'f', null), ('f', {R}, 'a', 3, 'f', null)")
    assert filled.value("select count(*) from pgflow.step_tasks") == 4


def test_steps_of_different_flows_may_differ_in_case_only(filled: Engine) -> None:
    filled.flow("g")
    filled.execute(f"{STEP} ('g', 'A', 0, 'g')")
    assert filled.value("select count(*) from pgflow.steps where lower(step_slug) = 'a'") == 2


def test_a_deleted_worker_is_forgotten_by_its_tasks(filled: Engine) -> None:
    filled.execute("update pgflow.step_tasks set last_worker_id = %s", WORKER)
    filled.execute("delete from pgflow.workers")
    assert filled.task(RUN, "a")["last_worker_id"] is None


@pytest.mark.parametrize("table", ["flows", "steps", "runs", "step_states"])
def test_no_other_row_goes_while_something_refers_to_it(
    filled: Engine, refused: Callable[..., Diagnostic], table: str
) -> None:
    assert refused(f"delete from pgflow.{table}").sqlstate == FOREIGN_KEY
