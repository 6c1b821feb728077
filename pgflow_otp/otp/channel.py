"""Frames between two processes over a socket pair: a small JSON header and, where wanted, a raw payload.

One writer and one reader per end, no lock. A half frame at the end of the stream is discarded (statement 200).
"""

from __future__ import annotations

import math
import select
import socket
import struct
from typing import Any

import orjson

_LENGTHS = struct.Struct("!II")
LONGEST_HEADER = 4 * 1024 * 1024
LONGEST_PAYLOAD = 1024 * 1024 * 1024

Frame = tuple[dict[str, Any], bytes]


class ChannelBroken(Exception):
    """The other end sent something that is no frame. `frames` came before it, and count."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.frames: list[Frame] = []


def encode_frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    head = orjson.dumps(header)
    return _LENGTHS.pack(len(head), len(payload)) + head + payload


def readable(source: int | socket.socket | Channel, seconds: float) -> bool:
    """Wait until something, or the end, can be read. Not with select(), which knows descriptors below 1024 only: a host
    may have more open."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(math.ceil(max(seconds, 0) * 1000)))


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes; return the frames that are now complete.

        Raises:
            ChannelBroken: the bytes are no frame.
        """
        self._buffer += data
        frames: list[Frame] = []
        start = 0
        view = memoryview(self._buffer)
        try:
            while len(view) - start >= _LENGTHS.size:
                head_length, payload_length = _LENGTHS.unpack_from(view, start)
                if head_length > LONGEST_HEADER or payload_length > LONGEST_PAYLOAD:
                    raise ChannelBroken(f"a frame of {head_length} + {payload_length} bytes")
                body = start + _LENGTHS.size
                end = body + head_length + payload_length
                if len(view) < end:
                    break
                try:
                    header = orjson.loads(view[body : body + head_length])
                except orjson.JSONDecodeError as error:
                    raise ChannelBroken(f"a frame without a header: {error}") from None
                if not isinstance(header, dict):
                    raise ChannelBroken(f"a header that is no object: {header!r}")
                frames.append((header, bytes(view[body + head_length : end])))
                start = end
        except ChannelBroken as error:
            error.frames = frames
            raise
        finally:
            view.release()
        del self._buffer[:start]
        return frames


class Channel:
    """One end of a channel, never blocking. What cannot be written at once is kept until `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._reader = FrameReader()
        self._unsent = bytearray()
        self.is_open = True

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Return the two ends of a new channel; both are closed on exec."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), Channel(theirs)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something left to write."""
        return bool(self._unsent)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Queue a frame and write what the other end can take. A broken pipe is no error: the reader is about to be
        found dead (statement 188)."""
        if self.is_open:
            self._unsent += encode_frame(header, payload)
            self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        while self._unsent and self.is_open:
            try:
                sent = self.socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived. `is_open` turns false at the end of the stream; the descriptor stays,
        so that whoever watches it can stop watching before `close`.

        Raises:
            ChannelBroken: the other end sent something else than frames.
        """
        frames: list[Frame] = []
        while self.is_open:
            try:
                data = self.socket.recv(262_144)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.is_open = False
                break
            try:
                frames += self._reader.feed(data)
            except ChannelBroken as error:
                self.is_open = False
                error.frames = frames + error.frames
                raise
            if len(data) < 65_536:
                break
        return frames

    def receive_messages(self) -> list[dict[str, Any]]:
        """Return the headers of what has arrived. Garbage ends the channel, as its end does."""
        try:
            frames = self.receive()
        except ChannelBroken as error:
            frames = error.frames
        return [header for header, _ in frames]

    def close(self) -> None:
        """Close this end. May be called again."""
        self.is_open = False
        self.socket.close()
