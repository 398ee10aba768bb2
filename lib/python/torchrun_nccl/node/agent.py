"""Agent: one per node. Says what the node is, starts the engine, keeps the heartbeat, stops the tree.

It never touches a log file itself: a file system that blocks must cost no heartbeat.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import signal
import socket
import struct
import sys
import time
from typing import Callable, NoReturn

from torchrun_nccl import environment
from torchrun_nccl.channel import OUTPUT_LIMIT, Channel, Frame, Heart
from torchrun_nccl.loop import Loop, Timer
from torchrun_nccl.node import engine, facts, processes
from torchrun_nccl.node.starter import SOCKET_VARIABLE

STARTER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "starter.py")
TAIL_BYTES = 65536
#: After KILL, or after the release of all ranks, the starters get this long to write their last bytes and end.
LEAVE_SECONDS = 2.5
DOOR_BEAT_SECONDS = 2.0
REACH_SECONDS = 5.0
#: Once one address of node 0 has answered, the others get this long: a slow one is no better.
REACH_SETTLE = 0.5
#: Grace of a stop that nobody could name another for: the launcher is gone before it said one.
DEFAULT_GRACE = 5.0


class Rank:
    """One rank of this node, as its starter's connection tells it."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.rank = -1
        self.local_rank = -1
        self.is_started = False
        self.is_ended = False
        self.is_gone = False


