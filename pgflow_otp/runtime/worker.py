"""A worker: one flow's claims, handlers and outcomes. One asyncio loop; the database, but no user code.

The loop settles what has come in, claims what it has room for, and waits for the next reason to do either. It alone
uses the main connection; the heartbeat has its own.
"""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg
from loguru import logger

from pgflow_otp import log
from pgflow_otp.db import tasks, workers
from pgflow_otp.db.connection import connect_async
from pgflow_otp.errors import DatabaseUnavailable
from pgflow_otp.flow.payload import storable
from pgflow_otp.otp.process import allow_many_descriptors, become_subreaper, offer_to_the_oom_killer
from pgflow_otp.pool.forkserver import HandlerConfig
from pgflow_otp.pool.outcome import Outcome
from pgflow_otp.pool.pool import HandlerPool
from pgflow_otp.runtime.backoff import Backoff
from pgflow_otp.runtime.heartbeat import Heartbeat
from pgflow_otp.runtime.poll_timer import PollTimer
from pgflow_otp.runtime.waiting import wait_event

if TYPE_CHECKING:
    from pgflow_otp.db.tasks import ClaimedTask
    from pgflow_otp.flow.target import Source
    from pgflow_otp.otp.child import ChildContext
    from pgflow_otp.settings import Settings

