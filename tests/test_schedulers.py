"""Slurm, LSF, Flux and Grid Engine: job environments to allocations, and which job is the real one."""

from __future__ import annotations

import doctest
import re
from collections.abc import Mapping
from dataclasses import replace

import cases
import pytest
import test_allocation
from cases import reader
from torchrun_nccl import schedulers
from torchrun_nccl.allocation import Allocation, Host, Run
from torchrun_nccl.errors import BadAllocation
from torchrun_nccl.schedulers import SCHEDULERS, detect, reading, slurm, started_many_times

ELSEWHERE = "give the hosts with --hosts or --hostfile, or use this machine alone with --scheduler none"
IN_THE_JOB = f"run this in the job script, or {ELSEWHERE}"
IN_SLURM = f"run this in the job script or in a shell of salloc, or {ELSEWHERE}"


def commands(outputs: Mapping[str, str]) -> Run:
    def run(words: tuple[str, ...]) -> str:
        if " ".join(words) not in outputs:
            raise FileNotFoundError(2, "No such file or directory", words[0])
        return outputs[" ".join(words)]

    return run


def found(
    env: Mapping[str, str], files: Mapping[str, str] | None = None, outputs: Mapping[str, str] | None = None
) -> Allocation:
    return detect(env, reader(files or {}), hostname="here.site", run=commands(outputs or {}))


def shape(allocation: Allocation) -> list[tuple[str, int, int, int | None, int | None]]:
    return [(host.name, host.line, host.slots, host.gpus, host.cpus) for host in allocation.hosts]


def even(*names: str, gpus: int | None, cpus: int | None) -> list[Host]:
    return [Host(name, line, gpus=gpus, cpus=cpus) for line, name in enumerate(names)]


# --- whole allocations of job environments ---

V100 = [f"gadi-gpu-v100-000{number}" for number in (1, 2, 3)]
GADI = ".gadi.nci.org.au"
BY_SLURM = "SLURM_JOB_ID and SLURM_JOB_NODELIST are set"
BY_PE = "PE_HOSTFILE is set"

SLURM_CASES = {
    "slurm-batch": ("42", even(*V100, gpus=4, cpus=4)),
    "slurm-salloc": ("42", even(*V100, gpus=4, cpus=4)),
    "slurm-with-pbs-names": ("42", even(*V100, gpus=4, cpus=4)),
    "slurm-with-stale-pbs": ("42", even(*V100, gpus=4, cpus=4)),
    # A task among others reads the same job; started_many_times refuses it.
    "slurm-step": ("42", even(*V100, gpus=4, cpus=4)),
    # SLURM_NNODES=1 there is the step's.
    "slurm-step-single": ("42", even(*V100, gpus=4, cpus=4)),
    "slurm-gres": ("1", even(*V100[:2], gpus=2, cpus=1)),
    "slurm-gpus-uneven": ("2", [Host(V100[0], 0, gpus=4, cpus=1), Host(V100[1], 1, gpus=2, cpus=1)]),
    "slurm-gpus-per-task": ("5", even(*V100[:2], gpus=4, cpus=8)),
    "slurm-gpus-per-task-uneven": ("62", [Host("gpu1", 0, gpus=2, cpus=2), Host("gpu2", 1, gpus=1, cpus=1)]),
    "slurm-exclusive": ("8", even(*V100[:2], gpus=2, cpus=8)),
    "slurm-cpu-only": ("9", even(*V100[:2], gpus=None, cpus=1)),
    "slurm-single": ("10", even(V100[0], gpus=1, cpus=2)),
    "slurm-export-none": ("12", even(*V100[:2], gpus=4, cpus=1)),  # A35
    "slurm-array-last": ("13", even(V100[0], gpus=2, cpus=1)),
    "slurm-salloc-gres": ("15", even(*V100[:2], gpus=2, cpus=1)),
    "slurm-salloc-gpus-per-task": ("16", even(*V100[:2], gpus=4, cpus=4)),
    # SLURM_GPUS_ON_NODE=1 there is the step's (A32).
    "slurm-step-gpus-per-task": ("16", even(*V100[:2], gpus=4, cpus=4)),
    "slurm-interactive-step": ("17", even(*V100[:2], gpus=4, cpus=1)),
    "slurm-uneven": (
        "61",
        [Host("n10", 0, cpus=8), Host("n2", 1, cpus=2), Host("m7", 2, cpus=2)],
    ),
    "slurm-tutorial-4x1": ("63", even("node01", "node02", "node03", "node04", gpus=1, cpus=4)),  # B19
    "slurm-end-time": ("64", even("nid001024", "nid001025", gpus=4, cpus=64)),  # A34
    "jean-zay-24x8": (
        "1265432",
        even(*(f"jean-zay-iam{n:02}" for n in (*range(1, 13), *range(15, 27))), gpus=8, cpus=64),
    ),
    "lumi-4x8": ("7261234", even("nid005012", "nid005013", "nid005014", "nid005015", gpus=8, cpus=128)),
    "perlmutter-2x4": ("24680135", even("nid001024", "nid001033", gpus=4, cpus=128)),
    "frontier-2x8": ("1912345", even("frontier04321", "frontier04322", gpus=8, cpus=112)),
}
OTHER_CASES = {
    "lsf-hostfile": (
        "lsf",
        "8101",
        [Host("h2", 0, 4), Host("h1", 4, 4), Host("h10", 8, 4)],
        "LSB_JOBID and LSB_DJOB_HOSTFILE are set",
    ),
    "lsf-mcpu-hosts": (
        "lsf",
        "8102",
        [Host(f"gpu{number}.site", line, 64) for line, number in enumerate((7, 3, 8, 1, 2, 4, 5, 6))],
        "LSB_JOBID and LSB_MCPU_HOSTS are set",
    ),
    "lsf-hosts": ("lsf", "8103", [Host("h2", 0, 2), Host("h1", 2, 1)], "LSB_JOBID and LSB_HOSTS are set"),
    # B29: the file's order, not the alphabet's.
    "summit-4x6": (
        "lsf",
        "1415926",
        [Host("h22n07", 1, 42), Host("h22n08", 43, 42), Host("a05n11", 85, 42), Host("d14n02", 127, 42)],
        "LSB_JOBID and LSB_DJOB_HOSTFILE are set; batch5, the launch node, is left out",
    ),
    "lassen-2x4": (
        "lsf",
        "2718281",
        [Host("lassen3", 1, 40), Host("lassen31", 2, 40)],
        "LSB_JOBID and LSB_MCPU_HOSTS are set; lassen710, the launch node, is left out",
    ),
    "flux-batch": (
        "flux",
        "ƒ2RkYbPMxK",
        [Host("tuolumne1005", 0), Host("tuolumne1006", 1)],
        "FLUX_ENCLOSING_ID is set",
    ),
    "flux-batch-old": (
        "flux",
        "",
        [Host("corona171", 0), Host("corona173", 1), Host("corona174", 2)],
        "FLUX_URI is set",
    ),
    "flux-run": ("flux", "f3ETxsR9H", [Host("t1", 0), Host("t2", 1)], "FLUX_JOB_ID is set"),  # A56
    "sge-serial": (
        "sge",
        "1",
        [Host(V100[0] + GADI, 0, 1, cpus=1)],
        "SGE_TASK_ID is set, and no parallel environment",
    ),
    "sge-fill-up": (
        "sge",
        "2",
        [
            Host(V100[1] + GADI, 0, 8, cpus=8),
            Host(V100[2] + GADI, 1, 8, cpus=8),
            Host(V100[0] + GADI, 2, 4, cpus=4),
        ],
        BY_PE,
    ),
    "sge-per-host": (
        "sge",
        "3",
        [Host(V100[1] + GADI, 0, 8, cpus=8), Host(V100[2] + GADI, 1, 8, cpus=8)],
        BY_PE,
    ),
    "sge-array": ("sge", "4", [Host(V100[0] + GADI, 0, 8, cpus=8)], BY_PE),
}
MORE = {
    "slurm-with-pbs-names": {"why": f"{BY_SLURM}; PBS_JOBID is set too, and passed over"},
    "slurm-with-stale-pbs": {"why": f"{BY_SLURM}; PBS_JOBID is set too, and passed over"},
    "slurm-array-last": {"array_index": "6"},
    "slurm-end-time": {"end_time": 1714651200.0},
    "lsf-mcpu-hosts": {"array_index": "3"},
    "sge-array": {"array_index": "3"},
}
CASES = {name: ("slurm", *case, BY_SLURM) for name, case in SLURM_CASES.items()} | OTHER_CASES

