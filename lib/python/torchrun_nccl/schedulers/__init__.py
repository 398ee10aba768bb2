"""Where to run: the one place that decides between what was asked for and what the environment shows.

In this order:
1. `--hosts`, `--hostfile`, `--simulate` or `--scheduler`, one of them;
2. the first of SCHEDULERS whose variables are set and whose job can be read here; before it one whose job is real, which
   something beside the variables shows: they alone may have come along from where the job was submitted;
3. a scheduler that cannot be read yet: refused;
4. this machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

from torchrun_nccl.allocation import Allocation, Env, Host, ReadText, Run
from torchrun_nccl.errors import BadAllocation, UsageError
from torchrun_nccl.hostlist import MAX_HOSTS, parse_hostfile, parse_hosts, short_names
from torchrun_nccl.schedulers import flux, foreign, lsf, pbs, sge, slurm
from torchrun_nccl.schedulers.reading import first_set, no_command
from torchrun_nccl.schedulers.steps import started_many_times

__all__ = ["NO_SCHEDULER", "SCHEDULERS", "detect", "names", "started_many_times"]


class Scheduler(Protocol):
    """What a module of a scheduler has. SIGNS: variables of its jobs; an empty host name means this machine."""

    NAME: str
    SIGNS: tuple[str, ...]

    def is_present(self, env: Env) -> bool: ...

    def is_real(self, env: Env, read_text: ReadText, run: Run) -> bool: ...

    def read(self, env: Env, read_text: ReadText, run: Run) -> Allocation: ...


#: Flux comes before all others: its jobs run inside theirs.
SCHEDULERS: Final[tuple[Scheduler, ...]] = (flux, pbs, slurm, lsf, sge)

#: `--scheduler none`: this machine, whatever the environment shows.
NO_SCHEDULER: Final = "none"


def names() -> tuple[str, ...]:
    """What `--scheduler` takes."""
    return (*(scheduler.NAME for scheduler in SCHEDULERS), *(row.name for row in _unread()), NO_SCHEDULER)


def detect(
    env: Env,
    read_text: ReadText,
    *,
    hostname: str,
    scheduler: str | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    simulate: tuple[int, int] | None = None,
    run: Run = no_command,
) -> Allocation:
    """The hosts to run on, and why these. Without run the schedulers' own commands are done without."""
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
        return _on(hostname, _named(scheduler, env, read_text, run))
    found = _found(env, read_text, run)
    return _on(hostname, found) if found else _local(hostname, "no scheduler variables found")


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


def _on(hostname: str, allocation: Allocation) -> Allocation:
    """A job without a list of hosts has this one."""
    return replace(allocation, hosts=tuple(replace(host, name=host.name or hostname) for host in allocation.hosts))


def _unread() -> tuple[foreign.Foreign, ...]:
    known = {reader.NAME for reader in SCHEDULERS}
    return tuple(row for row in foreign.FOREIGN if row.name not in known)


def _named(name: str, env: Env, read_text: ReadText, run: Run) -> Allocation:
    why = f"--scheduler {name} was given"
    for row in _unread():
        if row.name == name:
            raise foreign.refusal(row, env)
    reader = {reader.NAME: reader for reader in SCHEDULERS}[name]
    if not reader.is_present(env):
        raise BadAllocation(f"{why}, but none of its variables is set here: run this in the job script")
    return replace(reader.read(env, read_text, run), why=why)


def _found(env: Env, read_text: ReadText, run: Run) -> Allocation | None:
    present = [reader for reader in SCHEDULERS if reader.is_present(env)]
    others = [row for row in _unread() if row.sign(env)]
    real = [reader for reader in present if len(present) > 1 and reader.is_real(env, read_text, run)]
    problems: list[BadAllocation] = []
    for reader in [*real, *(reader for reader in present if reader not in real)]:
        try:
            allocation = reader.read(env, read_text, run)
        except BadAllocation as problem:
            if reader in real:
                raise
            problems.append(problem)
        else:
            signs = [first_set(env, one.SIGNS) for one in present if one is not reader]
            signs += [row.sign(env) for row in others]
            passed_over = "".join(f"; {sign} is set too, and passed over" for sign in signs)
            return replace(allocation, why=allocation.why + passed_over)
    if others:
        raise foreign.refusal(others[0], env, problems)
    if problems:
        raise _all_of(problems)
    return None


def _all_of(problems: list[BadAllocation]) -> BadAllocation:
    """One message: the first whole, of the others the cause, which stands before the first semicolon."""
    first, *others = (str(problem) for problem in problems)
    return BadAllocation(first + "".join(f" ({other.partition(';')[0]})" for other in others))
