"""The root's end of the channel to the program that embeds the tree; and the watch on that program."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from pgflow_otp.otp.channel import Channel, ChannelBroken
from pgflow_otp.otp.process import open_pidfd

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgflow_otp.otp.supervisor import Supervisor
    from pgflow_otp.runtime.workers import Answer

#: Seconds between two looks at the parent where the kernel does not tell of its death.
_LOOK = 2.0
#: Seconds the host may take to read the last message.
_LAST_WORDS = 1.0


class Host:
    """When the host dies, so does the tree: the end of the channel tells, or the kernel, when another process that the
    host has started holds the channel open.

    Args:
        supervisor: the tree.
        descriptor: this end of the channel.
        pid: the host; None where only the channel tells.
        ask: answers its questions.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        descriptor: int,
        pid: int | None,
        ask: Callable[[dict[str, Any], Answer, bytes], None],
    ) -> None:
        self._supervisor = supervisor
        self._ask = ask
        self._channel = Channel(socket.socket(fileno=descriptor))
        self._watch_channel()
        if pid is not None:
            self._watch_process(pid)

    def tell(self, name: str, **content: Any) -> None:
        """Send a message; what the host cannot take now is sent when it can."""
        if self._channel.is_open:
            self._channel.send({"m": name, **content})
            self._watch_channel()

    def tell_last(self, name: str, **content: Any) -> None:
        """Send the last message: nobody will come back to send the rest of it."""
        self._channel.socket.settimeout(_LAST_WORDS)
        self._channel.send({"m": name, **content})

    def _watch_channel(self) -> None:
        self._supervisor.attach(self._channel, self._ready, write=self._channel.has_unsent)

    def _ready(self) -> None:
        self._channel.flush()
        try:
            frames = self._channel.receive()
        except ChannelBroken as error:
            frames = error.frames
        for header, data in frames:
            self._asked(header, data)
        if self._channel.is_open:
            self._watch_channel()
            return
        self._supervisor.detach(self._channel)
        self._channel.close()
        self._gone()

    def _asked(self, question: dict[str, Any], data: bytes) -> None:
        number = question.pop("id", None)
        self._ask(question, lambda answer: self.tell("answer", id=number, **answer), data)

    def _watch_process(self, pid: int) -> None:
        pidfd = open_pidfd(pid)
        if pidfd is not None and os.getppid() == pid:  # It is still the host's: nobody else has got its number.
            self._supervisor.attach(pidfd, lambda: self._process_gone(pidfd))
            return
        if pidfd is not None:
            os.close(pidfd)
        self._look(pid)

    def _look(self, pid: int) -> None:
        if os.getppid() == pid:
            self._supervisor.after(_LOOK, lambda: self._look(pid))
        else:
            self._gone()

    def _process_gone(self, pidfd: int) -> None:
        self._supervisor.detach(pidfd)
        os.close(pidfd)
        self._gone()

    def _gone(self) -> None:
        if not self._supervisor.is_stopping:
            self._supervisor.stop()  # The host is gone, and with it the reason to run.
