"""What `Supervisor.spawn` needs before there is a tree: its targets, its database, its root process."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import IO

from pgflow_otp.db.dsn import check_dsn
from pgflow_otp.db.embedded import EmbeddedServer
from pgflow_otp.errors import ConfigurationError
from pgflow_otp.flow.dsl import Flow
from pgflow_otp.flow.target import target_of
from pgflow_otp.runtime.boot import BootConfig, command, hand_over, package_parent
from pgflow_otp.settings import check_limits


def targets_of(flows: Iterable[str | Flow] | str | Flow) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Return targets, and the pickled flows among them.

    Raises:
        ConfigurationError: one is neither a target nor a flow, or there is none.
        FlowDefinitionError: a flow cannot be pickled.
    """
    if isinstance(flows, str | Flow):
        flows = (flows,)
    targets: list[str] = []
    objects: dict[str, bytes] = {}
    for flow in flows if isinstance(flows, Iterable) else (flows,):
        if isinstance(flow, str) and flow:
            targets.append(flow)
        elif isinstance(flow, Flow):
            target, data = target_of(flow)
            if target in objects and objects[target] != data:
                raise ConfigurationError(f"two of the flows have the slug '{flow.slug}'")
            targets.append(target)
            if data is not None:
                objects[target] = data
        else:
            raise ConfigurationError(f"flows holds {flow!r}; give targets such as 'myapp.flows', or Flow objects")
    if not targets:
        raise ConfigurationError("flows is empty; give targets such as 'myapp.flows', or Flow objects")
    return tuple(targets), objects


def limits_of(max_concurrency: int | None, batch_size: int | None) -> dict[str, int]:
    """Return the limits that are given, checked."""
    given = {"max_concurrency": max_concurrency, "batch_size": batch_size}
    limits = {key: value for key, value in given.items() if value is not None}
    check_limits(limits)
    return limits


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel. Their numbers are no standard descriptors', which the host may have closed:
    those are given to the root as such."""
    low = socket.socketpair()
    try:
        ours, theirs = (socket.socket(fileno=_above_standard(end.fileno())) for end in low)
    finally:
        for end in low:
            end.close()
    return ours, theirs


def _above_standard(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def start_root(config: BootConfig, channel: socket.socket, stderr: int | IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start the root as a fresh interpreter: the caller's threads do not matter, nor do its descriptors."""
    low = hand_over(config)
    descriptor = _above_standard(low)
    os.close(low)
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


def _standard_error() -> int:
    """Return where the host writes its errors. One that has replaced the stream has the descriptor still; one that has
    closed both is spared the log."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        descriptor = 2
    try:
        os.fstat(descriptor)
    except OSError:
        return subprocess.DEVNULL
    return descriptor
