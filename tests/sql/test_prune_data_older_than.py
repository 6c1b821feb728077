"""pgflow.prune_data_older_than (sql-contract 4.2)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import errors

if TYPE_CHECKING:
    import uuid

    from support.engine import Engine

DAY = 86_400


def prune(engine: Engine, *flows: str, interval: str = "1 day") -> dict[str, Any]:
    query = "select * from pgflow.prune_data_older_than(%s::interval, %s::text[])"
    return engine.row(query, interval, list(flows) or None)


def counts(runs: int = 0, states: int = 0, tasks: int = 0, workers: int = 0) -> dict[str, int]:
    return {
        "deleted_runs": runs,
        "deleted_step_states": states,
        "deleted_step_tasks": tasks,
        "deleted_workers": workers,
    }


def completed(engine: Engine, flow: str = "f") -> uuid.UUID:
    """A completed run: a map of two, then a single step."""
    engine.flow(flow, max_attempts=1)
    engine.step("m", flow=flow, step_type="map")
    engine.step("z", "m", flow=flow)
    run = engine.start([1, 2], flow=flow)
    engine.claim(flow=flow)
    for index in (0, 1):
        engine.complete(run, "m", index, index)
    engine.claim(flow=flow)
    engine.complete(run, "z", output=1)
    assert engine.run(run)["status"] == "completed"
    return run


def age(engine: Engine, seconds: float = 2 * DAY) -> None:
    engine.age(seconds)
    for queue in engine.rows("select lower(queue_name) as name from pgmq.list_queues()"):
        engine.execute(
            f'update pgmq."a_{queue["name"]}" set archived_at = archived_at - make_interval(secs => {seconds})'
        )


def left(engine: Engine) -> dict[str, int]:
    tables = ("runs", "step_states", "step_tasks", "workers")
    return {table: engine.value(f"select count(*) from pgflow.{table}") for table in tables}


def test_removes_a_completed_run_and_all_of_it(engine: Engine) -> None:
    completed(engine)
    age(engine)
    assert prune(engine) == counts(runs=1, states=2, tasks=3, workers=2)
    assert left(engine) == {"runs": 0, "step_states": 0, "step_tasks": 0, "workers": 0}
    assert engine.live() == engine.archived() == []


def test_definitions_queues_and_events_stay(engine: Engine) -> None:
    completed(engine)
    age(engine)
    before = engine.everything()
    prune(engine)
    after = engine.everything()
    for kept in ("flows", "steps", "deps", "worker_functions", "queues", "sent"):
        assert after[kept] == before[kept]


def test_removes_a_failed_run_whatever_its_steps_and_tasks_are(engine: Engine) -> None:
    engine.flow(max_attempts=1)
    engine.step("a")
    engine.step("b")
    engine.step("c", "b")
    run = engine.start()
    engine.claim()
    engine.fail(run, "a")
    assert engine.statuses(run) == {"a": "failed", "b": "started", "c": "created"}
    age(engine)
    assert prune(engine) == counts(runs=1, states=3, tasks=2, workers=1)


def test_a_run_that_has_not_ended_is_kept_however_old(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    age(engine, 1000 * DAY)
    before = engine.everything()
    assert prune(engine) == counts()
    assert engine.everything() == before
    assert engine.run(run)["status"] == "started"


@pytest.mark.parametrize(("beyond", "runs"), [(0, 0), (0.001, 1)])
@pytest.mark.parametrize("column", ["completed_at", "failed_at"])
def test_the_cutoff_counts_from_the_end_of_the_run(engine: Engine, column: str, beyond: float, runs: int) -> None:
    engine.flow()
    engine.start()
    status = column.removesuffix("_at")
    with engine.transaction() as own:  # Within one transaction now() stands still.
        own.execute(
            f"update pgflow.runs set status = '{status}', completed_at = null, started_at = now() - interval '9 days'"
        )
        own.execute(f"update pgflow.runs set {column} = now() - interval '1 day' - make_interval(secs => %s)", beyond)
        assert prune(own) == counts(runs=runs)


@pytest.mark.parametrize(("beyond", "workers"), [(0, 0), (0.001, 1)])
def test_workers_go_by_their_last_heartbeat(engine: Engine, beyond: float, workers: int) -> None:
    engine.worker()
    with engine.transaction() as own:
        own.execute(
            "update pgflow.workers set started_at = now() - interval '9 days', "
            "last_heartbeat_at = now() - interval '1 day' - make_interval(secs => %s)",
            beyond,
        )
        assert prune(own) == counts(workers=workers)


def test_a_task_of_a_removed_worker_is_kept_without_it(engine: Engine) -> None:
    engine.flow()
    engine.step("a")
    run = engine.start()
    engine.claim()
    age(engine)
    before = engine.task(run, "a")
    assert prune(engine) == counts(workers=1)
    assert engine.task(run, "a") == before | {"last_worker_id": None}


def test_live_messages_of_removed_runs_are_deleted_and_no_others(engine: Engine) -> None:
    engine.flow()
    engine.step("m", step_type="map")
    old, young = engine.start([1, 2]), engine.start([1])
    engine.execute("select pgmq.send('f', '{\"stranger\": true}')")
    engine.execute(
        "update pgflow.runs set status = 'failed', started_at = now() - interval '9 days', "
        "failed_at = now() - interval '2 days' where run_id = %s",
        old,
    )
    assert prune(engine) == counts(runs=1, states=1, tasks=2)
    assert [m["message"].get("run_id") for m in engine.live()] == [str(young), None]
    assert engine.archived() == []


def test_live_messages_are_deleted_from_each_queue_by_its_own_ids(engine: Engine) -> None:
    steps: list[dict[str, Any]] = [{"slug": slug, "stepType": "single", "dependencies": []} for slug in ("a", "b")]
    engine.execute("select pgflow.ensure_flow_compiled('f', %s::jsonb, 'step')", json.dumps({"steps": steps}))
    old, young = engine.start(), engine.start()
    engine.execute("update pgflow.step_tasks set message_id = null where run_id = %s and step_slug = 'b'", old)
    engine.execute(
        "update pgflow.runs set status = 'failed', started_at = now() - interval '9 days', "
        "failed_at = now() - interval '2 days' where run_id = %s",
        old,
    )
    assert prune(engine) == counts(runs=1, states=2, tasks=2)
    assert [m["message"]["run_id"] for m in engine.live("f__a")] == [str(young)]
    assert [m["message"]["run_id"] for m in engine.live("f__b")] == [str(old), str(young)]


def test_old_archived_messages_go_and_young_ones_stay(engine: Engine) -> None:
    completed(engine)
    engine.execute("update pgmq.a_f set archived_at = archived_at - interval '2 days' where msg_id = 1")
    assert prune(engine) == counts()
    assert [m["msg_id"] for m in engine.archived()] == [2, 3]


def test_old_archived_messages_go_from_the_queue_of_every_step(engine: Engine) -> None:
    steps: list[dict[str, Any]] = [{"slug": slug, "stepType": "single", "dependencies": []} for slug in ("a", "b")]
    engine.execute("select pgflow.ensure_flow_compiled('f', %s::jsonb, 'step')", json.dumps({"steps": steps}))
    engine.start()
    for queue in ("f__a", "f__b"):
        engine.execute("select pgmq.archive(%s, 1)", queue)
    age(engine)
    prune(engine)
    assert engine.archived("f__a") == engine.archived("f__b") == []


def test_the_default_queue_of_a_flow_without_steps_is_pruned_too(engine: Engine) -> None:
    engine.flow()
    engine.execute("select pgmq.send('f', '{}')")
    engine.execute("select pgmq.archive('f', 1)")
    age(engine)
    prune(engine)
    assert engine.archived() == []


def test_a_queue_that_only_bears_the_name_of_a_flow_with_step_queues_is_not_touched(engine: Engine) -> None:
    steps: list[dict[str, Any]] = [{"slug": "a", "stepType": "single", "dependencies": []}]
    engine.execute("select pgflow.ensure_flow_compiled('f', %s::jsonb, 'step')", json.dumps({"steps": steps}))
    engine.execute("select pgmq.create('f')")
    engine.execute("select pgmq.send('f', '{}')")
    engine.execute("select pgmq.archive('f', 1)")
    age(engine)
    prune(engine)
    assert [m["msg_id"] for m in engine.archived()] == [1]


def test_a_queue_of_nobody_is_not_touched(engine: Engine) -> None:
    engine.flow()
    engine.execute("select pgmq.create('stranger')")
    engine.execute("select pgmq.send('stranger', '{}')")
    engine.execute("select pgmq.archive('stranger', 1)")
    age(engine)
    prune(engine)
    assert len(engine.archived("stranger")) == 1


def test_a_missing_archive_table_is_skipped(engine: Engine) -> None:
    completed(engine, "f")
    completed(engine, "g")
    age(engine)
    engine.execute("drop table pgmq.a_f")
    assert prune(engine)["deleted_runs"] == 2
    assert engine.archived("g") == []


def test_a_filter_keeps_runs_and_archives_of_other_flows(engine: Engine) -> None:
    completed(engine, "f")
    kept = completed(engine, "g")
    age(engine)
    assert prune(engine, "f") == counts(runs=1, states=2, tasks=3, workers=4)
    assert [row["run_id"] for row in engine.rows("select run_id from pgflow.runs")] == [kept]
    assert (len(engine.archived("f")), len(engine.archived("g"))) == (0, 3)


def test_a_filter_names_several_flows_exactly(engine: Engine) -> None:
    for flow in ("f", "g", "h"):
        completed(engine, flow)
    age(engine)
    assert prune(engine, "f", "h", "G", "unknown")["deleted_runs"] == 2
    assert [row["flow_slug"] for row in engine.rows("select flow_slug from pgflow.runs")] == ["g"]


def test_workers_are_not_filtered(engine: Engine) -> None:
    engine.worker(queue="elsewhere")
    age(engine)
    assert prune(engine, "unknown") == counts(workers=1)


def test_an_empty_filter_means_all_flows(engine: Engine) -> None:
    completed(engine, "f")
    completed(engine, "g")
    age(engine)
    query = "select deleted_runs from pgflow.prune_data_older_than('1 day', array[]::text[])"
    assert engine.value(query) == 2


def test_mixed_case_flows_are_pruned_by_their_lowercase_queue(engine: Engine) -> None:
    completed(engine, "MyFlow")
    age(engine)
    assert prune(engine, "MyFlow")["deleted_runs"] == 1
    assert engine.archived("myflow") == []


def test_a_second_call_has_nothing_to_do(engine: Engine) -> None:
    completed(engine)
    age(engine)
    prune(engine)
    before = engine.everything()
    assert prune(engine) == counts()
    assert engine.everything() == before


def test_never_lists_the_queues(engine: Engine) -> None:
    completed(engine)
    age(engine)
    engine.execute(
        "create or replace function pgmq.list_queues() returns setof pgmq.queue_record language plpgsql "
        "as $$ begin raise exception 'listed'; end $$"
    )
    assert prune(engine)["deleted_runs"] == 1


def test_there_is_no_form_with_one_argument(engine: Engine) -> None:
    with pytest.raises(errors.UndefinedFunction):
        engine.execute("select pgflow.prune_data_older_than('1 day'::interval)")


def test_waits_for_an_outcome_that_holds_a_run_to_be_removed(engine: Engine) -> None:
    run = completed(engine)
    age(engine)
    with engine.transaction() as other:
        other.execute("select from pgflow.runs where run_id = %s for update", run)
        thread, results = engine.in_another_session(prune)
        engine.wait_blocked()
        assert len(engine.rows("select from pgflow.step_tasks for update skip locked")) == 3
    thread.join()
    assert results == [counts(runs=1, states=2, tasks=3, workers=2)]
