"""Slurm: batch scripts, shells of salloc and steps of one task.

How many GPUs a host has is said by other variables for each way to ask for them (22.05; on two hosts):

=========================  =====================================================================================
--gpus-per-node=v100:4     SLURM_GPUS_PER_NODE=v100:4
--gres=gpu:2               SLURM_GPUS_ON_NODE=2, of this host
--gpus-per-task=1          SLURM_GPUS_PER_TASK=1, with SLURM_TASKS_PER_NODE=4(x2); in a step both numbers of tasks
                           and SLURM_GPUS_ON_NODE are the step's
--gpus=6                   SLURM_GPUS=6, SLURM_GPUS_ON_NODE=4; nothing about the other host's 2
salloc --gres=gpu:2        nothing
=========================  =====================================================================================

What they leave open, `scontrol -d show job` says. A step's SLURM_NNODES and SLURM_TASKS_PER_NODE are its own;
SLURM_JOB_NUM_NODES, SLURM_JOB_NODELIST and SLURM_JOB_CPUS_PER_NODE are the job's everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from torchrun_nccl import hostlist
from torchrun_nccl.allocation import Allocation, Env, Host, ReadText, Run
from torchrun_nccl.errors import BadAllocation, BadHostList
from torchrun_nccl.schedulers.reading import ELSEWHERE, count, first_set, index, no_command, text_of

NAME = "slurm"

_JOB_ID: Final = ("SLURM_JOB_ID", "SLURM_JOBID")
_HOSTS: Final = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")  # gadi-gpu-v100-[0001,0003]
_NODES: Final = "SLURM_JOB_NUM_NODES"
_STEP_NODES: Final = "SLURM_NNODES"
SIGNS: tuple[str, ...] = (*_JOB_ID, *_HOSTS, _NODES, _STEP_NODES)
_STEP: Final = "SLURM_STEP_ID"
#: Set by the daemon that starts tasks: not in the shell of salloc.
_TASK_HOST: Final = "SLURMD_NODENAME"
_CPUS: Final = "SLURM_JOB_CPUS_PER_NODE"  # 8,2 or 72(x2),36
_TASKS: Final = "SLURM_TASKS_PER_NODE"
_GPUS: Final = "SLURM_GPUS"  # of the job
_GPUS_PER_NODE: Final = "SLURM_GPUS_PER_NODE"  # 4, v100:4
_GPUS_PER_TASK: Final = "SLURM_GPUS_PER_TASK"
_GPUS_HERE: Final = "SLURM_GPUS_ON_NODE"
_GPU_LIST_HERE: Final = "SLURM_JOB_GPUS"  # 0,1,2,3: the only one in old releases
_ARRAY_JOB_ID: Final = "SLURM_ARRAY_JOB_ID"
_ARRAY_INDEX: Final = "SLURM_ARRAY_TASK_ID"
_END: Final = "SLURM_JOB_END_TIME"
_COMPONENTS: Final = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")  # the second in old releases, or both

_COMPONENT: Final = re.compile(r"SLURM_(?:JOB_)?NODELIST_(?:HET|PACK)_GROUP_([0-9]{1,4})")
_GROUP: Final = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")
# `4`, `v100:4`, `gpu:v100:4`
_GPU_COUNT: Final = re.compile(r"(?:[^:,]+:){0,2}([0-9]{1,6})")
# `     Nodes=n[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:v100:4(IDX:0,2-4),shard:2(IDX:0)`
_DETAIL: Final = re.compile(r"^\s+Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", re.MULTILINE)
_DEVICES: Final = re.compile(r"\([^)]*\)")
_CGROUP: Final = "/proc/self/cgroup"

_IN_THE_JOB: Final = f"run this in the job script or in a shell of salloc, or {ELSEWHERE}"
_COUNTED_THERE: Final = "each node counts its own GPUs"


def is_present(env: Env) -> bool:
    return any(env.get(name) for name in SIGNS)


def is_real(env: Env, read_text: ReadText, run: Run = no_command) -> bool:
    """Whether this process is in the job's control group: `0::/system.slice/slurmstepd.scope/job_42/step_batch/user`."""
    job_id = env.get(first_set(env, _JOB_ID) or "", "")
    try:
        groups = text_of(read_text, _CGROUP)
    except OSError:
        return False
    return bool(job_id) and re.search(rf"/job_{re.escape(job_id)}(?:/|$)", groups, re.MULTILINE) is not None