#: Seconds a worker whose supervisor is dead may take to hand its tasks back.
LAST_WILL = 1.0
#: Exit status of a worker that was told by the database to make room for a new one.
DEPRECATED = 75
#: How readily the system ends a worker when memory runs out (0 as anything else, 1000 first). Handlers go before it.
WORKER_SCORE = 100
#: SQLSTATE classes of errors that another attempt may not meet: connection, resources, operator, lock, rollback.
_TRANSIENT_CLASSES = ("08", "40", "53", "55", "57", "58")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is told by whoever starts it."""

    slug: str
    target: str
    source: Source
    dsn: str
    settings: Settings

    @property
    def queue_name(self) -> str:
        return self.slug.lower()


def run_worker(context: ChildContext, config: WorkerConfig) -> int:
    """Start function of a worker process."""
    log.configure(f"worker:{config.slug}", config.settings.log_level)
    allow_many_descriptors()
    offer_to_the_oom_killer(WORKER_SCORE)
    become_subreaper()
    worker = Worker(context, config)
    worker.pool.start_forkserver()
    return asyncio.run(worker.run())


class Worker:
    """One worker process from registration to drain."""

    def __init__(self, context: ChildContext, config: WorkerConfig) -> None:
        self._context = context
        self._config = config
        self._settings = config.settings.for_flow(config.slug)
        self.worker_id = uuid4()
        handler_config = HandlerConfig(
            flow_slug=config.slug,
            target=config.target,
            source=config.source,
            dsn=config.dsn,
            max_payload=int(self._settings.max_payload_mb * 1024 * 1024),
            tree=self._settings.name,
            log_level=self._settings.log_level,
        )
        self.pool = HandlerPool(handler_config, self._settings, self._load_flow_input, self._wake_up)
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._registered = False
        self._wake = asyncio.Event()
        self._draining = asyncio.Event()
        self._hurry_event = asyncio.Event()
        self._deprecated = False
        self._running: set[asyncio.Task[None]] = set()
        self._outcomes: list[tuple[ClaimedTask, Outcome]] = []
        self._questions: list[tuple[UUID, asyncio.Future[bytes]]] = []
        self._timer = PollTimer(self._settings.min_poll_interval, self._settings.max_poll_interval, random.uniform)
        self._backoff = Backoff()
        self._outage_logged = False

    async def run(self) -> int:
        """Work until told to stop; return the exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)
        loop.add_signal_handler(signal.SIGCHLD, self.pool.kill_strays)
        loop.add_reader(self._context.channel.fileno(), self._message_arrived)
        loop.add_reader(self._context.lifeline, self._parent_died)
        self.pool.attach()
        # The promise of a start is a stable state, not a reachable database (29).
        self._context.ready(worker_id=str(self.worker_id), flow=self._config.slug)
        heartbeat = Heartbeat(
            self._config.dsn,
            self._config.slug,
            self.worker_id,
            self._settings.heartbeat_interval,
            is_registered=lambda: self._registered,
            running=lambda: self.pool.running,
            on_unwanted=self._end_unwanted,
            on_deprecated=self._deprecate,
        )
        beat = loop.create_task(heartbeat.run())
        try:
            await self._serve()
            await self._finish()
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
            self.pool.close()
            await self._disconnect()
        return DEPRECATED if self._deprecated else 0

    # The loop

    async def _serve(self) -> None:
        wait = 0.0
        while not self._draining.is_set():
            await self._wait(wait)
            try:
                await self._settle()
                wait = await self._claim()
                self._database_answers()
            except (psycopg.Error, DatabaseUnavailable) as error:
                # Not _wait: what has come in and cannot be recorded must not make it return at once.
                await wait_event(self._draining, await self._database_failed(error))
                wait = 0.0

    async def _wait(self, seconds: float) -> None:
        """Wait for a result, a wake-up, a free slot, the end, or so many seconds."""
        if not self._outcomes and not self._questions:
            await wait_event(self._wake, seconds)
        self._wake.clear()

    async def _claim(self) -> float:
        """Claim as much as there is room for; return how long to wait before the next look."""
        room = self._settings.max_concurrency - len(self._running)
        if self._draining.is_set() or room <= 0 or not self.pool.is_ready:
            return self._timer.found() if room > 0 else self._settings.max_poll_interval
        quantity = min(room, self._settings.batch_size)
        connection = await self._connect()
        claimed = await tasks.claim_tasks(
            connection,
            self._config.slug,
            self._config.queue_name,
            self.worker_id,
            quantity,
            self._settings.kill_grace,
        )
        for task in claimed:
            logger.debug("task started", **_fields(task))
            running = asyncio.create_task(self._run(task))
            self._running.add(running)
            running.add_done_callback(self._running.discard)
        if len(claimed) == quantity:
            self._timer.found()
            return 0.0 if room > quantity else self._settings.max_poll_interval
        return self._timer.found() if claimed else self._timer.empty()

    async def _run(self, task: ClaimedTask) -> None:
        try:
            outcome = await self.pool.run(task)
        except OSError as error:
            # No descriptor is left, or the like: the engine's trouble, not the task's.
            logger.error(f"a task could not be run: {error}", **_fields(task))
            outcome = Outcome("released")
        self._outcomes.append((task, outcome))
        self._wake.set()

    async def _settle(self) -> None:
        """Record every outcome that has come in. One that cannot be recorded now is kept for the next time."""
        while self._questions:
            run_id, answer = self._questions[0]
            payload = await tasks.get_flow_input(await self._connect(), run_id)
            self._questions.pop(0)
            if not answer.done():
                answer.set_result(payload if payload is not None else b"null")
        while self._outcomes:
            task, outcome = self._outcomes[0]
            if outcome.verdict == "cancelled":
                self._outcomes.pop(0)
                continue
            status = await self._settle_one(task, outcome)
            self._outcomes.pop(0)
            _log_outcome(task, outcome, status)

    async def _settle_one(self, task: ClaimedTask, outcome: Outcome) -> str:
        connection = await self._connect()
        verdict = outcome.verdict
        assert verdict != "cancelled"
        try:
            return await tasks.settle_task(connection, task, self.worker_id, verdict, outcome.output, outcome.error)
        except psycopg.Error as error:
            if connection.closed or is_transient(error):
                raise
            # The database will never take this: the task fails, and says why.
            reason = storable(f"the outcome could not be stored: {' '.join(str(error).split())}")
            logger.error(reason, **_fields(task))
            return await tasks.settle_task(connection, task, self.worker_id, "failed_for_good", None, reason)

    async def _load_flow_input(self, task: ClaimedTask) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions.append((task.run_id, answer))
        self._wake.set()
        return await answer

    # The end

    async def _finish(self) -> None:
        """Let what runs finish within the drain time, hand the rest back, and leave."""
        if (self._running or self._outcomes) and not self._hurry_event.is_set():
            limit, running = self._settings.drain_timeout, len(self._running)
            logger.info(f"stopping: waiting up to {limit:g} s for {running} running task{'s' * (running != 1)}")
            self.pool.tell_drain()
            await self._settle_until_idle(limit)
        if self._running or self._outcomes:
            self.pool.release_all(0.0 if self._hurry_event.is_set() else None)
            await self._settle_until_idle(LAST_WILL if self._hurry_event.is_set() else self._settings.kill_grace + 2)
        try:
            async with asyncio.timeout(LAST_WILL):
                await self._settle()
                if self._connection is not None and self._registered:
                    await workers.mark_worker_stopped(self._connection, self.worker_id)
        except (psycopg.Error, DatabaseUnavailable, TimeoutError) as error:
            logger.warning(f"could not say goodbye to the database: {_line(error)}")

    async def _settle_until_idle(self, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                while self._running or self._outcomes:
                    await self._wait(limit)
                    try:
                        await self._settle()
                    except (psycopg.Error, DatabaseUnavailable) as error:
                        await wait_event(self._hurry_event, await self._database_failed(error))
        except TimeoutError:
            pass

    def _wake_up(self) -> None:
        self._wake.set()

    def _drain(self) -> None:
        self._draining.set()
        self._wake.set()

    def _hurry(self) -> None:
        """Nobody waits any more: what runs is killed and handed back at once."""
        self._hurry_event.set()
        self.pool.release_all(0.0)
        self._drain()

    def _parent_died(self) -> None:
        """The supervisor is gone: kill the handlers, hand the tasks back in a second at most, and go."""
        asyncio.get_running_loop().remove_reader(self._context.lifeline)
        self._hurry()
        asyncio.get_running_loop().call_later(2 * LAST_WILL, self._leave_at_once)

    def _leave_at_once(self) -> None:
        self.pool.close()
        logger.error("the supervisor died and the database does not answer; leaving")
        signal.raise_signal(signal.SIGKILL)

    def _message_arrived(self) -> None:
        channel = self._context.channel
        messages = channel.receive_messages()
        if not channel.is_open:
            asyncio.get_running_loop().remove_reader(channel.fileno())
        for message in messages:
            if message["m"] == "shutdown":
                self._hurry() if message.get("hurry") else self._drain()
            elif message["m"] == "ping":
                channel.send({"m": "pong"})
            elif message["m"] == "poll_now":
                self._timer.found()
                self._wake.set()
            elif message["m"] == "check":
                channel.send({"m": "report", "id": message["id"], **self._report()})
            elif message["m"] == "scale":
                self._scale({key: message[key] for key in ("max_concurrency", "batch_size") if key in message})

    def _scale(self, limits: dict[str, Any]) -> None:
        """Work with other limits from now on. What runs is left to run."""
        self._settings = replace(self._settings, **limits)
        self.pool.resize(self._settings.max_concurrency)
        logger.info(f"scaled: {', '.join(f'{key} {value}' for key, value in limits.items())}")
        self._wake.set()

    def _report(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "slug": self._config.slug,
            "target": self._config.target,
            "worker_id": str(self.worker_id),
            "state": "draining" if self._draining.is_set() else "running" if self.pool.is_ready else "booting",
            "database": "unreachable" if self._outage_logged else "connected" if self._connection else "not connected",
            "max_concurrency": settings.max_concurrency,
            "batch_size": settings.batch_size,
            "running": len(self._running),
            "unsettled": len(self._outcomes),
            **self.pool.report(),
        }

    # The database

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = await connect_async(self._config.dsn, f"worker:{self._config.slug}")
            self._registered = False
        if not self._registered:
            await workers.register_worker(
                self._connection, self.worker_id, self._config.queue_name, f"python:{self._config.target}"[:500]
            )
            self._registered = True
        return self._connection

    async def _disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _database_failed(self, error: Exception) -> float:
        """Note an outage once; return how long to wait."""
        if not self._outage_logged:
            logger.warning(f"the database does not answer, trying again: {_line(error)}")
            self._outage_logged = True
        if self._connection is not None and (self._connection.closed or self._connection.broken):
            await self._disconnect()
        return self._backoff.next()

    def _database_answers(self) -> None:
        if self._outage_logged:
            logger.info("the database answers again")
            self._outage_logged = False
        self._backoff.reset()

    def _end_unwanted(self, task: ClaimedTask) -> None:
        if self.pool.cancel(task):
            logger.info("ending a task that nobody waits for any more", **_fields(task))

    def _deprecate(self) -> None:
        if not self._draining.is_set():
            logger.info("this worker was deprecated; draining, another takes over")
            self._deprecated = True
            self._drain()


def is_transient(error: psycopg.Error) -> bool:
    """Whether the same statement may succeed later."""
    return error.sqlstate is None or error.sqlstate[:2] in _TRANSIENT_CLASSES


def _fields(task: ClaimedTask) -> dict[str, Any]:
    return {"step": task.step_slug, "index": task.task_index, "run": str(task.run_id), "attempt": task.attempt}


def _log_outcome(task: ClaimedTask, outcome: Outcome, status: str) -> None:
    bound = logger.bind(**_fields(task))
    if status == "overtaken":
        bound.warning("the outcome came too late: another attempt has the task by now")
    elif outcome.verdict == "completed":
        bound.log("DEBUG" if status == "completed" else "WARNING", f"task {status}")
    elif outcome.verdict in ("failed", "failed_for_good"):
        first = (outcome.error or "").split("\n", 1)[0]
        left = f"attempt {task.attempt} of {task.max_attempts}" if status == "queued" else "no attempts left"
        bound.warning(f"task failed ({left}): {first}")
    else:
        bound.info("task handed back" if status == "queued" else f"task {status}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
