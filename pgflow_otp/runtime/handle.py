"""A tree as the child of another program: `Supervisor.spawn`."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import subprocess
from typing import IO, TYPE_CHECKING, Any

from pgflow_otp.client import Client
from pgflow_otp.db.dsn import check_dsn, find_dsn
from pgflow_otp.errors import ConfigurationError, PgflowError, TreeStartError
from pgflow_otp.otp.channel import Channel
from pgflow_otp.otp.exit_reason import signal_name
from pgflow_otp.runtime.boot import BootConfig, user_source
from pgflow_otp.runtime.mailbox import Mailbox
from pgflow_otp.runtime.spawning import channel_pair, limits_of, start_embedded, start_root, targets_of
from pgflow_otp.settings import DEFAULT_NAME, Settings, settings_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgflow_otp.db.embedded import EmbeddedServer
    from pgflow_otp.flow.dsl import Flow

#: Seconds beyond the drain time after which `stop` kills the tree.
_STOP_MARGIN = 15.0
#: Trees whose handle nobody holds any more: they live on. Their channel is the sign that the host does, too.
_alive: set[Supervisor] = set()
_numbers = itertools.count(1)


class Supervisor:
    """Handle of a running tree. Made by `Supervisor.spawn`; a context manager that stops the tree at its end.

    The tree is a program of its own, not a fork of the host: the host's threads, signals and descriptors do not matter.
    It stops when the host dies, and it does not when the handle is dropped. Any thread may use a handle, several at
    once; a process that the host has forked may not, and does no harm to the tree at its end.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, dsn: str, settings: Settings) -> None:
        self._process = process
        self._mailbox = Mailbox(channel, self._told)
        self._settings = settings
        self._dsn = dsn
        self._host_pid = os.getpid()
        self._server: EmbeddedServer | None = None
        self._modules: dict[str, dict[str, Any]] = {}
        self._is_ready = False
        self._failed: str | None = None
        self._ended: dict[str, Any] | None = None
        self._client: Client | None = None
        self._stop_requested = False

    @classmethod
    def spawn(
        cls,
        flows: Sequence[str | Flow] | str | Flow,
        *,
        dsn: str | None = None,
        stderr: int | IO[bytes] | None = None,
        **settings: Any,
    ) -> Supervisor:
        """Start a tree and return at once.

        Args:
            flows: targets, `module` or `module:attribute`, looked for where the host would, or Flow and Job objects.
                One that no importable module holds (made in a function, at a prompt, in the main script) is handed
                over itself, with the closures, lambdas and globals that its handlers use.
            dsn: database; None: PGFLOW_DSN, DATABASE_URL, libpq's variables, else the embedded server.
            stderr: where the tree's log goes, as for subprocess.Popen; None: the host's standard error.
            settings: fields of `Settings`. A tree without `name` gets one of its own, so that many may run on a host.

        Raises:
            ConfigurationError: a setting or the DSN is not valid, or no flows are given.
            FlowDefinitionError: a flow cannot be handed over; says why.
            DatabaseUnavailable: the embedded server does not start.
        """
        targets, objects = targets_of(flows)
        settings.setdefault("name", os.environ.get("PGFLOW_NAME") or f"{DEFAULT_NAME}-{os.getpid()}-{next(_numbers)}")
        tree_settings = settings_from(settings)
        found = check_dsn(dsn) if dsn is not None else find_dsn()
        server: EmbeddedServer | None = None
        if found is None:
            server, found = start_embedded()
        ours, theirs = channel_pair()
        config = BootConfig(
            targets=targets,
            source=user_source().with_objects(objects),
            dsn=found,
            settings=tree_settings,
            host=theirs.fileno(),
            host_pid=os.getpid(),
        )
        try:
            process = start_root(config, theirs, stderr)
        except BaseException:
            ours.close()
            if server is not None:
                server.release()
            raise
        finally:
            theirs.close()
        handle = cls(process, Channel(ours), found, tree_settings)
        handle._server = server
        _alive.add(handle)
        if server is not None:
            atexit.register(handle._at_exit)  # Nobody else would stop the embedded server.
        return handle

    @property
    def pid(self) -> int:
        """Pid of the root process."""
        return self._process.pid

    @property
    def name(self) -> str:
        """The tree's name, by which the command line finds it."""
        return self._settings.name

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
        self._check_owner()
        self._mailbox.wait_until(lambda: self._is_ready or self._failed is not None or self._ended is not None, timeout)
        if self._failed is not None:
            raise ConfigurationError(self._failed)
        if self._ended is not None or not self._mailbox.is_open:
            raise TreeStartError(self._how_it_ended())
        if not self._is_ready:
            retrying = [m["reason"] for m in self._modules.values() if m["status"] == "retrying"]
            why = f": {retrying[-1]}" if retrying else ""
            raise TimeoutError(f"the tree is not ready after {timeout:g} s{why}")

    def poll_now(self, slug: str) -> None:
        """Tell a flow's worker to look for work at once."""
        self._check_owner()
        self._mailbox.tell("poll_now", slug=slug)

    def status(self, timeout: float = 5.0) -> dict[str, Any]:
        """Return name, pid, state, uptime (seconds), `children` (the tree) and `modules` (what became of each target).

        Raises:
            PgflowError: the tree has ended, or does not answer within `timeout` seconds.
        """
        return dict(self._ask("status", timeout))

    def which_children(self, timeout: float = 5.0) -> list[dict[str, Any]]:
        """Return the tree as nested dicts: id, type, state, pid, restarts, uptime, children. Errors as `status`."""
        return list(self._ask("status", timeout)["children"])

    def count_children(self, timeout: float = 5.0) -> dict[str, int]:
        """Count the workers: specs, active, supervisors, workers. Errors as `status`."""
        return dict(self._ask("count_children", timeout))

    def check_worker(self, slug: str, *, timeout: float = 5.0) -> dict[str, Any]:
        """Return what a worker says of itself: state, limits, what runs, its handler processes with their tasks.

        Raises:
            PgflowError: no worker serves `slug`, it is not running, or it does not answer. Also as `status`.
        """
        return dict(self._ask("check_worker", timeout, slug=slug))

    def scale_worker(
        self, slug: str, *, max_concurrency: int | None = None, batch_size: int | None = None, timeout: float = 5.0
    ) -> dict[str, Any]:
        """Change the limits of a flow's worker; return those that hold now.

        Running handlers are left to run: with a lower limit, new claims wait. The limits outlive the worker's restarts,
        not the tree's.

        Raises:
            ConfigurationError: no limit is given, or one is out of its range (1 to 10 000).
            PgflowError: no worker serves `slug`. Also as `status`.
        """
        limits = limits_of(max_concurrency, batch_size)
        if not limits:
            raise ConfigurationError("scale_worker needs max_concurrency, batch_size, or both")
        return dict(self._ask("scale_worker", timeout, b"", slug=slug, **limits))

    def start_worker(
        self,
        flow: str | Flow,
        *,
        max_concurrency: int | None = None,
        batch_size: int | None = None,
        timeout: float = 60.0,
    ) -> dict[str, Any]:
        """Serve another flow, or one whose worker was stopped; return the slugs `started` and already `running`.

        Args:
            flow: a target or an object, as for `spawn`, or the slug of a worker that was stopped.
            max_concurrency: its limit, instead of the tree's setting.
            batch_size: likewise.
            timeout: seconds to wait; the tree goes on trying.

        Raises:
            PgflowError: it cannot be served; says why. Also as `status`.
        """
        limits = limits_of(max_concurrency, batch_size)
        (target,), objects = targets_of(flow)
        return dict(self._ask("start_worker", timeout, objects.get(target, b""), target=target, **limits))

    def stop_worker(self, slug: str, *, timeout: float | None = None) -> None:
        """Drain a flow's worker and leave it down until `start_worker`. Nothing happens when it is down.

        Args:
            slug: the flow.
            timeout: seconds to wait; None: as long as a drain may take. It goes on stopping all the same.

        Raises:
            PgflowError: no worker serves `slug`. Also as `status`.
        """
        self._ask("stop_worker", self._longest_stop() if timeout is None else timeout, slug=slug)

    def request_stop(self) -> None:
        """Ask the tree to stop and return at once. A second request hurries."""
        self._check_owner()
        self._mailbox.tell("stop", hurry=self._stop_requested)
        self._stop_requested = True

    def stop(self, timeout: float | None = None) -> int | None:
        """Stop the tree in order, wait for its end, and return its exit status. May be called again.

        Args:
            timeout: seconds until it is killed; None: drain_timeout and a margin.
        """
        self._check_owner()
        if self._process.poll() is None and not self._stop_requested:
            self.request_stop()
        if not self._wait_end(self._longest_stop() if timeout is None else timeout):
            self._process.kill()
            self._process.wait()
        return self._cleaned_up()

    def join(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the tree; its exit status, or None when `timeout` seconds were not enough."""
        self._check_owner()
        return self._cleaned_up() if self._wait_end(timeout) else None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() == self._host_pid:
            self.stop()

    # Talking with the tree

    def _ask(self, question: str, timeout: float, data: bytes = b"", **content: Any) -> Any:
        self._check_owner()
        answer = self._mailbox.ask(question, timeout, data, **content)
        if answer is None:
            if not self._mailbox.is_open or self._ended is not None:
                raise PgflowError(self._how_it_ended())
            raise PgflowError(f"the tree has not answered '{question}' within {timeout:g} s")
        if "error" in answer:
            raise PgflowError(answer["error"])
        return answer["ok"]

    def _told(self, message: dict[str, Any]) -> None:
        name = message["m"]
        if name == "ready":
            self._is_ready = True
        elif name == "module":
            self._modules[message["target"]] = message
        elif name == "failed":
            self._failed = "; ".join(str(module.get("reason")) for module in message["modules"])
        elif name == "ended":
            self._ended = message

    def _check_owner(self) -> None:
        if os.getpid() != self._host_pid:
            raise PgflowError(f"this tree belongs to process {self._host_pid}; a fork of it cannot use the handle")

    # Its end

    def _longest_stop(self) -> float:
        return self._settings.drain_timeout + self._settings.kill_grace + _STOP_MARGIN

    def _wait_end(self, timeout: float | None) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _how_it_ended(self) -> str:
        self._wait_end(1.0)
        if self._ended is not None:
            return f"the tree has ended with status {self._ended['status']}: {self._ended['reason']}"
        status = self._process.returncode
        if status is not None and status < 0:
            return f"the tree was killed by {signal_name(-status)}"
        return "the tree has ended; its log says why"

    def _cleaned_up(self) -> int:
        self._mailbox.wait_until(lambda: self._ended is not None, 1.0)
        self._mailbox.close()
        _alive.discard(self)
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            atexit.unregister(self._at_exit)
            self._server.release()
        return self._exit_status()

    def _exit_status(self) -> int:
        """Return the status the kernel gave, unless the host has taken it: one that ignores SIGCHLD, or reaps whatever
        it finds. Then the tree's last message tells; one that could say nothing was killed."""
        status = self._process.returncode
        assert status is not None
        if status != 0:
            return status
        return int(self._ended["status"]) if self._ended is not None else -signal.SIGKILL

    def _at_exit(self) -> None:
        if os.getpid() == self._host_pid:
            self.stop()
