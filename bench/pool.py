"""What isolation costs: tasks through the pool, beside pebble, ProcessPoolExecutor and a bare loop; kills, crashes."""

from __future__ import annotations

import asyncio
import datetime
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import psutil
from harness import Report, parse_options
from loguru import logger

from pgflow_otp.db.tasks import ClaimedTask
from pgflow_otp.flow.target import Source
from pgflow_otp.otp import process
from pgflow_otp.otp.channel import FrameReader, encode_frame
from pgflow_otp.pool.forkserver import HandlerConfig
from pgflow_otp.pool.pool import HandlerPool
from pgflow_otp.settings import Settings

try:
    import pebble
except ImportError:
    pebble = None

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from pgflow_otp.pool.outcome import Outcome

from contextlib import asynccontextmanager

HERE = str(Path(__file__).resolve().parent)
NOW = datetime.datetime.now(datetime.UTC)


def task(request: Any = None, timeout: float = 60) -> ClaimedTask:
    """Return a task as the database would give it."""
    raw = orjson.dumps(request)
    return ClaimedTask(uuid.uuid4(), "work", 0, 1, 1, NOW, timeout, raw, raw)  # type: ignore[arg-type]


@asynccontextmanager
async def pool(slots: int, **settings: Any) -> AsyncIterator[HandlerPool]:
    """Give a pool that is up, without a database behind it."""

    async def no_input(claimed: ClaimedTask) -> bytes:
        return b"null"

    source = Source((HERE, *sys.path))
    config = HandlerConfig("bench", "pool_flow:bench", source, "", 16 * 2**20, "bench", "ERROR")
    made = HandlerPool(config, Settings(max_concurrency=slots, **settings), no_input, lambda: None)
    made.start_forkserver()
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, made.kill_strays)
    made.attach()
    await made.wait_booted()
    try:
        yield made
    finally:
        made.close()