def read(env: Env, read_text: ReadText, run: Run = no_command) -> Allocation:
    """The job's hosts in Slurm's order, which is that of SLURM_NODEID."""
    id_name = first_set(env, _JOB_ID)
    job_id = env[id_name] if id_name else ""
    job = f"Slurm job {job_id}".strip()
    _refuse_components(env, job)
    list_name = first_set(env, _HOSTS)
    if list_name is None:
        raise BadAllocation(f"{job}: neither {_HOSTS[0]} nor {_HOSTS[1]} names a host here; {_IN_THE_JOB}")
    names = _names(env, list_name, job, run)
    gpus, warnings = _gpus(env, job_id, names, run)
    cpus = _per_host(env, _CPUS, names)
    lost = f"{_JOB_ID[0]} is not set: without it srun starts nothing in this job"
    return Allocation(
        NAME,
        job_id,
        tuple(Host(name, line, gpus=gpus.get(name), cpus=cpus.get(name) or None) for line, name in enumerate(names)),
        why=f"{id_name} and {list_name} are set" if id_name else f"{list_name} is set",
        array_index=index(env.get(_ARRAY_INDEX, "")),
        end_time=_end_time(env),
        warnings=warnings if id_name else (lost, *warnings),
    )


def _refuse_components(env: Env, job: str) -> None:
    """A heterogeneous job's SLURM_JOB_NODELIST is that of one component: never take it for the whole."""
    found = sorted({int(match[1]) for match in map(_COMPONENT.fullmatch, env) if match})
    sizes = [f"{name}={env[name]}" for name in _COMPONENTS if (count(env, name) or 0) > 1]
    # Every step has SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0: one component is no sign.
    if not sizes and len(found) < 2:
        return
    lists = [_component(env, number) for number in found]
    named = ", ".join(f"component {number} is {hosts}" for number, hosts in zip(found, lists))
    raise BadAllocation(
        f"{job} is heterogeneous ({sizes[0] if sizes else f'{len(found)} components'})"
        f"{f': {named}' if named else ''}; a launch runs on one component: choose it, as in "
        f"--hosts '{lists[-1] if lists else 'n[1-2]'}'"
    )


def _component(env: Env, number: int) -> str:
    """Its hosts; the old names stand beside the new ones."""
    forms = (f"{stem}_{kind}_GROUP_{number}" for kind in ("HET", "PACK") for stem in _HOSTS)
    return env.get(first_set(env, forms) or "", "empty")


def _names(env: Env, list_name: str, job: str, run: Run) -> tuple[str, ...]:
    text = env[list_name]
    names = _by_scontrol(text, run) if "[" in text else ()
    if not names:
        try:
            names = hostlist.expand(text, f"{job}: {list_name}")
        except BadHostList as problem:
            raise BadAllocation(f"{problem}; {ELSEWHERE}") from problem
    counted = _NODES if env.get(_NODES) or env.get(_STEP) else _STEP_NODES
    if count(env, counted) not in (None, len(names)):
        hosts = "1 host" if len(names) == 1 else f"{len(names)} hosts"
        raise BadAllocation(
            f"{job}: {list_name}={text} names {hosts}, but {counted}={env[counted]}: "
            f"one of them is left over from elsewhere; {_IN_THE_JOB}"
        )
    return names


def _by_scontrol(text: str, run: Run) -> tuple[str, ...]:
    """Slurm's own reading, one name a line; nothing where it has none.

    22.05 says "Invalid hostlist" to `n[1-2]-ib` and `x[0-1]y[2,4-5]z`; containers seldom have scontrol.
    """
    try:
        return hostlist.expand(run(("scontrol", "show", "hostnames", text)), "scontrol show hostnames")
    except (OSError, BadHostList):
        return ()


def _gpus(env: Env, job_id: str, names: tuple[str, ...], run: Run) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """GPUs granted on each host, as far as Slurm says it, and what to warn about."""
    by_variables = _gpus_by_variables(env, names)
    if by_variables is not None:
        return by_variables, ()
    by_scontrol = _gpus_by_scontrol(env, job_id, names, run)
    if by_scontrol:
        return by_scontrol, ()
    said = first_set(env, (_GPUS, _GPUS_PER_TASK, _GPUS_HERE, _GPU_LIST_HERE))
    if said is None:
        return {}, ()
    hosts = "1 host" if len(names) == 1 else f"{len(names)} hosts"
    return {}, (f"{said}={env[said]} does not say what each of {hosts} has, nor does scontrol; {_COUNTED_THERE}",)


