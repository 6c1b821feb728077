"""What the database pays: CPU of the backend and wall time, per call and per item, alone and in batches."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from harness import Backend, Report, fresh_database, parse_options, server

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 100
ROUNDS = 5
SHAPES = {
    "one": [("a", [], "single")],
    "chain": [("a", [], "single"), ("b", ["a"], "single"), ("c", ["b"], "single")],
    "diamond": [("a", [], "single"), ("b", ["a"], "single"), ("c", ["a"], "single"), ("d", ["b", "c"], "single")],
}
MAPS = (100, 1_000, 10_000, 100_000)
ITEM = {"name": "an item of a map", "number": 12345}


def main() -> None:
    options = parse_options(__doc__ or "")
    report = Report("sql", options)
    with server(options) as dsn:
        for history in (0, 10_000 if options.quick else 100_000):
            with fresh_database(dsn) as database, Backend(database) as backend:
                label = f" after {history} runs" if history else ""
                bench = SqlBench(report, backend, label, rounds=3 if options.quick else ROUNDS)
                bench.fill(history)
                bench.measure_shapes()
                report.calibrate()
                if not history:
                    bench.measure_maps(MAPS[:3] if options.quick else MAPS)
    report.finish()


class SqlBench:
    """Drives runs through one backend and accounts for what each kind of call costs it."""

    def __init__(self, report: Report, backend: Backend, label: str, rounds: int) -> None:
        self.report = report
        self.backend = backend
        self.connection = backend.connection
        self.label = label
        self.rounds = rounds
        self.worker = uuid.uuid4()
        self.connection.execute("select pgflow.register_worker(%s, 'bench', 'python:bench')", (self.worker,))
        for slug, steps in SHAPES.items():
            self.define(slug, steps)
        self.define("exhausted", SHAPES["one"], max_attempts=1)
        self.define("retried", SHAPES["one"], max_attempts=1_000)
        self.define("mapped", [("m", [], "map")])

    def define(self, slug: str, steps: list[tuple[str, list[str], str]], max_attempts: int = 3) -> None:
        self.connection.execute("select pgflow.create_flow(%s, %s, 0)", (slug, max_attempts))
        for step, parents, kind in steps:
            self.connection.execute("select pgflow.add_step(%s, %s, %s, step_type => %s)", (slug, step, parents, kind))

    def fill(self, history: int) -> None:
        """Make finished runs, the way they are stored, faster than by running them."""

    def measure(self, key: str, count: int, work: Callable[[], None]) -> None:
        cpu, began = self.backend.cpu_ms(), time.perf_counter()
        work()
        wall, after = (time.perf_counter() - began) * 1e3, self.backend.cpu_ms()
        self.report.add(f"{key}{self.label}, wall", "ms", wall / count)
        if cpu is not None and after is not None:
            self.report.add(f"{key}{self.label}, CPU", "ms", (after - cpu) / count)

    def measure_shapes(self) -> None:
        for slug in SHAPES:
            for number in range(self.rounds + 1):
                self.drive(slug, warming_up=number == 0)
        for slug in ("exhausted", "retried"):
            for number in range(self.rounds + 1):
                self.start(slug, BATCH)
                tasks = self.claim(slug, BATCH)
                if number:
                    self.measure(f"fail_task, {slug}", len(tasks), lambda tasks=tasks: self.fail(tasks))
                else:
                    self.fail(tasks)

    def drive(self, slug: str, warming_up: bool) -> None:
        measure = (lambda key, count, work: work()) if warming_up else self.measure
        measure(f"start_flow, {slug}", BATCH, lambda: self.start(slug, BATCH))
        while messages := self.read(slug, 10):
            tasks: list[Any] = []
            measure(f"start_tasks of 10, {slug}", len(messages), lambda: tasks.extend(self.start_tasks(slug, messages)))
            measure(f"complete_task, {slug}", len(tasks), lambda: self.complete(tasks))

    def measure_maps(self, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            items = json.dumps([ITEM] * size)
            self.measure(f"start_flow, map of {size}", 1, lambda: self.start("mapped", 1, items))
            for _ in range(self.rounds):
                messages = self.read("mapped", 10)
                tasks: list[Any] = []
                self.measure(
                    f"start_tasks of 10, map of {size}",
                    len(messages),
                    lambda: tasks.extend(self.start_tasks("mapped", messages)),
                )
                self.measure(f"complete_task, map of {size}", len(tasks), lambda: self.complete(tasks))
            self.connection.execute("select pgflow.delete_run(run_id) from pgflow.runs where flow_slug = 'mapped'")

    def start(self, slug: str, count: int, value: str = '{"order": 1, "customer": "c"}') -> None:
        for _ in range(count):
            self.connection.execute("select run_id from pgflow.start_flow(%s, %s)", (slug, value))

    def read(self, slug: str, count: int) -> list[int]:
        rows = self.connection.execute("select msg_id from pgmq.read(%s, 5, %s)", (slug, count)).fetchall()
        return [row[0] for row in rows]

    def claim(self, slug: str, count: int) -> list[Any]:
        return self.start_tasks(slug, self.read(slug, count))

    def start_tasks(self, slug: str, messages: list[int]) -> list[Any]:
        query = "select run_id, step_slug, task_index from pgflow.start_tasks(%s, %s::bigint[], %s, %s)"
        return self.connection.execute(query, (slug, messages, self.worker, slug)).fetchall()

    def complete(self, tasks: list[Any]) -> None:
        for run_id, step, index in tasks:
            self.connection.execute(
                "select pgflow.complete_task(%s, %s, %s, %s)", (run_id, step, index, '{"done": true}')
            )

    def fail(self, tasks: list[Any]) -> None:
        for run_id, step, index in tasks:
            self.connection.execute("select pgflow.fail_task(%s, %s, %s, 'no luck')", (run_id, step, index))


if __name__ == "__main__":
    main()
