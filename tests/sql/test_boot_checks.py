"""What sibling workers check, and the statements they run, in their order (sql-contract 4.1, 4.3, 5.1, 5.2)."""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import errors
from psycopg.rows import dict_row, tuple_row

if TYPE_CHECKING:
    from support.engine import Engine

NO_PATTERN = {"defined": False}


def shape(**options: int) -> str:
    """A single step `a`, a map `m` over it, and a single step `z` after both."""
    common = {
        "whenUnmet": "skip",
        "whenExhausted": "fail",
        "requiredInputPattern": NO_PATTERN,
        "forbiddenInputPattern": NO_PATTERN,
    }
    steps = [
        {"slug": slug, "stepType": kind, "dependencies": dependencies, **common}
        for slug, kind, dependencies in (("a", "single", []), ("m", "map", ["a"]), ("z", "single", ["a", "m"]))
    ]
    return json.dumps({"steps": steps, "options": options})


def numbered(engine: Engine, query: str, *args: Any) -> list[tuple[Any, ...]]:
    """Rows by position of a statement with $1 parameters, as the Elixir driver sends and reads it."""
    with psycopg.RawCursor(engine.connection, row_factory=tuple_row) as cursor:
        cursor.execute(query.encode(), args)
        return cursor.fetchall() if cursor.description else []


def named(engine: Engine, query: str, **args: Any) -> list[dict[str, Any]]:
    with psycopg.Cursor(engine.connection, row_factory=dict_row) as cursor:
        return cursor.execute(query.encode(), args).fetchall()


def resolves(engine: Engine, signature: str) -> bool:
    return engine.value("select to_regprocedure(%s) is not null", signature) is True


# 4.1: what the Elixir worker checks


@pytest.mark.parametrize(
    "signature",
    [
        "pgflow.ensure_flow_compiled(text,jsonb)",
        "pgflow.ensure_flow_compiled(text,jsonb,text,jsonb)",
        "pgflow.track_worker_function(text,text)",
        "pgflow.start_tasks(text,bigint[],uuid,text)",
        "pgflow.start_tasks(text,bigint[],uuid,text,text)",
    ],
)
def test_what_a_worker_calls_resolves(engine: Engine, signature: str) -> None:
    assert resolves(engine, signature)


@pytest.mark.parametrize(
    "signature",
    [
        "pgflow.start_tasks(text,bigint[],uuid)",
        "pgflow.ensure_flow_compiled(text,jsonb,boolean)",
        "pgflow.track_worker_function(text)",
        "pgflow.create_flow(text,integer,integer,integer,text)",
        "pgflow._create_flow_from_shape(text,jsonb)",
        "pgflow._create_flow_from_shape(text,jsonb,text,jsonb)",
    ],
)
def test_what_was_removed_does_not_resolve(engine: Engine, signature: str) -> None:
    assert not resolves(engine, signature)


def test_a_task_record_has_exactly_these_fields(engine: Engine) -> None:
    fields = engine.rows(
        "select attname, format_type(atttypid, atttypmod) as type from pg_attribute "
        "where attrelid = 'pgflow.step_task_record'::regclass and attnum > 0 and not attisdropped order by attnum"
    )
    assert [(field["attname"], field["type"]) for field in fields] == [
        ("flow_slug", "text"),
        ("run_id", "uuid"),
        ("step_slug", "text"),
        ("input", "jsonb"),
        ("msg_id", "bigint"),
        ("task_index", "integer"),
        ("flow_input", "jsonb"),
        ("attempts_count", "integer"),
    ]


@pytest.mark.parametrize(("view", "least"), [("pgflow_version", 2), ("extensions_version", 6)])
def test_the_levels_are_high_enough(engine: Engine, view: str, least: int) -> None:
    comment = engine.value("select obj_description(to_regclass(%s), 'pg_class')", f"pgflow.{view}")
    found = re.search(r"version=(\d+)", comment)
    assert found
    assert int(found[1]) >= least