async def in_turn(run: Callable[[], Awaitable[Any]], tasks: int, at_once: int) -> float:
    """Run so many tasks, so many at once; return µs a task."""

    async def one_after_the_other(number: int) -> None:
        for _ in range(number):
            await run()

    await asyncio.gather(*(one_after_the_other(20) for _ in range(at_once)))
    began = time.perf_counter()
    await asyncio.gather(*(one_after_the_other(tasks // at_once) for _ in range(at_once)))
    return (time.perf_counter() - began) / tasks * 1e6


def measure_throughput(report: Report, tasks: int, repeats: int) -> None:
    for at_once in (1, 2):
        key = f"a no-op task, {at_once} at once"
        for _ in range(repeats):

            async def ours(n: int = at_once) -> float:
                async with pool(n) as made:
                    return await in_turn(lambda: made.run(task()), tasks, n)

            report.add(f"{key}: this pool", "us", asyncio.run(ours()))
            report.add(f"{key}: ProcessPoolExecutor", "us", _executor(tasks // 4, at_once))
            if pebble is not None:
                report.add(f"{key}: pebble", "us", _pebble(tasks // 4, at_once))
        report.add(f"{key}: a bare fork and socket", "us", [_bare(tasks) for _ in range(repeats)])
        for other, share in (("pebble", 1 / 5), ("ProcessPoolExecutor", 1 / 4), ("a bare fork and socket", None)):
            report.ratio(f"{key}: of {other}'s time", f"{key}: this pool", f"{key}: {other}")
            if share is not None:
                report.target(f"{key}: of {other}'s time", f"{key}: of {other}'s time", share)


def _executor(tasks: int, at_once: int) -> float:
    import pool_flow

    with ProcessPoolExecutor(at_once, mp_context=get_context("fork")) as executor:
        for future in [executor.submit(pool_flow.work, None) for _ in range(20)]:
            future.result()
        began = time.perf_counter()
        waiting = []
        for _ in range(tasks):
            waiting.append(executor.submit(pool_flow.work, None))
            if len(waiting) >= at_once:
                waiting.pop(0).result()
        for future in waiting:
            future.result()
        return (time.perf_counter() - began) / tasks * 1e6


def _pebble(tasks: int, at_once: int) -> float:
    import pool_flow

    with pebble.ProcessPool(max_workers=at_once, context=get_context("fork")) as executor:
        for future in [executor.schedule(pool_flow.work, args=[None]) for _ in range(20)]:
            future.result()
        began = time.perf_counter()
        waiting = []
        for _ in range(tasks):
            waiting.append(executor.schedule(pool_flow.work, args=[None], timeout=60))
            if len(waiting) >= at_once:
                waiting.pop(0).result()
        for future in waiting:
            future.result()
        return (time.perf_counter() - began) / tasks * 1e6


def _bare(tasks: int) -> float:
    """The least that it takes: a forked process, a socket, a frame each way."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    for end in (theirs,) if pid else (ours,):
        end.close()
    mine = ours if pid else theirs
    reader = FrameReader()
    if pid == 0:
        while data := mine.recv(65_536):
            for _header, payload in reader.feed(data):
                mine.sendall(encode_frame({"m": "done"}, orjson.dumps(orjson.loads(payload))))
        os._exit(0)
    header = {"m": "task", "run_id": str(uuid.uuid4()), "step": "work", "index": 0, "attempt": 1, "timeout": 60}
    began = time.perf_counter()
    for _ in range(tasks):
        mine.sendall(encode_frame(header, b"null"))
        while not reader.feed(mine.recv(65_536)):
            pass
    took = (time.perf_counter() - began) / tasks * 1e6
    mine.close()
    os.waitpid(pid, 0)
    return took


def measure_kills(report: Report, rounds: int, folder: Path) -> None:
    """How late a deadline is, and how soon the slot works again after a kill and a crash."""

    async def measure() -> None:
        note = folder / "note"
        async with pool(1, kill_grace=5) as made:
            for _ in range(rounds):
                await made.run(task(["until_term", str(note), f"{note}.began"], 0.1))
                began = float(Path(f"{note}.began").read_text())
                report.add("from deadline to SIGTERM", "ms", (float(note.read_text()) - began - 0.1) * 1e3)
        async with pool(1, kill_grace=0) as made:
            for _ in range(rounds):
                await made.run(task())
                began = time.monotonic()
                hanging = asyncio.ensure_future(made.run(task(["hang"], 0.1)))
                await hanging
                await made.run(task())
                report.add("from SIGKILL to the next task done", "ms", (time.monotonic() - began - 0.1) * 1e3)
            for _ in range(rounds):
                await made.run(task(["segv", str(note)]))
                await made.run(task())
                took = time.monotonic() - float(note.read_text())
                report.add("from SIGSEGV to the next task done", "ms", took * 1e3)

    asyncio.run(measure())
    report.target("deadline to SIGTERM (ms)", "from deadline to SIGTERM", 10)
    report.target("SIGKILL to next task done (ms)", "from SIGKILL to the next task done", 30)
    report.target("SIGSEGV to next task done (ms)", "from SIGSEGV to the next task done", 30)


def measure_neighbours(report: Report, seconds: float) -> None:
    """Quick tasks in half of the slots, while those in the other half are killed again and again."""

    async def p99(killing: bool) -> float:
        samples: list[float] = []
        async with pool(4, kill_grace=0) as made:
            over = time.monotonic() + seconds

            async def quick() -> None:
                while time.monotonic() < over:
                    began = time.perf_counter()
                    await made.run(task())
                    samples.append((time.perf_counter() - began) * 1e3)
                    await asyncio.sleep(0.001)

            async def killed() -> None:
                while time.monotonic() < over:
                    await made.run(task(["hang"], 0.05))

            others = [killed(), killed()] if killing else []
            await asyncio.gather(quick(), quick(), *others)
        return statistics.quantiles(samples, n=100)[98]

    quiet, disturbed = asyncio.run(p99(False)), asyncio.run(p99(True))
    report.add("p99 of quick tasks, undisturbed", "ms", quiet)
    report.add("p99 of quick tasks, half of the slots being killed", "ms", disturbed)
    report.add("p99 disturbed against undisturbed", "times", disturbed / quiet)
    report.target("p99 disturbed against undisturbed", "p99 disturbed against undisturbed", 2)


def measure_executor_under_crash(report: Report) -> None:
    """What a crash does to the other tasks in flight elsewhere."""
    import pool_flow

    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(2, mp_context=get_context("fork")) as executor:
            futures = [executor.submit(pool_flow.work, None if n else ["segv", f"{folder}/note"]) for n in range(8)]
            broken = sum(isinstance(future.exception(), BrokenProcessPool) for future in futures)
        report.add("ProcessPoolExecutor: tasks of 8 lost to one SIGSEGV", "", float(broken))

        async def ours() -> int:
            async with pool(2) as made:
                outcomes = await asyncio.gather(
                    *(_when_free(made, task(None if n else ["segv", f"{folder}/note"])) for n in range(2))
                )
                return sum(outcome.verdict != "completed" for outcome in outcomes)

        report.add("this pool: tasks of 2 lost to one SIGSEGV", "", float(asyncio.run(ours())))


async def _when_free(made: HandlerPool, claimed: ClaimedTask) -> Outcome:
    return await made.run(claimed)


def measure_soak(report: Report, tasks: int) -> None:
    """Every task ends once; afterwards there is no zombie, no descriptor and no memory more than before."""

    async def soak() -> None:
        rng = random.Random(7)
        ends = {"completed": 0, "failed": 0, "other": 0}
        async with pool(4, kill_grace=0, max_tasks_per_process=3) as made:
            with tempfile.TemporaryDirectory() as folder:
                note = f"{folder}/note"

                async def runner(number: int) -> None:
                    for _ in range(number):
                        dice = rng.random()
                        request = ["hang"] if dice < 0.05 else ["segv", note] if dice < 0.1 else None
                        outcome = await made.run(task(request, 0.05 if request == ["hang"] else 60))
                        wanted = "completed" if request is None else "failed"
                        ends[outcome.verdict if outcome.verdict == wanted else "other"] += 1

                await asyncio.gather(*(runner(50) for _ in range(4)))
                own = psutil.Process()
                descriptors, memory = own.num_fds(), own.memory_info().rss
                began = time.perf_counter()
                await asyncio.gather(*(runner(tasks // 4) for _ in range(4)))
                report.add("soak: a task", "us", (time.perf_counter() - began) / tasks * 1e6)
                report.add("soak: tasks that ended otherwise than they had to", "", float(ends["other"]))
                zombies = sum(c.status() == psutil.STATUS_ZOMBIE for c in own.children(recursive=True))
                report.add("soak: zombies", "", float(zombies))
                report.add("soak: descriptors more", "", float(own.num_fds() - descriptors))
                report.add("soak: memory more", "MiB", (own.memory_info().rss - memory) / 2**20)

    asyncio.run(soak())
    report.target("soak: wrong ends", "soak: tasks that ended otherwise than they had to", 0)
    report.target("soak: zombies", "soak: zombies", 4)


def measure_outside_kills(report: Report, rounds: int) -> None:
    """SIGKILL from outside at a random moment around the result: each task still ends once."""

    async def rounds_of_kills() -> tuple[int, int]:
        rng = random.Random(11)
        completed = failed = 0
        loop = asyncio.get_running_loop()
        async with pool(1, kill_grace=0) as made:
            for _ in range(rounds):
                answer = await made.run(task(["pid"]))
                victim = int(answer.output or b"0") if answer.verdict == "completed" else 0
                running = asyncio.ensure_future(made.run(task()))
                if victim:
                    loop.call_later(rng.random() * 0.0004, process.signal_process, victim, signal.SIGKILL)
                outcome = await asyncio.wait_for(running, 30)
                completed += outcome.verdict == "completed"
                failed += outcome.verdict in ("failed", "released")
        return completed, failed

    completed, failed = asyncio.run(rounds_of_kills())
    report.add("outside kills: completed", "", float(completed))
    report.add("outside kills: failed with a reason, or handed back", "", float(failed))
    report.add("outside kills: neither", "", float(rounds - completed - failed))
    report.target("outside kills: neither", "outside kills: neither", 0)


def main() -> None:
    options = parse_options(__doc__ or "")
    report = Report("pool", options)
    quick = options.quick
    logger.remove()
    process.become_subreaper()
    measure_throughput(report, 2000 if quick else 10_000, 2 if quick else 5)
    report.calibrate()
    with tempfile.TemporaryDirectory() as folder:
        measure_kills(report, 10 if quick else 50, Path(folder))
    measure_neighbours(report, 3 if quick else 15)
    measure_executor_under_crash(report)
    report.calibrate()
    measure_soak(report, 1000 if quick else 20_000)
    measure_outside_kills(report, 200 if quick else 2000)
    report.finish()


if __name__ == "__main__":
    main()
