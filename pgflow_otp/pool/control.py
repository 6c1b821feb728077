"""The channel between worker and forkserver: frames that may carry descriptors."""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Any

from pgflow_otp.otp.channel import FrameReader, encode_frame

_MOST_DESCRIPTORS = 16


class ControlChannel:
    """One end. Descriptors arrive in the order in which they were sent, before the frame they belong to is complete."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.is_open = True
        self._reader = FrameReader()
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()

    @staticmethod
    def pair() -> tuple[ControlChannel, ControlChannel]:
        """Return the two ends of a new channel."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return ControlChannel(ours), ControlChannel(theirs)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, header: dict[str, Any], *descriptors: int) -> None:
        """Send a frame, or keep it for `flush`. The descriptors stay the caller's."""
        self._unsent.append((encode_frame(header), tuple(os.dup(d) for d in descriptors)))
        self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        while self._unsent and self.is_open:
            data, descriptors = self._unsent[0]
            try:
                if descriptors:
                    sent = socket.send_fds(self.socket, [data], list(descriptors))
                else:
                    sent = self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._drop_unsent()
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = (data[sent:], ())

    def receive(self) -> list[dict[str, Any]]:
        """Return the frames that have arrived; take their descriptors with `take_descriptor`, one after the other.

        Raises:
            ChannelBroken: the other end sent something else than frames.
        """
        frames: list[dict[str, Any]] = []
        while self.is_open:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 65_536, _MOST_DESCRIPTORS)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data, descriptors = b"", []
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
                self._descriptors.append(descriptor)
            if not data:
                self.is_open = False
                break
            frames += [header for header, _ in self._reader.feed(data)]
            if self.socket.getblocking():
                break
        return frames

    def take_descriptor(self) -> int:
        """Return the next received descriptor; it is the caller's from now on."""
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close this end, and every descriptor that nobody took. May be called again."""
        self.is_open = False
        self.socket.close()
        self._drop_unsent()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _drop_unsent(self) -> None:
        for _, descriptors in self._unsent:
            for descriptor in descriptors:
                os.close(descriptor)
        self._unsent.clear()
