"""The channel between launcher and agent: frames, greeting, heartbeat; both ends.

A frame is one line of JSON in ASCII (bytes that are no UTF-8 travel as surrogate escapes). The node speaks first:
a newline, the magic word and who it is, because a login shell's start-up files may print before it does::

    \\ntorchrun_nccl-door 174170283.gadi-pbs-0123456789ab 1\\n

Over TCP both ends then prove that they know the key (authentication.py); over inherited pipes and ssh that is not needed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from .loop import Loop

Frame = dict[str, Any]

MAGIC = b"torchrun_nccl-door"
#: A stranger may send this much, and take this long, before it has proved itself.
GREETING_LIMIT = 4096
GREETING_SECONDS = 5.0
#: What start-up files of a login shell may print before the door speaks.
CHATTER_LIMIT = 1 << 20
FRAME_LIMIT = 64 << 20
#: Copied output beyond this much waiting is dropped (it stands in the log) rather than kept without bound.
OUTPUT_LIMIT = 1 << 20


def encode(frame: Frame) -> bytes:
    return json.dumps(frame, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> Frame:
    """Raises ValueError for what is no frame, however hostile."""
    try:
        frame = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(frame, dict):
        raise ValueError("a frame is a JSON object")
    return frame


def greeting(launch_id: str, index: int) -> bytes:
    return b"\n%s %s %d\n" % (MAGIC, launch_id.encode("ascii"), index)


def split_greeting(data: bytes) -> tuple[str, int, bytes] | None:
    """Launch id, node index and the bytes after the greeting; None while it has not come whole.

    >>> split_greeting(b"Welcome!\\nno newline\\ntorchrun_nccl-door 7-ab 1\\n{}")
    ('7-ab', 1, b'{}')
    """
    start = data.find(b"\n" + MAGIC + b" ")
    end = data.find(b"\n", start + 1)
    if start < 0 or end < 0:
        return None
    words = data[start + 1 : end].decode("ascii", "replace").split()
    if len(words) != 3 or not words[2].isdigit():
        raise ValueError(f"not a greeting: {words}")
    return words[1], int(words[2]), data[end + 1 :]


class Channel:
    """Frames over two descriptors (or one socket's, twice), without ever blocking the loop."""

    def __init__(
        self, loop: Loop, reader: int, writer: int, receive: Callable[[Frame], None], lost: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._reader, self._writer = reader, writer
        self._receive, self._lost = receive, lost
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._open = True
        self._is_deaf = False
        self.heard = time.monotonic()
        for fd in {reader, writer}:
            os.set_blocking(fd, False)
        self._watch()

    def _watch(self) -> None:
        read = None if self._is_deaf else self._read
        write = self._flush if self._outgoing else None
        if self._reader == self._writer:
            self._loop.watch(self._reader, read, write)
        else:
            self._loop.watch(self._reader, read)
            self._loop.watch(self._writer, None, write)

    @property
    def waiting(self) -> int:
        """Bytes not yet taken by the other side."""
        return len(self._outgoing)

    def send(self, frame: Frame) -> None:
        self.send_encoded(encode(frame))

    def send_encoded(self, data: bytes) -> None:
        """A frame that goes to many, encoded once."""
        if not self._open:
            return
        idle = not self._outgoing
        self._outgoing += data
        if idle:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                sent = os.write(self._writer, memoryview(self._outgoing)[:65536])
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(f"cannot send: {error.strerror}")
            return
        self._watch()

    def feed(self, data: bytes) -> None:
        """Take bytes that were read from the descriptor before this object existed."""
        self._incoming += data
        self._cut()

    def _read(self) -> None:
        try:
            data = os.read(self._reader, 262144)
        except BlockingIOError:
            return
        except OSError as error:
            self._deaf(f"cannot receive: {error.strerror}")
            return
        if not data:
            self._deaf("closed by the other side")
            return
        self.heard = time.monotonic()
        self._incoming += data
        self._cut()

    def _cut(self) -> None:
        while self._open:
            end = self._incoming.find(b"\n")
            if end < 0:
                if len(self._incoming) > FRAME_LIMIT:
                    self.close("a frame without end")
                return
            line = bytes(self._incoming[:end])
            del self._incoming[: end + 1]
            try:
                frame = decode(line)
            except ValueError as error:
                self.close(f"not a frame: {error}")
                return
            self._receive(frame)

    def _deaf(self, why: str) -> None:
        """Nothing more will be heard. What we have to say may still arrive: the end of one direction is not the other's."""
        if not self._is_deaf:
            self._is_deaf = True
            self._watch()
            self._lost(why)

    def close(self, why: str = "") -> None:
        """End the channel; with a reason it is reported as lost."""
        if not self._open:
            return
        self._open = False
        for fd in {self._reader, self._writer}:
            self._loop.forget(fd)
            os.close(fd)
        if why and not self._is_deaf:
            self._is_deaf = True
            self._lost(why)

    def finish(self, seconds: float = 2.0) -> None:
        """Push out what waits, for at most `seconds`, then close: for the last words of a process."""
        deadline = time.monotonic() + seconds
        while self._open and self._outgoing and time.monotonic() < deadline:
            self._flush()
            if self._outgoing:
                time.sleep(0.01)
        self.close()


class Heart:
    """Sends a beat every interval and says when the other side has been silent too long."""

    def __init__(
        self, loop: Loop, channel: Channel, interval: float, lost_after: float, silent: Callable[[float], None]
    ) -> None:
        self._loop, self._channel = loop, channel
        self._interval, self._lost_after, self._silent = interval, lost_after, silent
        self._due = time.monotonic() + interval
        self._timer = loop.after(interval, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._due > 2 * self._interval:
            # We were suspended or swapped out: what the other side sent may still wait unread, so it gets a fresh window.
            self._channel.heard = now
        if now - self._channel.heard > self._lost_after:
            self._silent(now - self._channel.heard)
            return
        self._channel.send({"is": "beat"})
        self._due = now + self._interval
        self._timer = self._loop.after(self._interval, self._beat)

    def stop(self) -> None:
        self._timer.cancel()
