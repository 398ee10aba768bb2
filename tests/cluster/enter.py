"""Running commands on a virtual host from outside, and seeing what runs there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pbs import proc

PATH = "/usr/local/bin:/usr/bin:/bin"
ROOT_PATH = f"/usr/local/sbin:/usr/sbin:/sbin:{PATH}"


class Found(NamedTuple):
    """A living process on a virtual host; pid is its number out here."""

    host: str
    pid: int
    words: tuple[str, ...]


def enter_words(pid: int) -> list[str]:
    """Words that, before a command, run it beside PID 1 of a host."""
    return ["/usr/bin/nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", "--pid"]


def user_words(user: str) -> list[str]:
    """Words that become that user; no session, no PAM, no process in between."""
    if user == "root":
        return []
    return ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--inh-caps=-all"]


def environment_words(pairs: Mapping[str, str], cwd: str) -> list[str]:
    return ["/usr/bin/env", "-i", f"--chdir={cwd}", *(f"{name}={value}" for name, value in pairs.items())]


class HostProcess(subprocess.Popen[str]):
    """A command on a host. Out here there is `nsenter`, which waits for it; a signal is for the command itself."""

    def __init__(self, words: Sequence[str], **options: Any) -> None:
        super().__init__(words, text=True, errors="surrogateescape", **options)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.inner(), number)

    def inner(self) -> int:
        """Its number out here; raises ProcessLookupError where it has ended."""
        while self.poll() is None:
            children = [process.pid for process in proc.processes() if process.parent == self.pid]
            # What nsenter forked has left our PID namespace; before that there is none.
            if children:
                return children[0]
        raise ProcessLookupError

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __exit__(self, *error: Any) -> None:
        """The end of the block is its end."""
        self.kill()
        super().__exit__(*error)


def namespace(pid: int | str) -> str:
    """Names the PID namespace that a process lives in; empty where the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def processes_in(namespaces: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Host and number of each living process; namespaces: the host by its namespace."""
    for process in proc.processes():
        host = namespaces.get(namespace(process.pid))
        if host is not None and process.lives:
            yield host, process.pid


def owner(pid: int) -> int | None:
    """The number of its user."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return None


def has_mark(pid: int, mark: str) -> bool:
    """Whether its environment at its start held `NAME=value`."""
    with contextlib.suppress(OSError):
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
