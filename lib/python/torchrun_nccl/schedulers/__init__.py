"""Where to run: the one place that decides between what was asked for and what the environment shows.

In this order:
1. `--hosts`, `--hostfile`, `--simulate` or `--scheduler`, one of them;
2. the first of SCHEDULERS whose variables are set and whose job can be read here;
3. a scheduler that cannot be read yet: refused;
4. this machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

from torchrun_nccl.allocation import Allocation, Env, Host, ReadText
from torchrun_nccl.errors import BadAllocation, UsageError
from torchrun_nccl.hostlist import MAX_HOSTS, parse_hostfile, parse_hosts, short_names
from torchrun_nccl.schedulers import foreign, pbs
from torchrun_nccl.schedulers.steps import started_many_times

__all__ = ["NO_SCHEDULER", "SCHEDULERS", "detect", "names", "started_many_times"]


class Scheduler(Protocol):
    """What a module of a scheduler has."""

    NAME: str

    def is_present(self, env: Env) -> bool: ...

    def read(self, env: Env, read_text: ReadText) -> Allocation: ...


SCHEDULERS: Final[tuple[Scheduler, ...]] = (pbs,)

#: `--scheduler none`: this machine, whatever the environment shows.
NO_SCHEDULER: Final = "none"


def names() -> tuple[str, ...]:
    """What `--scheduler` takes."""
    return (*(scheduler.NAME for scheduler in SCHEDULERS), *(row.name for row in foreign.FOREIGN), NO_SCHEDULER)


def detect(
    env: Env,
    read_text: ReadText,
    *,
    hostname: str,
    scheduler: str | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    simulate: tuple[int, int] | None = None,
) -> Allocation:
    """The hosts to run on, and why these."""
    _check_options(scheduler, hosts, hostfile, simulate)
    if hosts is not None:
        return Allocation("hosts", "", parse_hosts(hosts, "--hosts"), why="--hosts was given")
    if hostfile is not None:
        return Allocation("hostfile", "", _read_hostfile(hostfile, read_text), why=f"--hostfile {hostfile} was given")
    if simulate is not None:
        return _simulated(hostname, *simulate)
    if scheduler == NO_SCHEDULER:
        return _local(hostname, f"--scheduler {NO_SCHEDULER} was given")
    if scheduler is not None:
        return _named(scheduler, env, read_text)
    return _found(env, read_text) or _local(hostname, "no scheduler variables found")


def _check_options(
    scheduler: str | None, hosts: str | None, hostfile: str | None, simulate: tuple[int, int] | None
) -> None:
    if scheduler is not None and scheduler not in names():
        raise UsageError(f'--scheduler: "{scheduler}" is none of {", ".join(names())}')
    given = {
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--simulate": simulate,
        f"--scheduler {scheduler}": None if scheduler == NO_SCHEDULER else scheduler,
    }
    chosen = [option for option, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} each say where to run: give one of them")


def _read_hostfile(path: str, read_text: ReadText) -> tuple[Host, ...]:
    if path == "-":
        raise UsageError("--hostfile -: standard input is never read; give a file")
    try:
        text = read_text(path)
    except OSError as error:
        raise UsageError(f"--hostfile {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not text, or a path that cannot be one
        raise UsageError(f"--hostfile {path} is not a text file: {error}") from error
    return parse_hostfile(text, path)


def _simulated(hostname: str, nodes: int, processes: int) -> Allocation:
    if not (1 <= nodes <= MAX_HOSTS and processes >= 1):
        raise UsageError(f"--simulate {nodes}x{processes}: give nodes and processes per node from 1 up, as in 2x4")
    (short,) = short_names((hostname,))
    hosts = tuple(Host(f"{short}-sim{node}", node, processes) for node in range(nodes))
    return Allocation("simulate", "", hosts, why=f"--simulate {nodes}x{processes} was given")


def _local(hostname: str, why: str) -> Allocation:
    return Allocation("local", "", (Host(hostname, 0),), why=why)


def _named(name: str, env: Env, read_text: ReadText) -> Allocation:
    why = f"--scheduler {name} was given"
    for row in foreign.FOREIGN:
        if row.name == name:
            raise foreign.refusal(row, env)
    reader = {reader.NAME: reader for reader in SCHEDULERS}[name]
    if not reader.is_present(env):
        raise BadAllocation(f"{why}, but none of its variables is set here: run this in the job script")
    return replace(reader.read(env, read_text), why=why)


def _found(env: Env, read_text: ReadText) -> Allocation | None:
    """A job is real if it can be read here: variables alone may come from where the job was submitted."""
    others = foreign.found(env)
    problems: list[BadAllocation] = []
    for reader in (reader for reader in SCHEDULERS if reader.is_present(env)):
        try:
            allocation = reader.read(env, read_text)
        except BadAllocation as problem:
            problems.append(problem)
        else:
            passed_over = "".join(f"; {row.sign(env)} is set too, and passed over" for row in others)
            return replace(allocation, why=allocation.why + passed_over)
    if others:
        raise foreign.refusal(others[0], env, problems)
    if problems:
        raise problems[0]
    return None
