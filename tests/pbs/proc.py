"""Reads /proc: who is in a session, who descends from a process, who carries a mark. Kills nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str

    @property
    def lives(self) -> bool:
        """A zombie runs nothing; it only waits for its parent."""
        return self.state not in "ZX"


def processes() -> Iterator[Process]:
    """Every process of this machine; one that ends while we read is left out."""
    for pid in _pids():
        if stat := _read(f"/proc/{pid}/stat"):
            # "12 (a) b) S 1 12 12 ...": the name may hold anything, also brackets.
            state, parent, _, session = stat.rpartition(b")")[2].split(None, 4)[:4]
            yield Process(pid, int(parent), int(session), state.decode())


def descendants(ancestor: int) -> set[int]:
    """Living processes below `ancestor`, without itself."""
    table = list(processes())
    children: dict[int, list[Process]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)
    found: set[int] = set()
    todo = [ancestor]
    while todo:
        below = [process for process in children.get(todo.pop(), ()) if process.pid not in found]
        found.update(process.pid for process in below if process.lives)
        todo += [process.pid for process in below]
    return found


def marked(mark: str) -> set[int]:
    """Living processes whose environment at their start held `NAME=value` exactly."""
    word = b"\0" + os.fsencode(mark) + b"\0"
    return {pid for pid in _pids() if word in b"\0" + _read(f"/proc/{pid}/environ") + b"\0"}


def words(pid: int) -> tuple[str, ...]:
    """The command line, for a message."""
    return tuple(os.fsdecode(word) for word in _read(f"/proc/{pid}/cmdline").split(b"\0")[:-1])


def members(sessions: Iterable[int]) -> dict[int, list[int]]:
    """Living processes of each of these sessions."""
    found: dict[int, list[int]] = {session: [] for session in sessions}
    for process in processes():
        if process.session in found and process.lives:
            found[process.session].append(process.pid)
    return found


def _pids() -> list[int]:
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdigit()]


def _read(path: str) -> bytes:
    """Plain system calls: a scan of thousands of processes must stay cheap."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:  # ended meanwhile, or another user's
        return b""
    try:
        return b"".join(iter(lambda: os.read(file, 1 << 16), b""))
    except OSError:
        return b""
    finally:
        os.close(file)
