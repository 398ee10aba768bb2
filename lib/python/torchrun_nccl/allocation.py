"""Where am I: what a scheduler, a list or this machine gives us to run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Env = Mapping[str, str]
#: Reads a file as text; raises OSError. Handed in, so that reading a scheduler stays pure.
ReadText = Callable[[str], str]
#: Runs a scheduler's own command, a few seconds at most, and gives its stdout; raises OSError where it fails. Handed in.
Run = Callable[[tuple[str, ...]], str]


@dataclass(frozen=True)
class Host:
    """One host of the allocation.

    name: exactly the scheduler's string; some transports take no other.
    line: 0-based index of the host's first line in the scheduler's list.
    slots: number of lines, or of slots, the list gives this host.
    gpus, cpus: what the scheduler granted on this host; None where it does not say.
    """

    name: str
    line: int
    slots: int = 1
    gpus: int | None = None
    cpus: int | None = None


@dataclass(frozen=True)
class Allocation:
    """The hosts of a launch, in the order that decides the node ranks.

    scheduler: pbs, hosts, simulate, local, ...
    job_id: the scheduler's own string, empty where there is no job.
    array_index: the index of an array job's member, else empty.
    why: one phrase that says what made us choose this scheduler.
    end_time: seconds since the epoch at which the job is killed; None where not known.
    warnings: oddities worth a line to the user.
    """

    scheduler: str
    job_id: str
    hosts: tuple[Host, ...]
    why: str
    array_index: str = ""
    end_time: float | None = None
    warnings: tuple[str, ...] = ()
