"""One small event loop for the launcher, the door, the agent and the starter: descriptors, timers, signals."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable

Call = Callable[[], None]


class Timer:
    """A call in the future; ``cancel`` makes it void."""

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Single thread; callbacks run one after the other, so state needs no lock."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: dict[int, tuple[Call | None, Call | None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._running = True
        self._signals: dict[int, Callable[[int], None]] = {}

    def watch(self, fd: int, read: Call | None = None, write: Call | None = None) -> None:
        """Call `read` or `write` whenever `fd` is ready; replaces what was watched there; none: forget it."""
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        known = fd in self._calls
        if not events:
            if known:
                self._selector.unregister(fd)
                del self._calls[fd]
            return
        self._calls[fd] = (read, write)
        if known:
            self._selector.modify(fd, events)
        else:
            self._selector.register(fd, events)

    def forget(self, fd: int) -> None:
        self.watch(fd)

    def after(self, seconds: float, call: Call) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + max(0.0, seconds), next(self._count), timer))
        return timer

    def on_signals(self, numbers: Iterable[int], call: Callable[[int], None]) -> None:
        """Have `call(number)` run inside the loop; the handler itself does nothing but wake it."""
        if not self._signals:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            self.watch(reader, lambda: self._drain_signals(reader))
        for number in numbers:
            self._signals[number] = call
            signal.signal(number, _woken)
            signal.siginterrupt(number, False)

    def _drain_signals(self, reader: int) -> None:
        for number in dict.fromkeys(os.read(reader, 4096)):
            call = self._signals.get(number)
            if call:
                call(number)

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Serve until `stop` is called."""
        self._running = True
        while self._running:
            self._serve_once()

    def _serve_once(self) -> None:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        wait = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, mask in self._selector.select(wait):
            read, write = self._calls.get(key.fd, (None, None))
            if mask & selectors.EVENT_WRITE and write:
                write()
            # The write call may have dropped this descriptor.
            if mask & selectors.EVENT_READ and read and self._calls.get(key.fd, (None, None))[0] is read:
                read()
            if not self._running:
                return
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            call = heapq.heappop(self._timers)[2].call
            if call:
                call()
            if not self._running:
                return


def _woken(number: int, frame: object) -> None:
    """The wake-up descriptor has carried the number already."""