HET = (
    " is heterogeneous (SLURM_HET_SIZE=2): component 0 is gadi-gpu-v100-0001, component 1 is gadi-gpu-v100-[0002-0003]; "
    "a launch runs on one component: choose it, as in --hosts 'gadi-gpu-v100-[0002-0003]'"
)
REFUSED = {
    "slurm-het": f"Slurm job 1{HET}",
    "slurm-het-salloc": f"Slurm job 3{HET}",
    "slurm-het-step": f"Slurm job 1{HET}",
    "sge-slave-task": "Grid Engine job 2: PE_HOSTFILE is not set here, but PE=mpi: only the job script has it, "
    f"tasks of qrsh -inherit do not; {IN_THE_JOB}",
}


def test_every_case_is_expected_and_says_what_it_is() -> None:
    expected = [*CASES, *REFUSED, *test_allocation.PBS_CASES, *test_allocation.REFUSED]
    assert sorted(expected) == list(cases.names())
    for name in expected:
        assert [line.partition(":")[0] for line in cases.head(name) if ": " in line][:2] == ["Site", "Shows"]
        assert any(re.match("Origin: (captured|reconstructed)", line) for line in cases.head(name))


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    scheduler, job_id, hosts, why = CASES[name]
    env, read_text = cases.load(name)
    expected = replace(Allocation(scheduler, job_id, tuple(hosts), why), **MORE.get(name, {}))
    assert detect(env, read_text, hostname="here.site", run=cases.answers(name)) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_refused_case(name: str) -> None:
    env, read_text = cases.load(name)
    with pytest.raises(BadAllocation, match=f"^{re.escape(REFUSED[name])}$"):
        detect(env, read_text, hostname="here.site", run=cases.answers(name))


@pytest.mark.parametrize("name", [name for name in SLURM_CASES if name != "slurm-salloc-gres"])
def test_slurm_without_scontrol_loses_at_most_the_number_of_gpus(name: str) -> None:
    env, read_text = cases.load(name)
    without = slurm.read(env, read_text)
    expected = slurm.read(env, read_text, cases.answers(name))
    if without.warnings:
        assert name in ("slurm-gpus-uneven", "slurm-step-gpus-per-task")
        expected = replace(expected, hosts=tuple(replace(host, gpus=None) for host in expected.hosts))
    assert replace(without, warnings=()) == expected


