"""Was this started once for the job, or once for each task of it?"""

from __future__ import annotations

import re
from typing import Final

from torchrun_nccl.allocation import Env

# OpenPBS 23.06: the job script has 1; tasks have 8 hex digits: 00000002 on its host, 40000001 on another.
_PBS_TASK: Final = "PBS_TASKNUM"
_HEX: Final = re.compile(r"[0-9A-Fa-f]{1,16}")
# LSF: 1, 2, ... in the tasks of blaunch. How many there are is nowhere.
_LSF_TASK: Final = "LSF_PM_TASKID"

# Each row: a variable that only a task has, those with the number of tasks (the first that is set counts), the starter.
# Both are wanted, for a size alone may be left over from elsewhere.
_TASKS: Final = (
    ("SLURM_STEP_ID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "srun"),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "mpirun"),
    ("PALS_RANKID", ("PALS_SIZE", "PMI_SIZE", "PALS_LOCAL_SIZE"), "mpiexec"),
    ("PMI_RANK", ("PMI_SIZE",), "mpiexec"),
    ("MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "mpirun"),
    ("JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",), "jsrun"),
    ("FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "flux run"),
)

_ONCE: Final = "start torchrun_nccl.sh once per job; it starts the nodes itself"


def started_many_times(env: Env) -> str | None:
    """Say so if this is one task of several.

    >>> started_many_times({"PBS_TASKNUM": "40000001"})
    'started by pbsdsh (PBS_TASKNUM=40000001): start torchrun_nccl.sh once per job; it starts the nodes itself'
    """
    task = env.get(_PBS_TASK, "")
    if _HEX.fullmatch(task) and int(task, 16) > 1:
        return f"started by pbsdsh ({_PBS_TASK}={task}): {_ONCE}"
    task = env.get(_LSF_TASK, "")
    if task.isdecimal() and int(task) > 1:
        return f"started by blaunch ({_LSF_TASK}={task}): {_ONCE}"
    for rank, sizes, starter in _TASKS:
        size = next((name for name in sizes if env.get(name)), None)
        if env.get(rank) and size and env[size].isdecimal() and int(env[size]) > 1:
            return f"started by {starter} as one of {env[size]} tasks ({size}={env[size]}): {_ONCE}"
    return None
