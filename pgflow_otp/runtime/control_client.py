"""The caller's end of the control socket."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import orjson

from pgflow_otp.errors import PgflowError, TreeNotFound

if TYPE_CHECKING:
    from pathlib import Path


class ControlClient:
    """A connection to a running tree. A context manager.

    Args:
        path: its control socket, as `find_tree` gives it.

    Raises:
        TreeNotFound: nobody listens there.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._received = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(5.0)
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise TreeNotFound(
                f"the tree '{self.name}' cannot be reached at {path}: {error.strerror or error}"
            ) from None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, question: str, timeout: float | None = 5.0, **content: Any) -> Any:
        """Ask, and return the answer.

        Args:
            question: one of those of `runtime.administration`.
            timeout: seconds to wait; None: for as long as the tree lives.
            content: what belongs to the question.

        Raises:
            PgflowError: the tree refuses, does not answer in time, or ends.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(orjson.dumps({"ask": question, **content}) + b"\n")
        except OSError as error:
            raise self._unanswered(question, timeout, error) from None
        answer = orjson.loads(self._line(question, timeout, deadline))
        if "error" in answer:
            raise PgflowError(answer["error"])
        return answer["ok"]

    def wait_end(self, timeout: float | None) -> bool:
        """Wait until the tree has ended; False when that takes longer than `timeout` seconds."""
        self._socket.settimeout(timeout)
        try:
            while self._socket.recv(65_536):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def _line(self, question: str, timeout: float | None, deadline: float | None) -> bytes:
        while b"\n" not in self._received:
            try:
                if deadline is not None:
                    self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                data = self._socket.recv(65_536)
            except OSError as error:
                raise self._unanswered(question, timeout, error) from None
            if not data:
                raise PgflowError(f"the tree '{self.name}' has ended")
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return line

    def _unanswered(self, question: str, timeout: float | None, error: OSError) -> PgflowError:
        if isinstance(error, TimeoutError):
            return PgflowError(f"the tree '{self.name}' has not answered '{question}' within {timeout:g} s")
        return PgflowError(f"the tree '{self.name}' has ended")
