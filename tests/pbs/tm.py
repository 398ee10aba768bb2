"""The client's side of the task API (TM), for the commands in bin/. Imports little: a start should cost 30 ms."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

TYPE_CHECKING = False  #: `typing` itself would cost a fifth of our start-up time
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

REFUSED = 99  #: what nobody has seen on a real PBS is not guessed
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
NEEDED = ("PBS_JOBID", "PBS_JOBCOOKIE", "PBS_NODENUM", "PBS_TASKNUM", "PBS_MOMPORT")


class Usage(Exception):
    """A call that the real command answers with its usage text."""


class Signalled(Exception):
    """One of SIGNALS came while we waited."""


def refuse(why: str) -> NoReturn:
    fail(f"not known to the PBS stand-in: {why}", REFUSED)


def fail(text: str, code: int) -> NoReturn:
    print(f"{sys.argv[0].rpartition('/')[2]}: {text}", file=sys.stderr)
    sys.exit(code)


def like_c() -> None:
    """Die of ^C and of a closed pipe as a C program does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def gnu_getopt(words: Sequence[str], flags: str, valued: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Options and the rest, as GNU getopt does it: options count also after other words, until `--`.

    >>> gnu_getopt(["-n1", "prog", "-s", "--", "-v"], "sv", "n")
    ([('n', '1'), ('s', '')], ['prog', '-v'])
    """
    options: list[tuple[str, str]] = []
    rest: list[str] = []
    todo = list(reversed(words))
    while todo:
        word = todo.pop()
        if word == "--":
            return options, rest + todo[::-1]
        if not word.startswith("-") or word == "-":
            rest.append(word)
            continue
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in valued and (letters or todo):
                options.append((letter, letters or todo.pop()))
                letters = ""
            elif letter in flags:
                options.append((letter, ""))
            else:
                raise Usage(word)
    return options, rest


def missing() -> bool:
    """PBS 23.06: any of these missing is a "bad environment"; PBS_NODEFILE is not among them."""
    return any(name not in os.environ for name in NEEDED)


class Mom:
    """A connection to the MoM of this host: PBS_MOMPORT on 127.0.0.1."""

    def __init__(self) -> None:
        try:
            self.socket = socket.create_connection(("127.0.0.1", int(os.environ["PBS_MOMPORT"])))
        except (OSError, ValueError) as error:
            refuse(f"no MoM at PBS_MOMPORT={os.environ['PBS_MOMPORT']} ({error})")
        self.buffer = b""
        self.caught: list[int] = []
        self.wakeup = -1

    def catch_signals(self) -> None:
        """From now on SIGNALS make `receive` raise, and nothing else."""
        self.wakeup, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self.caught.append(number))

    def send(self, op: str, **message: Any) -> None:
        text = {"op": op, "cookie": os.environ["PBS_JOBCOOKIE"], "job_id": os.environ["PBS_JOBID"], **message}
        self.socket.sendall(json.dumps(text).encode() + b"\n")

    def spawn(self, index: int, line: int, words: Sequence[str]) -> None:
        """Byte for byte: JSON has no bytes, latin-1 has a letter for each."""
        self.send("spawn", index=index, line=line, words=[os.fsencode(word).decode("latin-1") for word in words])

    def receive(self) -> dict[str, Any]:
        """The next message; waits as long as it takes, as the real one does."""
        while b"\n" not in self.buffer:
            self._wait()
            data = self.socket.recv(1 << 16)
            if not data:
                fail("the MoM has gone", 1)
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "refused" in message:
            refuse(message["refused"])
        return message

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        if self.wakeup >= 0:
            poll.register(self.wakeup, select.POLLIN)
        ready = poll.poll()
        if self.caught:
            raise Signalled(self.caught[0])
        assert ready

    def finish(self) -> None:
        """Wait until the MoM has read all we said."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(2)
            while self.socket.recv(1 << 16):
                pass
        except OSError:  # it has gone, or is in no hurry
            pass