# --- Slurm ---


def slurm_job(nodelist: str, outputs: Mapping[str, str] | None = None, **variables: str) -> Allocation:
    env = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": nodelist, "SLURMD_NODENAME": "n1", **variables}
    return slurm.read(env, reader({}), commands(outputs or {}))


@pytest.mark.parametrize(
    "nodelist, names",
    [
        # A21
        ("linux[1,2]", "linux1 linux2"),
        ("alpha,beta", "alpha beta"),
        ("a,b[001,003],c", "a b001 b003 c"),
        ("h[001,003-004,006]", "h001 h003 h004 h006"),
        ("c4-[011-012],c9-002", "c4-011 c4-012 c9-002"),
        ("r[1-2]n[08-11]", "r1n08 r1n09 r1n10 r1n11 r2n08 r2n09 r2n10 r2n11"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("x[0-1]y[2,4-5]z", "x0y2z x0y4z x0y5z x1y2z x1y4z x1y5z"),
        ("n[10,2]", "n10 n2"),
        ("a[1-2],b3", "a1 a2 b3"),
        ("gadi-gpu-v100-[0001,0003,0006]", "gadi-gpu-v100-0001 gadi-gpu-v100-0003 gadi-gpu-v100-0006"),
    ],
)
def test_slurm_list(nodelist: str, names: str) -> None:
    nodes = str(len(names.split()))
    assert " ".join(host.name for host in slurm_job(nodelist, SLURM_JOB_NUM_NODES=nodes).hosts) == names


@pytest.mark.parametrize(
    "answer, names",
    [
        ("n2\nn1\n", ["n2", "n1"]),  # Slurm knows best
        ("", ["n1", "n2"]),  # 22.05: "Invalid hostlist" and nothing on stdout
        ("module: not found!\n", ["n1", "n2"]),
        (None, ["n1", "n2"]),  # A24
    ],
)
def test_slurm_reads_its_own_lists(answer: str | None, names: list[str]) -> None:
    outputs = {} if answer is None else {"scontrol show hostnames n[1-2]": answer}
    assert [host.name for host in slurm_job("n[1-2]", outputs).hosts] == names


def test_slurm_is_not_asked_about_plain_names() -> None:
    def run(words: tuple[str, ...]) -> str:
        raise AssertionError(words)

    env = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n1,n2", "SLURM_GPUS_PER_NODE": "4"}
    assert [host.name for host in slurm.read(env, reader({}), run).hosts] == ["n1", "n2"]


DETAIL = "JobId=42\n   NumNodes=3\n     Nodes=n1 CPU_IDs=0 Mem=0 GRES={}\n     Nodes=n[2-3] CPU_IDs=0 Mem=64 GRES={}\n"
NO_DAEMON = {"SLURMD_NODENAME": ""}


@pytest.mark.parametrize(
    "variables, gres, gpus",
    [
        ({"SLURM_GPUS_PER_NODE": "4"}, None, 4),
        ({"SLURM_GPUS_PER_NODE": "v100:4", "SLURM_GPUS_ON_NODE": "8"}, None, 4),
        ({"SLURM_GPUS_PER_NODE": "gpu:v100:4"}, None, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, None, 3),
        ({"SLURM_GPUS_PER_NODE": "0"}, None, 0),
        ({"SLURM_GPUS_PER_NODE": "four", "SLURM_GPUS_ON_NODE": "2"}, None, 2),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "8(x3)"}, None, 2),
        ({"SLURM_JOB_GPUS": "0,1,3"}, None, 3),
        # A32, A12
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8"}, None, 8),
        ({"SLURM_GPUS_PER_TASK": "v100:2", "SLURM_TASKS_PER_NODE": "2(x3)"}, None, 4),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "5,1(x2)"}, None, [5, 1, 1]),
        # Asked: nothing said, or of another place.
        (NO_DAEMON, ("gpu:2(IDX:0,3)", "gpu:2(IDX:0-1)"), 2),
        ({}, ("gpu:2(IDX:0-1)", "gpu:2(IDX:0-1)"), None),
        (NO_DAEMON, None, None),
        (NO_DAEMON, ("", ""), None),
        (NO_DAEMON, ("gpu:a:0(IDX:),gpu:b:1(IDX:5),shard:9(IDX:0-1)", "nic:1"), [1, 0, 0]),
        ({"SLURM_GPUS": "v100:6", "SLURM_GPUS_ON_NODE": "2"}, ("gpu:2(IDX:0-1)", "gpu:v100:2(IDX:1-2)"), 2),
        ({"SLURM_STEP_ID": "0", "SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "1"}, ("gpu:4", "gpu:4"), 4),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_CPUS_PER_NODE": "8,4(x2)"}, ("gpu:4", "gpu:2"), [4, 2, 2]),
    ],
)
def test_slurm_gpus(variables: dict[str, str], gres: tuple[str, str] | None, gpus: int | list[int] | None) -> None:
    outputs = {"scontrol -d show job 42": DETAIL.format(*gres)} if gres else {}
    allocation = slurm_job("n[1-3]", outputs, **variables)
    assert [host.gpus for host in allocation.hosts] == (gpus if isinstance(gpus, list) else [gpus] * 3)
    assert allocation.warnings == ()


