"""What of the caller's environment workers see, and what of their node's."""

from __future__ import annotations

import pytest
from torchrun_nccl.environment import DEVICE_NAMES, HOST_NAMES, SCRATCH_NAMES, STALE_NAMES, carried, for_worker


def worker(
    caller: dict[str, str], own: dict[str, str], settings: dict[str, str] | None = None, folders: str = ""
) -> dict[str, str]:
    """The whole way of a variable: from the caller over the channel into a worker on a node called n2."""
    return for_worker(carried(caller.items()), own, "n2", folders.split().__contains__, (settings or {}).items())


#: What a task of TM starts with: next to nothing of the job script's.
TASK = {"PATH": "/bin:/usr/bin", "HOME": "/home/me", "PBS_JOBID": "17.pbs0", "PBS_NODENUM": "1", "NCPUS": "12"}


@pytest.mark.parametrize(
    "caller, expected",
    [
        # A16, A50: the caller's, not the task's.
        ({"PATH": "/venv/bin:/usr/bin"}, {"PATH": "/venv/bin:/usr/bin"}),
        ({"VIRTUAL_ENV": "/venv", "CONDA_PREFIX": "/c"}, {"VIRTUAL_ENV": "/venv", "CONDA_PREFIX": "/c"}),
        ({"LD_LIBRARY_PATH": "/lib/x", "NCCL_DEBUG": "INFO"}, {"LD_LIBRARY_PATH": "/lib/x", "NCCL_DEBUG": "INFO"}),
        ({"PBS_JOBID": "17.pbs0", "PBS_O_WORKDIR": "/w"}, {"PBS_JOBID": "17.pbs0", "PBS_O_WORKDIR": "/w"}),
        ({"PBS_NODEFILE": "/var/spool/pbs/aux/17.pbs0"}, {"PBS_NODEFILE": "/var/spool/pbs/aux/17.pbs0"}),
        ({"PBS_JOBCOOKIE": "5C96"}, {"PBS_JOBCOOKIE": "5C96"}),
        # ... byte for byte.
        ({"EMPTY": "", "A B": "c", "a=b": "d=e"}, {"EMPTY": "", "A B": "c", "a=b": "d=e"}),
        ({"BASH_FUNC_module%%": "() {  eval `x`\n}"}, {"BASH_FUNC_module%%": "() {  eval `x`\n}"}),
        ({"ODD": "\udcff\n\t'\"$"}, {"ODD": "\udcff\n\t'\"$"}),
        # A45: nothing is replayed by a shell, so that a name that is read-only there is no danger.
        ({"SHELLOPTS": "a", "UID": "7", "PWD": "/w"}, {"SHELLOPTS": "a", "UID": "7", "PWD": "/w"}),
        # PYTHONPATH as it is set or unset (B39).
        ({"PYTHONPATH": "/p", "PYTHONNOUSERSITE": "1"}, {"PYTHONPATH": "/p", "PYTHONNOUSERSITE": "1"}),
        ({"PYTHONPATH": ""}, {"PYTHONPATH": ""}),
        ({}, {}),
        # A47: another launcher's world
        ({"RANK": "5", "WORLD_SIZE": "99", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1", "NODE_RANK": "1"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "8", "PMI_RANK": "3", "PMIX_RANK": "3", "PALS_RANKID": "3", "MPI_LOCALRANKID": "1"}, {}),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1", "GROUP_RANK": "1", "ROLE_NAME": "d"}, {}),
        # ... but not whatever has such a word in its name.
        ({"MY_RANK": "5", "RANKS": "1", "MASTER": "x", "OMP_NUM_THREADS": "3"},
         {"MY_RANK": "5", "RANKS": "1", "MASTER": "x", "OMP_NUM_THREADS": "3"}),
        # A48: they would change torchrun's options.
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_RDZV_ENDPOINT": "x:1"}, {}),
        # Ours
        ({"TORCHRUN_NCCL_PYTHON": "/p", "TORCHRUN_NCCL_KEY": "k"}, {}),
        # Of the caller's host, task, step or session
        ({"SSH_CONNECTION": "a", "SSH_AUTH_SOCK": "/s", "DISPLAY": ":1", "XDG_RUNTIME_DIR": "/run/user/7"}, {}),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n1", "SLURM_CPU_BIND_LIST": "0x1",
          "SLURMD_NODENAME": "n1"}, {}),
        ({"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-2]"}, {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-2]"}),
        ({"PBS_TASKNUM": "1", "PBS_MOMPORT": "15003"}, {}),
    ],
)  # fmt: skip
def test_callers_variables_in_a_bare_task(caller, expected):
    # PBS's number of this host and its CPUs here are the task's own.
    assert worker(caller, TASK) == {**expected, "PBS_NODENUM": "1", "NCPUS": "12"}


