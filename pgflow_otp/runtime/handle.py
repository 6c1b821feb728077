"""A tree as the child of another program: `Supervisor.spawn`."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pgflow_otp.client import Client
from pgflow_otp.db.dsn import check_dsn, find_dsn
from pgflow_otp.db.embedded import EmbeddedServer
from pgflow_otp.errors import ConfigurationError, PgflowError, TreeStartError
from pgflow_otp.otp.channel import Channel, readable
from pgflow_otp.runtime.root import BootConfig, command, hand_over
from pgflow_otp.settings import Settings, settings_from

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds beyond the drain time after which `stop` kills the tree.
_STOP_MARGIN = 15.0


class Supervisor:
    """Handle of a running tree. Made by `Supervisor.spawn`; a context manager that stops the tree at its end.

    The tree is a program of its own, not a fork of the host: the host's threads, signals and descriptors do not matter.
    It stops when the host dies. One thread at a time may use a handle.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, dsn: str, settings: Settings) -> None:
        self._process = process
        self._channel = channel
        self._settings = settings
        self._dsn = dsn
        self._server: EmbeddedServer | None = None
        self._messages: list[dict[str, Any]] = []
        self._modules: dict[str, dict[str, Any]] = {}
        self._ready: dict[str, Any] | None = None
        self._client: Client | None = None
        self._questions = 0
        self._stop_requested = False

    @classmethod
    def spawn(
        cls,
        flows: Sequence[str] | str,
        *,
        dsn: str | None = None,
        stderr: int | IO[bytes] | None = None,
        **settings: Any,
    ) -> Supervisor:
        """Start a tree and return at once.

        Args:
            flows: targets, `module` or `module:attribute`; modules are looked for where the host would.
            dsn: database; None: PGFLOW_DSN, DATABASE_URL, libpq's variables, else the embedded server.
            stderr: where the tree's log goes, as for subprocess.Popen; None: the host's standard error.
            settings: fields of `Settings`.

        Raises:
            ConfigurationError: a setting or the DSN is not valid, or no flows are given.
            DatabaseUnavailable: the embedded server does not start.
        """
        targets = (flows,) if isinstance(flows, str) else tuple(flows)
        if not targets or not all(isinstance(t, str) for t in targets):
            raise ConfigurationError(f"flows is {flows!r}; it has to be a list of targets such as 'myapp.flows'")
        tree_settings = settings_from(settings)
        found = check_dsn(dsn) if dsn is not None else find_dsn()
        server: EmbeddedServer | None = None
        if found is None:
            server, found = start_embedded()
        ours, theirs = socket.socketpair()
        config = BootConfig(
            targets=targets,
            search_path=import_path(),
            dsn=found,
            settings=tree_settings,
            host=theirs.fileno(),
        )
        try:
            process = _start_root(config, theirs, stderr)
        except BaseException:
            ours.close()
            if server is not None:
                server.release()
            raise
        finally:
            theirs.close()
        handle = cls(process, Channel(ours), found, tree_settings)
        handle._server = server
        if server is not None:
            atexit.register(handle.stop)  # Nobody else would stop the embedded server.
        return handle

    @property
    def pid(self) -> int:
        """Pid of the root process."""
        return self._process.pid

    @property
    def dsn(self) -> str:
        """The database the tree works on."""
        return self._dsn

    @property
    def log(self) -> IO[bytes] | None:
        """The tree's log, when `spawn` was given stderr=subprocess.PIPE."""
        return self._process.stdout

    @property
    def client(self) -> Client:
        """A client of the tree's database."""
        if self._client is None:
            self._client = Client(self._dsn)
        return self._client

    def await_ready(self, timeout: float = 10.0) -> None:
        """Wait until every target is served or has failed for good, and at least one is served.

        Raises:
            ConfigurationError: no target can be served; says why for each.
            TreeStartError: the tree ended.
            TimeoutError: it takes longer than `timeout` seconds; the tree goes on trying.
        """
        deadline = time.monotonic() + timeout
        while self._ready is None:
            message = self._next_message(deadline)
            if message is None:
                retrying = [m["reason"] for m in self._modules.values() if m["status"] == "retrying"]
                why = f": {retrying[-1]}" if retrying else ""
                raise TimeoutError(f"the tree is not ready after {timeout:g} s{why}")
            if message["m"] == "failed":
                raise ConfigurationError("; ".join(str(m.get("reason")) for m in message["modules"]))
            if message["m"] == "ended":
                raise TreeStartError(f"the tree ended with status {message['status']}: {message['reason']}")

    def poll_now(self, slug: str) -> None:
        """Tell a flow's worker to look for work at once."""
        self._channel.send({"m": "poll_now", "slug": slug})

    def which_children(self, timeout: float = 5.0) -> list[dict[str, Any]]:
        """Return the tree as nested dicts: id, type, state, pid, restarts, uptime, children.

        Raises:
            PgflowError: the tree has ended, or does not answer within `timeout` seconds.
        """
        return list(self.status(timeout)["children"])

    def status(self, timeout: float = 5.0) -> dict[str, Any]:
        """Return `children` (the tree) and `modules` (what became of each target). Errors as `which_children`."""
        self._questions += 1
        self._channel.send({"m": "status", "id": self._questions})
        deadline = time.monotonic() + timeout
        while (message := self._next_message(deadline)) is not None:
            if message["m"] == "ended":
                break
            if message["m"] == "status" and message["id"] == self._questions:
                return message
        raise PgflowError("the tree does not answer" if self._channel.is_open else "the tree has ended")

    def request_stop(self) -> None:
        """Ask the tree to stop and return at once. A second request hurries, a third kills."""
        self._stop_requested = True
        self._channel.send({"m": "stop"})

    def stop(self, timeout: float | None = None) -> int | None:
        """Stop the tree in order, wait for its end, and return its exit status. May be called again.

        Args:
            timeout: seconds until it is killed; None: drain_timeout and a margin.
        """
        if self._process.poll() is None and not self._stop_requested:
            self.request_stop()
        limit = timeout
        if limit is None:
            limit = self._settings.drain_timeout + self._settings.kill_grace + _STOP_MARGIN
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return self._cleaned_up()

    def join(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the tree; its exit status, or None when `timeout` seconds were not enough."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        return self._cleaned_up()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _cleaned_up(self) -> int | None:
        self._channel.close()
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            atexit.unregister(self.stop)
            self._server.release()
        return self._process.returncode

    def _next_message(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message of the tree; None at the deadline. The end of the channel is a message too."""
        while self._channel.is_open:
            known = len(self._messages)
            self._messages += self._channel.receive_messages()
            if len(self._messages) > known:
                break
            left = deadline - time.monotonic()
            if left <= 0 or not self._channel.is_open:
                break
            readable(self._channel, left)
        if not self._messages:
            if self._channel.is_open:
                return None
            return {"m": "ended", "status": self._process.wait(), "reason": "its log says why"}
        message = self._messages.pop(0)
        if message["m"] == "ready":
            self._ready = message
        elif message["m"] == "module":
            self._modules[message["target"]] = message
        return message


def _start_root(config: BootConfig, channel: socket.socket, stderr: int | IO[bytes] | None) -> subprocess.Popen[bytes]:
    descriptor = hand_over(config)
    try:
        return subprocess.Popen(
            command(package_parent(), descriptor),
            stdin=subprocess.DEVNULL,
            stdout=stderr if stderr is not None else _standard_error(),
            stderr=subprocess.STDOUT,
            pass_fds=(descriptor, channel.fileno()),
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def start_embedded() -> tuple[EmbeddedServer, str]:
    """Bring up the embedded server and install the schema in it; the server and its DSN."""
    from pgflow_otp.db import schema
    from pgflow_otp.db.connection import connect

    server = EmbeddedServer()
    dsn = check_dsn(server.acquire())
    try:
        with connect(dsn, "setup") as connection:
            schema.install(connection)
    except BaseException:
        server.release()
        raise
    return server, dsn


def import_path() -> tuple[str, ...]:
    """Return where user modules are looked for: the current directory first, then what the host sees."""
    here = os.getcwd()
    return (here, *(entry for entry in sys.path if entry not in ("", here)))


def package_parent() -> str:
    """Return the folder that holds the package."""
    return str(Path(__file__).resolve().parent.parent.parent)


def _standard_error() -> int | None:
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return 2