@pytest.mark.parametrize(
    "variables, detail, said",
    [
        ({"SLURM_GPUS": "7", "SLURM_GPUS_ON_NODE": "4"}, None, "SLURM_GPUS=7"),  # A29
        ({"SLURM_GPUS": "7"}, "     Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:4\n", "SLURM_GPUS=7"),  # a host is missing
        ({"SLURM_GPUS": "7"}, "     Nodes=n[1 CPU_IDs=0 Mem=0 GRES=gpu:4\n", "SLURM_GPUS=7"),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_CPUS_PER_NODE": "8,4(x2)"}, None, "SLURM_GPUS_ON_NODE=4"),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_ID": "0", "SLURM_GPUS_ON_NODE": "1"}, None, "SLURM_GPUS_PER_TASK=1"),
    ],
)
def test_slurm_gpus_that_are_not_known_are_not_guessed(variables: dict[str, str], detail: str | None, said: str) -> None:
    allocation = slurm_job("n[1-3]", {"scontrol -d show job 42": detail} if detail else {}, **variables)
    assert [host.gpus for host in allocation.hosts] == [None] * 3
    warning = f"{said} does not say what each of 3 hosts has, nor does scontrol; each node counts its own GPUs"
    assert allocation.warnings == (warning,)


def test_slurm_array_member_is_asked_for_by_its_index() -> None:
    """`scontrol show job 42` would show all members where 42 is the array."""
    detail = "     Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)\n"
    array = {"SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "6", "SLURM_GPUS": "2"}
    allocation = slurm_job("n[1-2]", {"scontrol -d show job 42_6": detail}, **array)
    assert [host.gpus for host in allocation.hosts] == [1, 1]
    assert allocation.array_index == "6"


@pytest.mark.parametrize(
    "value, cpus",
    [
        ("8,2(x2)", [8, 2, 2]),
        ("72(x2),36", [72, 72, 36]),
        ("5,0(x2)", [5, None, None]),
        ("8(x2)", [None] * 3),  # of other hosts
        ("8(x2),", [None] * 3),
        ("", [None] * 3),
    ],
)
def test_slurm_cpus(value: str, cpus: list[int | None]) -> None:
    allocation = slurm_job("n[1-3]", SLURM_JOB_CPUS_PER_NODE=value, SLURM_CPUS_PER_TASK="32", SLURM_CPUS_PER_GPU="8")
    assert [host.cpus for host in allocation.hosts] == cpus


@pytest.mark.parametrize(
    "value, end",
    [("1714651200", 1714651200.0), ("", None), ("0", None), ("NONE", None), ("2024-05-02T12:00:00", None)],
)
def test_slurm_end_time(value: str, end: float | None) -> None:
    assert slurm_job("n1", SLURM_JOB_END_TIME=value).end_time == end


@pytest.mark.parametrize(
    "env, message",
    [
        # A24
        (
            {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": ""},
            f"Slurm job 42: neither SLURM_JOB_NODELIST nor SLURM_NODELIST names a host here; {IN_SLURM}",
        ),
        (
            {"SLURM_JOBID": "7"},
            f"Slurm job 7: neither SLURM_JOB_NODELIST nor SLURM_NODELIST names a host here; {IN_SLURM}",
        ),
        (
            {"SLURM_NNODES": "2"},
            f"Slurm job: neither SLURM_JOB_NODELIST nor SLURM_NODELIST names a host here; {IN_SLURM}",
        ),
        (
            {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "3"},
            "Slurm job 42: SLURM_JOB_NODELIST=n[1-3] names 3 hosts, but SLURM_JOB_NUM_NODES=2: "
            f"one of them is left over from elsewhere; {IN_SLURM}",
        ),
        (
            {"SLURM_JOB_ID": "42", "SLURM_NODELIST": "n1", "SLURM_NNODES": "2"},
            "Slurm job 42: SLURM_NODELIST=n1 names 1 host, but SLURM_NNODES=2: "
            f"one of them is left over from elsewhere; {IN_SLURM}",
        ),
        (
            {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-"},
            f'Slurm job 42: SLURM_JOB_NODELIST: "[1-" at character 2 has no closing bracket; {ELSEWHERE}',
        ),
        (
            {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "(null)"},
            'Slurm job 42: SLURM_JOB_NODELIST: "(null)" at character 1 is not a host name; '
            f"write hosts as n1,n2 or n[1-3,7]; {ELSEWHERE}",
        ),
        # A57
        (
            {
                "SLURM_JOB_ID": "42",
                "SLURM_HET_SIZE": "2",
                "SLURM_JOB_NODELIST": "c1",
                "SLURM_JOB_NODELIST_HET_GROUP_0": "c1",
                "SLURM_JOB_NODELIST_HET_GROUP_1": "g[1-2]",
            },
            "Slurm job 42 is heterogeneous (SLURM_HET_SIZE=2): component 0 is c1, component 1 is g[1-2]; "
            "a launch runs on one component: choose it, as in --hosts 'g[1-2]'",
        ),
        (
            {
                "SLURM_JOB_ID": "42",
                "SLURM_PACK_SIZE": "2",
                "SLURM_JOB_NODELIST": "c1",
                "SLURM_NODELIST_PACK_GROUP_0": "c1",
                "SLURM_NODELIST_PACK_GROUP_1": "g[1-2]",
            },
            "Slurm job 42 is heterogeneous (SLURM_PACK_SIZE=2): component 0 is c1, component 1 is g[1-2]; "
            "a launch runs on one component: choose it, as in --hosts 'g[1-2]'",
        ),
        (
            {"SLURM_JOB_ID": "42", "SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST": "c1"},
            "Slurm job 42 is heterogeneous (SLURM_HET_SIZE=3); "
            "a launch runs on one component: choose it, as in --hosts 'n[1-2]'",
        ),
        (
            {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST_HET_GROUP_0": "c1", "SLURM_JOB_NODELIST_HET_GROUP_1": "g1"},
            "Slurm job 42 is heterogeneous (2 components): component 0 is c1, component 1 is g1; "
            "a launch runs on one component: choose it, as in --hosts 'g1'",
        ),
    ],
)
def test_bad_slurm_job(env: dict[str, str], message: str) -> None:
    with pytest.raises(BadAllocation, match=f"^{re.escape(message)}$"):
        found(env)


def test_one_component_is_an_ordinary_job() -> None:
    one = {"SLURM_HET_SIZE": "1", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1"}
    assert [host.name for host in slurm_job("n1", **one).hosts] == ["n1"]


@pytest.mark.parametrize(
    "env, job_id, why, warnings",
    [
        ({"SLURM_JOBID": "7"}, "7", "SLURM_JOBID and SLURM_JOB_NODELIST are set", ()),
        (
            {"SLURM_NNODES": "2"},
            "",
            "SLURM_JOB_NODELIST is set",
            ("SLURM_JOB_ID is not set: without it srun starts nothing in this job",),
        ),
    ],
)
def test_slurm_job_id(env: dict[str, str], job_id: str, why: str, warnings: tuple[str, ...]) -> None:
    allocation = found({**env, "SLURM_JOB_NODELIST": "n[1-2]"})
    assert (allocation.job_id, allocation.why, allocation.warnings) == (job_id, why, warnings)


# --- LSF ---


@pytest.mark.parametrize(
    "variables, files, hosts",
    [
        # A52
        ({"LSB_MCPU_HOSTS": "h2 4 h1 4"}, {}, [("h2", 0, 4), ("h1", 1, 4)]),
        ({"LSB_HOSTS": "h2 h2 h1"}, {}, [("h2", 0, 2), ("h1", 2, 1)]),
        ({"LSB_DJOB_HOSTFILE": "/f"}, {"/f": "h2\nh2\nh1\nh2\n"}, [("h2", 0, 3), ("h1", 2, 1)]),
        ({"LSB_DJOB_RANKFILE": "/f", "LSB_HOSTS": "h1 h2"}, {"/f": "h2\nh1"}, [("h2", 0, 1), ("h1", 1, 1)]),
        ({"LSB_DJOB_HOSTFILE": "/gone", "LSB_DJOB_RANKFILE": "/f"}, {"/f": "h2\r\nh1\r\n"}, [("h2", 0, 1), ("h1", 1, 1)]),
        ({"LSB_DJOB_HOSTFILE": "/f", "LSB_HOSTS": "h1"}, {"/f": "\n"}, [("h1", 0, 1)]),
        # A54: one machine by three names is for a resolver to see.
        ({"LSB_HOSTS": "s1 s1.example s1-ib"}, {}, [("s1", 0, 1), ("s1.example", 1, 1), ("s1-ib", 2, 1)]),
        # Not launch nodes: nothing else says so, or it is all there is.
        ({"LSB_MCPU_HOSTS": "h1 1 h2 1"}, {}, [("h1", 0, 1), ("h2", 1, 1)]),
        ({"LSB_MCPU_HOSTS": "batch1 1"}, {}, [("batch1", 0, 1)]),
        ({"LSB_MCPU_HOSTS": "batchelor 1 h2 4"}, {}, [("batchelor", 0, 1), ("h2", 1, 4)]),
        ({"LSB_MCPU_HOSTS": "h0 1 h1 4 h2 3"}, {}, [("h0", 0, 1), ("h1", 1, 4), ("h2", 2, 3)]),
        ({"LSB_MCPU_HOSTS": "h0 1 h1 1 h2 4", "CSM_ALLOCATION_ID": "1"}, {}, [("h0", 0, 1), ("h1", 1, 1), ("h2", 2, 4)]),
        ({"LSB_MCPU_HOSTS": "h0 2 h1 4", "CSM_ALLOCATION_ID": "1"}, {}, [("h0", 0, 2), ("h1", 1, 4)]),
        # Launch nodes.
        ({"LSB_MCPU_HOSTS": "batch5 1 h1 42 h2 42"}, {}, [("h1", 1, 42), ("h2", 2, 42)]),
        ({"LSB_MCPU_HOSTS": "login2.site 1 h1 42"}, {}, [("h1", 1, 42)]),
        ({"LSB_MCPU_HOSTS": "any 1 h1 42 h2 7", "CSM_ALLOCATION_ID": "1"}, {}, [("h1", 1, 42), ("h2", 2, 7)]),
    ],
)
def test_lsf_hosts(variables: dict[str, str], files: dict[str, str], hosts: list[tuple[str, int, int]]) -> None:
    allocation = found({"LSB_JOBID": "1", **variables}, files)
    assert [host[:3] for host in shape(allocation)] == hosts


@pytest.mark.parametrize(
    "pairs, warning",
    [
        (
            "h0 1 h1 42 h2 42",
            "LSB_MCPU_HOSTS gives h0 1 slot and each other host 42: "
            "if it is a launch node, leave it out with --hosts 'h[1-2]'",
        ),
        (
            "h0 1 h1 42",
            "LSB_MCPU_HOSTS gives h0 1 slot and the other host 42: if it is a launch node, leave it out with --hosts 'h1'",
        ),
    ],
)
def test_lsf_host_that_looks_like_a_launch_node_is_said(pairs: str, warning: str) -> None:
    allocation = found({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": pairs})
    assert allocation.hosts[0].name == "h0"
    assert allocation.warnings == (warning,)


@pytest.mark.parametrize(
    "variables, files, message",
    [
        (
            {},
            {},
            "LSF job 1: none of LSB_DJOB_HOSTFILE, LSB_DJOB_RANKFILE, LSB_MCPU_HOSTS, LSB_HOSTS names a host here; "
            + IN_THE_JOB,
        ),
        (
            {"LSB_DJOB_HOSTFILE": "/gone", "LSB_DJOB_RANKFILE": "/f"},
            {"/f": ""},
            "LSF job 1: LSB_DJOB_HOSTFILE=/gone cannot be read: No such file or directory; LSB_DJOB_RANKFILE=/f is empty; "
            + IN_THE_JOB,
        ),
        (
            {"LSB_DJOB_HOSTFILE": "/f"},
            {"/f": "h1\nh1 4\n"},
            f'LSF job 1: LSB_DJOB_HOSTFILE=/f line 2 is not one host name: "h1 4"; {ELSEWHERE}',
        ),
        (
            {"LSB_MCPU_HOSTS": "h2 4 h1"},
            {},
            f'LSF job 1: LSB_MCPU_HOSTS: "" after h1 is not a number of slots; {ELSEWHERE}',
        ),
        (
            {"LSB_MCPU_HOSTS": "h2 h1"},
            {},
            f'LSF job 1: LSB_MCPU_HOSTS: "h1" after h2 is not a number of slots; {ELSEWHERE}',
        ),
        ({"LSB_HOSTS": "h2 -oX"}, {}, f'LSF job 1: LSB_HOSTS is not one host name: "-oX"; {ELSEWHERE}'),
    ],
)
def test_bad_lsf_job(variables: dict[str, str], files: dict[str, str], message: str) -> None:
    with pytest.raises(BadAllocation, match=f"^{re.escape(message)}$"):
        found({"LSB_JOBID": "1", **variables}, files)


@pytest.mark.parametrize("value, index", [("0", ""), ("", ""), ("3", "3"), ("../x", "")])
def test_lsf_array_index(value: str, index: str) -> None:
    assert found({"LSB_JOBID": "1", "LSB_HOSTS": "h", "LSB_JOBINDEX": value}).array_index == index


# --- Flux ---

URI = "local:///tmp/flux-x/local-0"


@pytest.mark.parametrize(
    "env, outputs, hosts",
    [
        ({"FLUX_URI": URI}, {"flux hostlist local": "t[2,1]\n"}, ["t2", "t1"]),
        ({"FLUX_URI": URI}, {"flux hostlist local": "t1,t1,t2\n"}, ["t1", "t2"]),  # several brokers on a host
        ({"FLUX_URI": URI}, {"flux hostlist local": "\n", "flux getattr hostlist": "t1"}, ["t1"]),
        ({"FLUX_JOB_ID": "f2", "FLUX_JOB_NNODES": "1"}, {"flux jobs -n -o {nodelist} f2": "t7\n"}, ["t7"]),
        ({"FLUX_JOB_ID": "f2", "FLUX_JOB_NNODES": "2"}, {"flux hostlist local": "t[1-2]"}, ["t1", "t2"]),
    ],
)
def test_flux_hosts(env: dict[str, str], outputs: dict[str, str], hosts: list[str]) -> None:
    assert [host.name for host in found(env, outputs=outputs).hosts] == hosts


@pytest.mark.parametrize(
    "env, outputs, message",
    [
        (
            {"FLUX_URI": URI},
            {},
            "Flux job (FLUX_URI is set): no list of its hosts: `flux hostlist local`: No such file or directory, "
            f"`flux getattr hostlist`: No such file or directory; have the job's flux on PATH, or {ELSEWHERE}",
        ),
        (
            {"FLUX_JOB_ID": "f2"},
            {"flux hostlist local": "no such job!", "flux jobs -n -o {nodelist} f2": ""},
            'Flux job f2 (FLUX_JOB_ID is set): no list of its hosts: `flux hostlist local` answered "no such job!", '
            f'`flux jobs -n -o {{nodelist}} f2` answered ""; have the job\'s flux on PATH, or {ELSEWHERE}',
        ),
        (
            {"FLUX_JOB_ID": "f2", "FLUX_JOB_NNODES": "2"},
            {"flux hostlist local": "t[1-9]"},
            f"Flux job f2: flux names 9 hosts, but FLUX_JOB_NNODES=2: one of them is of another job; {IN_THE_JOB}",
        ),
    ],
)
def test_bad_flux_job(env: dict[str, str], outputs: dict[str, str], message: str) -> None:
    with pytest.raises(BadAllocation, match=f"^{re.escape(message)}$"):
        found(env, outputs=outputs)


def test_a_shell_that_talks_to_the_whole_cluster_is_in_no_job_of_flux() -> None:
    assert found({"FLUX_URI": "local:///run/flux/local"}).scheduler == "local"


# --- Grid Engine ---


def test_sge_hostfile() -> None:
    # A55: one host by two queues, and columns beyond the second are not for us.
    text = "h1 4 gpu.q@h1 UNDEFINED\nh2 8 gpu.q@h2 0,0:0,1\nh1 4 b.q@h1 <NULL>\n"
    allocation = found({"JOB_ID": "9", "PE_HOSTFILE": "/pe", "NSLOTS": "16"}, {"/pe": text})
    assert shape(allocation) == [("h1", 0, 8, None, 8), ("h2", 1, 8, None, 8)]


@pytest.mark.parametrize(
    "variables, files, host",
    [
        ({}, {}, ("here.site", 0, 1, None, 1)),
        ({"NSLOTS": "4", "SGE_JOB_SPOOL_DIR": "/gone"}, {}, ("here.site", 0, 4, None, 4)),
        ({"SGE_JOB_SPOOL_DIR": "/spool"}, {"/spool/pe_hostfile": "h7 2 all.q@h7 UNDEFINED\n"}, ("h7", 0, 2, None, 2)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"scheduler": "sge"}])
def test_sge_job_without_parallel_environment_has_this_host(
    variables: dict[str, str],
    files: dict[str, str],
    host: tuple[str, int, int, int | None, int],
    options: dict[str, str],
) -> None:
    env = {"JOB_ID": "9", "SGE_TASK_ID": "undefined", **variables}
    allocation = detect(env, reader(files), hostname="here.site", **options)
    assert (allocation.job_id, allocation.array_index, shape(allocation)) == ("9", "", [host])


@pytest.mark.parametrize(
    "text, problem",
    [
        (
            None,
            "cannot be read: No such file or directory; is the job over, or is this another machine? "
            f"Run this in the job script, or {ELSEWHERE}",
        ),
        ("\n", f"is empty; {ELSEWHERE}"),
        ("h1 4 q UNDEFINED\nh2\n", f'line 2 is not HOST SLOTS QUEUE: "h2"; {ELSEWHERE}'),
        ("h1 four q\n", f'line 1 is not HOST SLOTS QUEUE: "h1 four q"; {ELSEWHERE}'),
        ("-oX 4 q\n", f'line 1 is not one host name: "-oX"; {ELSEWHERE}'),
    ],
)
def test_bad_sge_hostfile(text: str | None, problem: str) -> None:
    files = {} if text is None else {"/pe": text}
    with pytest.raises(BadAllocation, match=f"^{re.escape(f'Grid Engine job 9: PE_HOSTFILE=/pe {problem}')}$"):
        found({"JOB_ID": "9", "PE_HOSTFILE": "/pe"}, files)


# --- the variables of several schedulers at once ---

CGROUPS = {
    "v2": "0::/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0\n",
    "v2, several daemons": "0::/system.slice/n1_slurmstepd.scope/job_42/step_0/user/task_0\n",
    "v1": "4:memory:/slurm/uid_1001/job_42/step_batch\n1:name=systemd:/system.slice/slurmd.service\n",
}


@pytest.mark.parametrize("name", CGROUPS)
def test_slurm_job_is_real_in_its_control_group(name: str) -> None:
    read_text = reader({"/proc/self/cgroup": CGROUPS[name]})
    assert slurm.is_real({"SLURM_JOB_ID": "42"}, read_text)
    assert not slurm.is_real({"SLURM_JOB_ID": "4"}, read_text)
    assert not slurm.is_real({"SLURM_NNODES": "1"}, read_text)
    assert not slurm.is_real({"SLURM_JOB_ID": "42"}, reader({}))


PBS = {"PBS_JOBID": "1.s", "PBS_NODEFILE": "/n"}
SLURM = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "s1"}
LSF = {"LSB_JOBID": "8", "LSB_HOSTS": "l1"}
LSF_FILE = {"LSB_JOBID": "8", "LSB_DJOB_HOSTFILE": "/l"}
SGE = {"JOB_ID": "9", "PE_HOSTFILE": "/pe"}
SGE_SERIAL = {"JOB_ID": "9", "SGE_TASK_ID": "undefined"}
FLUX = {"FLUX_URI": URI}
FILES = {"/n": "p1\n", "/l": "l1\n", "/pe": "g1 1 q x\n", "/proc/self/cgroup": CGROUPS["v2"]}
ANSWERS = {"flux hostlist local": "f1\n", "flux getattr size": "1\n"}


@pytest.mark.parametrize(
    "env, here, host, why",
    [
        # The one with something beside its variables.
        (PBS | SLURM, "/n", "p1", "SLURM_JOB_ID is set too, and passed over"),
        (PBS | SLURM, "", "s1", "PBS_JOBID is set too, and passed over"),
        (PBS | SLURM, "/proc/self/cgroup", "s1", "PBS_JOBID is set too, and passed over"),
        (SLURM | LSF, "", "s1", "LSB_JOBID is set too, and passed over"),
        (SLURM | LSF_FILE, "/l", "l1", "SLURM_JOB_ID is set too, and passed over"),
        (SLURM | LSF_FILE, "/l /proc/self/cgroup", "s1", "LSB_JOBID is set too, and passed over"),
        (SLURM | SGE, "/pe", "g1", "SLURM_JOB_ID is set too, and passed over"),
        (SLURM | SGE, "", "s1", "PE_HOSTFILE is set too, and passed over"),
        (SLURM | SGE_SERIAL, "", "s1", "SGE_TASK_ID is set too, and passed over"),
        (LSF | SGE_SERIAL, "", "l1", "SGE_TASK_ID is set too, and passed over"),
        # Flux runs inside the others' jobs, if it runs.
        (PBS | FLUX, "/n flux", "f1", "PBS_JOBID is set too, and passed over"),
        (LSF | FLUX, "flux", "f1", "LSB_JOBID is set too, and passed over"),
        (SLURM | FLUX, "", "s1", "FLUX_URI is set too, and passed over"),
        (
            PBS | SLURM | LSF | {"OAR_JOB_ID": "3"},
            "/n",
            "p1",
            "SLURM_JOB_ID is set too, and passed over; LSB_JOBID is set too, and passed over; "
            "OAR_JOB_ID is set too, and passed over",
        ),
    ],
)
def test_the_real_job_wins(env: dict[str, str], here: str, host: str, why: str) -> None:
    files = {path: text for path, text in FILES.items() if path in here.split()}
    allocation = found(env, files, ANSWERS if "flux" in here else {})
    assert [host.name for host in allocation.hosts] == [host]
    assert allocation.why.partition("; ")[2] == why


@pytest.mark.parametrize(
    "env, files, message",
    [
        # A real job that cannot be used is never passed over for one that is not.
        (SLURM | {"SLURM_HET_SIZE": "2"} | LSF, FILES, "Slurm job 42 is heterogeneous (SLURM_HET_SIZE=2)"),
        (PBS | SLURM, {"/n": "p1 4\n"}, "PBS job 1.s: PBS_NODEFILE=/n line 1 is not one host name"),
        # None is there: the first in full, the others in short.
        (
            PBS | SGE,
            {},
            "PBS job 1.s: PBS_NODEFILE=/n cannot be read: No such file or directory; is the job over, or is this "
            f"another machine? {IN_THE_JOB[0].upper()}{IN_THE_JOB[1:]} "
            "(Grid Engine job 9: PE_HOSTFILE=/pe cannot be read: No such file or directory)",
        ),
        (
            PBS | {"OAR_JOB_ID": "3"},
            {},
            "OAR job 3 (OAR_JOB_ID is set): this version cannot read such a job; "
            "give --hosts HOST,HOST, or --scheduler none to use this machine alone "
            "(PBS job 1.s: PBS_NODEFILE=/n cannot be read: No such file or directory)",
        ),
    ],
)
def test_no_job_that_can_be_used(env: dict[str, str], files: dict[str, str], message: str) -> None:
    with pytest.raises(BadAllocation, match=f"^{re.escape(message)}"):
        found(env, files)


@pytest.mark.parametrize("module", SCHEDULERS, ids=lambda module: module.NAME)
def test_by_name(module: schedulers.Scheduler) -> None:
    jobs = {"pbs": PBS, "slurm": SLURM, "lsf": LSF, "flux": FLUX, "sge": SGE_SERIAL}
    job = jobs[module.NAME]
    others = {name: value for other in jobs.values() if other is not job for name, value in other.items()}
    allocation = detect(others | job, reader(FILES), hostname="n", scheduler=module.NAME, run=commands(ANSWERS))
    expected = detect(job, reader(FILES), hostname="n", run=commands(ANSWERS))
    assert expected.scheduler == module.NAME
    assert allocation == replace(expected, why=f"--scheduler {module.NAME} was given")
    message = f"--scheduler {module.NAME} was given, but none of its variables is set here: run this in the job script"
    with pytest.raises(BadAllocation, match=f"^{re.escape(message)}$"):
        detect(others, reader(FILES), hostname="n", scheduler=module.NAME)


# --- small things ---


@pytest.mark.parametrize(
    "env, message",
    [
        ({"LSF_PM_TASKID": "1"}, None),
        ({"LSF_PM_TASKID": "2"}, "started by blaunch (LSF_PM_TASKID=2)"),
        # A56: a rank that is not handed on is no task.
        ({"FLUX_TASK_RANK": "", "FLUX_JOB_SIZE": "2"}, None),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, "started by flux run as one of 2 tasks (FLUX_JOB_SIZE=2)"),
        (
            {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "24"},
            "started by jsrun as one of 24 tasks (JSM_NAMESPACE_SIZE=24)",
        ),
    ],
)
def test_started_many_times(env: dict[str, str], message: str | None) -> None:
    once = ": start torchrun_nccl.sh once per job; it starts the nodes itself"
    assert started_many_times(env) == (message and message + once)


@pytest.mark.parametrize(
    "version, by", [("TORQUE-6.0.2", ", by Torque 6.0.2"), ("23.06.06", ""), ("", ""), ("TORQUE-x\x1b", "")]
)
def test_torque_is_named(version: str, by: str) -> None:
    env = {**PBS, "PBS_VERSION": version}
    assert found(env, FILES).why == f"PBS_JOBID and PBS_NODEFILE are set{by}"


def test_file_that_is_not_text() -> None:
    def read_text(path: str) -> str:
        return b"\xff".decode()

    with pytest.raises(BadAllocation, match="cannot be read: 'utf-8' codec can't decode byte"):
        detect({"PE_HOSTFILE": "/pe"}, read_text, hostname="n")


def test_docstrings() -> None:
    assert doctest.testmod(reading) == doctest.TestResults(failed=0, attempted=1)
