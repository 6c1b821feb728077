"""What may be asked of a running tree, by the program that embeds it or over the control socket.

status                                  the tree, and what became of each target
tree                                    the same, with what each worker says of itself
count_children                          of the workers
check_worker   slug                     what a worker says of itself
scale_worker   slug [max_concurrency] [batch_size]
start_worker   target or slug [max_concurrency] [batch_size]
stop_worker    slug                     answered when it has drained
poll_now       slug
stop           [hurry]                  answered at once; the end of the connection is the end of the tree
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

from pgflow_otp.errors import ConfigurationError, PgflowError
from pgflow_otp.flow.target import parse_target
from pgflow_otp.runtime.tree import ROOT_FLAGS, WORKERS
from pgflow_otp.settings import check_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgflow_otp.otp.event_loop import Timer
    from pgflow_otp.otp.hooks import Path
    from pgflow_otp.otp.supervisor import Supervisor
    from pgflow_otp.runtime.boot import BootConfig
    from pgflow_otp.runtime.workers import Answer, Served, Workers

    Ask: TypeAlias = Callable[[dict[str, Any], Answer], None]

#: Seconds a worker may take to say how it is.
_REPORT_WAIT = 1.0


class Administration:
    """Answers questions. An answer is {"ok": …} or {"error": text}, at once or later, and never blocks the root.

    Args:
        supervisor: the tree.
        config: what it was started with.
        workers: which workers there should be.
    """

    def __init__(self, supervisor: Supervisor, config: BootConfig, workers: Workers) -> None:
        self._supervisor = supervisor
        self._config = config
        self._workers = workers
        self._began = time.monotonic()
        self._checks: dict[int, _Check] = {}
        self._last_check = 0
        self._questions: dict[str, Callable[[dict[str, Any], Answer], None]] = {
            "status": lambda question, answer: answer({"ok": self.status()}),
            "tree": self._tree,
            "count_children": lambda question, answer: answer({"ok": supervisor.count_children(WORKERS)}),
            "check_worker": self._for_worker(self._check_worker),
            "scale_worker": self._for_worker(self._scale_worker),
            "start_worker": self._start_worker,
            "stop_worker": self._for_worker(self._stop_worker),
            "poll_now": self._for_worker(self._poll_now),
            "stop": self._stop,
        }

    def ask(self, question: dict[str, Any], answer: Answer, data: bytes = b"") -> None:
        """Answer a question. `data`: the flow that is to be served, where it is an object."""
        known = self._questions.get(question["ask"])
        if known is None:
            answer({"error": f"unknown question '{question['ask']}'; known: {', '.join(sorted(self._questions))}"})
            return
        try:
            known({**question, "data": data} if data else question, answer)
        except PgflowError as error:
            answer({"error": str(error)})

    def status(self) -> dict[str, Any]:
        """Return the tree as it is now."""
        return {
            "name": self._config.settings.name,
            "pid": os.getpid(),
            "version": version("pgflow-otp"),
            "uptime": round(time.monotonic() - self._began, 3),
            "state": "stopping" if self._supervisor.is_stopping else "running",
            "restart_period": ROOT_FLAGS.period,
            "children": self._supervisor.which_children(),
            "modules": list(self._workers.modules.values()),
        }

    def report_arrived(self, path: Path, message: dict[str, Any]) -> None:
        """A worker says how it is."""
        check = self._checks.get(message["id"])
        if check is not None:
            check.arrived(path, {k: v for k, v in message.items() if k not in ("m", "id")})

    # The questions

    def _tree(self, question: dict[str, Any], answer: Answer) -> None:
        status = self.status()
        nodes = [child for child in status["children"] if child["id"] == WORKERS[0]]
        paths = [(*WORKERS, worker["id"]) for node in nodes for worker in node.get("children", [])]

        def checked(reports: dict[Path, dict[str, Any]]) -> None:
            answer({"ok": {**status, "workers": {path[-1]: report for path, report in reports.items()}}})

        self._check(paths, checked)

    def _check_worker(self, served: Served, question: dict[str, Any], answer: Answer) -> None:
        def checked(reports: dict[Path, dict[str, Any]]) -> None:
            if reports:
                answer({"ok": reports[served.path]})
            elif self._workers.is_running(served):
                answer({"error": f"the worker of '{served.slug}' does not answer"})
            else:
                answer({"error": f"the worker of '{served.slug}' is not running"})

        self._check([served.path], checked)

    def _scale_worker(self, served: Served, question: dict[str, Any], answer: Answer) -> None:
        limits = _limits(question)
        if not limits:
            raise ConfigurationError("give max_concurrency, batch_size, or both")
        self._workers.scale(served, limits)

        def checked(reports: dict[Path, dict[str, Any]]) -> None:
            now = reports.get(served.path, {})
            shown = {key: now[key] for key in ("max_concurrency", "batch_size") if key in now} or served.limits
            answer({"ok": {"slug": served.slug, "running": bool(now), **shown}})

        self._check([served.path], checked)

    def _start_worker(self, question: dict[str, Any], answer: Answer) -> None:
        limits = _limits(question)
        target = question.get("target")
        if not isinstance(target, str):
            raise ConfigurationError("give a target, module or module:attribute, or the slug of a stopped worker")
        served = self._workers.find(target)
        if served is not None:
            self._workers.start_known(served, limits, answer)
            return
        data = question.get("data")
        if data is None:
            parse_target(target)
        self._workers.start_target(target, limits, answer, data)

    def _stop_worker(self, served: Served, question: dict[str, Any], answer: Answer) -> None:
        self._workers.stop(served, answer)

    def _poll_now(self, served: Served, question: dict[str, Any], answer: Answer) -> None:
        self._supervisor.send(served.path, "poll_now")
        answer({"ok": None})

    def _stop(self, question: dict[str, Any], answer: Answer) -> None:
        answer({"ok": {"pid": os.getpid(), "name": self._config.settings.name}})
        hurry = bool(question.get("hurry"))
        if not self._supervisor.is_stopping:
            self._supervisor.stop()
        elif not hurry:
            return
        if hurry:
            self._supervisor.stop()

    def _for_worker(self, of_worker: Callable[[Served, dict[str, Any], Answer], None]) -> Ask:
        def asked(question: dict[str, Any], answer: Answer) -> None:
            slug = str(question.get("slug"))
            served = self._workers.find(slug)
            if served is None:
                answer(self._workers.explain_unknown(slug))
            else:
                of_worker(served, question, answer)

        return asked

    def _check(self, paths: list[Path], on_done: Callable[[dict[Path, dict[str, Any]]], None]) -> None:
        """Ask workers how they are; those that do not answer in time are left out."""
        self._last_check += 1
        number = self._last_check
        asked = {path for path in paths if self._supervisor.send(path, "check", id=number)}

        def done(reports: dict[Path, dict[str, Any]]) -> None:
            self._checks.pop(number, None)
            on_done(reports)

        if not asked:
            done({})
            return
        self._checks[number] = check = _Check(asked, done)
        check.timer = self._supervisor.after(_REPORT_WAIT, check.timed_out)


class _Check:
    """Reports that are waited for."""

    def __init__(self, asked: set[Path], on_done: Callable[[dict[Path, dict[str, Any]]], None]) -> None:
        self._missing = asked
        self._reports: dict[Path, dict[str, Any]] = {}
        self._on_done = on_done
        self.timer: Timer | None = None

    def arrived(self, path: Path, report: dict[str, Any]) -> None:
        if path in self._missing:
            self._missing.discard(path)
            self._reports[path] = report
            if not self._missing:
                if self.timer is not None:
                    self.timer.cancel()
                self._on_done(self._reports)

    def timed_out(self) -> None:
        self._on_done(self._reports)


def _limits(question: dict[str, Any]) -> dict[str, int]:
    limits = {key: question[key] for key in ("max_concurrency", "batch_size") if question.get(key) is not None}
    check_limits(limits)
    return limits