@pytest.mark.parametrize("table", ["flows", "steps", "deps", "runs", "step_states", "step_tasks", "workers"])
def test_the_tables_exist(engine: Engine, table: str) -> None:
    query = "select 1 from information_schema.tables where table_schema = 'pgflow' and table_name = %s"
    assert engine.value(query, table) == 1


@pytest.mark.parametrize("function", ["start_flow", "complete_task", "fail_task"])
def test_the_functions_exist(engine: Engine, function: str) -> None:
    query = "select count(*) from pg_proc where pronamespace = 'pgflow'::regnamespace and proname = %s"
    assert engine.value(query, function) == 1


def test_pgmq_is_an_extension_or_a_schema(engine: Engine) -> None:
    query = "select exists (select from pg_extension where extname = 'pgmq') or to_regclass('pgmq.meta') is not null"
    assert engine.value(query) is True


def test_valid_status_mentions_all_six_statuses(engine: Engine) -> None:
    definition = engine.value(
        "select pg_get_constraintdef(oid) from pg_constraint "
        "where conrelid = 'pgflow.step_tasks'::regclass and conname = 'valid_status'"
    )
    for status in ("queued", "started", "completed", "failed", "skipped", "cancelled"):
        assert f"'{status}'" in definition


@pytest.mark.parametrize("table", ["steps", "step_tasks"])
def test_every_route_is_stored_and_valid(engine: Engine, table: str) -> None:
    column = "select attnotnull from pg_attribute where attrelid = %s::regclass and attname = 'queue_name'"
    constraint = "select contype from pg_constraint where conrelid = %s::regclass and conname = 'queue_name_is_valid'"
    assert engine.value(column, f"pgflow.{table}") is True
    assert engine.value(constraint, f"pgflow.{table}") == "c"


