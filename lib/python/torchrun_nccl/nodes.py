"""One node as the launcher sees it while it runs: its transport's process and its channel."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from . import channel
from .agreement import NodeFacts
from .channel import Channel, Heart
from .environment import Pairs
from .loop import Loop, Timer
from .node import processes
from .plan import NodePlan
from .transports import LISTENER, TRANSPORTS, Words, basename

SAID_BYTES = 2000
END_SECONDS = 1.0
#: A door whose agent was killed sweeps its tree for at most this long.
DOOR_SECONDS = 6.0
#: Pauses before a transport is tried again.
RETRY_SECONDS = (0.2, 0.5, 1.0)
SSH_FAILED = 255
#: What ssh says (OpenSSH 9.2) where another try would end alike.
LASTING = re.compile(
    "Host key verification failed|Could not resolve hostname|Bad configuration option|Bad owner or permissions"
)


class Start:
    """One process of a transport, and the nodes it starts: all that have the same words."""

    def __init__(self, words: Words, addresses: str, environment: Pairs, is_step: bool, nodes: Sequence[Node] = ()) -> None:
        """Start it, with its stdin and stdout as pipes where they are the channel. Raises OSError."""
        self.nodes = nodes
        self._is_door = bool(nodes) and nodes[0].plan.transport == "local"
        is_tcp = LISTENER in words
        # A file, not a pipe: nobody needs to read it while the transport runs.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        self.process = subprocess.Popen(
            [addresses if word == LISTENER else word for word in words],
            stdin=subprocess.DEVNULL if is_tcp else subprocess.PIPE,
            stdout=self._words if is_tcp else subprocess.PIPE,
            stderr=self._words,
            cwd="/",
            env=dict(environment),
            preexec_fn=_preparer(os.getpid(), is_step),
        )

    def take_pipes(self) -> tuple[int, int]:
        """The descriptors of a transport whose stdin and stdout are the channel: to read, to write."""
        assert self.process.stdin
        assert self.process.stdout
        found = os.dup(self.process.stdout.fileno()), os.dup(self.process.stdin.fileno())
        self.process.stdout.close()
        self.process.stdin.close()
        return found

    def said(self) -> str:
        """The last line it printed, for a message."""
        end = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, end - SAID_BYTES))
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def kill(self) -> None:
        """KILL its group, unless nodes that it started are still there: srun would take them with it.

        A door on this machine is not killed at first: only it can sweep what an agent that is gone has left, so its
        agent is, should that hang, and the door does the rest.
        """
        if all(node.is_over for node in self.nodes) and self.process.poll() is None:
            if self._is_door:
                self._is_door = False
                for pid, parent in processes.parents().items():
                    if parent == self.process.pid:
                        processes.send_signal(pid, signal.SIGKILL)
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Node:
    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.is_tcp = LISTENER in plan.words
        self.is_step = TRANSPORTS[plan.transport].is_step
        self.start: Start | None = None
        self.channel: Channel | None = None
        self.heart: Heart | None = None
        self.deadline: Timer | None = None
        self.facts: NodeFacts | None = None
        self.reached: dict[str, str] = {}
        self.retries = list(RETRY_SECONDS)
        self.is_over = False

    @property
    def index(self) -> int:
        return self.plan.index

    @property
    def host(self) -> str:
        return self.plan.host

    def said(self) -> str:
        """The last line its transport printed, for a message."""
        return self.start.said() if self.start else ""

    def may_retry(self) -> bool:
        """Whether its transport failed by itself (ssh's 255), and not for a reason that stays."""
        if self.start is None or not TRANSPORTS[self.plan.transport].is_shell:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.start.process.wait(END_SECONDS) == SSH_FAILED and not LASTING.search(self.said())
        return False

    def starter(self) -> str:
        """The program that was to start the door, for a message."""
        return basename(self.plan.words[0]) if self.plan.transport != "local" else "its process"

    def close(self) -> None:
        """No more of this node; its transport does not end by itself, so it is killed at once."""
        self.is_over = True
        if self.deadline:
            self.deadline.cancel()
        if self.heart:
            self.heart.stop()
        if self.channel:
            self.channel.close()

    def kill_transport(self) -> None:
        if self.start:
            self.start.kill()


class Greeting:
    """Reads a pipe until a door's greeting; drops all that a login shell's start-up files print before it.

    done: called with the bytes after the greeting of this launch and node; any other greeting is chatter too.
    """

    def __init__(
        self, loop: Loop, reader: int, expected: bytes, done: Callable[[bytes], None], failed: Callable[[str], None]
    ) -> None:
        self._loop, self._reader, self._expected = loop, reader, expected
        self._done, self._failed = done, failed
        self._seen = bytearray(b"\n")
        os.set_blocking(reader, False)
        loop.watch(reader, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._reader, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._seen += data
        start = self._seen.find(self._expected)
        if start >= 0:
            self._loop.forget(self._reader)
            self._done(bytes(self._seen[start + len(self._expected) :]))
        elif not data or len(self._seen) > channel.CHATTER_LIMIT:
            self._loop.forget(self._reader)
            self._failed("ended before the node answered" if not data else "printed 1 MB instead of an answer")


def end_transports(nodes: Iterable[Node]) -> None:
    """After the goodbye a transport ends by itself in milliseconds; one that does not is killed."""
    end_starts({id(node.start): node.start for node in nodes if node.start}.values())


def end_starts(starts: Collection[Start]) -> None:
    for is_kill, seconds in ((False, END_SECONDS), (True, DOOR_SECONDS), (True, END_SECONDS)):
        deadline = time.monotonic() + seconds
        for start in starts:
            if is_kill:
                start.kill()
        for start in starts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                start.process.wait(max(0.0, deadline - time.monotonic()))


def _preparer(parent: int, is_step: bool) -> Callable[[], None]:
    """Runs in the forked transport: a process group of its own, so that ^C and our stop do not race; TERM with our death.

    srun gets no TERM: it would KILL the step, and with it the agents that stop their ranks with a grace.
    """

    def prepare() -> None:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        if not is_step:
            processes.die_with_parent(signal.SIGTERM, parent)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
