"""OpenPBS and PBS Pro, with or without a site's own variables, and Torque where it uses the same names.

Only PBS_JOBID and PBS_NODEFILE are on every site. What else is set differs, so nothing rests on one of these alone:

=======================  ==========================================================================
OpenPBS 23.06            NCPUS (CPUs of the first chunk, or ompthreads); nothing about GPUs or nodes
NCI Gadi                 PBS_NCPUS, PBS_NGPUS, PBS_NNODES (whole job), PBS_NCI_NCPUS_PER_NODE
sites with a job hook    PBS_NCPUS (whole job), PBS_NGPUS (of **this host** only)
Torque 4.2, 6.0          PBS_NP, PBS_NUM_NODES, PBS_NUM_PPN, PBS_GPUFILE
=======================  ==========================================================================
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from torchrun_nccl.allocation import Allocation, Env, Host, ReadText, Run
from torchrun_nccl.errors import BadAllocation
from torchrun_nccl.schedulers import reading
from torchrun_nccl.schedulers.reading import ELSEWHERE, can_read, count, no_command, reason, text_of

NAME = "pbs"

_JOB_ID: Final = "PBS_JOBID"  # 142.pbs0, 75[0].pbs0, 174170283.gadi-pbs
_NODEFILE: Final = "PBS_NODEFILE"  # /var/spool/pbs/aux/75[0].pbs0
SIGNS: tuple[str, ...] = (_JOB_ID, _NODEFILE, "PBS_ENVIRONMENT")
_ARRAY_INDEX: Final = ("PBS_ARRAY_INDEX", "PBS_ARRAYID")  # OpenPBS, Torque
_CPUS: Final = ("PBS_NCPUS", "PBS_NP")  # of the whole job
_GPUS: Final = "PBS_NGPUS"
_GPUFILE: Final = "PBS_GPUFILE"
_NCI: Final = "PBS_NCI_"
_NODES: Final = ("PBS_NNODES", "PBS_NUM_NODES")  # NCI, Torque
_NCI_CPUS_PER_NODE: Final = "PBS_NCI_NCPUS_PER_NODE"
_VERSION: Final = "PBS_VERSION"  # Torque alone: TORQUE-6.0.2

_ARRAY_JOB_ID: Final = re.compile(r"[0-9]+\[([0-9]+)\].*")
# Torque 6.0: `node1-gpu0`
_GPU: Final = re.compile(r"(?P<host>.+)-gpu/?[0-9]+")


def is_present(env: Env) -> bool:
    return any(env.get(name) for name in SIGNS)


def is_real(env: Env, read_text: ReadText, run: Run = no_command) -> bool:
    """Whether the job's nodefile is here; it is removed when the job ends."""
    return can_read(read_text, env.get(_NODEFILE))


def read(env: Env, read_text: ReadText, run: Run = no_command) -> Allocation:
    """The job's hosts in the order of the nodefile; only the job script's host need have that file."""
    job_id = env.get(_JOB_ID)
    if not job_id:
        raise BadAllocation(
            f"{_JOB_ID} is not set, but other variables of a PBS job are: part of its environment is lost; "
            f"run this in the job script, or {ELSEWHERE}"
        )
    lines = _read_nodefile(env, read_text, job_id)
    slots = Counter(lines)
    gpus, gpu_warnings = _gpus(env, read_text, slots)
    cpus = _cpus(env, slots)
    first: dict[str, int] = {}
    for index, name in enumerate(lines):
        first.setdefault(name, index)
    return Allocation(
        NAME,
        job_id,
        tuple(Host(name, first[name], slots[name], gpus.get(name), cpus.get(name)) for name in slots),
        why=f"{_JOB_ID} and {_NODEFILE} are set{_by_torque(env)}",
        array_index=_array_index(env, job_id),
        warnings=(*_shared_hosts(env, lines), *gpu_warnings),
    )


def _read_nodefile(env: Env, read_text: ReadText, job_id: str) -> list[str]:
    """The hosts, one for each line: `pbsdsh -n` counts these lines.

    OpenPBS 23.06 writes one line per MPI slot (select=2:ncpus=4:mpiprocs=4), chunk after chunk:
        node1.cluster.test
        node1.cluster.test
        ...
        node2.cluster.test
    """
    path = env.get(_NODEFILE)
    if not path:
        raise BadAllocation(
            f"PBS job {job_id}: {_NODEFILE} is not set here; tasks on the first host of a job do not have it, nor do "
            f"ssh sessions: run this in the job script, or {ELSEWHERE}"
        )
    where = f"PBS job {job_id}: {_NODEFILE}={path}"
    try:
        text = text_of(read_text, path)
    except OSError as error:
        raise BadAllocation(
            f"{where} cannot be read: {reason(error)}; is the job over, or is this another machine? "
            f"Run this in the job script, or {ELSEWHERE}"
        ) from error
    if not text.strip():
        raise BadAllocation(f"{where} is empty; {ELSEWHERE}")
    return [reading.host(line.strip(), f"{where} line {number}") for number, line in enumerate(text.rstrip().split("\n"), 1)]


