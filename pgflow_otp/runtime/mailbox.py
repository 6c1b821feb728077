"""What a tree says to its host, for any number of the host's threads at once."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from pgflow_otp.otp.channel import readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgflow_otp.otp.channel import Channel


class Mailbox:
    """The host's end of the channel. No thread of its own: of the threads that wait, one reads, the others are told.

    Args:
        channel: the channel to the root.
        on_message: gets every message that is no answer, under the mailbox's lock.
    """

    def __init__(self, channel: Channel, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._channel = channel
        self._on_message = on_message
        self._changed = threading.Condition()
        self._someone_reads = False
        self._is_closing = False
        self._questions = 0
        self._answers: dict[int, dict[str, Any] | None] = {}

    @property
    def is_open(self) -> bool:
        """Whether the tree can still say something."""
        return self._channel.is_open

    def tell(self, question: str, **content: Any) -> None:
        """Send what needs no answer."""
        with self._changed:
            self._channel.send({"ask": question, **content})

    def ask(self, question: str, timeout: float, data: bytes = b"", **content: Any) -> dict[str, Any] | None:
        """Send a question and wait for its answer; None when it does not come within `timeout` seconds, or never."""
        with self._changed:
            self._questions += 1
            number = self._questions
            self._answers[number] = None
            self._channel.send({"ask": question, "id": number, **content}, data)
        self.wait_until(lambda: self._answers[number] is not None, timeout)
        with self._changed:
            return self._answers.pop(number)

    def wait_until(self, holds: Callable[[], bool], timeout: float) -> bool:
        """Read until something holds; False at the timeout (seconds) or when the channel has ended before."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not holds():
                left = deadline - time.monotonic()
                if left <= 0 or not self._channel.is_open:
                    return False
                if self._someone_reads:
                    self._changed.wait(left)
                    continue
                self._read(left)
        return True

    def close(self) -> None:
        """Close the channel once no thread reads it. The tree has ended, so a reader meets the end at once."""
        with self._changed:
            self._is_closing = True
            while self._someone_reads:
                self._changed.wait(1.0)
            self._channel.close()
            self._changed.notify_all()

    def _read(self, seconds: float) -> None:
        self._someone_reads = True
        self._changed.release()
        try:
            readable(self._channel, min(seconds, 1.0) if self._channel.has_unsent else seconds)
        finally:
            self._changed.acquire()
            self._someone_reads = False
            self._changed.notify_all()
        self._channel.flush()
        for message in self._channel.receive_messages():
            if message["m"] != "answer":
                self._on_message(message)
            elif message["id"] in self._answers:
                self._answers[message["id"]] = message
