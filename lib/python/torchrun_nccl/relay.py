"""Relay: the command on a host outside the job (a login node's salloc shell) runs itself once, on the job's first node.

The nodes may not reach the login node, and the launcher must outlive nothing that they do; so all but the terminal is
on the first node. Text, signals and the exit code travel over one channel of the launcher's own kind.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass

from . import authentication
from .channel import Channel, Frame, Heart
from .environment import Pairs
from .errors import DeadlinePassed, NodeLost
from .listener import Listener
from .loop import Loop
from .node.engine import ISOLATED
from .nodes import Start, end_starts
from .options import Options
from .transports import KEY_VARIABLE, LISTENER, Words

CALL_SECONDS = 60.0
Show = Callable[[int, bytes], None]


@dataclass(frozen=True)
class Call:
    """What the inner launcher is to be: our own command line, in our own place."""

    launch_id: str
    host: str
    words: Words
    argv: Words
    environment: Pairs
    passed: Pairs
    directory: str
    umask: int
    limits: tuple[tuple[str, int], ...]
    options: Options


def relay_words(program: str, host: str, runner: str, inner: str, launch_id: str, seconds: float) -> Words:
    return (
        program, "-N1", "-n1", f"--nodelist={host}", "--overlap", "--cpu-bind=none", "--input=none", "--mpi=none",
        runner, *ISOLATED, inner, f"{launch_id}.0", LISTENER, f"{seconds:g}",
    )  # fmt: skip


def relay(call: Call, show: Show) -> int:
    """Run the call; its exit code. show: takes what it prints, with 1 for stdout and 2 for stderr."""
    return _Relay(call, show).run()


class _Relay:
    def __init__(self, call: Call, show: Show) -> None:
        self._call, self._show = call, show
        self._loop = Loop()
        self._channel: Channel | None = None
        self._code: int | None = None
        self._why = ""
        self._waiting: list[int] = []
        secret = secrets.token_hex(16)
        key = authentication.derive_key(secret.encode(), call.launch_id)
        listener = Listener(self._loop, call.launch_id, key, self._take)
        environment = (*call.passed, (KEY_VARIABLE, secret))
        self._deadline = self._loop.after(CALL_SECONDS, self._overdue)
        self._start = Start(call.words, listener.addresses(), environment, is_step=True)

    def run(self) -> int:
        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        self._loop.on_signals(stops, self._forward)
        self._loop.on_signals((signal.SIGCHLD,), lambda _: self._look())
        self._loop.run()
        end_starts([self._start])
        if self._code is None:
            error = DeadlinePassed if self._why.startswith("no answer") else NodeLost
            raise error(f"{self._call.host}: {self._why}{self._start.said()}")
        return self._code

    def _take(self, index: int, fd: int) -> None:
        if self._channel is not None:
            os.close(fd)
            return
        self._deadline.cancel()
        call, options = self._call, self._call.options
        self._channel = Channel(self._loop, fd, fd, self._receive, self._lost)
        self._channel.send(
            {
                "is": "call",
                "argv": call.argv,
                "environment": call.environment,
                "directory": call.directory,
                "umask": call.umask,
                "limits": call.limits,
                "heartbeat": options.heartbeat,
                "lost_after": options.lost_after,
            }
        )
        Heart(
            self._loop, self._channel, options.heartbeat, options.lost_after, lambda _: self._lost("it is silent")
        )
        for number in self._waiting:
            self._forward(number)

    def _receive(self, frame: Frame) -> None:
        if frame["is"] == "text":
            self._show(frame["stream"], os.fsencode(frame["text"]))
        elif frame["is"] == "exit":
            self._code = frame["code"]
            self._loop.stop()

    def _forward(self, number: int) -> None:
        if self._channel is None:
            self._waiting.append(number)
        else:
            self._channel.send({"is": "signal", "number": number})

    def _lost(self, why: str) -> None:
        self._why = f"lost the command that runs there: {why}"
        self._loop.stop()

    def _overdue(self) -> None:
        self._why = f"no answer within {CALL_SECONDS:.0f} s"
        self._loop.stop()

    def _look(self) -> None:
        """srun that ends before the channel is there has failed; after that the last frame counts."""
        if self._start.process.poll() is not None and self._channel is None:
            self._why = f"srun ended ({self._start.process.returncode})"
            self._loop.stop()
