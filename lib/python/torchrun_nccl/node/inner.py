"""Inner launcher: runs the command itself on the first node of a job, for a relay on a host outside the job.

    python -I -S -B inner.py LAUNCH_ID.0 10.6.1.31:40123 SECONDS

srun starts it. What the command prints, and its exit code, go back as frames; signals come as frames, because srun
swallows one INT and turns a TERM into a KILL of the step.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from torchrun_nccl.channel import Channel, Frame, Heart
from torchrun_nccl.errors import Refused
from torchrun_nccl.loop import Loop
from torchrun_nccl.node import door, processes
from torchrun_nccl.node.engine import ISOLATED

MAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "__main__.py")


class Inner:
    def __init__(self, fd: int) -> None:
        self._loop = Loop()
        self._child = 0
        self._streams: dict[int, int] = {}
        self._loop.on_signals((signal.SIGCHLD,), lambda _: self._reap())
        # Slurm signals every process of the step; the command is told by the relay, once.
        self._loop.on_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2), lambda _: None)
        self._channel = Channel(self._loop, fd, fd, self._receive, lambda _: self._lost())

    def run(self) -> None:
        self._loop.run()

    def _receive(self, frame: Frame) -> None:
        if frame["is"] == "call":
            self._call(frame)
        elif frame["is"] == "signal" and self._child:
            processes.send_signal(self._child, frame["number"])

    def _call(self, call: Frame) -> None:
        Heart(self._loop, self._channel, call["heartbeat"], call["lost_after"], lambda _: self._lost())
        pipes = {1: os.pipe(), 2: os.pipe()}
        parent = os.getpid()

        def prepare() -> None:
            os.setsid()
            processes.die_with_parent(signal.SIGTERM, parent)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            for number, (_, writer) in pipes.items():
                os.dup2(writer, number)
            processes.set_soft_limits(call["limits"])
            os.umask(call["umask"])

        try:
            os.chdir(call["directory"])
        except OSError as error:
            text = f"torchrun_nccl: {socket.gethostname()}: directory {call['directory']}: {error.strerror}\n"
            self._channel.send({"is": "text", "stream": 2, "text": text})
            self._end(Refused.exit_code)
        words = (sys.executable, *ISOLATED, MAIN, *call["argv"])
        self._child = processes.spawn(words, dict(call["environment"]), prepare)
        for number, (reader, writer) in pipes.items():
            os.close(writer)
            os.set_blocking(reader, False)
            self._streams[number] = reader
            self._loop.watch(reader, self._reader(number))

    def _reader(self, number: int) -> Callable[[], None]:
        def read() -> None:
            self._read(number)

        return read

    def _read(self, number: int) -> bool:
        """Pass one portion on; False when there is none now."""
        reader = self._streams[number]
        try:
            data = os.read(reader, 65536)
        except BlockingIOError:
            return False
        if data:
            self._channel.send({"is": "text", "stream": number, "text": os.fsdecode(data)})
            return True
        self._loop.forget(reader)
        return False

    def _reap(self) -> None:
        for pid, code in processes.reap():
            if pid == self._child:
                for number in self._streams:
                    while self._read(number):
                        pass
                self._end(code if code >= 0 else 128 - code)

    def _end(self, code: int) -> NoReturn:
        self._channel.send({"is": "exit", "code": code})
        self._channel.finish()
        os._exit(0)

    def _lost(self) -> None:
        """The relay is gone: the command ends as if its terminal had."""
        if self._child:
            processes.send_signal(self._child, signal.SIGTERM)
        else:
            os._exit(1)


def main(arguments: list[str]) -> NoReturn:
    launch_id, _, index = arguments[0].rpartition(".")
    Inner(door.open_socket(arguments[1], launch_id, int(index), float(arguments[2]))).run()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