RECORDS = "SETOF pgflow.step_task_record"
EMPTY = 'search_path=""'
SETTINGS = {
    "start_tasks(text,bigint[],uuid,text)": (
        "flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text", RECORDS, "v", False, {EMPTY},
    ),
    "start_tasks(text,bigint[],uuid,text,text)": (
        "flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text, step_slug text", RECORDS, "v", False,
        {EMPTY, "plan_cache_mode=force_custom_plan"},
    ),
    "fail_task(uuid,text,int,text)": (
        "run_id uuid, step_slug text, task_index integer, error_message text", "SETOF pgflow.step_tasks", "v", False,
        {EMPTY},
    ),
    "_archive_task_message(uuid,text,int)": (
        "p_run_id uuid, p_step_slug text, p_task_index integer", "void", "v", False, {EMPTY},
    ),
    "set_vt_batch(text,bigint[],int[])": (
        "queue_name text, msg_ids bigint[], vt_offsets integer[]",
        "TABLE(msg_id bigint, read_ct integer, enqueued_at timestamp with time zone, vt timestamp with time zone, "
        "message jsonb, headers jsonb)", "v", False, set(),
    ),
    "requeue_stalled_tasks()": ("", "integer", "v", True, {EMPTY}),
    "track_worker_function(text,text)": (
        "function_name text, start_mode text DEFAULT 'http'::text", "void", "v", False, set(),
    ),
    "mark_worker_stopped(uuid)": ("worker_id uuid", "void", "v", False, set()),
    "poll_for_tasks(text,int,int,int,int)": (
        "queue_name text, vt integer, qty integer, max_poll_seconds integer DEFAULT 5, "
        "poll_interval_ms integer DEFAULT 100", RECORDS, "v", False, {EMPTY},
    ),
    "get_flow_input(uuid)": ("p_run_id uuid", "jsonb", "s", False, {EMPTY}),
    "flow_exists(text)": ("p_flow_slug text", "boolean", "s", False, {EMPTY}),
    "get_step_output(uuid,text)": ("p_run_id uuid, p_step_slug text", "jsonb", "s", False, {EMPTY}),
    "register_worker(uuid,text,text)": (
        "p_worker_id uuid, p_queue_name text, p_function_name text", "void", "v", False, {EMPTY},
    ),
    "recover_stalled_tasks(double precision)": (
        "p_stale_threshold double precision", "TABLE(recovered_count bigint, vt_batches bigint)", "v", True, {EMPTY},
    ),
    "prune_data_older_than(interval,text[])": (
        "p_retention_interval interval, p_flow_slugs text[]",
        "TABLE(deleted_runs bigint, deleted_step_states bigint, deleted_step_tasks bigint, deleted_workers bigint)",
        "v", False, {EMPTY},
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", SETTINGS)
def test_a_function_looks_the_same_in_the_catalogue(engine: Engine, function: str) -> None:
    row = engine.row(
        "select pg_get_function_arguments(oid) as arguments, pg_get_function_result(oid) as result, "
        "provolatile, prosecdef, coalesce(proconfig, '{}') as config from pg_proc where oid = %s::regprocedure",
        f"pgflow.{function}",
    )
    arguments, result, volatility, definer, config = SETTINGS[function]
    assert row | {"config": set(row["config"])} == {
        "arguments": arguments,
        "result": result,
        "provolatile": volatility,
        "prosecdef": definer,
        "config": config,
    }


def test_delete_run_takes_one_run_and_answers_yes_or_no(engine: Engine) -> None:
    query = (
        "select pg_get_function_arguments(oid) as arguments, pg_get_function_result(oid) as result "
        "from pg_proc where oid = 'pgflow.delete_run(uuid)'::regprocedure"
    )
    assert engine.row(query) == {"arguments": "p_run_id uuid", "result": "boolean"}


# 4.3: statements on tables


@pytest.mark.parametrize("deprecated", [False, True])
def test_a_heartbeat_reports_deprecation(engine: Engine, deprecated: bool) -> None:
    worker = engine.worker()
    engine.age(100)
    if deprecated:
        engine.execute("update pgflow.workers set deprecated_at = now()")
    before = engine.value("select last_heartbeat_at from pgflow.workers")
    query = (
        "UPDATE pgflow.workers SET last_heartbeat_at = now() WHERE worker_id = $1 RETURNING (deprecated_at IS NOT NULL)"
    )
    assert numbered(engine, query, worker) == [(deprecated,)]
    assert engine.value("select last_heartbeat_at from pgflow.workers") > before
    assert numbered(engine, query, uuid.uuid4()) == []


def test_effective_options_are_those_of_the_step_else_of_the_flow(engine: Engine) -> None:
    engine.flow(max_attempts=4, base_delay=5, timeout=6)
    engine.step("a")
    engine.step("b", max_attempts=1, base_delay=0, timeout=3)
    rows = numbered(
        engine,
        "SELECT s.step_slug, COALESCE(s.opt_timeout, f.opt_timeout), COALESCE(s.opt_max_attempts, f.opt_max_attempts), "
        "COALESCE(s.opt_base_delay, f.opt_base_delay) FROM pgflow.steps s "
        "JOIN pgflow.flows f ON f.flow_slug = s.flow_slug WHERE s.flow_slug = $1 ORDER BY s.step_index",
        "f",
    )
    assert rows == [("a", 6, 4, 5), ("b", 3, 1, 0)]


def test_skipped_steps_come_in_the_order_of_time_and_definition(engine: Engine) -> None:
    engine.flow()
    engine.step("z", required_input_pattern={"never": 1}, when_unmet="skip-cascade")
    engine.step("y", "z")
    engine.step("a", required_input_pattern={"never": 1})
    engine.step("b")
    run = engine.start()
    rows = numbered(
        engine,
        "SELECT ss.step_slug, ss.skip_reason FROM pgflow.step_states ss JOIN pgflow.steps s "
        "ON s.flow_slug = ss.flow_slug AND s.step_slug = ss.step_slug "
        "WHERE ss.run_id = $1 AND ss.status = 'skipped' ORDER BY ss.skipped_at, s.step_index",
        run,
    )
    assert rows == [("z", "condition_unmet"), ("y", "dependency_skipped"), ("a", "condition_unmet")]


@pytest.mark.parametrize(
    ("table", "columns"),
    {
        "flows": "flow_slug, opt_max_attempts, opt_base_delay, opt_timeout, created_at, queue_mode, flow_type",
        "steps": "flow_slug, step_slug, step_type, step_index, deps_count, opt_max_attempts, opt_base_delay, "
        "opt_timeout, opt_start_delay, required_input_pattern, forbidden_input_pattern, when_unmet, when_exhausted, "
        "created_at, queue_name",
        "deps": "flow_slug, dep_slug, step_slug, created_at",
        "runs": "run_id, flow_slug, status, input, output, remaining_steps, started_at, completed_at, failed_at",
        "step_states": "flow_slug, run_id, step_slug, status, remaining_tasks, initial_tasks, remaining_deps, output, "
        "error_message, skip_reason, created_at, started_at, completed_at, failed_at, skipped_at",
        "step_tasks": "flow_slug, run_id, step_slug, message_id, task_index, status, attempts_count, error_message, "
        "output, queued_at, started_at, completed_at, failed_at, last_worker_id, requeued_count, last_requeued_at, "
        "permanently_stalled_at, queue_name",
        "workers": "worker_id, queue_name, function_name, started_at, deprecated_at, stopped_at, last_heartbeat_at, "
        "pgflow_version",
    }.items(),
)
def test_whole_rows_are_read_by_the_names_of_their_columns(engine: Engine, table: str, columns: str) -> None:
    engine.flow()
    engine.step("a")
    engine.step("b", "a")
    engine.start()
    engine.claim()
    rows = engine.rows(f"select {columns} from pgflow.{table}")
    assert rows == engine.rows(f"select * from pgflow.{table}")
    assert rows


def test_a_run_can_be_put_off_in_the_transaction_that_starts_it(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    with engine.transaction() as own:
        ((run,),) = numbered(own, "SELECT run_id FROM pgflow.start_flow($1, $2::jsonb)", "f", "{}")
        ((queue, message),) = numbered(
            own, "SELECT queue_name, message_id FROM pgflow.step_tasks WHERE run_id = $1", run
        )
        query = "SELECT count(*) FROM pgflow.set_vt_batch($1, ARRAY[$2]::bigint[], ARRAY[$3]::int[])"
        assert numbered(own, query, queue, message, 600) == [(1,)]
    assert engine.read() == []
    engine.execute("update pgmq.q_f set vt = clock_timestamp() where msg_id = %s", message)
    assert engine.read() == [message]


def test_a_declined_message_can_be_told_from_an_orphan(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a", when_exhausted="skip")
    engine.step("b")
    run = engine.start()
    engine.execute("select pgmq.send('f', '{}')")
    engine.execute(
        "update pgflow.step_states set status = 'skipped', remaining_tasks = null, skip_reason = 'handler_failed' "
        "where step_slug = 'a'"
    )
    rows = numbered(
        engine,
        "SELECT t.step_slug, ss.status FROM pgmq.q_f q JOIN pgflow.step_tasks t "
        "ON t.flow_slug = $1 AND t.queue_name = $2 AND t.message_id = q.msg_id "
        "JOIN pgflow.step_states ss ON ss.run_id = t.run_id AND ss.step_slug = t.step_slug "
        "WHERE q.msg_id = ANY ($3::bigint[]) ORDER BY 1",
        "f", "f", [1, 2, 3],
    )  # fmt: skip
    assert rows == [("a", "skipped"), ("b", "started")]
    assert engine.run(run)["status"] == "started"


def test_a_run_can_be_deleted_by_hand(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    run = engine.start([1, 2])
    engine.claim()
    engine.complete(run, "m", 0, 1)
    with engine.transaction() as own:
        own.execute("select from pgflow.runs where run_id = %s for update", run)
        ids = [t["message_id"] for t in own.rows("select message_id from pgflow.step_tasks where run_id = %s", run)]
        for table in ("q_f", "a_f"):
            own.execute(f"delete from pgmq.{table} where msg_id = any (%s::bigint[])", ids)
        for table in ("step_tasks", "step_states", "runs"):
            own.execute(f"delete from pgflow.{table} where run_id = %s", run)
    after = engine.everything()
    assert after["runs"] == after["step_states"] == after["step_tasks"] == []
    assert (after["live"], after["archived"]) == ({"f": []}, {"f": []})


def test_a_flow_whose_queue_table_was_lost_can_be_deleted(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    engine.execute("drop table pgmq.q_f")
    with engine.transaction() as own:
        own.execute("select pg_advisory_xact_lock(1, hashtext(lower('f')))")
        own.execute("select pgmq.create(queue_name) from (select distinct queue_name from pgflow.steps) q")
        own.execute("select pgflow.delete_flow_and_data('f')")
    after = engine.everything()
    assert after["flows"] == after["steps"] == after["queues"] == []


def test_a_definition_can_be_written_by_position(engine: Engine) -> None:
    numbered(engine, "SELECT pgflow.create_flow($1, $2, $3, $4)", "f", 1, 2, 30)
    numbered(
        engine,
        "SELECT pgflow.add_step($1, $2, $3::text[], $4, $5, $6, $7, $8)",
        "f", "m", [], None, None, None, 3, "map",
    )  # fmt: skip
    numbered(
        engine,
        "SELECT pgflow.add_step($1, $2, $3::text[], $4, $5, $6, $7, $8, $9::jsonb, $10::jsonb, $11, $12)",
        "f", "b", ["m"], 7, 8, 9, None, "single", '{"m": [1]}', None, "fail", "skip-cascade",
    )  # fmt: skip
    assert engine.row("select opt_max_attempts, opt_base_delay, opt_timeout from pgflow.flows") == {
        "opt_max_attempts": 1,
        "opt_base_delay": 2,
        "opt_timeout": 30,
    }
    steps = engine.rows(
        "select step_slug, step_type, opt_max_attempts, opt_base_delay, opt_timeout, opt_start_delay, "
        "required_input_pattern, forbidden_input_pattern, when_unmet, when_exhausted from pgflow.steps order by 1 desc"
    )
    assert [tuple(step.values()) for step in steps] == [
        ("m", "map", None, None, None, 3, None, None, "skip", "fail"),
        ("b", "single", 7, 8, 9, None, {"m": [1]}, None, "fail", "skip-cascade"),
    ]


# 5.1: the TypeScript worker

HANDLERS = {"a": [1, 2], "m": "item", "z": {"done": True}}


class TypeScript:
    """The statements of a TypeScript flow worker, in its order."""

    def __init__(self, engine: Engine, mode: str) -> None:
        self.engine = engine
        self.mode = mode
        self.id = uuid.uuid4()
        routes = [{"stepSlug": s, "queueName": self.queue(s)} for s in HANDLERS]
        named(engine, "SELECT pgflow.track_worker_function(%(name)s)", name="my-worker")
        (compiled,) = named(
            engine,
            "SELECT pgflow.ensure_flow_compiled(%(slug)s, %(shape)s::jsonb, %(mode)s::text, %(routes)s::jsonb) "
            "as result",
            slug="f", shape=shape(baseDelay=0), mode=mode, routes=json.dumps(routes),
        )  # fmt: skip
        assert compiled["result"] == {"status": "compiled", "differences": [], "mismatchKind": None}
        (row,) = named(
            engine,
            "INSERT INTO pgflow.workers (queue_name, worker_id, function_name, pgflow_version) "
            "VALUES (%(queue)s, %(id)s, %(name)s, %(version)s) RETURNING *",
            queue=self.queue("a"), id=self.id, name="my-worker", version="0.14.1",
        )  # fmt: skip
        assert row["worker_id"] == self.id

    def queue(self, step: str) -> str:
        return "f" if self.mode == "flow" else f"f__{step}"

    def beat(self) -> bool:
        (row,) = named(
            self.engine,
            "UPDATE pgflow.workers SET last_heartbeat_at = clock_timestamp() WHERE worker_id = %(id)s "
            "RETURNING (deprecated_at IS NOT NULL) AS is_deprecated",
            id=self.id,
        )
        return bool(row["is_deprecated"])

    def poll(self, step: str) -> list[dict[str, Any]]:
        messages = named(
            self.engine,
            "SELECT * FROM pgmq.read_with_poll(queue_name => %(queue)s, vt => 5, qty => 10, max_poll_seconds => 2, "
            "poll_interval_ms => 100)",
            queue=self.queue(step),
        )
        selector = "" if self.mode == "flow" else ", step_slug => %(step)s"
        return named(
            self.engine,
            "SELECT * FROM pgflow.start_tasks(flow_slug => %(slug)s, msg_ids => %(ids)s::bigint[], "
            f"worker_id => %(id)s::uuid, queue_name => %(queue)s::text{selector})",
            # As the client sends them: bigint ids are strings there.
            slug="f", ids=[str(m["msg_id"]) for m in messages], id=self.id, queue=self.queue(step), step=step,
        )  # fmt: skip

    def complete(self, task: dict[str, Any]) -> None:
        named(
            self.engine,
            "SELECT pgflow.complete_task(run_id => %(run)s::uuid, step_slug => %(step)s::text, "
            "task_index => %(index)s::int, output => %(output)s::jsonb)",
            run=str(task["run_id"]), step=task["step_slug"], index=task["task_index"],
            output=json.dumps(HANDLERS[task["step_slug"]]),
        )  # fmt: skip

    def fail(self, task: dict[str, Any]) -> None:
        named(
            self.engine,
            "SELECT pgflow.fail_task(run_id => %(run)s::uuid, step_slug => %(step)s::text, "
            "task_index => %(index)s::int, error_message => %(error)s::text)",
            run=str(task["run_id"]), step=task["step_slug"], index=task["task_index"], error="Error: broken",
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["flow", "step"])
def test_a_typescript_worker_drives_a_run_to_its_end(engine: Engine, mode: str) -> None:
    worker = TypeScript(engine, mode)
    (run,) = named(
        engine,
        "SELECT * FROM pgflow.start_flow(flow_slug => %(slug)s::text, input => %(input)s::jsonb)",
        slug="f", input='{"x": 1}',
    )  # fmt: skip
    assert worker.beat() is False

    (first,) = worker.poll("a")
    assert (first["input"], first["flow_input"], first["attempts_count"]) == ({}, {"x": 1}, 1)
    worker.fail(first)
    (again,) = worker.poll("a")
    assert (again["msg_id"], again["attempts_count"]) == (first["msg_id"], 2)
    worker.complete(again)

    items = worker.poll("m")
    assert {(t["task_index"], t["input"], t["flow_input"]) for t in items} == {(0, 1, None), (1, 2, None)}
    query = "SELECT input FROM pgflow.runs WHERE run_id = %(run)s"
    assert named(engine, query, run=run["run_id"]) == [{"input": {"x": 1}}]
    for item in items:
        worker.complete(item)

    (last,) = worker.poll("z")
    assert last["input"] == {"a": [1, 2], "m": ["item", "item"]}
    worker.complete(last)
    assert engine.run(run["run_id"])["status"] == "completed"
    assert engine.run(run["run_id"])["output"] == {"z": {"done": True}}

    engine.execute("update pgflow.workers set deprecated_at = now()")
    assert worker.beat() is True
    named(engine, "SELECT pgflow.mark_worker_stopped(%(id)s::uuid)", id=str(worker.id))
    assert engine.value("select stopped_at is not null from pgflow.workers") is True


def test_a_typescript_worker_finds_its_definition_at_its_second_start(engine: Engine) -> None:
    TypeScript(engine, "flow")
    query = "SELECT pgflow.ensure_flow_compiled(%(slug)s, %(shape)s::jsonb, 'flow'::text, null::jsonb) as result"
    (verified,) = named(engine, query, slug="f", shape=shape())
    assert verified["result"]["status"] == "verified"
    (mismatch,) = named(engine, query, slug="f", shape=json.dumps({"steps": []}))
    assert mismatch["result"]["status"] == "mismatch"


def test_a_browser_starts_a_run_and_looks_at_it(engine: Engine) -> None:
    TypeScript(engine, "flow")
    run_id = uuid.uuid4()
    (started,) = named(
        engine,
        "SELECT pgflow.start_flow_with_states(flow_slug => 'f', input => '{}'::jsonb, run_id => %(run)s) as result",
        run=run_id,
    )
    (seen,) = named(engine, "SELECT pgflow.get_run_with_states(run_id => %(run)s) as result", run=run_id)
    assert started["result"]["run"]["run_id"] == str(run_id)
    assert seen["result"]["run"] == started["result"]["run"]
    assert {step["step_slug"] for step in seen["result"]["steps"]} == {"a", "m", "z"}


def test_a_compiled_migration_runs(engine: Engine) -> None:
    for statement in (
        "SELECT pgflow.create_flow('f', max_attempts => 5, base_delay => 2, timeout => 9);",
        "SELECT pgflow.add_step('f', 'a');",
        "SELECT pgflow.add_step('f', 'm', ARRAY['a'], timeout => 4, start_delay => 0, step_type => 'map');",
        "SELECT pgflow.add_step('f', 'z', ARRAY['a', 'm'], max_attempts => 1);",
    ):
        engine.execute(statement)
    stored = engine.value("select pgflow._get_flow_shape('f')")
    assert [(s["slug"], s["stepType"], s["dependencies"]) for s in stored["steps"]] == [
        ("a", "single", []),
        ("m", "map", ["a"]),
        ("z", "single", ["a", "m"]),
    ]


# 5.2: the Elixir worker


class Elixir:
    """The statements of an Elixir worker, in its order; rows are read by position."""

    def __init__(self, engine: Engine, flow: str = "MyFlow") -> None:
        self.engine = engine
        self.flow = flow
        self.id = uuid.uuid4()
        query = "SELECT pgflow.ensure_flow_compiled($1::text, $2::jsonb)"
        with engine.transaction() as own:
            ((self.compiled,),) = numbered(own, query, flow, shape(maxAttempts=1, baseDelay=1, timeout=30))
            numbered(own, "UPDATE pgflow.flows SET flow_type = $1 WHERE flow_slug = $2", "flow", flow)
            numbered(own, "SELECT pgflow.track_worker_function($1, 'process')", "elixir:My")
        numbered(engine, "SELECT pgflow.register_worker($1, $2, $3)", self.id, flow.lower(), "elixir:My")

    def poll(self) -> list[tuple[Any, ...]]:
        messages = numbered(
            self.engine,
            "SELECT msg_id, read_ct, enqueued_at, vt, message "
            "FROM pgmq.read(queue_name => $1::text, vt => 5, qty => 10)",
            self.flow.lower(),
        )
        return numbered(
            self.engine,
            "SELECT * FROM pgflow.start_tasks($1::text, $2::bigint[], $3::uuid, $4::text)",
            self.flow, [m[0] for m in messages], self.id, self.flow.lower(),
        )  # fmt: skip

    def complete(self, task: tuple[Any, ...]) -> str:
        query = "SELECT * FROM pgflow.complete_task($1, $2, $3, $4::jsonb)"
        (row,) = numbered(self.engine, query, task[1], task[2], task[5], json.dumps(HANDLERS[task[2]]))
        return str(row[5])

    def fail(self, task: tuple[Any, ...]) -> str:
        query = "SELECT * FROM pgflow.fail_task($1, $2, $3, $4)"
        (row,) = numbered(self.engine, query, task[1], task[2], task[5], "broken")
        return str(row[5])

    def start(self, value: Any) -> uuid.UUID:
        query = "SELECT run_id FROM pgflow.start_flow($1, $2::jsonb)"
        ((run,),) = numbered(self.engine, query, self.flow, json.dumps(value))
        assert isinstance(run, uuid.UUID)
        return run


def test_an_elixir_worker_drives_a_run_to_its_end(engine: Engine) -> None:
    worker = Elixir(engine)
    assert worker.compiled["status"] == "compiled"
    assert numbered(engine, "SELECT pgflow.flow_exists($1)", "MyFlow") == [(True,)]
    run = worker.start({"x": 1})
    (first,) = worker.poll()
    message = engine.task(run, "a")["message_id"]
    assert first == ("MyFlow", run, "a", {}, message, 0, {"x": 1}, 1)
    assert worker.complete(first) == "completed"
    items = worker.poll()
    assert {(item[5], item[3]) for item in items} == {(0, 1), (1, 2)}
    assert [worker.complete(item) for item in items] == ["completed", "completed"]
    (last,) = worker.poll()
    assert last[3] == {"a": [1, 2], "m": ["item", "item"]}
    assert worker.complete(last) == "completed"
    query = "SELECT status, output FROM pgflow.runs WHERE run_id = $1"
    assert numbered(engine, query, run) == [("completed", {"z": {"done": True}})]
    assert numbered(engine, "SELECT pgflow.get_flow_input($1)", run) == [({"x": 1},)]
    assert numbered(engine, "SELECT pgflow.get_step_output($1, $2)", run, "m") == [(["item", "item"],)]
    numbered(engine, "SELECT pgflow.mark_worker_stopped($1)", worker.id)
    engine.age(7_200)
    query = "SELECT * FROM pgflow.prune_data_older_than(make_interval(hours => $1), $2)"
    assert numbered(engine, query, 1, ["MyFlow"]) == [(1, 3, 4, 1)]


def test_an_elixir_worker_learns_that_a_callback_came_too_late(engine: Engine) -> None:
    worker = Elixir(engine)
    run = worker.start({})
    (first,) = worker.poll()
    worker.complete(first)
    one, two = worker.poll()
    assert worker.fail(one) == "failed"
    assert worker.complete(two) == worker.fail(two) == "cancelled"
    assert engine.run(run)["status"] == "failed"


def test_an_elixir_worker_that_starts_again_verifies(engine: Engine) -> None:
    Elixir(engine)
    assert Elixir(engine).compiled["status"] == "verified"
    assert len(engine.rows("select from pgflow.workers")) == 2


def test_elixir_recovery_requeues_then_gives_up_then_escalates(engine: Engine) -> None:
    worker = Elixir(engine)
    run = worker.start({})
    for _ in range(3):
        assert len(worker.poll()) == 1
        engine.age(91)
        assert numbered(engine, "SELECT * FROM pgflow.recover_stalled_tasks(60)") == [(1, 1)]
    assert len(worker.poll()) == 1
    engine.age(91)
    assert numbered(engine, "SELECT * FROM pgflow.recover_stalled_tasks(60)") == [(0, 0)]
    assert numbered(engine, "SELECT pgflow.escalate_permanently_stalled()") == [(1,)]
    assert engine.run(run)["status"] == "failed"


def test_both_workers_share_one_flow(engine: Engine) -> None:
    typescript = TypeScript(engine, "flow")
    elixir = Elixir(engine, "f")
    assert elixir.compiled["status"] == "verified"
    run = elixir.start({})
    (first,) = typescript.poll("a")
    typescript.complete(first)
    items = elixir.poll()
    assert [elixir.complete(item) for item in items] == ["completed", "completed"]
    (last,) = typescript.poll("z")
    typescript.complete(last)
    assert engine.run(run)["status"] == "completed"


def test_starting_a_flow_that_was_not_compiled_names_the_constraint(engine: Engine) -> None:
    before = engine.everything()
    with pytest.raises(errors.ForeignKeyViolation) as raised:
        numbered(engine, "SELECT * FROM pgflow.start_flow($1, $2::jsonb)", "unknown", "{}")
    assert raised.value.diag.constraint_name == "runs_flow_slug_fkey"
    assert engine.everything() == before