def _array_index(env: Env, job_id: str) -> str:
    """The 5 of `1234[5].pbs0`; older Torque has it in a variable only."""
    match = _ARRAY_JOB_ID.fullmatch(job_id)
    found = (match[1] if match else "", *(env.get(name, "") for name in _ARRAY_INDEX))
    return next(filter(None, map(reading.index, found)), "")


def _by_torque(env: Env) -> str:
    version = re.fullmatch(r"TORQUE-([0-9.]+)", env.get(_VERSION, ""))
    return f", by Torque {version[1]}" if version else ""


def _gpus(env: Env, read_text: ReadText, slots: Counter[str]) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """GPUs granted on each host, as far as a file or variable says it, and what to warn about."""
    if env.get(_GPUFILE):
        return _gpus_by_file(env[_GPUFILE], read_text, slots)
    total = count(env, _GPUS)
    # One host: the job's total and the host's own number are the same. More: it is the total on NCI only.
    if total is None or (len(slots) > 1 and not _is_nci(env)):
        return {}, ()
    shares = _shares(total, slots)
    if shares:
        return shares, ()
    return {}, (f"{_GPUS}={total} cannot be shared out evenly over {len(slots)} hosts; each node counts its own GPUs",)


def _gpus_by_file(path: str, read_text: ReadText, slots: Counter[str]) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Torque: one line per GPU, `node1-gpu0`. Without GPUs, or where Torque does not manage them, it is empty."""
    where = f"{_GPUFILE}={path}"
    try:
        lines = dict.fromkeys(line.strip() for line in text_of(read_text, path).split("\n") if line.strip())
    except OSError as error:
        return {}, (f"{where} cannot be read: {reason(error)}; each node counts its own GPUs",)
    hosts: Counter[str] = Counter()
    for line in lines:
        match = _GPU.fullmatch(line)
        if match is None or match["host"] not in slots:
            return {}, (f"{where}: {json.dumps(line)} is no GPU of this job's hosts; each node counts its own GPUs",)
        hosts[match["host"]] += 1
    return ({host: hosts[host] for host in slots} if hosts else {}), ()


def _cpus(env: Env, slots: Counter[str]) -> Mapping[str, int]:
    """CPUs granted on each host, as far as the variables say it."""
    total = next((number for number in (count(env, name) for name in _CPUS) if number is not None), None)
    if total is None:
        return {}
    # Gadi and Torque write one line per CPU: then the lines say it, also where the hosts differ.
    if total == sum(slots.values()):
        return slots
    return _shares(total, slots) if len(slots) == 1 or _is_nci(env) else {}


def _shares(total: int, slots: Counter[str]) -> Mapping[str, int]:
    """Equal parts of a total for hosts that look equal; nothing where that would be a guess."""
    is_even = len(set(slots.values())) == 1 and total % len(slots) == 0
    return {host: total // len(slots) for host in slots} if is_even else {}


def _shared_hosts(env: Env, lines: list[str]) -> Iterator[str]:
    """Say that chunks share a host, which `select=2` allows without `place=scatter`, where it can be known.

    Two chunks side by side on one host look like one chunk with more MPI slots. But these are certain:
    the hosts n2, n1, n2 of OpenPBS are three chunks, and some sites count the nodes they meant to give.
    """
    hosts = len(set(lines))
    chunks = 1 + sum(one != other for one, other in zip(lines, lines[1:]))
    signs = [(chunks, f"in {chunks} separate places"), *_counted_nodes(env)]
    found = next((sign for number, sign in signs if number > hosts), None)
    if found:
        yield (
            f"{_NODEFILE} names {hosts} {'host' if hosts == 1 else 'hosts'}, but {found}: some chunks share a host, "
            f"and one node is started for each host; with OpenPBS, place=scatter gives each chunk a host of its own"
        )


def _counted_nodes(env: Env) -> Iterator[tuple[int, str]]:
    for name in _NODES:
        nodes = count(env, name)
        if nodes is not None:
            yield nodes, f"{name}={nodes}"
    total, per_node = count(env, _CPUS[0]), count(env, _NCI_CPUS_PER_NODE)
    if total and per_node:
        nodes = -(-total // per_node)
        yield nodes, f"{_CPUS[0]}={total} with {_NCI_CPUS_PER_NODE}={per_node} makes {nodes}"


def _is_nci(env: Env) -> bool:
    return any(name.startswith(_NCI) for name in env)
