"""What the database pays: CPU of the backend and wall time, per call and per item, alone and in batches."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness import Backend, Report, fresh_database, parse_options, server

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 100
SHAPES: dict[str, list[tuple[str, list[str]]]] = {
    "one": [("a", [])],
    "chain": [("a", []), ("b", ["a"]), ("c", ["b"])],
    "diamond": [("a", []), ("b", ["a"]), ("c", ["a"]), ("d", ["b", "c"])],
}
MAPS = (100, 1_000, 10_000, 100_000)
ITEM = {"name": "an item of a map", "number": 12345}
INPUT = '{"order": 1, "customer": "c"}'
OUTPUT = '{"done": true}'

# The rows that a run of one step costs whoever writes them, without conditions, maps, dependents and events: nothing
# with the same tables, constraints and queue can be much faster.
LOWER_BOUND = """
create schema bench;
create function bench.start(p_slug text, p_input jsonb) returns uuid language plpgsql as $$
declare
  v_run_id constant uuid := gen_random_uuid();
begin
  insert into pgflow.runs (run_id, flow_slug, input, remaining_steps) values (v_run_id, p_slug, p_input, 1);
  insert into pgflow.step_states (
    flow_slug, run_id, step_slug, status, initial_tasks, remaining_tasks, started_at
  ) values (p_slug, v_run_id, 'a', 'started', 1, 1, now());
  insert into pgflow.step_tasks (flow_slug, run_id, step_slug, message_id, queue_name)
  select p_slug, v_run_id, 'a', s, p_slug
  from pgmq.send(p_slug, jsonb_build_object(
    'flow_slug', p_slug, 'run_id', v_run_id, 'step_slug', 'a', 'task_index', 0)) s;
  return v_run_id;
end
$$;
create function bench.complete(p_run_id uuid, p_output jsonb) returns void language plpgsql as $$
declare
  v_task pgflow.step_tasks;
begin
  perform from pgflow.runs r where r.run_id = p_run_id for update;
  update pgflow.step_tasks t set status = 'completed', completed_at = now(), output = p_output
  where t.run_id = p_run_id and t.step_slug = 'a' and t.task_index = 0
  returning t.* into v_task;
  update pgflow.step_states ss set status = 'completed', remaining_tasks = 0, completed_at = now(), output = p_output
  where ss.run_id = p_run_id and ss.step_slug = 'a';
  update pgflow.runs r set status = 'completed', remaining_steps = 0, completed_at = now(),
    output = jsonb_build_object('a', p_output)
  where r.run_id = p_run_id;
  perform pgmq.archive(v_task.queue_name, v_task.message_id);
end
$$;
"""

# Finished runs as they are stored, faster than by running them.
HISTORY = """
with made as (
  select gen_random_uuid() as run_id, g.n as message_id, now() - interval '1 hour' as at
  from generate_series(1, {runs}) as g(n)
), runs as (
  insert into pgflow.runs (run_id, flow_slug, status, input, output, remaining_steps, started_at, completed_at)
  select run_id, 'one', 'completed', '{input}', '{output}', 0, at, at from made
), states as (
  insert into pgflow.step_states (
    flow_slug, run_id, step_slug, status, remaining_tasks, initial_tasks, output, created_at, started_at, completed_at)
  select 'one', run_id, 'a', 'completed', 0, 1, '{output}', at, at, at from made
), tasks as (
  insert into pgflow.step_tasks (
    flow_slug, run_id, step_slug, message_id, status, attempts_count, output, queued_at, started_at, completed_at,
    last_worker_id, queue_name)
  select 'one', run_id, 'a', message_id, 'completed', 1, '{output}', at, at, at, '{worker}', 'one' from made
)
insert into pgmq.a_one (msg_id, read_ct, enqueued_at, archived_at, vt, message)
select message_id, 1, at, at, at,
  jsonb_build_object('flow_slug', 'one', 'run_id', run_id, 'step_slug', 'a', 'task_index', 0)
