"""What runs on a pretended host: becoming a task, and the helpers behind the words that enter a host."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

CLONE_NEWUTS = 0x04000000
CANNOT_EXECUTE = 254  #: PBS 23.06: the status of a task that could not be started


def execute(program: bytes, words: list[bytes], environment: Mapping[bytes, bytes]) -> NoReturn:
    """Become the program: no shell, looked up in the task's own PATH; a script without `#!` is run by sh."""
    folders = environment.get(b"PATH", b"/bin:/usr/bin").split(b":")
    paths = [program] if b"/" in program else [folder + b"/" + program for folder in folders]
    failure = errno.ENOENT
    for path in paths:
        try:
            os.execve(path, words, environment)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                os.execve(b"/bin/sh", [b"sh", path, *words[1:]], environment)
            if error.errno and error.errno not in (errno.ENOENT, errno.ENOTDIR):
                failure = error.errno
    # PBS 23.06: 3-4 garbage bytes instead of the program's name, in the job's error file.
    os.write(2, b"\x90\xd5\xc3\x7f: " + os.strerror(failure).encode() + b"\n")
    os._exit(CANNOT_EXECUTE)


def default_signals(ignored: Iterable[int]) -> None:
    """Undo what Python, or whoever started the MoM, ignores or blocks."""
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):  # KILL, STOP, and those of the C library
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def own_host_name(name: str) -> None:
    """A UTS namespace per session: to the job it looks as if each host had its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)


def lead(report: str, ignored: str, program: str, *words: str) -> NoReturn:
    """Behind the words that enter a host: lead a session there, tell the MoM our number, become the task."""
    with contextlib.suppress(PermissionError):
        os.setsid()  # refused where the words did not fork: we lead the session already
    with socket.socket(fileno=int(report)) as stream:
        stream.send(b"lead")  # the kernel tells the MoM our number as it is outside
    # Not os.environb: in the C locale Python adds LC_CTYPE to that.
    pairs = [word.partition(b"=") for word in Path("/proc/self/environ").read_bytes().split(b"\0")[:-1]]
    environment = {name: value for name, _, value in pairs}
    os.chdir(environment[b"HOME"])
    default_signals([int(ignored)] if ignored else [])
    execute(os.fsencode(program), [os.fsencode(word) for word in words], environment)


def listen(report: str, port: str) -> None:
    """Behind the words that enter a host: open the MoM's port in that host's network and hand it over."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with socket.socket(fileno=int(report)) as stream:
        try:
            listener.bind(("127.0.0.1", int(port)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            stream.send(b"taken")  # no network of its own: it sees the MoM's first port
            return
        listener.listen(128)
        socket.send_fds(stream, [b"own"], [listener.fileno()])


def can_name_hosts() -> bool:
    """Whether this user may have UTS namespaces; tried in a child."""
    pid = os.fork()
    if not pid:
        try:
            own_host_name("trial")
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
