"""Copies the ranks' lines to our stdout from a thread: a reader that stalls must not stall the launch."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import IO

LIMIT = 16 << 20


class Printer:
    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._blocks: deque[bytes] = deque()
        self._ready = threading.Condition()
        self._pending = 0
        self._dropped = 0
        self._is_broken = False
        self._thread: threading.Thread | None = None

    def put(self, rank: int, text: str) -> None:
        """Queue lines of one rank, each marked ``[rank]``; beyond LIMIT bytes they are counted instead."""
        prefix = b"[%d] " % rank
        lines = os.fsencode(text).splitlines(keepends=True)
        block = b"".join(prefix + line.rstrip(b"\r\n") + b"\n" for line in lines)
        with self._ready:
            if self._pending > LIMIT or self._is_broken:
                self._dropped += len(lines)
                return
            self._blocks.append(block)
            self._pending += len(block)
            self._ready.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._print, daemon=True)
            self._thread.start()

    def _print(self) -> None:
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

    def finish(self, seconds: float) -> int:
        """Wait for what is pending; the number of lines that were left out."""
        deadline = time.monotonic() + seconds
        while self._pending and not self._is_broken and time.monotonic() < deadline:
            time.sleep(0.005)
        return self._dropped
