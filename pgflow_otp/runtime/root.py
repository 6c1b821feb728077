"""The root process: the supervisor, and the few decisions that are this engine's own.

Started as a fresh interpreter, `python -m pgflow_otp.runtime.root FD`, which reads its configuration from the
descriptor FD. No database connection, no user code, no thread, ever.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from loguru import logger
from setproctitle import setproctitle

from pgflow_otp import log
from pgflow_otp.errors import ConfigurationError, TreeStartError
from pgflow_otp.otp.exit_reason import BAD_CONFIGURATION, START_FAILED, ExitReason
from pgflow_otp.otp.hooks import Hooks, Path
from pgflow_otp.otp.process import become_subreaper, close_other_descriptors, hold_stop_signals
from pgflow_otp.otp.supervisor import Supervisor
from pgflow_otp.runtime.administration import Administration
from pgflow_otp.runtime.boot import BootConfig
from pgflow_otp.runtime.control_socket import ControlSocket
from pgflow_otp.runtime.host import Host
from pgflow_otp.runtime.rendezvous import Claim, claim
from pgflow_otp.runtime.tree import WORKERS, tree_spec
from pgflow_otp.runtime.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgflow_otp.otp import operation as ops


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
    become_subreaper()  # What a dead worker leaves behind comes here, and goes.
    status = Root(config).run()
    if config.embedded is not None:
        from pgflow_otp.db.embedded import EmbeddedServer  # only now: the root itself needs no database

        server = EmbeddedServer()
        server.adopt(config.embedded)
        server.release()
    sys.stderr.flush()
    os._exit(status)


class Root(Hooks):
    """Tells recovery of dead workers, announces when the tree is ready, and talks with the host."""

    def __init__(self, config: BootConfig) -> None:
        self._config = config
        self._supervisor = Supervisor(tree_spec(config), name=config.settings.name, hooks=self)
        self._workers = Workers(self._supervisor, config, self._announce)
        self._administration = Administration(self._supervisor, config, self._workers)
        #: Ids of dead workers until recovery says that their tasks are released.
        self._unreleased: list[str] = []
        self._announced = False
        self._status: int | None = None
        self._stopping = False
        self._host: Host | None = None

    def run(self) -> int:
        """Run the tree to its end; return the exit status."""
        config = self._config
        if config.host is not None:
            self._host = Host(self._supervisor, config.host, config.host_pid, self._administration.ask)
        try:
            claimed = _claim(config.settings.name)
        except TreeStartError as error:
            logger.error(str(error))
            self._tell_last(START_FAILED, str(error))
            return START_FAILED
        control = ControlSocket(self._supervisor, claimed, self._administration.ask) if claimed is not None else None
        status = self._supervisor.run()
        reason = self._supervisor.result
        if status != 0 and reason is not None:
            logger.error(f"the tree has ended: {reason.info or reason}")
        if self._status is not None:
            status = self._status
        self._tell_last(status, str(reason))
        if control is not None:
            control.close()
        return status

    # From the tree

    def on_start(self, path: Path, info: dict[str, Any]) -> None:
        if path == ("recovery",):
            for worker_id in self._unreleased:
                self._supervisor.send(("recovery",), "release", worker_id=worker_id)
        elif path[:1] == WORKERS:
            logger.debug(f"{path[-1]} is up")
        self._workers.child_started(path)

    def on_exit(self, path: Path, reason: ExitReason, info: dict[str, Any], *, requested: bool) -> None:
        worker_id = info.get("worker_id")
        if worker_id and not (requested and reason.kind == "shutdown"):
            self._unreleased.append(worker_id)
            self._supervisor.send(("recovery",), "release", worker_id=worker_id)
        if path[:1] == WORKERS:
            self._workers.child_exited(path, finished=reason.kind == "normal")

    def on_message(self, path: Path, message: dict[str, Any]) -> None:
        name = message["m"]
        if name in ("start_worker", "module", "done"):
            news = self._workers.starter_said(path, message)
            if news is not None:
                self._tell_host("module", **news)
        elif name == "report":
            self._administration.report_arrived(path, message)
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

    def _announce(self) -> None:
        """Tell once everything that was asked for is up, or why nothing is."""
        if self._stopping:
            return
        modules = list(self._workers.modules.values())
        if not self._announced:
            if not any(m["status"] == "succeeded" for m in modules):
                logger.error("there is nothing to serve")
                self._status = BAD_CONFIGURATION
                self._tell_host("failed", modules=modules)
                self._supervisor.stop()
                return
            logger.info(f"ready: serving {', '.join(self._workers.slugs)}")
            self._announced = True
        self._tell_host("ready", modules=modules)

    def _tell_last(self, status: int, reason: str) -> None:
        if self._host is not None:
            self._host.tell_last("ended", status=status, reason=reason)

    def _tell_host(self, name: str, **content: Any) -> None:
        if self._host is not None:
            self._host.tell(name, **content)


def _claim(name: str) -> Claim | None:
    """Take the tree's name; None where the host has no place for it: nobody can talk to the tree then, but it works."""
    try:
        return claim(name)
    except ConfigurationError as error:
        logger.warning(f"no control socket, so `pgflow-otp tree` and the like will not find this tree: {error}")
        return None


def _tree_lines(children: Sequence[dict[str, Any]], depth: int = 0) -> list[str]:
    lines: list[str] = []
    for child in children:
        pid = f" pid {child['pid']}" if child["pid"] else ""
        lines.append(f"{'  ' * depth}{child['id']}: {child['state']}{pid}, restarts {child['restarts']}")
        lines += _tree_lines(child.get("children", []), depth + 1)
    return lines
