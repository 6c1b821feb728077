"""The root's end of the control socket: a line of JSON asks, a line of JSON answers. Never blocks."""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import orjson
from loguru import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgflow_otp.otp.supervisor import Supervisor
    from pgflow_otp.runtime.administration import Ask
    from pgflow_otp.runtime.rendezvous import Claim

_MOST_CALLERS = 32
_LONGEST_LINE = 1024 * 1024
_LONGEST_BACKLOG = 16 * 1024 * 1024
#: Seconds until callers are let in again after the system had no descriptor for one.
_PAUSE = 1.0


class ControlSocket:
    """Listens, and passes on what is asked.

    Args:
        supervisor: whose loop watches the descriptors.
        claim: the tree's name and listening socket.
        ask: answers questions.
    """

    def __init__(self, supervisor: Supervisor, claim: Claim, ask: Ask) -> None:
        self._supervisor = supervisor
        self._claim = claim
        self._ask = ask
        self._callers: set[_Caller] = set()
        self._listen()

    def close(self) -> None:
        """Let go of the name. Callers see the end of the connection when the process ends, not before: they wait for
        just that."""
        self._claim.release()

    def _listen(self) -> None:
        self._supervisor.attach(self._claim.listener, self._called)

    def _called(self) -> None:
        try:
            sock, _ = self._claim.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning(f"a caller of the control socket could not be let in: {error.strerror}")
            self._supervisor.detach(self._claim.listener)
            self._supervisor.after(_PAUSE, self._listen)
            return
        if len(self._callers) >= _MOST_CALLERS or not _is_ours(sock):
            sock.close()
            return
        self._callers.add(_Caller(sock, self._supervisor, self._ask, self._callers.discard))


class _Caller:
    """One connection."""

    def __init__(
        self, sock: socket.socket, supervisor: Supervisor, ask: Ask, on_end: Callable[[_Caller], None]
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._supervisor = supervisor
        self._ask = ask
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._is_open = True
        supervisor.attach(sock, self._ready)

    def hang_up(self) -> None:
        if self._is_open:
            self._is_open = False
            self._supervisor.detach(self._socket)
            self._socket.close()
            self._on_end(self)

    def _ready(self) -> None:
        if self._unsent:
            self._flush()
        if not self._is_open:
            return
        try:
            data = self._socket.recv(65_536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.hang_up()
            return
        self._received += data
        while self._is_open and b"\n" in self._received:
            line, _, rest = bytes(self._received).partition(b"\n")
            self._received = bytearray(rest)
            self._asked(line)
        if len(self._received) > _LONGEST_LINE:
            self.hang_up()

    def _asked(self, line: bytes) -> None:
        try:
            question = orjson.loads(line)
            if not isinstance(question, dict) or not isinstance(question.get("ask"), str):
                raise ValueError
        except ValueError:
            self._answer({"error": 'a question is a JSON object such as {"ask": "status"}'})
            return
        number = question.pop("id", None)
        self._ask(question, lambda answer: self._answer({"id": number, **answer}))

    def _answer(self, answer: dict[str, Any]) -> None:
        if not self._is_open:
            return
        self._unsent += orjson.dumps(answer) + b"\n"
        if len(self._unsent) > _LONGEST_BACKLOG:
            self.hang_up()  # It asks, but does not read.
        else:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.hang_up()
            return
        self._supervisor.attach(self._socket, self._ready, write=bool(self._unsent))


def _is_ours(sock: socket.socket) -> bool:
    """Whether the caller is this user or root. The directory sees to it already; this holds where it could not."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return uid in (0, os.getuid())
