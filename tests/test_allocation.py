"""Where am I: job environments to allocations, and what is chosen when several things say where to run."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterable

import cases
import pytest
from cases import reader
from torchrun_nccl.allocation import Allocation, Host
from torchrun_nccl.errors import BadAllocation, BadHostList, UsageError
from torchrun_nccl.schedulers import detect, names, pbs, started_many_times, steps

GADI = ".gadi.nci.org.au"
NODE = ".cluster.test"
NOT_YET = ": this version cannot read such a job; give --hosts HOST,HOST, or --scheduler none to use this machine alone"
ELSEWHERE = "give the hosts with --hosts or --hostfile, or use this machine alone with --scheduler none"
SHARED = (
    ": some chunks share a host, and one node is started for each host; "
    "with OpenPBS, place=scatter gives each chunk a host of its own"
)


def pbs_job(lines: Iterable[str], **variables: str) -> Allocation:
    env = {"PBS_JOBID": "1234.srv", "PBS_NODEFILE": "/aux/1234.srv", **variables}
    text = "".join(f"{line}\n" for line in lines)
    return detect(env, reader({"/aux/1234.srv": text}), hostname="login")


def shape(allocation: Allocation) -> list[tuple[str, int, int, int | None, int | None]]:
    return [(host.name, host.line, host.slots, host.gpus, host.cpus) for host in allocation.hosts]


# case: job id, then for each host: name, first line, lines, GPUs, CPUs
PBS_CASES = {
    "gadi-gpuvolta-1x1": ("174170280.gadi-pbs", [("gadi-gpu-v100-0031" + GADI, 0, 12, 1, 12)]),
    "gadi-gpuvolta-1x2": ("174170281.gadi-pbs", [("gadi-gpu-v100-0031" + GADI, 0, 24, 2, 24)]),
    "gadi-gpuvolta-1x4": ("174170282.gadi-pbs", [("gadi-gpu-v100-0031" + GADI, 0, 48, 4, 48)]),
    "gadi-gpuvolta-2x4": (
        "174170283.gadi-pbs",
        [("gadi-gpu-v100-0031" + GADI, 0, 48, 4, 48), ("gadi-gpu-v100-0054" + GADI, 48, 48, 4, 48)],
    ),
    "gadi-gpuvolta-2x4-line-per-host": (
        "174170285.gadi-pbs",
        [("gadi-gpu-v100-0031" + GADI, 0, 1, 4, 48), ("gadi-gpu-v100-0054" + GADI, 1, 1, 4, 48)],
    ),
    "gadi-gpuvolta-4x4": (
        "174170284.gadi-pbs",
        [
            ("gadi-gpu-v100-0102" + GADI, 0, 48, 4, 48),
            ("gadi-gpu-v100-0031" + GADI, 48, 48, 4, 48),
            ("gadi-gpu-v100-0009" + GADI, 96, 48, 4, 48),
            ("gadi-gpu-v100-0054" + GADI, 144, 48, 4, 48),
        ],
    ),
    "gadi-dgxa100-1x8": ("174170286.gadi-pbs", [("gadi-dgx-a100-0002" + GADI, 0, 128, 8, 128)]),
    "gadi-dgxa100-2x8": (
        "174170287.gadi-pbs",
        [("gadi-dgx-a100-0002" + GADI, 0, 128, 8, 128), ("gadi-dgx-a100-0001" + GADI, 128, 128, 8, 128)],
    ),
    "gadi-gpuhopper-1x4": ("174170288.gadi-pbs", [("gadi-gpu-h200-0017" + GADI, 0, 48, 4, 48)]),
    "gadi-gpuhopper-2x4": (
        "174170289.gadi-pbs",
        [("gadi-gpu-h200-0017" + GADI, 0, 48, 4, 48), ("gadi-gpu-h200-0018" + GADI, 48, 48, 4, 48)],
    ),
    "gadi-normal-cpu": ("174170290.gadi-pbs", [("gadi-cpu-clx-2119" + GADI, 0, 4, 0, 4)]),
    "derecho-2x4-mpiprocs1": (
        "4862001.desched1",
        [("deg0037.hsn.de.hpc.ucar.edu", 0, 1, None, None), ("deg0042.hsn.de.hpc.ucar.edu", 1, 1, None, None)],
    ),
    "derecho-2x4-mpiprocs4": (
        "4862004.desched1",
        [("deg0037.hsn.de.hpc.ucar.edu", 0, 4, None, None), ("deg0042.hsn.de.hpc.ucar.edu", 4, 4, None, None)],
    ),
    "polaris-2x4": (
        "2038492.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov",
        [
            ("x3005c0s13b0n0.hsn.cm.polaris.alcf.anl.gov", 0, 1, None, None),
            ("x3206c0s37b0n0.hsn.cm.polaris.alcf.anl.gov", 1, 1, None, None),
        ],
    ),
    "aurora-2x12": (
        "699852.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",
        [
            ("x4711c1s2b0n0.hostmgmt2711.cm.aurora.alcf.anl.gov", 0, 1, None, None),
            ("x4711c1s3b0n0.hostmgmt2711.cm.aurora.alcf.anl.gov", 1, 1, None, None),
        ],
    ),
    # PBS_NGPUS=1 and PBS_NUM_PPN=4 are of this host, PBS_NCPUS=8 of the job: halving either could be wrong.
    "job-hook-2x1": (
        "31876.pbs-m1.grid.test",
        [("gpu3.grid.test", 0, 1, None, None), ("gpu4.grid.test", 1, 1, None, None)],
    ),
    "openpbs-scatter": ("142.pbs0", [("node1" + NODE, 0, 1, None, None), ("node2" + NODE, 1, 1, None, None)]),
    "openpbs-mpiprocs": ("143.pbs0", [("node1" + NODE, 0, 4, None, None), ("node2" + NODE, 4, 4, None, None)]),
    # No variable tells two chunks from one with two MPI slots, so nothing is said.
    "openpbs-packed": ("144.pbs0", [("node1" + NODE, 0, 2, None, None)]),
    "openpbs-uneven": (
        "145.pbs0",
        [("node1" + NODE, 0, 1, None, None), ("node2" + NODE, 1, 2, None, None), ("node3" + NODE, 3, 2, None, None)],
    ),
    "openpbs-interleaved": ("146.pbs0", [("node2" + NODE, 0, 2, None, None), ("node1" + NODE, 1, 1, None, None)]),
    "openpbs-script-host-absent": ("147.pbs0", [("node2" + NODE, 0, 2, None, None)]),
    "openpbs-nodes-ppn": ("148.pbs0", [("node1" + NODE, 0, 2, None, None), ("node2" + NODE, 2, 2, None, None)]),
    "openpbs-short-names": ("149.pbs0", [("node1", 0, 1, None, None), ("node2", 1, 1, None, None)]),
    "openpbs-interactive": ("150.pbs0", [("node1" + NODE, 0, 1, None, None), ("node2" + NODE, 1, 1, None, None)]),
    "openpbs-array": ("75[0].pbs0", [("node1" + NODE, 0, 1, None, None), ("node2" + NODE, 1, 1, None, None)]),
    "openpbs-task-other-host": ("151.pbs0", [("node1" + NODE, 0, 1, None, None), ("node2" + NODE, 1, 1, None, None)]),
    "pbs-with-stale-slurm": ("152.pbs0", [("node1" + NODE, 0, 1, None, None), ("node2" + NODE, 1, 1, None, None)]),
    "torque-gpufile-2x2": ("1399.login01", [("node1", 0, 4, 2, 4), ("node2", 4, 4, 2, 4)]),
    "torque-gpufile-uneven": ("1400.login01", [("node1", 0, 4, 3, 4), ("node2", 4, 2, 1, 2)]),
    "torque-gpufile-empty": ("1401.login01", [("node1", 0, 1, None, 1)]),
    "torque-packed": ("5436955.rocks.cluster.test", [("compute-32-14", 0, 4, None, 4)]),
    "torque-array": ("77-5.login01", [("node1", 0, 2, None, 2)]),
}
ARRAY_INDEX = {"openpbs-array": "0", "torque-array": "5"}
WARNINGS = {
    "openpbs-interleaved": ("PBS_NODEFILE names 2 hosts, but in 3 separate places" + SHARED,),
    "torque-packed": ("PBS_NODEFILE names 1 host, but PBS_NUM_NODES=2" + SHARED,),
}
BY_PBS = "PBS_JOBID and PBS_NODEFILE are set"
WHY = {
    "pbs-with-stale-slurm": f"{BY_PBS}; SLURM_JOB_ID is set too, and passed over",
    "torque-gpufile-2x2": f"{BY_PBS}, by Torque 6.0.2",
    "torque-gpufile-uneven": f"{BY_PBS}, by Torque 6.0.2",
    "torque-gpufile-empty": f"{BY_PBS}, by Torque 6.0.2",
    "torque-packed": f"{BY_PBS}, by Torque 4.2.9",
    "torque-array": f"{BY_PBS}, by Torque 2.4.16",
}

REFUSED = {
    "openpbs-task-first-host": "PBS job 151.pbs0: PBS_NODEFILE is not set here; tasks on the first host of a job do "
    f"not have it, nor do ssh sessions: run this in the job script, or {ELSEWHERE}",
}

STARTED = {
    "openpbs-task-first-host": "started by pbsdsh (PBS_TASKNUM=00000002)",
    "openpbs-task-other-host": "started by pbsdsh (PBS_TASKNUM=40000001)",
    "slurm-step": "started by srun as one of 6 tasks (SLURM_STEP_NUM_TASKS=6)",
}
ONCE = ": start torchrun_nccl.sh once per job; it starts the nodes itself"


@pytest.mark.parametrize("name", PBS_CASES)
def test_pbs_case(name: str) -> None:
    job_id, hosts = PBS_CASES[name]
    env, read_text = cases.load(name)
    assert detect(env, read_text, hostname="any.where") == Allocation(
        scheduler="pbs",
        job_id=job_id,
        hosts=tuple(Host(*host) for host in hosts),
        why=WHY.get(name, BY_PBS),
        array_index=ARRAY_INDEX.get(name, ""),
        warnings=WARNINGS.get(name, ()),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused_case(name: str) -> None:
    env, read_text = cases.load(name)
    with pytest.raises(BadAllocation, match=f"^{re.escape(REFUSED[name])}$"):
        detect(env, read_text, hostname="any.where")


@pytest.mark.parametrize("name", cases.names())
def test_none_is_this_machine_alone(name: str) -> None:
    env, read_text = cases.load(name)
    alone = Allocation("local", "", (Host("any.where", 0),), why="--scheduler none was given")
    assert detect(env, read_text, hostname="any.where", scheduler="none") == alone


@pytest.mark.parametrize("name", cases.names())
def test_started_many_times_in_cases(name: str) -> None:
    env, _ = cases.load(name)
    assert started_many_times(env) == (STARTED[name] + ONCE if name in STARTED else None)


@pytest.mark.parametrize(
    "lines, hosts",
    [
        (["n2"] * 48 + ["n1"] * 48, [("n2", 0, 48), ("n1", 48, 48)]),  # A04, A18
        (["n2", "n1", "n2", "n1"], [("n2", 0, 2), ("n1", 1, 2)]),
        (["n10", "n9"], [("n10", 0, 1), ("n9", 1, 1)]),
        (["n1"] * 4 + ["n2"] * 4, [("n1", 0, 4), ("n2", 4, 4)]),
        (["10.0.0.2", "10.0.0.1", "2001:db8::5"], [("10.0.0.2", 0, 1), ("10.0.0.1", 1, 1), ("2001:db8::5", 2, 1)]),
        (["n1\r", " n2 ", ""], [("n1", 0, 1), ("n2", 1, 1)]),
        (
            ["s1", "s1.example", "s1-ib"],
            [("s1", 0, 1), ("s1.example", 1, 1), ("s1-ib", 2, 1)],
        ),  # no guess about names: A54
    ],
)
def test_hosts_keep_order_string_and_first_line(lines: list[str], hosts: list[tuple[str, int, int]]) -> None:
    assert [host[:3] for host in shape(pbs_job(lines))] == hosts


@pytest.mark.parametrize(
    "lines, variables, shares",
    [
        # One host: the number of the job and of the host are the same.
        (["n1"], {"PBS_NGPUS": "3", "PBS_NCPUS": "7"}, [(3, 7)]),
        (["n1"] * 12, {"PBS_NCPUS": "12", "PBS_NGPUS": "1", "PBS_NCI_NCPUS_PER_NODE": "48"}, [(1, 12)]),  # A11
        (["n1"], {"PBS_NP": "8", "PBS_NUM_NODES": "1", "PBS_NUM_PPN": "1"}, [(None, 8)]),  # Torque 4.2.9, procs=8
        (["n1"], {"PBS_NGPUS": "four", "PBS_NCPUS": ""}, [(None, None)]),
        # More than one: PBS_NGPUS is the job's only on NCI.
        (["n1", "n2"], {"PBS_NGPUS": "2", "PBS_NCPUS": "8"}, [(None, None), (None, None)]),
        (["n1", "n2"], {"PBS_NGPUS": "2", "PBS_NCPUS": "8", "PBS_NCI_HT": "0"}, [(1, 4), (1, 4)]),
        (["n1", "n2"], {"PBS_NGPUS": "0", "PBS_NCI_HT": "0"}, [(0, None), (0, None)]),
        # One line per CPU: the lines say what each host has.
        (["n1"] * 2 + ["n2"] * 6, {"PBS_NCPUS": "8"}, [(None, 2), (None, 6)]),
        (["n1"] * 4 + ["n2"] * 2, {"PBS_NP": "6"}, [(None, 4), (None, 2)]),
    ],
)
def test_shares(lines: list[str], variables: dict[str, str], shares: list[tuple[int | None, int | None]]) -> None:
    allocation = pbs_job(lines, **variables)
    assert [(host.gpus, host.cpus) for host in allocation.hosts] == shares
    assert allocation.warnings == ()


@pytest.mark.parametrize(
    "lines, variables, warning",
    [
        # A29: 7 GPUs on 2 hosts are not 3 and 3.
        (["n1", "n2"], {"PBS_NGPUS": "7", "PBS_NCI_HT": "0"}, "PBS_NGPUS=7 cannot be shared out evenly over 2 hosts; "),
        (
            ["n1", "n2", "n2"],
            {"PBS_NGPUS": "4", "PBS_NCI_HT": "0"},
            "PBS_NGPUS=4 cannot be shared out evenly over 2 hosts; ",
        ),
    ],
)
def test_uneven_gpus(lines: list[str], variables: dict[str, str], warning: str) -> None:
    allocation = pbs_job(lines, **variables)
    assert [host.gpus for host in allocation.hosts] == [None, None]
    assert allocation.warnings == (warning + "each node counts its own GPUs",)


@pytest.mark.parametrize(
    "lines, variables, sign",
    [
        (["n1"] * 4, {"PBS_NNODES": "2"}, "1 host, but PBS_NNODES=2"),
        (["n1"] * 4, {"PBS_NUM_NODES": "4"}, "1 host, but PBS_NUM_NODES=4"),
        (
            ["n1"] * 96,
            {"PBS_NCPUS": "96", "PBS_NCI_NCPUS_PER_NODE": "48"},
            "1 host, but PBS_NCPUS=96 with PBS_NCI_NCPUS_PER_NODE=48 makes 2",
        ),
        (["n2", "n1", "n2", "n1"], {"PBS_NNODES": "9"}, "2 hosts, but in 4 separate places"),
    ],
)
def test_fewer_hosts_than_chunks_is_said_where_it_is_known(
    lines: list[str], variables: dict[str, str], sign: str
) -> None:
    assert pbs_job(lines, **variables).warnings == (f"PBS_NODEFILE names {sign}{SHARED}",)


@pytest.mark.parametrize(
    "text, gpus, warnings",
    [
        ("n1-gpu0\nn1-gpu1\nn2-gpu3\n", [2, 1], ()),
        ("n2-gpu/0\n", [0, 1], ()),
        ("n1-gpu0\nn1-gpu0\nn2-gpu0\n", [1, 1], ()),  # one GPU, shared by two processes
        ("\n", [None, None], ()),
        (
            "n3-gpu0\n",
            [None, None],
            ('PBS_GPUFILE=/g: "n3-gpu0" is no GPU of this job\'s hosts; each node counts its own GPUs',),
        ),
        (
            "0,1\n",
            [None, None],
            ('PBS_GPUFILE=/g: "0,1" is no GPU of this job\'s hosts; each node counts its own GPUs',),
        ),
        (
            None,
            [None, None],
            ("PBS_GPUFILE=/g cannot be read: No such file or directory; each node counts its own GPUs",),
        ),
    ],
)
def test_gpufile(text: str | None, gpus: list[int | None], warnings: tuple[str, ...]) -> None:
    files = {"/n": "n1\nn2\n"} if text is None else {"/n": "n1\nn2\n", "/g": text}
    env = {"PBS_JOBID": "1.s", "PBS_NODEFILE": "/n", "PBS_GPUFILE": "/g", "PBS_NGPUS": "8", "PBS_NCI_HT": "0"}
    allocation = pbs.read(env, reader(files))
    assert [host.gpus for host in allocation.hosts] == gpus
    assert allocation.warnings == warnings


@pytest.mark.parametrize(
    "variables, index",
    [
        ({"PBS_JOBID": "1234[5].srv"}, "5"),  # A09
        ({"PBS_JOBID": "1234[6].srv", "PBS_ARRAY_INDEX": "5"}, "6"),  # the id cannot be left over from elsewhere
        ({"PBS_JOBID": "1234[].srv", "PBS_ARRAY_INDEX": "7"}, "7"),
        ({"PBS_JOBID": "1234-8.srv", "PBS_ARRAYID": "8"}, "8"),
        ({"PBS_JOBID": "1234.srv"}, ""),
        ({"PBS_JOBID": "1234"}, ""),
        ({"PBS_JOBID": "1234.srv", "PBS_ARRAY_INDEX": "../x"}, ""),
    ],
)
def test_array_index(variables: dict[str, str], index: str) -> None:
    allocation = pbs_job(["n1"], **variables)
    assert (allocation.job_id, allocation.array_index) == (variables["PBS_JOBID"], index)


PATH = "/aux/1234[5].srv"
JOB = "PBS job 1234[5].srv: "


@pytest.mark.parametrize(
    "text, message",
    [
        ("", f"{JOB}PBS_NODEFILE={PATH} is empty; {ELSEWHERE}"),
        (" \n\n", f"{JOB}PBS_NODEFILE={PATH} is empty; {ELSEWHERE}"),
        ("n1\nn1 4\n", f'{JOB}PBS_NODEFILE={PATH} line 2 is not one host name: "n1 4"; {ELSEWHERE}'),
        ("n1\n\nn2\n", f'{JOB}PBS_NODEFILE={PATH} line 2 is not one host name: ""; {ELSEWHERE}'),
        ("n\x1b[1m\n", f'{JOB}PBS_NODEFILE={PATH} line 1 is not one host name: "n\\u001b[1m"; {ELSEWHERE}'),
        ("-oX\n", f'{JOB}PBS_NODEFILE={PATH} line 1 is not one host name: "-oX"; {ELSEWHERE}'),
        ("n1,n2\n", f'{JOB}PBS_NODEFILE={PATH} line 1 is not one host name: "n1,n2"; {ELSEWHERE}'),
        (
            None,
            f"{JOB}PBS_NODEFILE={PATH} cannot be read: No such file or directory; is the job over, or is this another "
            f"machine? Run this in the job script, or {ELSEWHERE}",
        ),
    ],
)
def test_bad_nodefile(text: str | None, message: str) -> None:
    files = {} if text is None else {PATH: text}
    with pytest.raises(BadAllocation, match=f"^{re.escape(message)}$"):
        detect({"PBS_JOBID": "1234[5].srv", "PBS_NODEFILE": PATH}, reader(files), hostname="n1")


def test_nodefile_that_is_not_text() -> None:
    def read_text(path: str) -> str:
        return b"\xff".decode()

    with pytest.raises(BadAllocation, match="cannot be read: 'utf-8' codec can't decode byte"):
        detect({"PBS_JOBID": "1.s", "PBS_NODEFILE": "/n"}, read_text, hostname="n1")
    with pytest.raises(UsageError, match=r"^--hostfile h.txt is not a text file: "):
        detect({}, read_text, hostname="n1", hostfile="h.txt")


@pytest.mark.parametrize("env", [{"PBS_NODEFILE": "/n"}, {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": ""}])
def test_part_of_a_pbs_job_is_not_this_machine_alone(env: dict[str, str]) -> None:
    with pytest.raises(BadAllocation, match=r"^PBS_JOBID is not set, but other variables of a PBS job are"):
        detect(env, reader({"/n": "n1\n"}), hostname="n1")


@pytest.mark.parametrize(
    "env, job",
    [
        ({"OAR_JOB_ID": "3"}, "OAR job 3 (OAR_JOB_ID is set)"),
        ({"OAR_JOB_ID": "3", "OAR_NODEFILE": "/n"}, "OAR job 3 (OAR_JOB_ID is set)"),
        ({"OAR_NODEFILE": "/n"}, "OAR job (OAR_NODEFILE is set)"),
    ],
)
def test_inside_a_job_that_cannot_be_read_yet(env: dict[str, str], job: str) -> None:
    with pytest.raises(BadAllocation, match=f"^{re.escape(job + NOT_YET)}$"):
        detect(env, reader({}), hostname="n1")


LOCAL = Allocation("local", "", (Host("n1.site", 0),), why="no scheduler variables found")
OPTIONS = {
    "nothing": ({}, LOCAL),
    "none": ({"scheduler": "none"}, Allocation("local", "", LOCAL.hosts, why="--scheduler none was given")),
    "hosts": (
        {"hosts": "b[1-2]:4,a"},
        Allocation("hosts", "", (Host("b1", 0, 4), Host("b2", 1, 4), Host("a", 2, 0)), why="--hosts was given"),
    ),
    "hosts, none": (
        {"hosts": "b", "scheduler": "none"},
        Allocation("hosts", "", (Host("b", 0, 0),), why="--hosts was given"),
    ),
    "hostfile": (
        {"hostfile": "h.txt"},
        Allocation("hostfile", "", (Host("m2", 0, 4), Host("m1", 1, 0)), why="--hostfile h.txt was given"),
    ),
    "simulate": (
        {"simulate": (2, 3)},
        Allocation("simulate", "", (Host("n1-sim0", 0, 3), Host("n1-sim1", 1, 3)), why="--simulate 2x3 was given"),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options, allocation = OPTIONS[name]
    read_text = reader({"h.txt": "m2 slots=4\nm1\n"})
    assert detect({}, read_text, hostname="n1.site", **options) == allocation
    if options:
        # They overrule what the environment shows.
        env = {"PBS_JOBID": "1.s", "PBS_NODEFILE": "/n", "SLURM_JOB_ID": "2"}
        assert detect(env, read_text, hostname="n1.site", **options) == allocation


def test_scheduler_by_name() -> None:
    env, read_text = cases.load("openpbs-scatter")
    by_name = detect(env, read_text, hostname="n1", scheduler="pbs")
    assert by_name.why == "--scheduler pbs was given"
    assert by_name.hosts == detect(env, read_text, hostname="n1").hosts


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"scheduler": "PBS"}, UsageError, '--scheduler: "PBS" is none of flux, pbs, slurm, lsf, sge, oar, none'),
        ({"scheduler": "pbs"}, BadAllocation, "--scheduler pbs was given, but none of its variables is set here: "),
        ({"scheduler": "oar"}, BadAllocation, "OAR job (--scheduler oar)" + NOT_YET),
        ({"hosts": "a", "hostfile": "h"}, UsageError, "--hosts and --hostfile each say where to run: give one of them"),
        ({"hosts": "a", "simulate": (1, 1)}, UsageError, "--hosts and --simulate each say where to run: give one"),
        ({"hostfile": "h", "scheduler": "pbs"}, UsageError, "--hostfile and --scheduler pbs each say where to run: "),
        ({"hosts": ""}, BadHostList, '--hosts: no host in ""'),
        ({"hosts": "gpu[1-"}, BadHostList, '--hosts: "[1-" at character 4 has no closing bracket'),
        ({"hostfile": "gone"}, UsageError, "--hostfile gone cannot be read: No such file or directory"),
        ({"hostfile": "-"}, UsageError, "--hostfile -: standard input is never read; give a file"),
        ({"hostfile": "bad"}, BadHostList, 'bad line 2 "n5 lots=8": "lots=8" at character 4 is not slots=N'),
        ({"simulate": (0, 4)}, UsageError, "--simulate 0x4: give nodes and processes per node from 1 up, as in 2x4"),
        ({"simulate": (2, 0)}, UsageError, "--simulate 2x0: "),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        detect({}, reader({"bad": "n1\nn5 lots=8\n"}), hostname="n1", **options)  # type: ignore[arg-type]


def test_known_names() -> None:
    assert names() == ("flux", "pbs", "slurm", "lsf", "sge", "oar", "none")


@pytest.mark.parametrize(
    "env, message",
    [
        ({}, None),
        ({"PBS_TASKNUM": "1"}, None),
        ({"PBS_TASKNUM": "00000001"}, None),
        ({"PBS_TASKNUM": "0"}, None),
        ({"PBS_TASKNUM": "x"}, None),
        ({"PBS_TASKNUM": "10000001"}, "started by pbsdsh (PBS_TASKNUM=10000001)"),
        ({"PBS_TASKNUM": "2"}, "started by pbsdsh (PBS_TASKNUM=2)"),
        ({"PBS_TASKNUM": "0000000A"}, "started by pbsdsh (PBS_TASKNUM=0000000A)"),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),  # a batch script
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "started by srun as one of 4 tasks (SLURM_NTASKS=4)"),
        # An interactive step keeps the job's SLURM_NTASKS.
        ({"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "16"}, None),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"},
            "started by mpirun as one of 8 tasks (OMPI_COMM_WORLD_SIZE=8)",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "started by mpiexec as one of 2 tasks (PMI_SIZE=2)"),
        (
            {"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "2"},
            "started by mpiexec as one of 2 tasks (PMI_SIZE=2)",
        ),
        ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "4"}, "started by mpiexec as one of 4 tasks (PALS_LOCAL_SIZE=4)"),
        # Left over: a size without a rank, a rank without a size (A47).
        ({"RANK": "5", "WORLD_SIZE": "99", "OMPI_COMM_WORLD_SIZE": "8", "PMI_RANK": "3"}, None),
    ],
)
def test_started_many_times(env: dict[str, str], message: str | None) -> None:
    assert started_many_times(env) == (message and message + ONCE)


def test_docstrings() -> None:
    assert doctest.testmod(steps) == doctest.TestResults(failed=0, attempted=1)