def _gpus_by_variables(env: Env, names: tuple[str, ...]) -> Mapping[str, int] | None:
    """None where they leave open what each host has."""
    per_node = _gpu_count(env, _GPUS_PER_NODE)
    if per_node is not None:
        return dict.fromkeys(names, per_node)
    total = _gpu_count(env, _GPUS)
    if total is not None:
        return {names[0]: total} if len(names) == 1 else None
    here = count(env, _GPUS_HERE)
    if here is None and env.get(_GPU_LIST_HERE):
        here = len(env[_GPU_LIST_HERE].split(","))
    per_task = _gpu_count(env, _GPUS_PER_TASK)
    if per_task is not None:
        if env.get(_STEP):
            return None
        tasks = _per_host(env, _TASKS, names)
        if tasks:
            return {name: tasks[name] * per_task for name in names}
    if here is None:
        # The daemon gives a task the number of its GPUs if there are any.
        return {} if env.get(_TASK_HOST) else None
    # --gres is per host; only hosts of different kinds, taken whole, may then have different numbers.
    cpus = _per_host(env, _CPUS, names)
    return dict.fromkeys(names, here) if len(set(cpus.values())) <= 1 else None


def _gpus_by_scontrol(env: Env, job_id: str, names: tuple[str, ...], run: Run) -> Mapping[str, int]:
    # The last member of an array has the array's own number, which means all members to scontrol.
    array = env.get(_ARRAY_JOB_ID)
    member = f"{array}_{env.get(_ARRAY_INDEX, '')}" if array else job_id
    try:
        detail = run(("scontrol", "-d", "show", "job", member)) if member else ""
        found = {name: _gres_gpus(gres) for hosts, gres in _DETAIL.findall(detail) for name in hostlist.expand(hosts)}
    except (OSError, BadHostList):
        return {}
    # Without any GPU, Slurm may just not know of the GPUs there are.
    return {name: found[name] for name in names} if found.keys() >= set(names) and any(found.values()) else {}


def _gres_gpus(text: str) -> int:
    """Of all kinds: `gpu:47gb:0(IDX:),gpu:a100:2(IDX:0,3),shard:4(IDX:0-3)` are 2."""
    items = (item.split(":") for item in _DEVICES.sub("", text).split(","))
    return sum(int(item[-1]) for item in items if item[0] == "gpu" and item[-1].isdecimal())


def _gpu_count(env: Env, name: str) -> int | None:
    """`v100:4` are 4, `a100:2,v100:1` are 3."""
    value = env.get(name, "")
    matches = [_GPU_COUNT.fullmatch(item) for item in value.split(",")]
    return sum(int(match[1]) for match in matches if match) if all(matches) else None


def _per_host(env: Env, name: str, names: tuple[str, ...]) -> Mapping[str, int]:
    """`72(x2),36` as a number for each host; nothing where it is of other hosts than these."""
    value = env.get(name, "")
    matches = [_GROUP.fullmatch(item) for item in value.split(",")]
    if not all(matches) or sum(int(match[2] or 1) for match in matches if match) != len(names):
        return {}
    numbers = (int(match[1]) for match in matches if match for _ in range(int(match[2] or 1)))
    return dict(zip(names, numbers))


def _end_time(env: Env) -> float | None:
    """Seconds since the epoch; 22.05 does not set it."""
    value = env.get(_END, "")
    return float(value) if re.fullmatch("[1-9][0-9]{0,11}", value) else None


def grace(config: str, most: float) -> float:
    """Seconds from TERM to KILL that fit into this Slurm's KillWait, at least 2; `most` where it does not say.

    Of `scontrol show config`, Slurm 22.05: ``KillWait                = 30 sec``

    >>> grace("KillWait                = 30 sec", 15), grace("KillWait = 4 sec", 15), grace("", 15)
    (15, 2, 15)
    """
    found = re.search(r"^KillWait\s*=\s*([0-9]+)", config, re.MULTILINE)
    return max(2, min(most, int(found[1]) - 3)) if found else most
