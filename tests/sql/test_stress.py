"""Many sessions on the same runs at once: no deadlock, every run ends, every counter is right."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
from support import invariants
from support.engine import Engine
from support.processes import wait_for

if TYPE_CHECKING:
    import uuid

SESSIONS = 8
RUNS = 200
OUTCOMES = {"completed": 80, "failed": 10, "released": 5, "crashed": 3, "failed_for_good": 2}


def define(engine: Engine) -> None:
    engine.flow("s", max_attempts=2)
    engine.step("a", flow="s")
    engine.step("m", "a", flow="s", step_type="map", when_exhausted="skip")
    engine.step("n", "m", flow="s", step_type="map", when_exhausted="skip-cascade")
    engine.step("c", "a", flow="s", required_input_pattern={"a": [1]}, when_unmet="skip")
    engine.step("d", "a", flow="s", forbidden_input_pattern={"a": [4]}, when_unmet="fail", when_exhausted="skip")
    engine.step("z", "n", "c", flow="s", when_exhausted="fail")


class Session:
    """Works on whatever it gets, by every way there is, until told to stop."""

    def __init__(self, dsn: str, seed: int, runs: list[uuid.UUID]) -> None:
        self.dsn = dsn
        self.chance = random.Random(seed)
        self.runs = runs
        self.statuses: set[str] = set()
        self.error: Exception | None = None

    def work(self, finished: threading.Event) -> None:
        try:
            with psycopg.connect(self.dsn, autocommit=True) as own:
                engine = Engine(self.dsn, own)
                worker = engine.worker(queue="s")
                while not finished.is_set():
                    self.settle(engine, worker)
                    self.disturb(engine, worker)
        except Exception as error:
            self.error = error
            finished.set()

    def settle(self, engine: Engine, worker: uuid.UUID) -> None:
        if self.chance.random() < 0.3:
            tasks = engine.claim(worker, "s", quantity=7)
            for task in tasks:
                key = (task["run_id"], task["step_slug"], task["task_index"])
                if self.chance.random() < 0.1:
                    engine.fail(*key)
                else:
                    engine.complete(*key, self.output())
            return
        tasks = engine.own_claim(worker, "s", quantity=self.chance.choice([3, 10, 30]))
        self.chance.shuffle(tasks)
        items: list[tuple[dict[str, Any], str, Any]] = []
        for task in tasks:
            (outcome,) = self.chance.choices(list(OUTCOMES), list(OUTCOMES.values()))
            items.append((task, outcome, self.output() if outcome == "completed" else "no luck"))
        if self.chance.random() < 0.3:
            self.statuses |= {engine.settle_one(worker, item) for item in items}
            return
        while items:
            verdicts = engine.settle(worker, items)
            self.statuses |= {verdict["status"] for verdict in verdicts}
            items = [items[verdict["place"] - 1] for verdict in verdicts if verdict["status"] == "busy"]

    def disturb(self, engine: Engine, worker: uuid.UUID) -> None:
        if self.chance.random() < 0.1:
            engine.execute("select * from pgflow.recover_stalled_tasks(-60.0)")
        if self.chance.random() < 0.05:
            engine.execute("select pgflow.requeue_stalled_tasks()")
        if self.chance.random() < 0.05:
            engine.execute("select * from pgflow_otp.release_worker(%s)", worker)
            engine.execute("update pgflow.workers set stopped_at = null where worker_id = %s", worker)
        if self.chance.random() < 0.05:
            engine.execute("select pgflow.escalate_permanently_stalled()")
        for action in ("cancel", "retry"):
            if self.chance.random() < 0.03:
                # Runs that have ended cannot be cancelled, and others not be retried.
                with suppress(psycopg.errors.ObjectNotInPrerequisiteState):
                    engine.execute(f"select pgflow_otp.{action}_run(%s, 'stress')", self.chance.choice(self.runs))

    def output(self) -> Any:
        return list(range(self.chance.randrange(6)))


def test_sessions_that_do_everything_at_once_do_not_get_in_each_others_way(engine: Engine, database: str) -> None:
    define(engine)
    runs = [engine.start(flow="s") for _ in range(RUNS)]
    finished = threading.Event()
    sessions = [Session(database, seed, runs) for seed in range(SESSIONS)]
    threads = [threading.Thread(target=session.work, args=(finished,)) for session in sessions]
    for thread in threads:
        thread.start()
    unfinished = "select count(*) from pgflow.runs where status = 'started'"
    try:
        wait_for(lambda: finished.is_set() or engine.value(unfinished) == 0, "the end of all runs", 120)
    finally:
        finished.set()
        for thread in threads:
            thread.join()
    assert [session.error for session in sessions if session.error] == []
    # A run that was retried in the last moment goes on: quietly to its end.
    worker = engine.worker(queue="s")
    engine.execute("select * from pgflow.recover_stalled_tasks(-60.0)")
    while engine.value(unfinished):
        engine.execute("update pgmq.q_s set vt = now()")
        tasks = engine.own_claim(worker, "s")
        engine.settle(worker, [(task, "completed", []) for task in tasks])
    invariants.check(engine)
    assert {"completed", "queued", "failed"} <= set().union(*(session.statuses for session in sessions))
