"""What the modules of the schedulers share: reading a number, a name or a list of hosts, and the way out if that fails."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Final, NoReturn

from torchrun_nccl.allocation import Env, Host, ReadText
from torchrun_nccl.errors import BadAllocation

ELSEWHERE: Final = "give the hosts with --hosts or --hostfile, or use this machine alone with --scheduler none"

_COUNT: Final = re.compile(r"[0-9]{1,9}")
_HOST: Final = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*")


def no_command(words: tuple[str, ...]) -> NoReturn:
    """Where no command may be run."""
    raise FileNotFoundError(2, "No such command", words[0])


def first_set(env: Env, names: Iterable[str]) -> str | None:
    """The first of these variables that is set and not empty."""
    return next((name for name in names if env.get(name)), None)


def count(env: Env, name: str) -> int | None:
    value = env.get(name, "")
    return int(value) if _COUNT.fullmatch(value) else None


def index(text: str) -> str:
    """The index of an array's member; nothing else gets into the names of logs."""
    return text if text.isascii() and text.isdecimal() else ""


def text_of(read_text: ReadText, path: str) -> str:
    try:
        return read_text(path)
    except ValueError as error:  # not text, or a path that cannot be one
        raise OSError(str(error)) from error


def can_read(read_text: ReadText, path: str | None) -> bool:
    try:
        return bool(path) and bool(text_of(read_text, path or ""))
    except OSError:
        return False


def reason(error: OSError) -> str:
    return error.strerror or str(error)


def host(text: str, where: str) -> str:
    if not _HOST.fullmatch(text):
        raise BadAllocation(f"{where} is not one host name: {json.dumps(text)}; {ELSEWHERE}")
    return text


def merged(listed: Iterable[tuple[str, int]]) -> tuple[Host, ...]:
    """The hosts of a list of names and slots; one named again keeps its place, and its slots add up.

    >>> [(host.name, host.line, host.slots) for host in merged([("n2", 4), ("n1", 8), ("n2", 4)])]
    [('n2', 0, 8), ('n1', 1, 8)]
    """
    lines: dict[str, int] = {}
    slots: Counter[str] = Counter()
    for line, (name, number) in enumerate(listed):
        lines.setdefault(name, line)
        slots[name] += number
    return tuple(Host(name, lines[name], slots[name]) for name in lines)
