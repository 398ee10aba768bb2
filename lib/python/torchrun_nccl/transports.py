"""Transports: from a node to the words that start its door. A table; what to use is decided once, with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .allocation import Allocation, Host
from .environment import Pairs
from .errors import Refused, UsageError
from .node.engine import ISOLATED

Words = tuple[str, ...]
#: Stands in a plan for what only the running launcher knows: ADDRESS:PORT,… of its listener.
LISTENER = "@LISTENER@"
#: Carries the key to a door where the transport hands its environment on.
KEY_VARIABLE = "TORCHRUN_NCCL_KEY"


#: Makes the words before the door's own: program, this host, all hosts to start, the user's options.
Start = Callable[[str, Host, tuple[Host, ...], Words], Words]


@dataclass(frozen=True)
class Transport:
    """How a door is started on another node.

    program: what must be on the node that launches. is_tcp: the door connects back; else its stdin and stdout are the
    channel. place: of a program that starts all nodes with the same words, the variable by which it tells each door its
    index. is_shell: the words pass through a login shell. passes: the variables the program gets, None for all of the
    caller's; a program that hands its environment on is also given the key.
    """

    name: str
    program: str
    is_tcp: bool
    start: Start
    place: str = ""
    is_shell: bool = False
    passes: tuple[str, ...] | None = None

    @property
    def is_step(self) -> bool:
        return bool(self.place)


def _local(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
    return ()


def _pbsdsh(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
    # -n counts lines of the nodefile, not hosts; without -- an argument such as -I would be pbsdsh's own.
    return (program, "-n", str(host.line), "--")


def _pbs_tmrsh(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
    # The exact string of the nodefile; `--` is refused.
    return (program, host.name)


def is_shared(transport: Transport, hosts: Sequence[Host]) -> bool:
    """Whether one process of this transport starts all of `hosts`."""
    return transport.is_step and len({host.gpus for host in hosts}) == 1


def _srun(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
    """Slurm 22.05: one step, one task a node, all GPUs and CPUs of the job, whatever the job itself asked for.

    A step without --gpus-per-node silently gets one GPU a node in a job made with --gpus-per-task. No single step can
    have all GPUs of a job whose nodes have different numbers of them, so such nodes get a step each.
    """
    names = ",".join(one.name for one in hosts)
    common = ("--overlap", "--cpu-bind=none", "--input=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0")
    if len({one.gpus for one in hosts}) > 1:
        gpus = (f"--gpus={host.gpus}",) if host.gpus else ()
        return (program, "-N1", "-n1", f"--nodelist={host.name}", *common, *gpus)
    gpus = (f"--gpus-per-node={host.gpus}",) if host.gpus else ()
    count = len(hosts)
    return (program, f"-N{count}", f"-n{count}", "--ntasks-per-node=1", f"--nodelist={names}", *common, *gpus)


def _qrsh(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
    # Grid Engine 8.1: joins its words into one line for a shell.
    return (program, "-inherit", host.name, "exec")


def _blaunch(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
    return (program, "-no-shell", "-z", host.name)


def _flux(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
    # A broker's rank is the host's place in the instance's host list.
    return (program, "exec", "-r", str(host.line))


def _openmpi(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
    """Open MPI 4.1, one start a host: over several hosts its ranks begin with the own host, whatever the order given.

    Its remote start strips domains unless told to keep them.
    """
    keep = ("--mca", "orte_keep_fqdn_hostnames", "1")
    return (program, "-n", "1", "--host", f"{host.name}:1", *keep, "--bind-to", "none", "-x", KEY_VARIABLE)


def _mpich(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
    # MPICH 4 and 5, hydra: hands the whole environment on.
    return (program, "-n", "1", "-hosts", host.name)


def _ssh(program: str, host: Host, hosts: tuple[Host, ...], options: Words) -> Words:
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
        # srun with the caller's environment lets SLURM_EXACT, SLURM_HOSTFILE, SLURM_NTASKS_PER_GPU, … change the step.
        Transport("srun", "srun", True, _srun, place="SLURM_PROCID", passes=("PATH", "HOME", "SLURM_JOB_ID", "SLURM_CONF")),
        Transport("qrsh", "qrsh", False, _qrsh, is_shell=True),
        Transport("blaunch", "blaunch", True, _blaunch),
        Transport("flux", "flux", True, _flux),
        Transport("ssh", "ssh", False, _ssh, is_shell=True),
        # The last resort, by --transport alone. As root Open MPI wants a variable more, which is the user's to set.
        Transport("openmpi", "mpirun", True, _openmpi),
        Transport("mpich", "mpiexec.hydra", True, _mpich),
    )
}

#: For nodes elsewhere, in order of preference, by scheduler. pbsdsh first: it relays TERM, a second path for a stop.
PREFERRED: dict[str, tuple[str, ...]] = {
    "pbs": ("pbsdsh", "pbs_tmrsh", "ssh"),
    "slurm": ("srun",),
    "sge": ("qrsh", "ssh"),
    "lsf": ("blaunch", "ssh"),
    "flux": ("flux",),
    "hosts": ("ssh",),
    "hostfile": ("ssh",),
}
#: These take a host's place in their own scheduler's list, so they serve no other list.
BOUND = {"pbsdsh": "pbs", "srun": "slurm", "flux": "flux"}
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
    if allocation.scheduler == "slurm" and not allocation.job_id:
        raise Refused("SLURM_JOB_ID is not set, and srun without it would ask for a new job; run this in the job script")
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
    if name in BOUND and allocation.scheduler != BOUND[name]:
        raise UsageError(
            f"--transport {name} starts the hosts of a job of its own scheduler, but {allocation.why}; take another"
        )
    program = find(transport.program) if transport.program else ""
    if program is None:
        searched = _FOLDERS_SEARCHED if name.startswith("pbs") else ""
        raise Refused(f"--transport {name}: {transport.program} is not on PATH{searched}")
    return Choice(transport, program, "asked for by --transport")


def door_words(
    runner: str, door: str, launch_id: str, index: int, transport: Transport, is_shared: bool, connect_timeout: float
) -> Words:
    """What runs on the node, whatever started it; the same on all nodes where one process starts them all."""
    where = LISTENER if transport.is_tcp else "stdio"
    place = transport.place if is_shared else str(index)
    return (runner, *ISOLATED, door, f"{launch_id}.{place}", where, f"{connect_timeout:g}")


def passed(transport: Transport, environment: Pairs, job_id: str) -> Pairs:
    """What of the caller's environment the program of a transport gets, without the key."""
    if transport.passes is None:
        return environment
    chosen = {name: value for name, value in environment if name in transport.passes}
    # A job may be known by the old name alone, and srun without this one would ask for a new job.
    return tuple(({"SLURM_JOB_ID": job_id} | chosen).items())


SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:=,@%+-")


def check_remote_words(words: Sequence[str]) -> None:
    """ssh's and qrsh's words pass through the user's login shell; csh, fish and sh agree only on plain characters."""
    for word in words:
        if not set(word) <= SAFE:
            raise Refused(
                f"no login shell can be trusted with {word!r}: install this package, and have its Python, "
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
