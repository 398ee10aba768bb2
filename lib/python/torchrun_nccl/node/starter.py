"""Rank starter: owns one rank's life, streams and exit record.

torchrun starts it (``--no-python``) with no word of the user's; the agent tells it over a unix socket what to run. It
outlives every signal torchrun or a terminal may send, so that the record of the rank's end is always made here, and it
holds its own end until the agent says so: torchrun sees a failure only after the launcher has decided what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import termios
import threading
import time
from collections import deque
from typing import Callable, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from torchrun_nccl.channel import OUTPUT_LIMIT, Channel, Frame
from torchrun_nccl.loop import Loop
from torchrun_nccl.node import processes

#: Names the agent's socket, in Linux's abstract space: nothing to clean up, whoever dies.
SOCKET_VARIABLE = "TORCHRUN_NCCL_AGENT"

#: What torchrun sets for a worker (torch 2.1 to 2.14, local_elastic_agent.py); all else a worker gets is the caller's.
TORCHRUN_NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip

CANNOT_RUN = 126  # as shells have it
TAIL_BYTES = 65536
PIECE_BYTES = 65536
PIECE_SECONDS = 1.0
#: Above this much unwritten text a rank waits for its log, as it would for a slow file; a log that does not move at
#: all for STUCK_SECONDS loses text instead of stopping the training.
PENDING_LIMIT = 8 << 20
STUCK_SECONDS = 2.0
FLUSH_SECONDS = 2.0
#: A program that is still importing torch has no handler for USR1 yet and would die of it; so long it waits for one.
READY_SECONDS = 15.0
F_SETPIPE_SZ = 1031  # linux/fcntl.h


class Log:
    """Appends blocks of whole lines from a thread of its own: a file system that blocks must not stop the reading."""

    def __init__(self, path: str, trouble: Callable[[str], None]) -> None:
        self._path, self._trouble = path, trouble
        self._blocks: deque[bytes] = deque()
        self._ready = threading.Condition()
        self.pending = 0
        self.moved = time.monotonic()
        self._told = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_blocks, daemon=True)
        self._thread.start()

    def put(self, block: bytes) -> None:
        with self._ready:
            if self.pending >= PENDING_LIMIT and self.is_stuck:
                self._dropped += len(block)
                return
            if self._dropped:
                lost = b"\n[torchrun_nccl: %d bytes dropped, the log could not be written]\n" % self._dropped
                self._dropped = 0
                self._blocks.append(lost)
                self.pending += len(lost)
            if not self.pending:
                self.moved = time.monotonic()
            self._blocks.append(block)
            self.pending += len(block)
            self._ready.notify()

    @property
    def is_stuck(self) -> bool:
        return time.monotonic() - self.moved > STUCK_SECONDS

    @property
    def is_full(self) -> bool:
        return self.pending >= PENDING_LIMIT and not self.is_stuck

    def flush(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.pending and time.monotonic() < deadline:
            time.sleep(0.002)

    def _write_blocks(self) -> None:
        fd = -1
        while True:
            with self._ready:
                while not self._blocks:
                    self._ready.wait()
                block = self._blocks.popleft()
            try:
                if fd < 0:
                    fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
                rest = memoryview(block)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            except OSError as error:
                if not self._told:
                    self._told = True
                    self._trouble(f"{self._path}: {error.strerror}; its text is lost, the training goes on")
            with self._ready:
                self.pending -= len(block)
                self.moved = time.monotonic()


class Stream:
    """Cuts what a pipe brings into whole lines; a line ends at \\n or \\r (a progress bar's)."""

    def __init__(self, loop: Loop, fd: int, emit: Callable[[bytes], None]) -> None:
        self._loop, self.fd, self._emit = loop, fd, emit
        self._piece = bytearray()
        self._born = 0.0
        self._is_timed = False
        self.taken = 0
        os.set_blocking(fd, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, F_SETPIPE_SZ, 262144)

    @property
    def waiting(self) -> int:
        """Bytes in the pipe now."""
        if self.fd < 0:
            return 0
        return int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)

    def read(self) -> bool:
        """Take one portion; False when there is nothing more now."""
        try:
            data = os.read(self.fd, 262144)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self.taken += len(data)
        self._piece += data
        end = max(self._piece.rfind(b"\n"), self._piece.rfind(b"\r")) + 1
        if len(self._piece) - end > PIECE_BYTES:
            end = len(self._piece)
        if end:
            self._emit(bytes(self._piece[:end]))
            del self._piece[:end]
            self._born = time.monotonic()
        if self._piece and not self._is_timed:
            self._is_timed = True
            self._born = time.monotonic()
            self._loop.after(PIECE_SECONDS, self._ripen)
        return True

    def _ripen(self) -> None:
        self._is_timed = False
        age = time.monotonic() - self._born
        if self._piece and age < PIECE_SECONDS:
            self._is_timed = True
            self._loop.after(PIECE_SECONDS - age, self._ripen)
        else:
            self.flush()

    def flush(self) -> None:
        if self._piece:
            self._emit(bytes(self._piece))
            self._piece.clear()

    def close(self) -> None:
        if self.fd >= 0:
            self.flush()
            self._loop.forget(self.fd)
            os.close(self.fd)
            self.fd = -1


