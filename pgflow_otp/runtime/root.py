"""The root process: the supervisor, and the few decisions that are this engine's own.

Started as a fresh interpreter, `python -m pgflow_otp.runtime.root FD`, which reads its configuration from the
descriptor FD. No database connection, no user code, no thread, ever.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from loguru import logger
from setproctitle import setproctitle

from pgflow_otp import log
from pgflow_otp.otp.channel import Channel
from pgflow_otp.otp.exit_reason import BAD_CONFIGURATION, ExitReason
from pgflow_otp.otp.hooks import Hooks, Path
from pgflow_otp.otp.process import close_other_descriptors, hold_stop_signals
from pgflow_otp.otp.supervisor import Supervisor
from pgflow_otp.runtime.tree import tree_spec, worker_spec
from pgflow_otp.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgflow_otp.otp import operation as ops

WORKERS: Path = ("workers",)


@dataclass(frozen=True, slots=True)
class BootConfig:
    """What the root is told by whoever starts it. Read from a descriptor: a DSN may hold a password.

    Attributes:
        targets: flow targets to serve.
        search_path: `sys.path` for the user's modules.
        dsn: the database.
        settings: the tree's settings.
        host: descriptor of the channel to the embedding process; None: nobody, signals rule alone.
        embedded: descriptor of the embedded server's lock; the root lets go of it at its end.
    """

    targets: tuple[str, ...]
    search_path: tuple[str, ...]
    dsn: str
    settings: Settings
    host: int | None = None
    embedded: int | None = None

    def as_bytes(self) -> bytes:
        return orjson.dumps(
            {
                "targets": self.targets,
                "search_path": self.search_path,
                "dsn": self.dsn,
                "settings": self.settings.as_json(),
                "host": self.host,
                "embedded": self.embedded,
            }
        )

    @staticmethod
    def from_bytes(data: bytes) -> BootConfig:
        raw = orjson.loads(data)
        return BootConfig(
            targets=tuple(raw["targets"]),
            search_path=tuple(raw["search_path"]),
            dsn=raw["dsn"],
            settings=Settings(**raw["settings"]),
            host=raw["host"],
            embedded=raw["embedded"],
        )


def command(package_parent: str, descriptor: int) -> list[str]:
    """Return the command line of a root process. The current directory is kept out of its import path: a queue.py of
    the user's must not stand in for the library's."""
    code = "import sys; sys.path.append(sys.argv[1]); from pgflow_otp.runtime.root import main; main(sys.argv[2])"
    return [sys.executable, "-P", "-c", code, package_parent, str(descriptor)]


def hand_over(config: BootConfig) -> int:
    """Return a descriptor that a root process reads its configuration from, however long it is. It may hold a password:
    it is kept in memory, or in a file without a name where the system has nothing better."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pgflow-otp")
    else:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
    with os.fdopen(descriptor, "wb", closefd=False) as sink:
        sink.write(config.as_bytes())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def main(descriptor: str) -> None:
    """Entry point of the root process."""
    hold_stop_signals()
    with os.fdopen(int(descriptor), "rb") as source:
        config = BootConfig.from_bytes(source.read())
    kept = [d for d in (config.host, config.embedded) if d is not None]
    for inherited in kept:
        os.set_inheritable(inherited, False)
    close_other_descriptors((0, 1, 2, *kept))
    setproctitle(f"pgflow-otp: supervisor [{config.settings.name}]")
    log.configure("root", config.settings.log_level)
    status = Root(config).run()
    if config.embedded is not None:
        from pgflow_otp.db.embedded import EmbeddedServer  # only now: the root itself needs no database

        server = EmbeddedServer()
        server.adopt(config.embedded)
        server.release()
    sys.stderr.flush()
    os._exit(status)