@pytest.mark.parametrize(
    "name, caller, own, expected",
    [
        # A31: never the calling node's list.
        ("CUDA_VISIBLE_DEVICES", "2,3", "0,1", "0,1"),
        ("CUDA_VISIBLE_DEVICES", "2,3", None, None),
        ("CUDA_VISIBLE_DEVICES", "2,3", "", ""),
        ("CUDA_VISIBLE_DEVICES", None, "0,1", "0,1"),
        ("ROCR_VISIBLE_DEVICES", "GPU-1a", "GPU-2b", "GPU-2b"),
        ("ZE_AFFINITY_MASK", "0", None, None),
        ("NCPUS", "48", "12", "12"),
        ("PBS_NODENUM", "0", "1", "1"),
        ("PBS_NODENUM", "0", None, None),
        ("SLURM_PROCID", "0", "5", "5"),
        ("SLURM_STEP_GPUS", "0", "1", "1"),
        ("SSH_AUTH_SOCK", "/tmp/a", "/tmp/b", "/tmp/b"),
        ("DISPLAY", ":1", None, None),
        # The task's own values of all others do not count.
        ("PATH", "/venv/bin", "/bin", "/venv/bin"),
        ("OMP_NUM_THREADS", "3", "12", "3"),
        ("PYTHONPATH", None, "/site", None),
        ("PBS_ENVIRONMENT", "PBS_INTERACTIVE", "PBS_BATCH", "PBS_INTERACTIVE"),
        # The host's name, where the caller has one
        ("HOSTNAME", "n1", "n2.site.org", "n2.site.org"),
        ("HOSTNAME", "n1", None, "n2"),
        ("HOSTNAME", None, "n2.site.org", None),
        # Stale even if the node has it
        ("RANK", None, "3", None),
        ("PMI_RANK", "1", "3", None),
    ],
)
def test_whose_value(name, caller, own, expected):
    result = worker({name: caller} if caller is not None else {}, {name: own} if own is not None else {})
    assert result == ({name: expected} if expected is not None else {})


@pytest.mark.parametrize(
    "caller, own, folders, expected",
    [
        # The node's own; PBS gives each host of a job one of the same name.
        ("/var/tmp/pbs.17", "/var/tmp/pbs.17", "", "/var/tmp/pbs.17"),
        ("/jobfs/17/a", "/jobfs/17/b", "/jobfs/17/a", "/jobfs/17/b"),
        # ssh sets none: the caller's path, if this node has it.
        ("/jobfs/17", None, "/jobfs/17", "/jobfs/17"),
        ("/jobfs/17", None, "", None),
        (None, "/tmp/x", "", "/tmp/x"),
        (None, None, "", None),
    ],
)
@pytest.mark.parametrize("name", SCRATCH_NAMES)
def test_scratch(name, caller, own, folders, expected):
    result = worker({name: caller} if caller else {}, {name: own} if own else {}, folders=folders)
    assert result.get(name) == expected


@pytest.mark.parametrize(
    "caller, own, settings, expected",
    [
        ({"OMP_NUM_THREADS": "48"}, {}, {"OMP_NUM_THREADS": "12"}, {"OMP_NUM_THREADS": "12"}),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({}, {}, {"GLOO_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "ib0"}),
    ],
)
def test_what_was_agreed_on_wins(caller, own, settings, expected):
    assert worker(caller, own, settings) == expected


def test_launchers_own_host():
    """Its task has all of the caller's environment: only what is stale goes."""
    caller = {"PATH": "/venv/bin", "CUDA_VISIBLE_DEVICES": "2,3", "TMPDIR": "/t", "HOSTNAME": "n2", "SSH_TTY": "/dev/pts/1"}
    assert worker({**caller, "RANK": "1"}, {**caller, "RANK": "1"}) == caller


def test_order_is_kept():
    """Rows that travel are as the caller has them, a name given twice too."""
    pairs = (("B", "1"), ("RANK", "0"), ("A", "2"), ("B", "3"))
    assert carried(pairs) == (("B", "1"), ("A", "2"), ("B", "3"))


def test_tables_do_not_overlap():
    assert set(DEVICE_NAMES) <= set(HOST_NAMES)
    assert set(HOST_NAMES) & {*STALE_NAMES, *SCRATCH_NAMES} == set()