class Starter:
    def __init__(self, address: str) -> None:
        self._loop = Loop()
        self._worker = 0
        self._began = 0.0
        self._code: int | None = None
        self._asked = 0
        self._noted: dict[int, float] = {}
        self._streams: dict[int, Stream] = {}
        self._tail = bytearray()
        self._is_paused = False
        self._logs: list[tuple[int, Log]] = []
        self._job: Frame = {}
        self._terminal = -1
        self._troubles: deque[str] = deque()
        self._loop.on_signals((signal.SIGCHLD,), lambda _: self._reap())
        # Ignoring TERM, INT and HUP by a handler, not by SIG_IGN: USR1 and USR2 are noted the same way.
        self._loop.on_signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), lambda _: None)
        self._loop.on_signals((signal.SIGUSR1, signal.SIGUSR2), self._note_signal)
        agent = socket.socket(socket.AF_UNIX)
        agent.connect("\0" + address)
        fd = agent.detach()
        self._channel = Channel(self._loop, fd, fd, self._receive, lambda _: self._agent_gone())
        self._channel.send({"is": "rank", "rank": int(os.environ["RANK"]), "local_rank": int(os.environ["LOCAL_RANK"])})

    def run(self) -> None:
        self._loop.run()

    def _receive(self, frame: Frame) -> None:
        kind = frame["is"]
        if kind == "job":
            self._start(frame)
        elif kind == "signal":
            self._signal_worker(frame["number"])
        elif kind == "kill":
            self._asked = self._asked or signal.SIGKILL
            self._kill_below()
        elif kind == "release":
            self._end()

    # --- the worker ---

    def _start(self, job: Frame) -> None:
        self._job = job
        environment = dict(job["environment"])
        environment.update({k: os.environ[k] for k in TORCHRUN_NAMES if k in os.environ})
        environment.update(job["overrides"])
        pipes = {1: os.pipe(), 2: os.pipe()}
        if job["terminal"]:
            with contextlib.suppress(OSError):
                self._terminal = os.open(job["terminal"], os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        me = os.getpid()
        self._began = time.monotonic()
        try:
            self._worker = processes.spawn(job["argv"], environment, lambda: _prepare(job, pipes, me))
        except OSError as error:  # no more processes allowed
            self._code = CANNOT_RUN
            text = f"torchrun_nccl: cannot start {job['argv'][0]}: {error.strerror}\n"
            self._channel.send({"is": "started", "pid": 0})
            self._channel.send({"is": "exit", "code": CANNOT_RUN, "at": time.monotonic(), "asked": 0, "tail": text})
            return
        for number, (reader, writer) in pipes.items():
            os.close(writer)
            self._streams[number] = Stream(self._loop, reader, self._emitter(number))
        # After the fork: a thread of ours must not be half-copied into the worker.
        self._logs = [(mask, Log(path, self._troubles.append)) for path, mask in job["logs"]]
        self._watch()
        self._channel.send({"is": "started", "pid": self._worker})

    def _emitter(self, number: int) -> Callable[[bytes], None]:
        return lambda block: self._emit(number, block)

    def _emit(self, number: int, block: bytes) -> None:
        for mask, log in self._logs:
            if mask & number:
                log.put(block)
        if number == 2:
            self._tail += block
            del self._tail[:-TAIL_BYTES]
        if self._terminal >= 0:
            with contextlib.suppress(OSError):
                os.write(self._terminal, block)
        if self._job["tee"] & number and self._channel.waiting < OUTPUT_LIMIT:
            self._channel.send({"is": "output", "stream": number, "text": os.fsdecode(block)})
        self._tell_troubles()
        if any(log.is_full for _, log in self._logs) and not self._is_paused:
            self._is_paused = True
            self._watch()
            self._loop.after(0.02, self._resume)

    def _tell_troubles(self) -> None:
        while self._troubles:
            self._channel.send({"is": "trouble", "text": self._troubles.popleft()})

    def _resume(self) -> None:
        self._is_paused = any(log.is_full for _, log in self._logs)
        if self._is_paused:
            self._loop.after(0.02, self._resume)
        self._watch()

    def _watch(self) -> None:
        for stream in self._streams.values():
            if stream.fd >= 0:
                self._loop.watch(stream.fd, None if self._is_paused else self._reader(stream))

    def _reader(self, stream: Stream) -> Callable[[], None]:
        def read() -> None:
            if not self._is_paused:
                stream.read()

        return read

    # --- signals ---

    def _note_signal(self, number: int) -> None:
        self._noted[number] = time.monotonic()

    def _signal_worker(self, number: int) -> None:
        if not self._worker or self._code is not None:
            return
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            # Slurm signals every process of a step, the worker too; the launcher's word for the same event comes on top.
            if time.monotonic() - self._noted.get(number, -1e9) < 1.0:
                return
            if time.monotonic() - self._began < READY_SECONDS and not processes.minds_signal(self._worker, number):
                self._loop.after(0.1, lambda: self._signal_worker(number))
                return
        else:
            self._asked = self._asked or number
        # A Python worker alone: its DataLoader children must live while it saves. A program gets it with its children.
        if self._job["signal_group"]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._worker, number)
        else:
            processes.send_signal(self._worker, number)

    # --- the end ---

    def _reap(self) -> None:
        now = time.monotonic()
        for pid, code in processes.reap():
            self._note_end(pid, code, now)

    def _note_end(self, pid: int, code: int, now: float) -> None:
        if pid != self._worker or self._code is not None:
            return
        self._code = code
        # Grandchildren may hold the pipes open, so what is there now is read, not to their end.
        for stream in self._streams.values():
            # Not to the pipe's end, nor until it is empty: grandchildren may write faster than we read.
            left = stream.waiting
            while left > 0 and stream.fd >= 0:
                before = stream.taken
                if not stream.read():
                    break
                left -= stream.taken - before
            stream.flush()
        self._channel.send(
            {
                "is": "exit",
                "code": code,
                "at": now,
                "asked": self._asked,
                "tail": os.fsdecode(bytes(self._tail)) if code else "",
            }
        )

    def _kill_below(self) -> None:
        now = time.monotonic()
        processes.kill_tree(os.getpid(), 2.0, lambda pid, code: self._note_end(pid, code, now))

    def _agent_gone(self) -> NoReturn:
        """The door removes the launch's folder, torchrun's TMPDIR and so ours, unless it was killed too."""
        self._kill_below()
        processes.remove_folder(os.environ.get("TMPDIR", ""))
        self._end()

    def _end(self) -> NoReturn:
        """Released, or the agent is gone: nothing below outlives us, the log keeps what was said."""
        self._kill_below()
        for _, log in self._logs:
            log.flush(FLUSH_SECONDS)
        self._tell_troubles()
        self._channel.finish(0.5)
        code = self._code or 0
        os._exit(code if code >= 0 else 128 - code)


def _prepare(job: Frame, pipes: dict[int, tuple[int, int]], parent: int) -> None:
    """In the forked worker, before its program."""
    os.setsid()
    processes.die_with_parent(signal.SIGKILL, parent)
    stdin = os.open(job["terminal"] or os.devnull, os.O_RDONLY | os.O_NOCTTY)
    os.dup2(stdin, 0)
    os.close(stdin)
    for number, (_, writer) in pipes.items():
        os.dup2(writer, number)
    processes.set_soft_limits(job["limits"])
    os.umask(job["umask"])
    os.chdir(job["directory"])


def main() -> None:
    processes.become_subreaper()
    address = os.environ.get(SOCKET_VARIABLE)
    if not address:
        sys.exit("torchrun_nccl: the rank starter is started by torchrun below an agent, not by hand")
    Starter(address).run()


if __name__ == "__main__":
    main()
