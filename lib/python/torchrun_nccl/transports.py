"""Transports: from a node to the words that start its door. A table; what to use is decided once, with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .allocation import Allocation, Host
from .errors import Refused, UsageError

Words = tuple[str, ...]
#: Stands in a plan for what only the running launcher knows: ADDRESS:PORT,… of its listener.
LISTENER = "@LISTENER@"


@dataclass(frozen=True)
class Transport:
    """program: what must be on the node that launches; start: words before the door's own."""

    name: str
    program: str
    is_tcp: bool
    start: Callable[[str, Host, Words], Words]


def _local(program: str, host: Host, options: Words) -> Words:
    return ()


def _pbsdsh(program: str, host: Host, options: Words) -> Words:
    # -n counts lines of the nodefile, not hosts; without -- an argument such as -I would be pbsdsh's own.
    return (program, "-n", str(host.line), "--")


def _pbs_tmrsh(program: str, host: Host, options: Words) -> Words:
    # The exact string of the nodefile; `--` is refused.
    return (program, host.name)


def _ssh(program: str, host: Host, options: Words) -> Words:
    # Whatever the user's ssh_config says, this must be one quiet command whose stdin and stdout are the channel.
    return (
        program, *options, "-T", "-x", "-a", "-S", "none",
        "-oBatchMode=yes", "-oControlMaster=no", "-oConnectTimeout=5", "-oRemoteCommand=none",
        "-oClearAllForwardings=yes", "-oPermitLocalCommand=no",
        "-oIgnoreUnknown=StdinNull,ForkAfterAuthentication,SessionType",
        "-oStdinNull=no", "-oForkAfterAuthentication=no", "-oSessionType=default", host.name, "exec",
    )  # fmt: skip


TRANSPORTS: dict[str, Transport] = {
    one.name: one
    for one in (
        Transport("local", "", False, _local),
        Transport("pbsdsh", "pbsdsh", True, _pbsdsh),
        Transport("pbs_tmrsh", "pbs_tmrsh", True, _pbs_tmrsh),
        Transport("ssh", "ssh", False, _ssh),
    )
}

#: For nodes elsewhere, in order of preference, by scheduler. pbsdsh first: it relays TERM, a second path for a stop.
PREFERRED: dict[str, tuple[str, ...]] = {
    "pbs": ("pbsdsh", "pbs_tmrsh", "ssh"),
    "hosts": ("ssh",),
    "hostfile": ("ssh",),
}
#: Where PBS lives when its bin folder is not on PATH.
PBS_FOLDERS = ("$PBS_EXEC/bin", "/opt/pbs/bin", "/opt/pbs/default/bin", "/usr/local/bin")
_FOLDERS_SEARCHED = f", nor in {', '.join(PBS_FOLDERS)}"


@dataclass(frozen=True)
class Choice:
    transport: Transport
    program: str
    why: str


def choose(allocation: Allocation, asked: str | None, needed: bool, find: Callable[[str], str | None]) -> Choice:
    """The transport for nodes that are not here.

    needed: whether there is any such node. find: gives the path of a program, or None.
    """
    if asked is not None:
        return _asked(allocation, asked, find)
    if not needed:
        return Choice(TRANSPORTS["local"], "", "every node is on this machine")
    missing: list[str] = []
    for name in PREFERRED[allocation.scheduler]:
        program = find(TRANSPORTS[name].program)
        if program is not None:
            passed_over = f"; no {', '.join(missing)} on PATH" if missing else ""
            return Choice(TRANSPORTS[name], program, f"found {program}{passed_over}")
        missing.append(TRANSPORTS[name].program)
    raise Refused(
        f"no way to start the other nodes: {' or '.join(missing)} is needed, but not on PATH"
        f"{_FOLDERS_SEARCHED if allocation.scheduler == 'pbs' else ''}"
    )


def _asked(allocation: Allocation, name: str, find: Callable[[str], str | None]) -> Choice:
    if name not in TRANSPORTS:
        raise UsageError(f'--transport: "{name}" is none of {", ".join(TRANSPORTS)}')
    transport = TRANSPORTS[name]
    if name == "pbsdsh" and allocation.scheduler != "pbs":
        raise UsageError(f"--transport pbsdsh counts the lines of a PBS job's host list, but {allocation.why}; take another")
    program = find(transport.program) if transport.program else ""
    if program is None:
        searched = _FOLDERS_SEARCHED if name.startswith("pbs") else ""
        raise Refused(f"--transport {name}: {transport.program} is not on PATH{searched}")
    return Choice(transport, program, "asked for by --transport")


def door_words(runner: str, door: str, launch_id: str, index: int, transport: Transport, connect_timeout: float) -> Words:
    """What runs on the node, whatever started it."""
    where = LISTENER if transport.is_tcp else "stdio"
    return (runner, "-I", "-S", "-B", door, f"{launch_id}.{index}", where, f"{connect_timeout:g}")


SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:=,@%+-")


def check_remote_words(words: Sequence[str]) -> None:
    """ssh's words pass through the user's login shell; csh, fish and sh agree only on plain characters."""
    for word in words:
        if not set(word) <= SAFE:
            raise Refused(
                f"ssh cannot carry {word!r} through every login shell: install this package, and have its Python, "
                f"under a path of plain characters, or use another transport"
            )


def is_name_of_here(name: str, own_names: frozenset[str], hostname: str) -> bool:
    """Whether a scheduler's name means this machine: equal, or one is the other's short form.

    A name with a user is reached through ssh even if it is here: the work may be another user's.

    >>> is_name_of_here("n1.site.org", frozenset(), "n1"), is_name_of_here("n1.a.org", frozenset(), "n1.b.org")
    (True, False)
    """
    if name in own_names or name == hostname:
        return True
    short, _, domain = name.partition(".")
    own_short, _, own_domain = hostname.partition(".")
    return short == own_short and not short.isdigit() and (not domain or not own_domain)


def basename(path: str) -> str:
    return path.rpartition("/")[2]