class Agent:
    def __init__(self, launch_id: str, index: int, reader: int, writer: int, door: int) -> None:
        self.launch_id, self.index = launch_id, index
        self._loop = Loop()
        self._loop.on_signals((signal.SIGCHLD,), lambda _: self._reap())
        self._loop.on_signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._told_to_stop)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._door = door
        os.set_blocking(door, False)
        self._loop.watch(door, self._door_gone)
        self._channel = Channel(self._loop, reader, writer, self._receive, self._channel_lost)
        self._heart: Heart | None = None
        self._node: Frame = {}
        self._job: Frame = {}
        self._folder = ""
        self._reach_listener: socket.socket | None = None
        self._log_lock: socket.socket | None = None
        self._log = ""
        self._leaving = ""
        self._calls = {
            "node": self._take_node,
            "job": self._take_job,
            "reach": self._reach,
            "go": self._start,
            "signal": self._forward_signal,
            "stop": self._stop_as_told,
            "leave": self._leave,
        }
        self._reset()

    def _reset(self) -> None:
        """Before each attempt."""
        self._go: Frame = {}
        self._began = 0.0
        self._ranks: list[Rank] = []
        self._engine = 0
        self._engine_tail = bytearray()
        self._listener: socket.socket | None = None
        self._stopping = False
        self._clearing = False
        self._timers: list[Timer] = []

    def run(self) -> None:
        self._loop.run()

    # --- what the launcher says ---

    def _receive(self, frame: Frame) -> None:
        kind = frame["is"]
        if kind == "beat":
            return
        self._calls[kind](frame)

    def _take_node(self, frame: Frame) -> None:
        self._node = frame

    def _take_job(self, job: Frame) -> None:
        self._job = job | self._node
        os.umask(job["umask"])
        found = facts.collect(self._job)
        found["index"] = self.index
        found["ports"] = self._offer_ports(found) if self.index == 0 else []
        self._channel.send({"is": "hello", "facts": found})
        self._heart = Heart(self._loop, self._channel, job["heartbeat"], job["lost_after"], self._launcher_silent)
        self._channel.heard = time.monotonic()
        self._beat_door()

    def _beat_door(self) -> None:
        """The door KILLs an agent that hangs: nobody else on this node would."""
        self._answer_door()
        self._loop.after(DOOR_BEAT_SECONDS, self._beat_door)

    def _answer_door(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._door, b".")

    def _offer_ports(self, found: Frame) -> list[int]:
        """Ports tested here just now; the first is held until the start, which also lets the others try to reach it."""
        given = self._job["master_port"]
        ports = [given] if given else facts.choose_ports(int(self.launch_id[-8:], 16))
        try:
            self._reach_listener = facts.listen_on(ports[0])
        except (OSError, IndexError) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "none found"
            found["errors"].append(f"port {given or ''} for the rendezvous: {reason} ({self._job['master_port_source']})")
            return []
        listener = self._reach_listener
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), lambda: self._answer_reach(listener))
        return ports

    def _answer_reach(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            visitor, _ = listener.accept()
            visitor.setblocking(False)
            visitor.send(self._reach_word())
            visitor.close()

    def _reach_word(self) -> bytes:
        return b"torchrun_nccl %s\n" % self.launch_id.encode()

    def _reach(self, frame: Frame) -> None:
        Reach(self._loop, frame["addresses"], frame["port"], self._reach_word(), self._reached)

    def _reached(self, found: dict[str, str]) -> None:
        self._channel.send({"is": "reached", "addresses": found})

    # --- start ---

    def _start(self, go: Frame) -> None:
        self._reset()
        self._go = go
        self._began = time.monotonic()
        if self._reach_listener:
            self._loop.forget(self._reach_listener.fileno())
            self._reach_listener.close()
            self._reach_listener = None
        self._prepare_log()
        self._worker_environment = environment.for_worker(
            self._job["environment"], os.environ, socket.gethostname(), os.path.isdir, go["settings"]
        )
        socket_name = self._listen()
        self._make_folder()
        address, port = go["master"]
        words = (
            *engine.torchrun_words(
                self._job["python"],
                go["nnodes"],
                go["node_rank"],
                go["nproc"],
                address,
                port,
                self.launch_id,
                self._job["torchrun"],
            ),
            *engine.starter_words(sys.executable, STARTER),
        )
        own = {SOCKET_VARIABLE: socket_name, "PYTHONSAFEPATH": "1", **({"TMPDIR": self._folder} if self._folder else {})}
        self._spawn_engine(words, self._worker_environment | own)

    def _prepare_log(self) -> None:
        """Name and create this node's log; an older launch's is kept under the time of its last word."""
        if self._log:
            return
        path = os.path.join(self._job["log_directory"], self._job["log"])
        # Held as long as this agent lives: a launch whose log is so marked is alive, on any file system.
        name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0torchrun_nccl-log-{os.getuid()}-{name}")
            self._log_lock = lock
            for old in (path, *glob.glob(glob.escape(path.removesuffix(".log")) + ".rank*.log")):
                with contextlib.suppress(OSError):
                    if os.stat(old).st_size:
                        os.rename(old, _older_name(old))
            own = path
            # Not to be had by this name, such as another user's: ours gets one of its own.
            if _why_not_open(path):
                path = f"{path.removesuffix('.log')}.{self.launch_id}.log"
                if _why_not_open(path):
                    path = own
        except OSError:
            lock.close()
            path = f"{path.removesuffix('.log')}.{self.launch_id}.log"
        reason = _why_not_open(path)
        if reason:
            self._channel.send({"is": "trouble", "text": f"{path}: {reason}; its text is lost, the training goes on"})
        self._log = path
        self._channel.send({"is": "log", "path": path})

    def _listen(self) -> str:
        address = f"torchrun_nccl-{os.getpid()}-{os.urandom(8).hex()}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + address)
        self._listener.listen(256)
        self._listener.setblocking(False)
        self._loop.watch(self._listener.fileno(), self._accept_rank)
        return address

    def _make_folder(self) -> None:
        """For torchrun's own temporary files; gone with us, or with the door, whatever torchrun leaves."""
        if not self._folder:
            with contextlib.suppress(OSError):
                folder = processes.launch_folder(self.launch_id, self.index)
                os.mkdir(folder, 0o700)
                os.chmod(folder, 0o700)  # whatever the user's umask is
                self._folder = folder

    def _spawn_engine(self, words: tuple[str, ...], variables: dict[str, str]) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)

        def prepare(stdin: int, out: int) -> None:
            os.dup2(stdin, 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir("/")  # `python -m` puts the current folder first on its path; the user's may hold a dis.py

        null = os.open(os.devnull, os.O_RDONLY)
        out = writer
        if self._job["verbose"]:
            inner_reader, out = os.pipe()
            processes.spawn(("tee", "-a", self._log), variables, lambda: prepare(inner_reader, writer))
            os.close(inner_reader)
        # USR1 and USR2 would kill torchrun and orphan its workers; ignored here, restored in the worker.
        self._engine = processes.spawn(words, variables, lambda: prepare(null, out), (signal.SIGUSR1, signal.SIGUSR2))
        for fd in {null, writer, out}:
            os.close(fd)
        self._loop.watch(reader, lambda: self._read_engine(reader))

    def _read_engine(self, reader: int) -> None:
        try:
            data = os.read(reader, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.forget(reader)
            os.close(reader)
            return
        self._engine_tail += data
        del self._engine_tail[:-TAIL_BYTES]

    # --- ranks ---

    def _accept_rank(self) -> None:
        assert self._listener
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        # struct ucred: pid, uid, gid. An abstract socket has no file mode to keep others out.
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            connection.close()
            return
        rank = Rank()
        fd = connection.detach()
        rank.channel = Channel(
            self._loop, fd, fd, lambda frame: self._hear_rank(rank, frame), lambda _: self._lose_rank(rank)
        )

    def _hear_rank(self, rank: Rank, frame: Frame) -> None:
        assert rank.channel
        kind = frame["is"]
        if kind == "rank":
            rank.rank, rank.local_rank = frame["rank"], frame["local_rank"]
            self._ranks.append(rank)
            if not self._stopping:
                rank.channel.send(self._rank_job(rank))
            else:
                rank.is_ended = True  # it came after the stop and never runs
                if self._all_ended():
                    self._clear()
        elif kind == "started":
            rank.is_started = True
            if sum(one.is_started for one in self._ranks) == self._go["nproc"]:
                self._channel.send({"is": "started"})
        elif kind == "exit":
            rank.is_ended = True
            self._send_exit(rank, frame["code"], frame["at"], frame["asked"], frame["tail"])
        elif kind == "output":
            if self._channel.waiting < OUTPUT_LIMIT:
                self._channel.send(frame | {"rank": rank.rank, "local_rank": rank.local_rank})
        elif kind == "trouble":
            self._channel.send(frame)

    def _rank_job(self, rank: Rank) -> Frame:
        job = self._job
        logs = [[self._log, 3]]
        if job["redirects"]:
            logs.append([f"{self._log.removesuffix('.log')}.rank{rank.rank}.log", job["redirects"]])
        shown = not job["tee_ranks"] or rank.local_rank in job["tee_ranks"]
        return {
            "is": "job",
            "argv": job["argv"],
            "environment": list(self._worker_environment.items()),
            "overrides": self._go["overrides"],
            "directory": job["directory"],
            "umask": job["umask"],
            "limits": job["limits"],
            "logs": logs,
            "tee": job["tee"] if shown else 0,
            "terminal": self._go["terminal"],
            "signal_group": job["signal_group"],
        }

    def _send_exit(self, rank: Rank, code: int | None, at: float, asked: int, tail: str) -> None:
        self._channel.send(
            {
                "is": "exit",
                "rank": rank.rank,
                "local_rank": rank.local_rank,
                "code": code,
                "ms": round((at - self._began) * 1000, 1),
                "asked": asked,
                "tail": tail,
            }
        )
        if self._stopping and self._all_ended():
            self._clear()

    def _lose_rank(self, rank: Rank) -> None:
        """A starter that ends before its record was killed; its worker died with it (parent-death signal)."""
        rank.is_gone = True
        assert rank.channel
        rank.channel.close()
        if rank.rank >= 0 and not rank.is_ended:
            rank.is_ended = True
            self._send_exit(rank, None, time.monotonic(), signal.SIGKILL if self._stopping else 0, "")
        if self._clearing and all(one.is_gone for one in self._ranks):
            self._sweep()

    def _all_ended(self) -> bool:
        return all(rank.is_ended for rank in self._ranks)

    def _tell_ranks(self, frame: Frame) -> None:
        for rank in self._ranks:
            if rank.channel and not rank.is_gone:
                rank.channel.send(frame)

    def _forward_signal(self, frame: Frame) -> None:
        self._tell_ranks({"is": "signal", "number": frame["number"]})

    # --- stop ---

    def _stop_as_told(self, frame: Frame) -> None:
        self._stop(frame["grace"], frame["number"])

    def _stop(self, grace: float, number: int = signal.SIGTERM) -> None:
        """TERM to all workers at once, `grace` seconds, KILL; a second call can only shorten the grace."""
        if self._clearing:
            return
        if not self._stopping:
            self._stopping = True
            self._tell_ranks({"is": "signal", "number": number})
        if not self._ranks or self._all_ended():
            self._clear()
            return
        self._timers.append(self._loop.after(grace, self._kill_ranks))

    def _kill_ranks(self) -> None:
        if not self._clearing:
            self._tell_ranks({"is": "kill"})
            self._timers.append(self._loop.after(LEAVE_SECONDS, self._clear))

    def _clear(self) -> None:
        """All ranks have ended: let the starters go (they flush the logs), then sweep what is left."""
        if self._clearing:
            return
        self._clearing = self._stopping = True
        self._tell_ranks({"is": "release"})
        if all(rank.is_gone for rank in self._ranks):
            self._sweep()
        else:
            self._timers.append(self._loop.after(LEAVE_SECONDS, self._sweep))

    def _sweep(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._listener:
            self._loop.forget(self._listener.fileno())
            self._listener.close()
        self._engine = 0
        left = processes.kill_tree(os.getpid())
        for rank in self._ranks:
            if rank.channel and not rank.is_gone:
                rank.is_gone = True
                rank.channel.close()
        self._reset()
        self._channel.send({"is": "stopped", "left": len(left)})
        if self._leaving:
            self._end(self._leaving)

    def _reap(self) -> None:
        for pid, code in processes.reap():
            if pid == self._engine:
                self._engine = 0
                self._loop.after(0.05, lambda code=code: self._report_engine(code))  # type: ignore[misc]

    def _report_engine(self, code: int) -> None:
        """torchrun ended although we hold its ranks: it could not start them, or somebody killed it."""
        if not self._stopping:
            tail = self._engine_tail.decode(errors="replace")
            self._channel.send({"is": "engine", "code": code, "ranks": len(self._ranks), "tail": tail})

    # --- the ends of others, and ours ---

    def _told_to_stop(self, number: int) -> None:
        self._answer_door()
        self._stop_myself(f"told to stop by {signal.Signals(number).name}")

    def _channel_lost(self, why: str) -> None:
        self._stop_myself(f"lost the launcher: {why}")

    def _launcher_silent(self, seconds: float) -> None:
        self._stop_myself(f"lost the launcher: silent for {seconds:.0f} s")

    def _stop_myself(self, why: str) -> None:
        if not self._leaving:
            self._leaving = why
            self._channel.send({"is": "stopping", "why": why})
            if self._go:
                self._stop(self._job.get("lost_grace", DEFAULT_GRACE))
            else:
                self._end(why)

    def _leave(self, frame: Frame) -> None:
        self._end("")

    def _end(self, why: str) -> NoReturn:
        self._channel.send({"is": "bye", "why": why})
        self._channel.finish()
        self._remove_folder()
        os._exit(0)

    def _door_gone(self) -> NoReturn:
        """The task or the job is over, the node may be the next job's: no grace."""
        processes.kill_tree(os.getpid())
        self._remove_folder()
        os._exit(1)

    def _remove_folder(self) -> None:
        if self._folder:
            processes.remove_launch_folder(self.launch_id, self.index)


class Reach:
    """Tries all addresses of node 0 at once; tells which answered as node 0, and from which own address."""

    def __init__(
        self, loop: Loop, addresses: list[str], port: int, word: bytes, done: Callable[[dict[str, str]], None]
    ) -> None:
        self._loop, self._word = loop, word
        self._done: Callable[[dict[str, str]], None] | None = done
        self._found: dict[str, str] = {}
        self._waiting: dict[int, tuple[str, socket.socket]] = {}
        self._timer = loop.after(REACH_SECONDS, self._finish)
        for address in addresses:
            attempt = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            attempt.setblocking(False)
            if attempt.connect_ex((address, port)) in (0, 115):  # EINPROGRESS
                self._waiting[attempt.fileno()] = (address, attempt)
                loop.watch(attempt.fileno(), self._reader(attempt.fileno()))
            else:
                attempt.close()
        self._finish_if_done()

    def _reader(self, fd: int) -> Callable[[], None]:
        return lambda: self._read(fd)

    def _read(self, fd: int) -> None:
        address, attempt = self._waiting.pop(fd)
        self._loop.forget(fd)
        with contextlib.suppress(OSError):
            # Some other program, or some other host with the same private address, may listen there.
            if attempt.recv(256) == self._word:
                self._found[address] = attempt.getsockname()[0]
                self._timer.cancel()
                self._timer = self._loop.after(REACH_SETTLE, self._finish)
        attempt.close()
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if not self._waiting:
            self._finish()

    def _finish(self) -> None:
        self._timer.cancel()
        for fd, (_, attempt) in self._waiting.items():
            self._loop.forget(fd)
            attempt.close()
        self._waiting.clear()
        done, self._done = self._done, None
        if done:
            done(self._found)


def _why_not_open(path: str) -> str:
    """Create a log; why it cannot be, or nothing. Not blocking, for it may be a FIFO that nobody reads."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _older_name(path: str) -> str:
    """output.train.py.node1.log -> output.train.py.node1.20261201-093011.log, by the time of its last change."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(os.stat(path).st_mtime))
    base = f"{path.removesuffix('.log')}.{stamp}"
    name, count = f"{base}.log", 1
    while os.path.exists(name):
        count += 1
        name = f"{base}-{count}.log"
    return name


def main(launch_id: str, index: int, reader: int, writer: int, door: int) -> NoReturn:
    """Serve one launch; called in the process that the door forked."""
    code = 1
    try:
        processes.become_subreaper()
        Agent(launch_id, index, reader, writer, door).run()
    except BaseException:
        import traceback

        traceback.print_exc()
        processes.kill_tree(os.getpid())
    os._exit(code)
