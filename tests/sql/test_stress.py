"""Many sessions on the same runs at once: no deadlock, every run ends, every counter is right."""

from __future__ import annotations

import json
import random
import threading
import uuid
from typing import Any

import psycopg

SESSIONS = 8
RUNS = 60
OUTCOMES = ("completed", "failed", "released", "crashed", "failed_for_good")


def test_sessions_that_claim_complete_fail_skip_and_requeue_do_not_get_in_each_others_way(
    connection: psycopg.Connection[Any], database: str
) -> None:
    connection.execute("select pgflow.create_flow('s', 2, 0, 60)")
    connection.execute("select pgflow.add_step('s', 'a')")
    connection.execute("select pgflow.add_step('s', 'm', array['a'], step_type => 'map', when_exhausted => 'skip')")
    connection.execute(
        "select pgflow.add_step('s', 'n', array['m'], step_type => 'map', when_exhausted => 'skip-cascade')"
    )
    connection.execute(
        "select pgflow.add_step('s', 'c', array['a'], required_input_pattern => '{\"a\": [1]}', when_unmet => 'skip')"
    )
    connection.execute("select pgflow.add_step('s', 'z', array['n', 'c'], when_exhausted => 'fail')")
    runs = [
        connection.execute("select run_id from pgflow.start_flow('s', '{}')").fetchone()[0]  # type: ignore[index]
        for _ in range(RUNS)
    ]
    errors: list[Exception] = []
    finished = threading.Event()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        worker = uuid.uuid4()
        try:
            with psycopg.connect(database, autocommit=True) as own:
                own.execute("select pgflow.register_worker(%s, 's', 'python:x')", (worker,))
                while not finished.is_set():
                    step(own, worker, chance)
        except Exception as error:
            errors.append(error)
            finished.set()

    def step(own: psycopg.Connection[Any], worker: uuid.UUID, chance: random.Random) -> None:
        claimed = own.execute("select * from pgflow_otp.claim_tasks('s', 's', %s, 1, 7)", (worker,)).fetchall()
        chance.shuffle(claimed)
        for task in claimed:
            outcome = chance.choices(OUTCOMES, [80, 10, 5, 3, 2])
            output = json.dumps(list(range(chance.randrange(6)))) if task[1] != "z" else "1"
            settle = "select pgflow_otp.settle_task(%s, %s, %s, %s, %s, %s, %s, 'no luck')"
            own.execute(settle, (task[0], task[1], task[2], worker, task[5], outcome[0], output))
        if chance.random() < 0.1:
            own.execute("select * from pgflow.recover_stalled_tasks(-60.0)")
        if chance.random() < 0.05:
            own.execute("select * from pgflow_otp.release_worker(%s)", (worker,))
            own.execute("update pgflow.workers set stopped_at = null where worker_id = %s", (worker,))
        if chance.random() < 0.05:
            own.execute("select pgflow.escalate_permanently_stalled()")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(SESSIONS)]
    for thread in threads:
        thread.start()
    unfinished = "select count(*) from pgflow.runs where status = 'started'"
    for _ in range(600):
        row = connection.execute(unfinished).fetchone()
        if finished.wait(0.1) or row == (0,):
            break
    finished.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert connection.execute(unfinished).fetchone() == (0,)
    assert len(runs) == RUNS
    check_invariants(connection)


def check_invariants(connection: psycopg.Connection[Any]) -> None:
    """What has to hold when everything has ended."""
    for claim, query in {
        "a run's counter is its unfinished steps": """
            select r.run_id from pgflow.runs r join pgflow.step_states ss using (run_id) where r.status = 'completed'
            group by r.run_id
            having r.remaining_steps <> count(*) filter (where ss.status not in ('completed', 'skipped'))""",
        "a step's counter is its unfinished tasks": """
            select ss.run_id from pgflow.step_states ss join pgflow.runs r using (run_id)
            left join pgflow.step_tasks t using (run_id, step_slug)
            where ss.status in ('started', 'completed') and r.status = 'completed'
            group by ss.run_id, ss.step_slug
            having ss.remaining_tasks <> count(*) filter (where t.status in ('queued', 'started'))""",
        "no task is open in a run that has ended": """
            select t.run_id from pgflow.step_tasks t join pgflow.runs r using (run_id)
            where r.status <> 'started' and t.status in ('queued', 'started')""",
        "no message is live whose task has ended": """
            select q.msg_id from pgmq.q_s q join pgflow.step_tasks t on t.message_id = q.msg_id
            where t.status not in ('queued', 'started')""",
        "a completed map has the output of each task": """
            select ss.run_id from pgflow.step_states ss join pgflow.steps st using (flow_slug, step_slug)
            where st.step_type = 'map' and ss.status = 'completed'
            and jsonb_array_length(ss.output) <> ss.initial_tasks""",
    }.items():
        assert connection.execute(query.encode()).fetchall() == [], claim
