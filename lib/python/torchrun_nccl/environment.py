"""What of the caller's environment reaches the workers: all of it, byte for byte, minus the two tables below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

Pairs = tuple[tuple[str, str], ...]

#: Device lists: each node's own, or the user's by the rule in agreement.py; never simply carried.
DEVICE_NAMES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
    "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR",
)  # fmt: skip

#: What belongs to a host, a task or a step: the node's own value wins, and where it has none there is none.
HOST_NAMES = (
    *DEVICE_NAMES,
    "NCPUS", "PBS_NODENUM", "PBS_TASKNUM", "PBS_MOMPORT", "PBS_VNODENUM",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_STEPID",
    "SLURMD_NODENAME", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT",
    "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_TOPOLOGY_ADDR",
    "DISPLAY", "XAUTHORITY", "XDG_RUNTIME_DIR", "XDG_SESSION_ID",
)  # fmt: skip
HOST_PREFIXES = ("SSH_", "SLURM_STEP_", "SLURM_CPU_BIND")

#: Node-local scratch: the node's own; else the caller's path, where the node has it too (with other content).
SCRATCH_NAMES = ("TMPDIR", "PBS_JOBFS", "PBS_JOBDIR", "TMP", "TEMP", "SLURM_TMPDIR")

#: Left over from another launcher, or ours to set; a library that finds them believes in another world.
STALE_NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "NODE_RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_HEALTH_CHECK_PORT", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
)  # fmt: skip
STALE_PREFIXES = ("PET_", "OMPI_", "PMI_", "PMIX_", "PALS_", "TORCHRUN_NCCL_")


def is_stale(name: str) -> bool:
    return name in STALE_NAMES or name.startswith(STALE_PREFIXES)


def belongs_to_host(name: str) -> bool:
    return name in HOST_NAMES or name.startswith(HOST_PREFIXES)


def carried(caller: Iterable[tuple[str, str]]) -> Pairs:
    """What travels: the caller's variables without the stale ones and those of its host."""
    return tuple((name, value) for name, value in caller if not is_stale(name) and not belongs_to_host(name))


def for_worker(
    carried_pairs: Iterable[tuple[str, str]],
    own: Mapping[str, str],
    hostname: str,
    is_directory: Callable[[str], bool],
    settings: Iterable[tuple[str, str]],
) -> dict[str, str]:
    """The environment of this node's workers.

    own: what the node's own task has. settings: what all nodes agreed on for this one.
    """
    result = dict(carried_pairs)
    result.update((name, value) for name, value in own.items() if belongs_to_host(name) and not is_stale(name))
    for name in SCRATCH_NAMES:
        if name in own:
            result[name] = own[name]
        elif name in result and not is_directory(result[name]):
            del result[name]
    if "HOSTNAME" in result:
        result["HOSTNAME"] = own.get("HOSTNAME", hostname)
    result.update(settings)
    return result