class Root(Hooks):
    """Starts the workers the starter asks for, tells recovery of the dead, and keeps the host informed."""

    def __init__(self, config: BootConfig) -> None:
        self._config = config
        self._supervisor = Supervisor(
            tree_spec(config.targets, config.search_path, config.dsn, config.settings),
            name=config.settings.name,
            hooks=self,
        )
        #: Ids of dead workers until recovery says that their tasks are released.
        self._unreleased: list[str] = []
        self._modules: dict[str, dict[str, Any]] = {}
        self._pending_workers = 0
        self._starter_done = False
        self._announced = False
        self._status: int | None = None
        self._stopping = False
        self._host: Channel | None = None

    def run(self) -> int:
        if self._config.host is not None:
            self._host = Channel(socket.socket(fileno=self._config.host))
            self._supervisor.attach(self._host, self._host_said)
        status = self._supervisor.run()
        reason = self._supervisor.result
        if status != 0 and reason is not None:
            logger.error(f"the tree has ended: {reason.info or reason}")
        if self._status is not None:
            status = self._status
        self._tell_host("ended", status=status, reason=str(reason))
        return status

    # From the tree

    def on_start(self, path: Path, info: dict[str, Any]) -> None:
        if path == ("recovery",):
            for worker_id in self._unreleased:
                self._supervisor.send(("recovery",), "release", worker_id=worker_id)
        elif path == ("starter",):
            self._starter_done = False
        elif path[:1] == WORKERS:
            logger.debug(f"{path[-1]} is up")

    def on_exit(self, path: Path, reason: ExitReason, info: dict[str, Any], *, requested: bool) -> None:
        worker_id = info.get("worker_id")
        if worker_id and not (requested and reason.kind == "shutdown"):
            self._unreleased.append(worker_id)
            self._supervisor.send(("recovery",), "release", worker_id=worker_id)

    def on_message(self, path: Path, message: dict[str, Any]) -> None:
        name = message["m"]
        if name == "start_worker":
            self._start_worker(message["slug"], message["target"])
        elif name == "module":
            self._modules[message["target"]] = {k: v for k, v in message.items() if k != "m"}
            self._tell_host("module", **self._modules[message["target"]])
        elif name == "done":
            self._starter_done = True
            self._announce()
        elif name == "released":
            self._unreleased = [w for w in self._unreleased if w != message["worker_id"]]
        elif name == "dump":
            for line in _tree_lines(self._supervisor.which_children()):
                logger.info(line)
        else:
            logger.debug(f"unknown message from {'/'.join(path)}: {name}")

    def on_report(self, path: Path, report: ops.Report) -> None:
        bound = logger.bind(supervisor="/".join(path[:-1]) or "root", offender=report.offender())
        bound.log(report.level, f"{'/'.join(path)}: {report.line()}")

    def on_stopping(self) -> None:
        self._stopping = True
        logger.info("stopping")
        self._tell_host("stopping")

    def _start_worker(self, slug: str, target: str) -> None:
        self._pending_workers += 1

        def started(answer: tuple[str, Any]) -> None:
            self._pending_workers -= 1
            if answer[0] == "error" and answer[1] not in ("already_started", "already_present", "stopping"):
                logger.error(f"worker:{slug} could not start: {answer[1]}")
                self._modules[target] = {"target": target, "status": "failed_permanent", "reason": str(answer[1])}
            self._announce()

        config = self._config
        spec = worker_spec(slug, target, config.search_path, config.dsn, config.settings)
        self._supervisor.start_child(WORKERS, spec, started)

    def _announce(self) -> None:
        """Tell once everything that was asked for is up, or why nothing is."""
        if not self._starter_done or self._pending_workers or self._stopping:
            return
        modules = list(self._modules.values())
        if not self._announced:
            served = [m for m in modules if m["status"] == "succeeded"]
            if not served:
                logger.error("there is nothing to serve")
                self._status = BAD_CONFIGURATION
                self._tell_host("failed", modules=modules)
                self._supervisor.stop()
                return
            logger.info(f"ready: serving {', '.join(sorted(m['slug'] for m in served))}")
            self._announced = True
        self._tell_host("ready", modules=modules)

    # From and to the host

    def _host_said(self) -> None:
        assert self._host is not None
        for message in self._host.receive_messages():
            self._host_asked(message)
        if not self._host.is_open:
            self._supervisor.detach(self._host)
            self._host.close()
            self._host = None
            if not self._stopping:
                self._supervisor.stop()  # The host is gone, and with it the reason to run.

    def _host_asked(self, message: dict[str, Any]) -> None:
        name = message["m"]
        if name == "stop":
            self._supervisor.stop()
        elif name == "poll_now":
            self._supervisor.send((*WORKERS, f"worker:{message['slug']}"), "poll_now")
        elif name == "status":
            self._tell_host(
                "status",
                id=message.get("id"),
                children=self._supervisor.which_children(),
                modules=list(self._modules.values()),
            )

    def _tell_host(self, name: str, **content: Any) -> None:
        if self._host is not None:
            self._host.send({"m": name, **content})


def _tree_lines(children: Sequence[dict[str, Any]], depth: int = 0) -> list[str]:
    lines: list[str] = []
    for child in children:
        pid = f" pid {child['pid']}" if child["pid"] else ""
        lines.append(f"{'  ' * depth}{child['id']}: {child['state']}{pid}, restarts {child['restarts']}")
        lines += _tree_lines(child.get("children", []), depth + 1)
    return lines
