"""The MoM of the stand-in: one small single-threaded process per job, on all pretended hosts at once.

It is a child subreaper with one `waitpid(-1)` loop: whatever of the job loses its parent ends up below it, so that
nothing can outlive the test. What PBS itself kills, and what it lets live, is another matter: see `_signal`.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import json
import math
import os
import selectors
import shlex
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pbs import proc
from pbs.job import Job, attributes, from_json, script_environment, task_environment, task_number
from pbs.task import CANNOT_EXECUTE, can_name_hosts, default_signals, execute, lead, listen, own_host_name

PR_SET_CHILD_SUBREAPER = 36
CHUNK = 1 << 16
SOCKET_HOLDS = 1 << 20  #: more than any socket's buffer
SIGNALLED = 256  #: PBS 23.06: death by signal N is the status 256+N
WALLTIME_EXCEEDED = -29  #: PBS 23.06: Exit_status after walltime
POLL = 0.02
CLEAR_TIME = 10.0

#: How our own helpers are started behind the words that enter a host: isolated, no site.
_TESTS = str(Path(__file__).resolve().parent.parent)
BOOT = f"import sys; sys.path.insert(0, {_TESTS!r}); from pbs import mom; mom.main()"
PYTHON = (sys.executable, "-ISc", BOOT)


class CannotServe(Exception):
    """This machine cannot give what the job asks for."""


@dataclass
class Session:
    """The script's login shell, or a task: one session on one host.

    number: TM's task number.
    pid: our child; with words that enter the host, that program, and the task is its child.
    leader: the session's id, which is what PBS kills by.
    """

    number: int
    host: str
    pid: int
    leader: int
    ended: bool = False
    client: Client | None = None
    index: int = 0
    streams: tuple[Stream, ...] = ()


@dataclass(eq=False)
class Stream:
    """Our end of a task's stdout or stderr, and the job's file that its bytes are appended to, raw."""

    source: socket.socket
    file: int


@dataclass
class Client:
    """One connection of pbsdsh, pbs_tmrsh, qdel or qstat, or the test's own."""

    socket: socket.socket
    buffer: bytes = b""

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it may have gone: pbsdsh -o, or killed
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The whole messages that have come; None at the end."""
        try:
            data = self.socket.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:  # a stranger on our port
            return None


class Mom:
    def __init__(self, job: Job, control: Client) -> None:
        self.job = job
        self.control = control
        self.selector = selectors.DefaultSelector()
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.timer_count = 0
        self.running: dict[int, Session] = {}  # by our child's pid
        self.sessions: dict[int, Session] = {}  # by TM number, until the session is known to be empty
        self.streams: set[Stream] = set()
        self.tasks_on = dict.fromkeys(job.hosts, 0)
        self.status: int | None = None
        self.dying = self.killing = self.over = self.closing = False
        self.started = time.monotonic()
        self.null = os.open("/dev/null", os.O_RDWR)
        self.files = {path: os.open(path, os.O_WRONLY | os.O_APPEND) for path in (job.output, job.error)}

    # -- the loop

    def serve(self) -> None:
        reading, writing = socket.socketpair()
        for end in (reading, writing):
            end.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._watch(reading, lambda: self._reap(reading))
        self._watch(self.control.socket, self._read_control)
        self._start_script()
        self.control.send(started=True)
        while not self.closing:
            for key, _ in self.selector.select(self._next_timer()):
                key.data()
            self._fire_timers()

    def _watch(self, source: socket.socket, action: Callable[[], None]) -> None:
        self.selector.register(source, selectors.EVENT_READ, action)

    def _unwatch(self, source: socket.socket) -> None:
        self.selector.unregister(source)
        source.close()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.timer_count += 1
        heapq.heappush(self.timers, (time.monotonic() + seconds, self.timer_count, action))

    def _next_timer(self) -> float | None:
        return max(self.timers[0][0] - time.monotonic(), 0) if self.timers else None

    def _fire_timers(self) -> None:
        while self.timers and self.timers[0][0] <= time.monotonic():
            heapq.heappop(self.timers)[2]()

    # -- starting sessions

    def _start_script(self) -> None:
        """PBS 23.06: the login shell leads a session, reads the script's path from a pipe and runs it as its child."""
        stdin, feed = os.pipe()
        os.write(feed, shlex.quote(self.job.script).encode() + b"\n")
        os.close(feed)
        # --noprofile: the environment is the one that was seen, not what this machine's profile makes of it.
        words = [b"-bash", b"--noprofile"]
        streams = (stdin, self.files[self.job.output], self.files[self.job.error])
        self._start(1, self.job.mother, b"/bin/bash", words, script_environment(self.job), streams, ())
        os.close(stdin)
        self.tasks_on[self.job.mother] = 1
        if self.job.walltime is not None:
            self._after(self.job.walltime, self._walltime_exceeded)

    def _start_task(self, client: Client, index: int, line: int, words: list[bytes]) -> None:
        if self.dying or self.killing:
            return  # PBS 23.06: after that TERM a new spawn hangs until the job is killed
        host = self.job.targets[line]
        self.tasks_on[host] += 1
        number = task_number(self.job, host, self.tasks_on[host])
        pairs = [socket.socketpair() for _ in range(2)]
        streams = (self.null, pairs[0][1].fileno(), pairs[1][1].fileno())
        # PBS 23.06: HUP is ignored in tasks, all else is default.
        environment = task_environment(self.job, line, number)
        session = self._start(number, host, words[0], words, environment, streams, (signal.SIGHUP,))
        session.client, session.index = client, index
        paths = (self.job.output, self.job.error)
        session.streams = tuple(self._follow(*pair, path) for pair, path in zip(pairs, paths))
        self._note(host, line, words)
        client.send(spawned=index, task=number)

    def _note(self, host: str, line: int, words: list[bytes]) -> None:
        """For the test's `job.spawns()`."""
        with Path(self.job.root, "spawns").open("a") as file:
            file.write(json.dumps([host, line, [word.decode("latin-1") for word in words]]) + "\n")

    def _start(
        self,
        number: int,
        host: str,
        program: bytes,
        words: list[bytes],
        environment: dict[str, str],
        streams: Sequence[int],
        ignored: Sequence[int],
    ) -> Session:
        enter = dict(self.job.enter).get(host, ())
        ours, theirs = socket.socketpair() if enter else (None, None)
        if ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        pid = os.fork()
        if not pid:
            try:
                self._become(host, program, words, environment, streams, ignored, theirs)
            except BaseException:
                traceback.print_exc()
            os._exit(CANNOT_EXECUTE)
        session = self.running[pid] = self.sessions[number] = Session(number, host, pid, pid)
        if ours and theirs:
            theirs.close()
            self._watch(ours, lambda: self._read_leader(session, ours))
        return session

    def _become(
        self,
        host: str,
        program: bytes,
        words: list[bytes],
        environment: dict[str, str],
        streams: Sequence[int],
        ignored: Sequence[int],
        report: socket.socket | None,
    ) -> NoReturn:
        """In the child: a session of its own, umask 077, the job's directory (PBS 23.06: not the script's)."""
        os.setsid()
        for target, source in enumerate(streams):
            os.dup2(source, target)
        default_signals(ignored)
        os.umask(0o077)
        os.chdir(self.job.home)
        if report is not None:
            os.set_inheritable(report.fileno(), True)
            wanted = ("lead", str(report.fileno()), "".join(str(int(number)) for number in ignored))
            helper = (*dict(self.job.enter)[host], *PYTHON, *wanted)
            program, words = os.fsencode(helper[0]), [*map(os.fsencode, helper), program, *words]
        elif self.job.uts:
            own_host_name(host.partition(".")[0] if self.job.short_names else host)
        execute(program, words, {os.fsencode(name): os.fsencode(value) for name, value in environment.items()})

    def _read_leader(self, session: Session, report: socket.socket) -> None:
        """Which process leads the session behind the words that enter the host, by its number out here."""
        data, extra, _, _ = report.recvmsg(8, socket.CMSG_SPACE(struct.calcsize("3i")))
        if data:
            session.leader = struct.unpack("3i", extra[0][2])[0]
        self._unwatch(report)

    # -- output

    def _follow(self, ours: socket.socket, theirs: socket.socket, path: str) -> Stream:
        """PBS 23.06: two sockets, so that `> /dev/stderr` fails. Read also after the task's end, and the job's."""
        theirs.close()
        ours.setblocking(False)
        stream = Stream(ours, self.files[path])
        self.streams.add(stream)
        self._watch(ours, lambda: self._copy(stream, CHUNK))
        return stream

    def _copy(self, stream: Stream, limit: int = SOCKET_HOLDS) -> None:
        """Append what has come, up to about `limit` bytes: a survivor may write for ever."""
        if stream not in self.streams:
            return
        while limit > 0:
            try:
                data = stream.source.recv(CHUNK)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.streams.remove(stream)
                self._unwatch(stream.source)
                return
            limit -= len(data)
            while data:
                data = data[os.write(stream.file, data) :]

    # -- ends

    def _reap(self, wakeup: socket.socket | None = None) -> None:
        """The only waitpid of this process; orphans of the job come here too."""
        if wakeup:
            with contextlib.suppress(BlockingIOError):
                while wakeup.recv(CHUNK):
                    pass
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if session := self.running.pop(pid, None):
                    self._session_ended(session, status)

    def _session_ended(self, session: Session, status: int) -> None:
        """PBS 23.06: when a task's first process ends, the rest of its session is KILLed at once."""
        session.ended = True
        code = SIGNALLED + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if session.number == 1:
            self._script_ended(code)
            return
        self._kill_rest(session)
        # What a task wrote stands in the job's file before pbsdsh hears of its end.
        for stream in session.streams:
            self._copy(stream)
        if session.client:
            session.client.send(ended=session.index, status=code)

    def _kill_rest(self, session: Session) -> None:
        """Until it is empty; then the session's number may belong to somebody else."""
        if self._signal([session], signal.SIGKILL):
            self._after(POLL, lambda: self._kill_rest(session))
        else:
            self.sessions.pop(session.number, None)

    def _script_ended(self, code: int) -> None:
        """PBS 23.06: the login shell's end is the job's end, except after qdel, when the MS must be empty first."""
        if self.status is None:
            self.status = code
        if not self.dying:
            self._kill_job()

    def _signal(self, sessions: Iterable[Session], number: int) -> bool:
        """To every process of these sessions, in any process group. A child that did setsid is not reached.

        One pass, as MoM does it: what is forked meanwhile may miss the signal.
        Leaders first: the login shell is to die of the signal itself (PBS 23.06: 271, seldom 143), not to see its
        script die of it.
        """
        leaders = {session.leader: session for session in sessions}
        found = proc.members(leaders)
        for leader, session in leaders.items():
            # One that was only just forked may not lead its session yet.
            if not session.ended and session.leader == session.pid and leader not in found[leader]:
                found[leader].append(leader)
        pids = {pid for pids in found.values() for pid in pids}
        for pid in sorted(pids, key=lambda pid: (pid not in leaders, pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        return any(found.values())

    def _on_mother(self) -> list[Session]:
        return [session for session in self.sessions.values() if session.host == self.job.mother]

    def _delete(self) -> None:
        """PBS 23.06, qdel: TERM to every process of every session of the job on the MS, nothing to sisters."""
        if self.dying or self.killing:
            return
        self.dying = True
        self._signal(self._on_mother(), signal.SIGTERM)
        self._after(self.job.kill_delay, self._kill_job)
        self._await_mother()

    def _await_mother(self) -> None:
        """PBS 23.06: sisters are killed when the MS has no process left (there at its next poll, 0-8 s)."""
        on_mother = self._on_mother()
        if self.killing:
            return
        if any(session.pid in self.running for session in on_mother) or any(
            proc.members(session.leader for session in on_mother).values()
        ):
            self._after(POLL, self._await_mother)
        else:
            self._kill_job()

    def _walltime_exceeded(self) -> None:
        """PBS 23.06: TERM as with qdel, KILL everywhere 10 s later, and no warning before."""
        if self.dying or self.killing:
            return
        assert self.job.walltime is not None
        used = max(math.ceil(time.monotonic() - self.started), int(self.job.walltime) + 1)
        text = f"=>> PBS: job killed: walltime {used} exceeded limit {int(self.job.walltime)}\n"
        os.write(self.files[self.job.error], text.encode())
        self.status = WALLTIME_EXCEEDED
        self._delete()

    def _kill_job(self) -> None:
        if not self.killing:
            self.killing = True
            self._kill_all()

    def _kill_all(self) -> None:
        """KILL to all sessions on all hosts until none is left; setsid'ed processes live on."""
        if self._signal(self.sessions.values(), signal.SIGKILL) or self.running:
            self._after(POLL / 4, self._kill_all)
        elif not self.over:
            self._job_over()

    def _job_over(self) -> None:
        self.over = True
        for stream in list(self.streams):
            self._copy(stream)
        for host in self.job.hosts:
            shutil.rmtree(self.job.tmpdir(host), ignore_errors=True)
        self.control.send(over=self.status)

    # -- requests

    def listen_on(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._watch(listener, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            client = Client(listener.accept()[0])
        except OSError:  # it has gone already
            return
        self._watch(client.socket, lambda: self._read_client(client))

    def _read_client(self, client: Client) -> None:
        messages = client.receive()
        if messages is None:
            self._unwatch(client.socket)
        for message in messages or ():
            self._answer(client, message)

    def _answer(self, client: Client, message: dict[str, Any]) -> None:
        if (message["cookie"], message["job_id"]) != (self.job.cookie, self.job.job_id):
            client.send(refused="another job's number or cookie")
            return
        {
            "init": self._init,
            "spawn": self._spawn,
            "signal": self._signal_task,
            "delete": self._delete_target,
            "attributes": self._attributes,
        }[message["op"]](client, message)

    def _init(self, client: Client, message: dict[str, Any]) -> None:
        # PBS 23.06: new pbsdsh and pbs_tmrsh calls after the TERM hang, also to the MS, until the job is killed.
        if not (self.dying or self.killing):
            client.send(targets=self.job.targets, addresses=dict(self.job.addresses))

    def _spawn(self, client: Client, message: dict[str, Any]) -> None:
        index, line = message["index"], message["line"]
        words = [word.encode("latin-1") for word in message["words"]]
        if self.job.cut_newlines:
            words = [word.partition(b"\n")[0] for word in words]
        if self.job.targets[line] in self.job.lost:
            client.send(lost=self.job.targets[line])
        elif self.job.spawn_delay:
            self._after(self.job.spawn_delay, lambda: self._start_task(client, index, line, words))
        else:
            self._start_task(client, index, line, words)

    def _signal_task(self, client: Client, message: dict[str, Any]) -> None:
        """PBS 23.06: works also while the job dies: a running pbsdsh can still relay."""
        session = self.sessions.get(message["task"])
        if session:
            self._signal([session], message["signal"])

    def _delete_target(self, client: Client, message: dict[str, Any]) -> None:
        client.send(deleted=True)
        self._delete()

    def _attributes(self, client: Client, message: dict[str, Any]) -> None:
        client.send(attributes=attributes(self.job))

    def _read_control(self) -> None:
        """What the test asks for; its end is ours, whatever it was."""
        messages = self.control.receive()
        if messages is None:
            self.closing = True
        for message in messages or ():
            if message["op"] == "delete":
                self._delete()
            else:
                # PBS 23.06, qsig: to all processes on the MS; the job is not marked dying.
                self._signal(self._on_mother(), message["signal"])

    # -- the end of the test

    def clear(self) -> None:
        """Nothing of the job stays, wherever it hid: below us, or marked with the job's cookie."""
        deadline = time.monotonic() + CLEAR_TIME
        while time.monotonic() < deadline:
            left = proc.descendants(os.getpid()) | proc.marked(f"PBS_JOBCOOKIE={self.job.cookie}")
            if not left and _no_child():
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL / 4)


def _no_child() -> bool:
    """Reaps; whether nothing is left to reap, now or later."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


# ---- starting


def open_ports(job: Job) -> tuple[int, list[socket.socket]]:
    """The MoM's port on 127.0.0.1, the same on every host that has a network of its own."""
    first = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = first.getsockname()[1]
    listeners = [first]
    for host, enter in filter(lambda pair: pair[1], job.enter):
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        words = [*enter, *PYTHON, "listen", str(theirs.fileno()), str(port)]
        pid = os.posix_spawnp(words[0], words, os.environ)
        theirs.close()
        data, descriptors, _, _ = socket.recv_fds(ours, 8, 1)
        os.waitpid(pid, 0)
        if not data:
            raise CannotServe(f"cannot enter {host} with: {shlex.join(enter)}")
        listeners += [socket.socket(fileno=descriptor) for descriptor in descriptors]
    return port, listeners


def with_uts(job: Job) -> bool:
    possible = job.uts != "no" and can_name_hosts()
    if job.uts == "yes" and not possible:
        raise CannotServe("UTS namespaces are not to be had: not root, or not in this kernel")
    return possible


def mom(control_fd: str) -> None:
    """The job comes as the first line on the control socket; answers and commands follow."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the test, whose end is ours
    control = Client(socket.socket(fileno=int(control_fd)))
    messages: list[dict[str, Any]] | None = []
    while messages == []:
        messages = control.receive()
    if not messages:
        return
    described = messages[0]
    try:
        uts = with_uts(from_json(described))
        port, listeners = open_ports(from_json(described))
    except CannotServe as error:
        control.send(failed=str(error))
        return
    control.send(port=port, uts=uts)
    server = Mom(from_json({**described, "port": port, "uts": "yes" if uts else ""}), control)
    for listener in listeners:
        server.listen_on(listener)
    try:
        server.serve()
    finally:
        server.clear()


def main() -> None:
    roles: dict[str, Callable[..., None]] = {"mom": mom, "lead": lead, "listen": listen}
    roles[sys.argv[1]](*sys.argv[2:])
