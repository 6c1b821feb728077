"""What other runtimes find in the catalogue: functions, tables, indexes, views, rights (sql-contract 1, 2, 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.errors import Diagnostic
    from support.engine import Engine

EMPTY_PATH = 'search_path=""'

# Name, arguments, result, settings: volatility (i, s, v), security definer (SD), parallel safe (PS), empty search_path.
# What the contract gives no search_path is not held to having none.
FUNCTIONS = [
    ("is_local", "", "boolean", "s PS sp"),
    ("is_valid_slug", "slug text", "boolean", "i sp"),
    ("is_valid_queue_name", "queue_name text", "boolean", "i sp"),
    ("calculate_retry_delay", "base_delay numeric, attempts_count integer", "integer", "i PS sp"),
    (
        "create_flow",
        "flow_slug text, max_attempts integer DEFAULT NULL::integer, base_delay integer DEFAULT NULL::integer, "
        "timeout integer DEFAULT NULL::integer",
        "pgflow.flows",
        "v sp",
    ),
    (
        "add_step",
        "flow_slug text, step_slug text, deps_slugs text[] DEFAULT '{}'::text[], "
        "max_attempts integer DEFAULT NULL::integer, base_delay integer DEFAULT NULL::integer, "
        "timeout integer DEFAULT NULL::integer, start_delay integer DEFAULT NULL::integer, "
        "step_type text DEFAULT 'single'::text, required_input_pattern jsonb DEFAULT NULL::jsonb, "
        "forbidden_input_pattern jsonb DEFAULT NULL::jsonb, when_unmet text DEFAULT 'skip'::text, "
        "when_exhausted text DEFAULT 'fail'::text",
        "pgflow.steps",
        "v sp",
    ),
    ("_get_flow_shape", "p_flow_slug text", "jsonb", "s sp"),
    ("_compare_flow_shapes", "p_local jsonb, p_db jsonb", "text[]", "s sp"),
    (
        "_create_flow_from_shape",
        "p_flow_slug text, p_shape jsonb, p_queue_mode text DEFAULT 'flow'::text",
        "void",
        "v sp",
    ),
    ("ensure_flow_compiled", "flow_slug text, shape jsonb", "jsonb", "v sp"),
    (
        "ensure_flow_compiled",
        "flow_slug text, shape jsonb, queue_mode text, route_map jsonb DEFAULT NULL::jsonb",
        "jsonb",
        "v sp",
    ),
    ("delete_flow_and_data", "p_flow_slug text", "void", "v sp"),
    ("_listed_queue_name", "p_queue_name text", "text", "s sp"),
    ("_resolve_step_queue_name", "p_flow_slug text, p_step_slug text, p_step_index integer", "text", "i sp"),
    ("_derive_queue_routes", "p_flow_slug text, p_shape jsonb, p_queue_mode text", "jsonb", "v sp"),
    ("_assert_step_queue_available", "p_flow_slug text, p_queue_name text", "boolean", "v sp"),
    ("start_flow", "flow_slug text, input jsonb, run_id uuid DEFAULT NULL::uuid", "SETOF pgflow.runs", "v sp"),
    ("start_flow_with_states", "flow_slug text, input jsonb, run_id uuid DEFAULT NULL::uuid", "jsonb", "v SD"),
    ("get_run_with_states", "run_id uuid", "jsonb", "v SD"),
    ("start_ready_steps", "run_id uuid", "void", "v sp"),
    ("cascade_resolve_conditions", "run_id uuid", "boolean", "v sp"),
    ("cascade_complete_taskless_steps", "run_id uuid", "integer", "v"),
    ("_cascade_force_skip_steps", "run_id uuid, step_slug text, skip_reason text", "integer", "v"),
    ("maybe_complete_run", "run_id uuid", "void", "v sp"),
    (
        "start_tasks",
        "flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text",
        "SETOF pgflow.step_task_record",
        "v sp",
    ),
    (
        "start_tasks",
        "flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text, step_slug text",
        "SETOF pgflow.step_task_record",
        "v sp",
    ),
    (
        "complete_task",
        "run_id uuid, step_slug text, task_index integer, output jsonb",
        "SETOF pgflow.step_tasks",
        "v sp",
    ),
    (
        "fail_task",
        "run_id uuid, step_slug text, task_index integer, error_message text",
        "SETOF pgflow.step_tasks",
        "v sp",
    ),
    ("_archive_task_message", "p_run_id uuid, p_step_slug text, p_task_index integer", "void", "v sp"),
    (
        "set_vt_batch",
        "queue_name text, msg_ids bigint[], vt_offsets integer[]",
        "TABLE(msg_id bigint, read_ct integer, enqueued_at timestamp with time zone, vt timestamp with time zone, "
        "message jsonb, headers jsonb)",
        "v",
    ),
    ("requeue_stalled_tasks", "", "integer", "v SD sp"),
    ("track_worker_function", "function_name text, start_mode text DEFAULT 'http'::text", "void", "v"),
    ("mark_worker_stopped", "worker_id uuid", "void", "v"),
    (
        "poll_for_tasks",
        "queue_name text, vt integer, qty integer, max_poll_seconds integer DEFAULT 5, "
        "poll_interval_ms integer DEFAULT 100",
        "SETOF pgflow.step_task_record",
        "v sp",
    ),
    ("get_flow_input", "p_run_id uuid", "jsonb", "s sp"),
    ("flow_exists", "p_flow_slug text", "boolean", "s sp"),
    ("get_step_output", "p_run_id uuid, p_step_slug text", "jsonb", "s sp"),
    ("register_worker", "p_worker_id uuid, p_queue_name text, p_function_name text", "void", "v sp"),
    (
        "recover_stalled_tasks",
        "p_stale_threshold double precision",
        "TABLE(recovered_count bigint, vt_batches bigint)",
        "v SD sp",
    ),
    (
        "prune_data_older_than",
        "p_retention_interval interval, p_flow_slugs text[]",
        "TABLE(deleted_runs bigint, deleted_step_states bigint, deleted_step_tasks bigint, deleted_workers bigint)",
        "v sp",
    ),
    ("escalate_permanently_stalled", "", "integer", "v"),
    ("delete_run", "p_run_id uuid", "boolean", "v"),
]

CRON_FUNCTIONS = {
    ("setup_requeue_stalled_tasks_cron", "cron_interval text DEFAULT '15 seconds'::text"),
    ("cleanup_ensure_workers_logs", "retention_hours integer DEFAULT 24"),
}

# Per table: columns in order, each with its type, "?" where it may be null, and its default.
COLUMNS = {
    "flows": {
        "flow_slug": "text",
        "opt_max_attempts": "integer = 3",
        "opt_base_delay": "integer = 1",
        "opt_timeout": "integer = 60",
        "created_at": "timestamp with time zone = now()",
        "queue_mode": "text = 'flow'::text",
        "flow_type": "text = 'flow'::text",
    },
    "steps": {
        "flow_slug": "text",
        "step_slug": "text",
        "step_type": "text = 'single'::text",
        "step_index": "integer = 0",
        "deps_count": "integer = 0",
        "opt_max_attempts": "integer?",
        "opt_base_delay": "integer?",
        "opt_timeout": "integer?",
        "opt_start_delay": "integer?",
        "required_input_pattern": "jsonb?",
        "forbidden_input_pattern": "jsonb?",
        "when_unmet": "text = 'skip'::text",
        "when_exhausted": "text = 'fail'::text",
        "created_at": "timestamp with time zone = now()",
        "queue_name": "text",
    },
    "deps": {
        "flow_slug": "text",
        "dep_slug": "text",
        "step_slug": "text",
        "created_at": "timestamp with time zone = now()",
    },
    "workers": {
        "worker_id": "uuid",
        "queue_name": "text",
        "function_name": "text",
        "started_at": "timestamp with time zone = now()",
        "deprecated_at": "timestamp with time zone?",
        "stopped_at": "timestamp with time zone?",
        "last_heartbeat_at": "timestamp with time zone = now()",
        "pgflow_version": "text?",
    },
    "worker_functions": {
        "function_name": "text",
        "enabled": "boolean = true",
        "debounce": "interval = '00:00:06'::interval",
        "last_invoked_at": "timestamp with time zone?",
        "created_at": "timestamp with time zone = now()",
        "updated_at": "timestamp with time zone = now()",
        "start_mode": "text = 'http'::text",
    },
    "runs": {
        "run_id": "uuid = gen_random_uuid()",
        "flow_slug": "text",
        "status": "text = 'started'::text",
        "input": "jsonb",
        "output": "jsonb?",
        "remaining_steps": "integer = 0",
        "started_at": "timestamp with time zone = now()",
        "completed_at": "timestamp with time zone?",
        "failed_at": "timestamp with time zone?",
    },
    "step_states": {
        "flow_slug": "text",
        "run_id": "uuid",
        "step_slug": "text",
        "status": "text = 'created'::text",
        "remaining_tasks": "integer?",
        "initial_tasks": "integer?",
        "remaining_deps": "integer = 0",
        "output": "jsonb?",
        "error_message": "text?",
        "skip_reason": "text?",
        "created_at": "timestamp with time zone = now()",
        "started_at": "timestamp with time zone?",
        "completed_at": "timestamp with time zone?",
        "failed_at": "timestamp with time zone?",
        "skipped_at": "timestamp with time zone?",
    },
    "step_tasks": {
        "flow_slug": "text",
        "run_id": "uuid",
        "step_slug": "text",
        "message_id": "bigint?",
        "task_index": "integer = 0",
        "status": "text = 'queued'::text",
        "attempts_count": "integer = 0",
        "error_message": "text?",
        "output": "jsonb?",
        "queued_at": "timestamp with time zone = now()",
        "started_at": "timestamp with time zone?",
        "completed_at": "timestamp with time zone?",
        "failed_at": "timestamp with time zone?",
        "last_worker_id": "uuid?",
        "requeued_count": "integer = 0",
        "last_requeued_at": "timestamp with time zone?",
        "permanently_stalled_at": "timestamp with time zone?",
        "queue_name": "text",
    },
}

INDEXES = {
    "idx_flows_normalized_slug": "UNIQUE flows (lower(flow_slug))",
    "idx_steps_normalized_slug": "UNIQUE steps (flow_slug, lower(step_slug))",
    "idx_deps_by_flow_step": "deps (flow_slug, step_slug)",
    "idx_deps_by_flow_dep": "deps (flow_slug, dep_slug)",
    "idx_workers_queue_name": "workers (queue_name)",
    "idx_workers_heartbeat": "workers (last_heartbeat_at)",
    "idx_workers_started_at": "workers (started_at)",
    "idx_workers_stopped_at": "workers (stopped_at)",
    "idx_runs_flow_slug": "runs (flow_slug)",
    "idx_runs_status": "runs (status)",
    "idx_runs_started_at": "runs (started_at)",
    "idx_runs_flow_started": "runs (flow_slug, started_at DESC)",
    "idx_step_states_ready": "step_states (run_id, status, remaining_deps) "
    "WHERE ((status = 'created'::text) AND (remaining_deps = 0))",
    "idx_step_states_failed": "step_states (run_id, step_slug) WHERE (status = 'failed'::text)",
    "idx_step_states_skipped": "step_states (run_id, step_slug) WHERE (status = 'skipped'::text)",
    "idx_step_states_flow_slug": "step_states (flow_slug)",
    "idx_step_states_run_id": "step_states (run_id)",
    "idx_step_tasks_queue_message": "UNIQUE step_tasks (queue_name, message_id) WHERE (message_id IS NOT NULL)",
    "idx_step_tasks_queued": "step_tasks (run_id, step_slug) WHERE (status = 'queued'::text)",
    "idx_step_tasks_completed": "step_tasks (run_id, step_slug) WHERE (status = 'completed'::text)",
    "idx_step_tasks_failed": "step_tasks (run_id, step_slug) WHERE (status = 'failed'::text)",
    "idx_step_tasks_flow_run_step": "step_tasks (flow_slug, run_id, step_slug)",
    "idx_step_tasks_started": "step_tasks (started_at) WHERE (status = 'started'::text)",
    "idx_step_tasks_queued_msg": "step_tasks (message_id) WHERE (status = 'queued'::text)",
    "idx_step_tasks_last_worker": "step_tasks (last_worker_id) WHERE (status = 'started'::text)",
}

KEYS = {
    "flows_pkey": "PRIMARY KEY (flow_slug)",
    "steps_pkey": "PRIMARY KEY (flow_slug, step_slug)",
    "steps_flow_slug_step_index_key": "UNIQUE (flow_slug, step_index)",
    "steps_flow_slug_fkey": "FOREIGN KEY (flow_slug) REFERENCES pgflow.flows(flow_slug)",
    "deps_pkey": "PRIMARY KEY (flow_slug, dep_slug, step_slug)",
    "deps_flow_slug_fkey": "FOREIGN KEY (flow_slug) REFERENCES pgflow.flows(flow_slug)",
    "deps_flow_slug_dep_slug_fkey": "FOREIGN KEY (flow_slug, dep_slug) REFERENCES pgflow.steps(flow_slug, step_slug)",
    "deps_flow_slug_step_slug_fkey": "FOREIGN KEY (flow_slug, step_slug) REFERENCES pgflow.steps(flow_slug, step_slug)",
    "workers_pkey": "PRIMARY KEY (worker_id)",
    "worker_functions_pkey": "PRIMARY KEY (function_name)",
    "runs_pkey": "PRIMARY KEY (run_id)",
    "runs_flow_slug_fkey": "FOREIGN KEY (flow_slug) REFERENCES pgflow.flows(flow_slug)",
    "step_states_pkey": "PRIMARY KEY (run_id, step_slug)",
    "step_states_flow_slug_fkey": "FOREIGN KEY (flow_slug) REFERENCES pgflow.flows(flow_slug)",
    "step_states_run_id_fkey": "FOREIGN KEY (run_id) REFERENCES pgflow.runs(run_id)",
    "step_states_flow_slug_step_slug_fkey": "FOREIGN KEY (flow_slug, step_slug) "
    "REFERENCES pgflow.steps(flow_slug, step_slug)",
    "step_tasks_pkey": "PRIMARY KEY (run_id, step_slug, task_index)",
    "step_tasks_flow_slug_fkey": "FOREIGN KEY (flow_slug) REFERENCES pgflow.flows(flow_slug)",
    "step_tasks_run_id_fkey": "FOREIGN KEY (run_id) REFERENCES pgflow.runs(run_id)",
    "step_tasks_run_id_step_slug_fkey": "FOREIGN KEY (run_id, step_slug) "
    "REFERENCES pgflow.step_states(run_id, step_slug)",
    "step_tasks_last_worker_id_fkey": "FOREIGN KEY (last_worker_id) REFERENCES pgflow.workers(worker_id) "
    "ON DELETE SET NULL",
}

TASK_RECORD = {
    "flow_slug": "text",
    "run_id": "uuid",
    "step_slug": "text",
    "input": "jsonb",
    "msg_id": "bigint",
    "task_index": "integer",
    "flow_input": "jsonb",
    "attempts_count": "integer",
}


def functions(engine: Engine) -> list[dict[str, Any]]:
    return engine.rows(
        "select proname::text as name, pg_get_function_arguments(oid) as arguments, "
        "pg_get_function_result(oid) as result, provolatile::text as volatility, prosecdef as definer, "
        "proparallel = 's' as parallel_safe, coalesce(proconfig, '{}') as config "
        "from pg_proc where pronamespace = 'pgflow'::regnamespace"
    )


def attributes(engine: Engine, name: str) -> dict[str, str]:
    return {
        row["name"]: row["type"]
        for row in engine.rows(
            "select attname::text as name, format_type(atttypid, atttypmod) as type from pg_attribute "
            "where attrelid = %s::regclass and attnum > 0 and not attisdropped order by attnum",
            f"pgflow.{name}",
        )
    }


def test_functions_are_as_declared(engine: Engine) -> None:
    declared = {
        (name, arguments): (result, settings[0], "SD" in settings, "PS" in settings)
        for name, arguments, result, settings in FUNCTIONS
    }
    found = {
        (row["name"], row["arguments"]): (row["result"], row["volatility"], row["definer"], row["parallel_safe"])
        for row in functions(engine)
    }
    assert {key: found.get(key) for key in declared} == declared


def test_functions_look_nothing_up_by_the_callers_path(engine: Engine) -> None:
    found = {(row["name"], row["arguments"]) for row in functions(engine) if EMPTY_PATH in row["config"]}
    assert {(name, arguments) for name, arguments, _, settings in FUNCTIONS if "sp" in settings} - found == set()


def test_claims_are_planned_for_their_arguments(engine: Engine) -> None:
    (row,) = (row for row in functions(engine) if row["name"] == "start_tasks" and "step_slug" in row["arguments"])
    assert "plan_cache_mode=force_custom_plan" in row["config"]


def test_there_is_no_function_but_these(engine: Engine) -> None:
    """Among others no telemetry, no ensure_workers, no retired overload, and none of our own additions."""
    found = {(row["name"], row["arguments"]) for row in functions(engine)}
    has_cron = engine.value("select exists (select from pg_extension where extname = 'pg_cron')")
    assert found == {(name, arguments) for name, arguments, *_ in FUNCTIONS} | (CRON_FUNCTIONS if has_cron else set())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "pgflow.start_tasks('f', array[1]::bigint[], gen_random_uuid())",
            "function pgflow.start_tasks(unknown, bigint[], uuid) does not exist",
        ),
        (
            "pgflow.prune_data_older_than('1 day'::interval)",
            "function pgflow.prune_data_older_than(interval) does not exist",
        ),
        (
            "pgflow.ensure_flow_compiled('f', '{}'::jsonb, true)",
            "function pgflow.ensure_flow_compiled(unknown, jsonb, boolean) does not exist",
        ),
    ],
)
def test_retired_calls_do_not_resolve(refused: Callable[..., Diagnostic], call: str, message: str) -> None:
    said = refused(f"select {call}")
    assert (said.sqlstate, said.message_primary) == ("42883", message)


@pytest.mark.parametrize("table", COLUMNS)
def test_columns(engine: Engine, table: str) -> None:
    found = engine.rows(
        "select a.attname::text as name, format_type(a.atttypid, a.atttypmod) || "
        "case when a.attnotnull then '' else '?' end || coalesce(' = ' || pg_get_expr(d.adbin, d.adrelid), '') as is "
        "from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum "
        "where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped",
        f"pgflow.{table}",
    )
    assert {row["name"]: row["is"] for row in found} == COLUMNS[table]


def test_columns_of_tasks_have_a_fixed_order(engine: Engine) -> None:
    """Another runtime reads the status of result rows by position."""
    assert list(attributes(engine, "step_tasks"))[:18] == list(COLUMNS["step_tasks"])


def test_fields_of_a_claim_have_a_fixed_order(engine: Engine) -> None:
    assert list(attributes(engine, "step_task_record").items()) == list(TASK_RECORD.items())


def test_relations_and_types_are_no_others(engine: Engine) -> None:
    query = "select relname::text, relkind::text from pg_class where relnamespace = 'pgflow'::regnamespace"
    assert {(row["relname"], row["relkind"]) for row in engine.rows(query + " and relkind <> 'i'")} == {
        *((table, "r") for table in COLUMNS),
        ("step_task_record", "c"),
        ("pgflow_version", "v"),
        ("extensions_version", "v"),
        ("step_progress", "v"),
    }
    assert engine.rows("select from pg_type where typtype = 'e' and typnamespace = 'pgflow'::regnamespace") == []


def test_indexes(engine: Engine) -> None:
    found = {
        row["indexname"]: ("UNIQUE " if "CREATE UNIQUE" in row["indexdef"] else "")
        + row["indexdef"].partition(" ON pgflow.")[2].replace(" USING btree", "")
        for row in engine.rows("select indexname::text, indexdef from pg_indexes where schemaname = 'pgflow'")
    }
    assert {name: found.get(name) for name in INDEXES} == INDEXES


def test_keys(engine: Engine) -> None:
    found = engine.rows(
        "select conname::text as name, pg_get_constraintdef(oid) as is from pg_constraint "
        "where connamespace = 'pgflow'::regnamespace and contype in ('p', 'u', 'f')"
    )
    assert {row["name"]: row["is"] for row in found} == KEYS


def test_status_of_tasks_is_spelled_out(engine: Engine) -> None:
    """Another runtime looks for the quoted literals in the definition."""
    query = "select pg_get_constraintdef(oid) from pg_constraint where conname = 'valid_status'"
    definition = engine.value(query + " and conrelid = 'pgflow.step_tasks'::regclass")
    for status in ("queued", "started", "completed", "failed", "skipped", "cancelled"):
        assert f"'{status}'" in definition


@pytest.mark.parametrize(("view", "version"), [("pgflow_version", 2), ("extensions_version", 6)])
def test_version_is_the_comment_of_a_view(engine: Engine, view: str, version: int) -> None:
    assert list(attributes(engine, view)) == ["placeholder"]
    assert engine.value("select obj_description(%s::regclass)", f"pgflow.{view}") == f"PgFlow version={version}"


def test_columns_of_step_progress(engine: Engine) -> None:
    assert list(attributes(engine, "step_progress")) == [
        "run_id",
        "flow_slug",
        "step_slug",
        "status",
        "total_tasks",
        "completed_tasks",
        "failed_tasks",
        "queued_tasks",
        "started_tasks",
    ]


@pytest.mark.parametrize("right", ["usage", "create"])
def test_nobody_has_rights_in_the_schema_unless_granted(engine: Engine, right: str) -> None:
    assert engine.value("select has_schema_privilege('public', 'pgflow', %s)", right) is False
