"""Host lists: `a[1-2],b3` to names, names back to `gpu[3-7]`, and host files to hosts.

The order of a list is the order of the node ranks: nothing here sorts what it hands on.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from torchrun_nccl.allocation import Host
from torchrun_nccl.errors import BadHostList

#: A list that stands for more hosts is a slip of the keyboard: `n[0-999999999]`.
MAX_HOSTS: Final = 100_000

_NAME_HELP: Final = "; write hosts as n1,n2 or n[1-3,7]"
_LINE_HELP: Final = "; a line is HOST, HOST slots=N or HOST:N"

# One word of a list: it ends at a comma or a blank outside of brackets. An open bracket takes all that follows.
_WORD: Final = re.compile(r"(?:\[[^\]]*(?:\]|\Z)|[^\s,\[])+")
# The pieces of a word `r[1-2]n[08-11]`: literal text and brackets; a bracket without its partner is a stray.
_PIECE: Final = re.compile(r"\[[^\[\]]*\]|(?P<literal>[^\[\]]+)|(?P<stray>.)")
# `7`, `08-11`
_SPAN: Final = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
# `n1:4`, `n[1-2]:4`, `[2001:db8::5]:4`, but not the address `2001:db8::5`
_WITH_SLOTS: Final = re.compile(r"(?P<name>[^:]*|(?:[^@\[\]]*@)?\[[^\[\]]*:[^\[\]]*\]):(?P<slots>[^:\[\]]*)")
_SLOTS: Final = re.compile(r"[1-9][0-9]{0,5}")
# `n[1-2]`, `n[1-2],m3 slots=4`
_LINE: Final = re.compile(r"(?P<hosts>(?:\[[^\]]*(?:\]|\Z)|[^\s\[])+)(?:\s+slots\s*=\s*(?P<slots>\S+))?\s*(?P<rest>.*)")

_USER: Final = r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]*@)?"
_HOST: Final = re.compile(rf"{_USER}(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]*)")
_ADDRESS: Final = re.compile(rf"{_USER}\[?(?P<address>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]?")
_LONGEST: Final = 255
_LONGEST_SHOWN: Final = 60

# The number fields of a name, for folding.
_NUMBER: Final = re.compile(r"([0-9]{1,18})")

_Item = TypeVar("_Item")


class _Place(NamedTuple):
    """A part of a list and where it stands, for the message if it is bad."""

    text: str
    offset: int
    source: str

    def bad(self, problem: str) -> BadHostList:
        return BadHostList(f"{self.source}: {_quoted(self.text)} at character {self.offset + 1} {problem}")


class _Literal(NamedTuple):
    """Text outside of brackets."""

    text: str

    @property
    def size(self) -> int:
        return 1

    def texts(self) -> Iterator[str]:
        return iter((self.text,))


class _Span(NamedTuple):
    """The numbers of `08-11`, and how wide they are written."""

    low: int
    high: int
    width: int

    @property
    def size(self) -> int:
        return self.high - self.low + 1

    def texts(self) -> Iterator[str]:
        return (str(number).zfill(self.width) for number in range(self.low, self.high + 1))


class _Named(NamedTuple):
    """A host as a list gives it; slots is 0 where the list names none."""

    name: str
    line: int
    slots: int


def expand(text: str, source: str = "host list") -> tuple[str, ...]:
    """The names that a bracket list stands for, in its order, each once, numbers as wide as they were written.

    >>> expand("a[1-2],b3")
    ('a1', 'a2', 'b3')
    >>> expand("r[1-2]n[08-09]-ib n[10,2]")
    ('r1n08-ib', 'r1n09-ib', 'r2n08-ib', 'r2n09-ib', 'n10', 'n2')
    >>> expand("me@n[1-2], [2001:db8::5]")
    ('me@n1', 'me@n2', '2001:db8::5')
    """
    words = (_names(word) for word in _words(text, source))
    return tuple(dict.fromkeys(_bounded(words, source)))


def parse_hosts(text: str, source: str) -> tuple[Host, ...]:
    """The hosts of a list whose words may end in a number of slots; 0 slots where the list names none.

    >>> [(host.name, host.slots) for host in parse_hosts("n[1-2]:4,m7", "--hosts")]
    [('n1', 4), ('n2', 4), ('m7', 0)]
    """
    return _merged(
        named._replace(line=position) for position, named in enumerate(_listed(_words(text, source), source))
    )


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    r"""The hosts of a file; a host that is named again keeps its place and its slots add up.

    >>> text = "# my nodes\nn1 slots=4\nn[2-3]:2\nm7\nn1 slots=2\n"
    >>> [(host.name, host.line, host.slots) for host in parse_hostfile(text, "hosts.txt")]
    [('n1', 1, 6), ('n2', 2, 2), ('n3', 2, 2), ('m7', 3, 0)]
    """
    lines = enumerate(text.lstrip("\ufeff").split("\n"))
    hosts = _merged(_bounded((_hostfile_line(line, index, source) for index, line in lines), source))
    if not hosts:
        raise BadHostList(f"{source} names no host{_LINE_HELP}")
    return hosts


def fold(hosts: Iterable[str]) -> str:
    """The shortest common writing of some names, for messages; `expand` gives the same set back.

    >>> fold(["gpu3", "gpu4", "gpu5", "gpu7"])
    'gpu[3-5,7]'
    >>> fold(["r1n08", "r1n09", "r2n08", "r2n09", "login"])
    'r[1-2]n[08-09],login'
    """
    rows = [(host,) if ":" in host else tuple(_NUMBER.split(host)) for host in dict.fromkeys(hosts)]
    longest = max(map(len, rows), default=0)
    # Fields alternate: text, number, text, number, text. The last number varies most often.
    for column in reversed(range(1, longest, 2)):
        rows = _fold_column(rows, column)
    return ",".join("".join(row) for row in rows)


def short_names(hosts: Iterable[str]) -> tuple[str, ...]:
    """For each host its name up to the first dot, or the full one where that would name two hosts.

    >>> short_names(["gadi-gpu-v100-0031.gadi.nci.org.au", "me@n7.a", "10.0.0.1"])
    ('gadi-gpu-v100-0031', 'n7', '10.0.0.1')
    >>> short_names(["n1.east", "n1.west"])
    ('n1.east', 'n1.west')
    """
    named = [(_short(host), host) for host in hosts]
    uses = Counter(short for short, _ in named)
    return tuple(short if uses[short] == 1 else host for short, host in named)


def _words(text: str, source: str) -> list[_Place]:
    words = [_Place(match.group(), match.start(), source) for match in _WORD.finditer(text)]
    if not words:
        raise BadHostList(f"{source}: no host in {_quoted(text)}{_NAME_HELP}")
    return words


def _listed(words: Iterable[_Place], source: str) -> Iterator[_Named]:
    pairs = (_split_slots(word) for word in words)
    return _bounded(((_Named(name, 0, slots) for name in _names(word)) for word, slots in pairs), source)


def _split_slots(word: _Place) -> tuple[_Place, int]:
    """`n[1-2]:4` is `n[1-2]` with 4 slots each."""
    match = _WITH_SLOTS.fullmatch(word.text)
    if match is None:
        return word, 0
    slots = _Place(match["slots"], word.offset + match.start("slots"), word.source)
    return word._replace(text=match["name"]), _slots(slots)


def _slots(place: _Place) -> int:
    if not _SLOTS.fullmatch(place.text):
        raise place.bad("is not a number of slots from 1 up")
    return int(place.text)


def _names(word: _Place) -> Iterator[str]:
    """The names of one word of a list: a name, an address, or brackets to multiply out."""
    if ":" in word.text:
        return iter((_address(word),))
    axes = [_axis(match, word) for match in _PIECE.finditer(word.text)]
    if math.prod(sum(item.size for item in axis) for axis in axes) > MAX_HOSTS:
        raise word.bad(f"stands for more than {MAX_HOSTS} hosts")
    texts = [tuple(itertools.chain.from_iterable(item.texts() for item in axis)) for axis in axes]
    return (_checked("".join(parts), word) for parts in itertools.product(*texts))


def _axis(match: re.Match[str], word: _Place) -> tuple[_Literal | _Span, ...]:
    """What one piece of a word can be: one literal, or the spans in a bracket."""
    place = _Place(match.group(), word.offset + match.start(), word.source)
    if match["literal"]:
        return (_Literal(match["literal"]),)
    if match["stray"] == "[":
        raise place._replace(text=word.text[match.start() :]).bad("has no closing bracket")
    if match["stray"]:
        raise place.bad("closes no bracket")
    return tuple(_spans(place))


def _spans(bracket: _Place) -> Iterator[_Span]:
    """`[08-11,14]`: its spans."""
    offset = bracket.offset + 1
    for text in bracket.text[1:-1].split(","):
        if not text.strip():
            raise bracket.bad("has an empty range")
        yield _span(_Place(text.strip(), offset, bracket.source))
        offset += len(text) + 1


def _span(place: _Place) -> _Span:
    """As Slurm and ClusterShell: `08-11` pads to two digits, `9-10` does not pad."""
    match = _SPAN.fullmatch(place.text)
    if match is None:
        raise place.bad("is not a number or a range like 08-11")
    low, high = match[1], match[2] or match[1]
    is_padded = any(number.startswith("0") and number != "0" for number in (low, high))
    if is_padded and len(low) != len(high):
        raise place.bad("mixes widths: write both numbers with the same number of digits")
    if int(low) > int(high):
        raise place.bad("runs backwards")
    return _Span(int(low), int(high), len(low))


def _checked(name: str, word: _Place) -> str:
    match = _HOST.fullmatch(name)
    if match is None or len(name) > _LONGEST:
        raise word.bad(f"is not a host name{_NAME_HELP}")
    # `--hosts 2` means a number of hosts to its author and 0.0.0.2 to the resolver.
    if not match["host"].strip("0123456789.") and not _is_ip(match["host"]):
        raise word.bad(f"is a number, not a host name or an address{_NAME_HELP}")
    return name


def _address(word: _Place) -> str:
    """An IPv6 literal, bare or in brackets: `2001:db8::5`, `[fe80::1%ib0]`, `me@2001:db8::5`."""
    match = _ADDRESS.fullmatch(word.text)
    if match is None or not _is_ip(match["address"]) or ("[" in word.text) != ("]" in word.text):
        raise word.bad(f"is neither a host name nor an IPv6 address{_NAME_HELP}")
    if ipaddress.IPv6Address(match["address"]).is_link_local and "%" not in match["address"]:
        raise word.bad("is a link-local address: name its interface, as in fe80::1%ib0")
    return word.text.replace("[", "").replace("]", "")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _bounded(parts: Iterable[Iterable[_Item]], source: str) -> Iterator[_Item]:
    for count, item in enumerate(itertools.chain.from_iterable(parts)):
        if count >= MAX_HOSTS:
            raise BadHostList(f"{source} stands for more than {MAX_HOSTS} hosts")
        yield item


def _hostfile_line(line: str, index: int, source: str) -> tuple[_Named, ...]:
    text = line.partition("#")[0].strip()
    if not text:
        return ()
    where = f"{source} line {index + 1} {_quoted(text)}"
    match = _LINE.fullmatch(text)
    rest = text if match is None else match["rest"]
    if match is None or rest:
        raise _Place(rest, len(text) - len(rest), where).bad(f"is not slots=N{_LINE_HELP}")
    listed = tuple(_listed(_words(match["hosts"], where), where))
    if match["slots"] is None:
        return tuple(named._replace(line=index) for named in listed)
    slots = _Place(match["slots"], match.start("slots"), where)
    if any(named.slots for named in listed):
        raise slots.bad("gives the slots a second time")
    return tuple(_Named(named.name, index, _slots(slots)) for named in listed)


def _merged(listed: Iterable[_Named]) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for name, line, slots in listed:
        known = hosts.get(name, Host(name, line, slots=0))
        hosts[name] = replace(known, slots=known.slots + slots)
    return tuple(hosts.values())


def _fold_column(rows: list[tuple[str, ...]], column: int) -> list[tuple[str, ...]]:
    """Make one row of those that differ in this number only."""
    numbers: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for row in rows:
        numbers.setdefault((row[:column], row[column + 1 :]), []).extend(row[column : column + 1])
    return [
        (*before, _fold_numbers(values), *after) if values else (*before, *after)
        for (before, after), values in numbers.items()
    ]


def _fold_numbers(values: list[str]) -> str:
    """`["08", "09", "12"]` to `[08-09,12]`; one number stays as it is."""
    if len(values) == 1:
        return values[0]
    runs: list[list[str]] = []
    for value in sorted(values, key=lambda text: (int(text), len(text))):
        if runs and _continues(runs[-1], value):
            runs[-1].append(value)
        else:
            runs.append([value])
    return "[" + ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "]"


def _continues(run: list[str], value: str) -> bool:
    """`10` continues 08, 09, and 9; `100` does not continue 08 to 99, which would need a third digit."""
    follows = value == str(int(run[-1]) + 1).zfill(len(run[-1]))
    padded = run[0].startswith("0") and run[0] != "0"
    return follows and (len(value) == len(run[0]) or not padded)


def _quoted(text: str) -> str:
    return json.dumps(text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "...")


def _short(host: str) -> str:
    name = host.rpartition("@")[2]
    return name if _is_ip(name) else name.partition(".")[0]
