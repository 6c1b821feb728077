"""The desired state: which workers there should be, with which limits, and how those that are asked for come up.

Kept by the root. It outlives every restart below the root, and ends with the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from loguru import logger

from pgflow_otp.runtime.tree import STARTER, WORKERS, added_starter_spec, worker_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgflow_otp.otp.hooks import Path
    from pgflow_otp.otp.supervisor import Supervisor
    from pgflow_otp.runtime.boot import BootConfig

    #: Gets the answer to a question: {"ok": …} or {"error": text}.
    Answer: TypeAlias = Callable[[dict[str, Any]], None]

#: Seconds beyond what its specification gives a worker before one that was asked to stop is killed.
_STOP_MARGIN = 2.0


@dataclass(slots=True)
class Served:
    """A flow that is served here, or was until somebody stopped its worker."""

    slug: str
    target: str
    limits: dict[str, int] = field(default_factory=dict)
    is_stopped: bool = False

    @property
    def path(self) -> Path:
        return (*WORKERS, f"worker:{self.slug}")


@dataclass(slots=True)
class _Starting:
    """A run of a starter: what it has asked for and what came of it."""

    targets: list[str] = field(default_factory=list)
    pending: int = 0
    is_done: bool = False
    limits: dict[str, int] = field(default_factory=dict)
    #: Who waits for it; None for the starter of the boot.
    answer: Answer | None = None

    @property
    def is_settled(self) -> bool:
        return self.is_done and not self.pending


class Workers:
    """Brings workers up and down.

    Args:
        supervisor: the tree.
        config: what the tree was started with.
        on_settled: called whenever everything the boot's starter had asked for is up, or has failed.
    """

    def __init__(self, supervisor: Supervisor, config: BootConfig, on_settled: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._config = config
        self._on_settled = on_settled
        #: What became of each target.
        self.modules: dict[str, dict[str, Any]] = {}
        self._served: dict[str, Served] = {}
        self._starting: dict[Path, _Starting] = {STARTER: _Starting()}
        self._stopping: dict[Path, list[Answer]] = {}

    def find(self, slug: str) -> Served | None:
        """Return what is known of a flow; as in the database, case does not tell slugs apart."""
        return self._served.get(slug.lower())

    @property
    def slugs(self) -> list[str]:
        """The flows whose workers should run."""
        return sorted(s.slug for s in self._served.values() if not s.is_stopped)

    def explain_unknown(self, slug: str) -> dict[str, Any]:
        """Return the answer to a question about a flow that is not served."""
        return {"error": f"no worker serves '{slug}' here; served: {', '.join(self.slugs) or 'nothing'}"}

    def is_running(self, served: Served) -> bool:
        child = self._supervisor.which_child(WORKERS, served.path[-1])
        return child is not None and child["state"] != "undefined"

    # What people ask for

    def start_target(self, target: str, limits: dict[str, int], answer: Answer, data: bytes | None = None) -> None:
        """Serve a target that was not given at the start: a starter of its own imports and registers it."""
        known = next((s for s in self._served.values() if s.target == target), None)
        if known is not None:
            self.start_known(known, limits, answer)
            return
        path: Path = (f"starter:{target}",)
        if path in self._starting and not self._starting[path].is_settled:
            answer({"error": f"{target} is being started already"})
            return
        if data is not None:
            self._config = replace(self._config, source=self._config.source.with_objects({target: data}))
        self._starting[path] = _Starting(limits=limits, answer=answer)
        spec = added_starter_spec(target, self._config)

        def started(reply: tuple[Any, ...]) -> None:
            if reply[0] == "error":
                del self._starting[path]
                answer({"error": f"{target} could not be started: {reply[1]}"})

        # Of an earlier time: it may be there still, finished.
        self._supervisor.delete_child((), path[-1], lambda _: self._supervisor.start_child((), spec, started))

    def start_known(self, served: Served, limits: dict[str, int], answer: Answer) -> None:
        """Start a worker that was stopped. One that runs is left alone, but for its limits."""
        if served.path in self._stopping:
            answer({"error": f"the worker of '{served.slug}' is still stopping; ask again when it is down"})
            return
        served.is_stopped = False
        if self.is_running(served):
            if limits:
                self.scale(served, limits)
            answer({"ok": {"started": [], "running": [served.slug], "target": served.target}})
            return
        served.limits |= limits

        def started(reply: tuple[Any, ...]) -> None:
            if reply[0] == "error":
                answer({"error": f"the worker of '{served.slug}' could not be started: {reply[1]}"})
            else:
                answer({"ok": {"started": [served.slug], "running": [], "target": served.target}})

        self._start(served, started)

    def stop(self, served: Served, answer: Answer) -> None:
        """Drain a worker and leave it down. It is asked by a message and ends by itself, so that its supervisor can
        restart others meanwhile; what takes longer than its specification allows is terminated."""
        was_running = self.is_running(served)
        served.is_stopped = True
        if not was_running:
            answer({"ok": {"slug": served.slug, "was_running": False}})
            return
        waiting = self._stopping.setdefault(served.path, [])
        waiting.append(answer)
        if len(waiting) > 1:
            return
        self._ask_to_stop(served)
        spec = self._supervisor.get_child_spec(WORKERS, served.path[-1])
        limit = spec.shutdown / 1000 if spec is not None and isinstance(spec.shutdown, int) else 0.0
        self._supervisor.after(limit + _STOP_MARGIN, lambda: self._terminate(served))

    def scale(self, served: Served, limits: dict[str, int]) -> None:
        """Change a worker's limits, now and for all its restarts."""
        served.limits |= limits
        self._supervisor.send(served.path, "scale", **served.limits)

    def _ask_to_stop(self, served: Served) -> None:
        if not self._supervisor.send(served.path, "shutdown"):
            self._terminate(served)  # It is between two lives.

    def _terminate(self, served: Served) -> None:
        if served.path not in self._stopping:
            return

        def terminated(reply: tuple[Any, ...]) -> None:
            self._stopped(served.path, str(reply[1]) if reply[0] == "error" and reply[1] != "not_found" else None)

        self._supervisor.terminate_child(WORKERS, served.path[-1], terminated)

    def _stopped(self, path: Path, error: str | None = None) -> None:
        slug = path[-1].removeprefix("worker:")
        for answer in self._stopping.pop(path, []):
            if error is None:
                answer({"ok": {"slug": slug, "was_running": True}})
            else:
                answer({"error": f"the worker of '{slug}' could not be stopped: {error}"})

    # What happens in the tree

    def child_started(self, path: Path) -> None:
        """A starter or a worker has come up."""
        if path in self._starting:
            starting = self._starting[path]
            starting.is_done = False
            starting.targets.clear()
        elif path[:1] == WORKERS:
            served = next((s for s in self._served.values() if s.path == path), None)
            if served is not None and served.is_stopped:
                self._ask_to_stop(served)  # It crashed while it was stopping.
            elif served is not None and served.limits:
                self._supervisor.send(path, "scale", **served.limits)

    def child_exited(self, path: Path, *, finished: bool) -> None:
        """A worker is dead; `finished`: it ended by itself and is not restarted."""
        if finished and path in self._stopping:
            # Its specification goes too; a dynamic supervisor keeps that of a transient child until it is deleted.
            self._supervisor.terminate_child(WORKERS, path[-1], lambda _: self._stopped(path))

    def starter_said(self, path: Path, message: dict[str, Any]) -> dict[str, Any] | None:
        """Take a starter's message; return what is news of a target."""
        starting = self._starting.setdefault(path, _Starting())
        name = message["m"]
        if name == "module":
            news = {k: v for k, v in message.items() if k != "m"}
            self.modules[news["target"]] = news
            if news["status"] != "retrying":
                starting.targets.append(news["target"])
            return news
        if name == "start_worker":
            self._wanted(path, message["slug"], message["target"])
        elif name == "done":
            starting.is_done = True
            self._settle(path)
        return None

    def _wanted(self, path: Path, slug: str, target: str) -> None:
        starting = self._starting[path]
        served = self._served.get(slug.lower())
        if served is None:
            served = self._served[slug.lower()] = Served(slug, target, dict(starting.limits))
        elif served.target != target:
            self._failed(target, f"the slug '{slug}' is served by {served.target} already")
            return
        if served.is_stopped:
            return
        starting.pending += 1

        def started(reply: tuple[Any, ...]) -> None:
            starting.pending -= 1
            if reply[0] == "error" and reply[1] not in ("already_started", "already_present", "stopping"):
                logger.error(f"worker:{slug} could not start: {reply[1]}")
                self._failed(target, str(reply[1]))
            self._settle(path)

        self._start(served, started)

    def _start(self, served: Served, reply: Callable[[tuple[Any, ...]], None]) -> None:
        settings = self._config.settings
        own = {**settings.worker_options.get(served.slug, {}), **served.limits}
        scaled = replace(settings, worker_options={**settings.worker_options, served.slug: own})
        config = replace(self._config, settings=scaled)
        self._supervisor.start_child(WORKERS, worker_spec(served.slug, served.target, config), reply)

    def _failed(self, target: str, reason: str) -> None:
        self.modules[target] = {"target": target, "status": "failed_permanent", "reason": reason}

    def _settle(self, path: Path) -> None:
        starting = self._starting[path]
        if not starting.is_settled:
            return
        if path == STARTER:
            self._on_settled()
        elif starting.answer is not None:
            answer, starting.answer = starting.answer, None
            results = [self.modules[target] for target in starting.targets]
            slugs = [r["slug"] for r in results if r["status"] == "succeeded"]
            if slugs:
                answer({"ok": {"started": slugs, "running": [], "target": path[0].removeprefix("starter:")}})
                return
            # Nothing came of it: as if it had never been asked for.
            for target in starting.targets:
                del self.modules[target]
            del self._starting[path]
            self._supervisor.terminate_child((), path[0], lambda _: self._supervisor.delete_child((), path[0]))
            answer({"error": "; ".join(str(r["reason"]) for r in results) or "nothing is served"})
