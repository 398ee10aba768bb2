"""Writes text for a person from a thread: a reader that stalls must not stall the launch."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import IO

LIMIT = 16 << 20


class Writer:
    """Blocks of whole lines, in order; beyond LIMIT waiting bytes they are counted instead."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._blocks: deque[bytes] = deque()
        self._ready = threading.Condition()
        self._pending = 0
        self._is_broken = False
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def put(self, block: bytes) -> None:
        with self._ready:
            if self._pending > LIMIT or self._is_broken:
                self.dropped += block.count(b"\n")
                return
            self._blocks.append(block)
            self._pending += len(block)
            self._ready.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()

    def _write(self) -> None:
        while True:
            with self._ready:
                while not self._blocks:
                    self._ready.wait()
                block = self._blocks.popleft()
            try:
                self._out.write(block)
                self._out.flush()
            except (OSError, ValueError):
                self._is_broken = True
            with self._ready:
                self._pending -= len(block)

    def finish(self, seconds: float) -> None:
        """Wait for what is pending, at most so long."""
        deadline = time.monotonic() + seconds
        while self._pending and not self._is_broken and time.monotonic() < deadline:
            time.sleep(0.002)


class Printer(Writer):
    """Copies the ranks' lines, each marked ``[rank]``."""

    def print(self, rank: int, text: str) -> None:
        prefix = b"[%d] " % rank
        lines = os.fsencode(text).splitlines()
        self.put(b"".join(prefix + line + b"\n" for line in lines))