from made;
select setval(pg_get_serial_sequence('pgmq.q_one', 'msg_id'), {runs});
"""


@dataclass(frozen=True, slots=True)
class Task:
    """A claimed task."""

    run_id: uuid.UUID
    step_slug: str
    task_index: int
    started_at: Any


def main() -> None:
    options = parse_options(__doc__ or "")
    report = Report("sql", options)
    history = 10_000 if options.quick else 100_000
    backlog = 10_000 if options.quick else 100_000
    report.settings |= {"batch": BATCH, "history": history, "backlog": backlog}
    rounds = 3 if options.quick else 10
    with (
        server(options) as dsn,
        fresh_database(dsn) as empty,
        fresh_database(dsn) as full,
        Backend(empty) as backend,
        Backend(full) as full_backend,
    ):
        bench = SqlBench(report, backend, rounds)
        grown = SqlBench(report, full_backend, rounds, f" after {history} runs")
        grown.fill(history)
        bench.measure_lower_bound()
        for number in range(rounds + 1):  # in turns: a machine changes its speed within a minute
            bench.measure_shape("one", number)
            grown.measure_shape("one", number)
        for slug in ("chain", "diamond"):
            for number in range(rounds + 1):
                bench.measure_shape(slug, number)
        bench.measure_failures()
        bench.measure_maps(MAPS[:3] if options.quick else MAPS)
        grown.measure_backlog(backlog)
    judge(report, history, backlog)
    report.finish()


def judge(report: Report, history: int, backlog: int) -> None:
    """Ratios within this run, and what was aimed at on a machine whose calibration loop takes 40 to 65 ms."""
    for kind in ("start", "complete"):
        call = {"start": "start_flow", "complete": "complete_task"}[kind]
        report.ratio(f"{call} against its lower bound", f"{call}, one, CPU", f"lower bound of {kind}, CPU")
        report.ratio(
            f"{call} with history against without", f"{call}, one after {history} runs, CPU", f"{call}, one, CPU"
        )
        report.target(f"{call} alone (ms of CPU)", f"{call}, one, CPU", 0.9)
    for call, bound in {"start_flows": 0.2, "claim_tasks": 0.1, "settle_tasks": 0.2}.items():
        name = f"{call} of {BATCH}"
        report.ratio(
            f"{name} with history against without", f"{name}, one after {history} runs, CPU", f"{name}, one, CPU"
        )
        report.target(f"{name} (ms of CPU per item)", f"{name}, one, CPU", bound)
    for size in MAPS:
        report.target(
            f"claim from a map of {size} (ms of CPU per task)", f"claim_tasks of 100, map of {size}, CPU", 0.1
        )
    report.target("claim from a backlog (ms of CPU per task)", f"claim_tasks of 100, backlog of {backlog}, CPU", 0.1)
    report.target(f"start of a map of {MAPS[-1]} (ms)", f"start_flow, map of {MAPS[-1]}, wall", 4_000)


class SqlBench:
    """Drives runs through one backend and accounts for what each kind of call costs it."""

    def __init__(self, report: Report, backend: Backend, rounds: int, label: str = "") -> None:
        self.report = report
        self.backend = backend
        self.connection = backend.connection
        self.rounds = rounds
        self.label = label
        self.worker = uuid.uuid4()
        self.connection.execute("select pgflow.register_worker(%s, 'bench', 'python:bench')", (self.worker,))
        for slug, steps in SHAPES.items():
            self.define(slug)
            for step, parents in steps:
                self.connection.execute("select pgflow.add_step(%s, %s, %s)", (slug, step, parents))
        for slug, attempts in {"exhausted": 1, "retried": 1_000}.items():
            self.define(slug, attempts)
            self.connection.execute("select pgflow.add_step(%s, 'a')", (slug,))
        self.define("mapped")
        self.connection.execute("select pgflow.add_step('mapped', 'm', step_type => 'map')")

    def define(self, slug: str, max_attempts: int = 3) -> None:
        self.connection.execute("select pgflow.create_flow(%s, %s, 0)", (slug, max_attempts))

    def fill(self, runs: int) -> None:
        """Make finished runs, and tell the planner, as autovacuum would."""
        filled = {"runs": runs, "input": INPUT, "output": OUTPUT, "worker": self.worker}
        self.connection.execute(HISTORY.format(**filled).encode())
        self.connection.execute("vacuum analyze")

    def measure(self, key: str, count: int, work: Callable[..., Any], *args: Any) -> Any:
        """Do something to so many items, and note what one of them costs."""
        cpu, began = self.backend.cpu_ms(), time.perf_counter()
        result = work(*args)
        wall, after = (time.perf_counter() - began) * 1e3, self.backend.cpu_ms()
        self.report.add(f"{key}{self.label}, wall", "ms", wall / count)
        if cpu is not None and after is not None:
            self.report.add(f"{key}{self.label}, CPU", "ms", (after - cpu) / count)
        return result

    def unmeasured(self, _key: str, _count: int, work: Callable[..., Any], *args: Any) -> Any:
        """The first round of everything, in which plans are made and functions compiled."""
        return work(*args)

    # What is measured

    def measure_lower_bound(self) -> None:
        self.connection.execute(LOWER_BOUND.encode())
        runs: list[uuid.UUID] = []

        def start() -> None:
            for _ in range(BATCH):
                row = self.connection.execute("select bench.start('one', %s)", (INPUT,)).fetchone()
                assert row
                runs.append(row[0])

        def complete() -> None:
            for run in runs:
                self.connection.execute("select bench.complete(%s, %s)", (run, OUTPUT))

        for number in range(self.rounds + 1):
            runs.clear()
            self.report.calibrate()
            measure = self.measure if number else self.unmeasured
            measure("lower bound of start", BATCH, start)
            measure("lower bound of complete", BATCH, complete)

    def measure_shape(self, slug: str, number: int) -> None:
        """Runs of one shape from start to end: by single calls, and by those for many."""
        self.report.calibrate()
        measure = self.measure if number else self.unmeasured
        measure(f"start_flow, {slug}", BATCH, self.start, slug, BATCH)
        while messages := self.read(slug, 10):
            tasks = measure(f"start_tasks of 10, {slug}", len(messages), self.start_tasks, slug, messages)
            measure(f"complete_task, {slug}", len(tasks), self.complete, tasks)

        measure(f"start_flows of {BATCH}, {slug}", BATCH, self.start_many, slug, BATCH)
        for _ in SHAPES[slug]:
            tasks = measure(f"claim_tasks of {BATCH}, {slug}", BATCH, self.claim, slug, BATCH)
            measure(f"settle_tasks of {BATCH}, {slug}", BATCH, self.settle, tasks, "completed")

    def measure_failures(self) -> None:
        for slug, outcome in {"exhausted": "fails the run", "retried": "is retried"}.items():
            for number in range(self.rounds + 1):
                self.report.calibrate()
                measure = self.measure if number else self.unmeasured
                self.start(slug, BATCH)
                tasks = self.claim(slug, BATCH)
                measure(f"fail_task that {outcome}", len(tasks), self.fail, tasks)
                self.start(slug, BATCH)
                tasks = self.claim(slug, BATCH)
                name = f"settle_tasks of {BATCH} of which each {outcome}"
                measure(name, len(tasks), self.settle, tasks, "failed")

    def measure_maps(self, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            items = json.dumps([ITEM] * size)
            for number in range(2 if size > 10_000 else 4):
                self.report.calibrate()
                measure = self.measure if number else self.unmeasured
                measure(f"start_flow, map of {size}", 1, self.start, "mapped", 1, items)
                for _ in range(min(self.rounds, size // (150 if size >= 1_000 else 50))):
                    messages = self.read("mapped", 10)
                    name = f"start_tasks of 10, map of {size}"
                    tasks = measure(name, 10, self.start_tasks, "mapped", messages)
                    measure(f"complete_task, map of {size}", 10, self.complete, tasks)
                    tasks = measure(f"claim_tasks of 40, map of {size}", 40, self.claim, "mapped", 40)
                    measure(f"settle_tasks of 40, map of {size}", 40, self.settle, tasks, "completed")
                    if size >= 1_000:
                        name = f"claim_tasks of 100, map of {size}"
                        tasks = measure(name, 100, self.claim, "mapped", 100)
                        self.settle(tasks, "completed")
                self.connection.execute("select pgflow.delete_run(run_id) from pgflow.runs where flow_slug = 'mapped'")

    def measure_backlog(self, size: int) -> None:
        """Claims in front of many queued tasks that the statistics do not know of."""
        for table in ("pgflow.runs", "pgflow.step_states", "pgflow.step_tasks", "pgmq.q_one"):
            self.connection.execute(f"alter table {table} set (autovacuum_enabled = off)".encode())
        self.label = ""
        for _ in range(size // 1_000):
            name = f"start_flows of 1000, into a backlog of {size}"
            self.measure(name, 1_000, self.start_many, "one", 1_000)
        for _ in range(self.rounds * 2):
            self.report.calibrate()
            name = f"claim_tasks of {BATCH}, backlog of {size}"
            tasks = self.measure(name, BATCH, self.claim, "one", BATCH)
            name = f"settle_tasks of {BATCH}, backlog of {size}"
            self.measure(name, BATCH, self.settle, tasks, "completed")
            messages = self.read("one", 10)
            tasks = self.measure(
                f"start_tasks of 10, backlog of {size}", 10, lambda m=messages: self.start_tasks("one", m)
            )
            self.measure(f"complete_task, backlog of {size}", 10, self.complete, tasks)

    # Calls

    def start(self, slug: str, count: int, value: str = INPUT) -> None:
        for _ in range(count):
            self.connection.execute("select run_id from pgflow.start_flow(%s, %s)", (slug, value))

    def start_many(self, slug: str, count: int) -> None:
        self.connection.execute("select pgflow_otp.start_flows(%s, %s)", (slug, [INPUT] * count))

    def read(self, slug: str, count: int) -> list[int]:
        rows = self.connection.execute("select msg_id from pgmq.read(%s, 300, %s)", (slug, count)).fetchall()
        return [row[0] for row in rows]

    def start_tasks(self, slug: str, messages: list[int]) -> list[Task]:
        query = "select run_id, step_slug, task_index, null from pgflow.start_tasks(%s, %s::bigint[], %s, %s)"
        rows = self.connection.execute(query, (slug, messages, self.worker, slug)).fetchall()
        return [Task(*row) for row in rows]

    def claim(self, slug: str, count: int) -> list[Task]:
        query = "select run_id, step_slug, task_index, started_at from pgflow_otp.claim_tasks(%s, %s, %s, 5, %s)"
        return [Task(*row) for row in self.connection.execute(query, (slug, slug, self.worker, count)).fetchall()]

    def complete(self, tasks: list[Task]) -> None:
        query = "select pgflow.complete_task(%s, %s, %s, %s)"
        for task in tasks:
            self.connection.execute(query, (task.run_id, task.step_slug, task.task_index, OUTPUT))

    def fail(self, tasks: list[Task]) -> None:
        query = "select pgflow.fail_task(%s, %s, %s, 'no luck')"
        for task in tasks:
            self.connection.execute(query, (task.run_id, task.step_slug, task.task_index))

    def settle(self, tasks: list[Task], outcome: str) -> None:
        said = [OUTPUT if outcome == "completed" else "no luck"] * len(tasks)
        nothing = [None] * len(tasks)
        self.connection.execute(
            "select pgflow_otp.settle_tasks(%s, %s, %s, %s, %s, %s, %s::text[], %s::text[])",
            (
                self.worker,
                [task.run_id for task in tasks],
                [task.step_slug for task in tasks],
                [task.task_index for task in tasks],
                [task.started_at for task in tasks],
                [outcome] * len(tasks),
                said if outcome == "completed" else nothing,
                nothing if outcome == "completed" else said,
            ),
        )


if __name__ == "__main__":
    main()
