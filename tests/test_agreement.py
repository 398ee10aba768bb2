"""What all nodes start with: devices, processes, threads, addresses; or why not, naming nodes."""

from __future__ import annotations

import doctest
import shlex
from dataclasses import replace

import pytest
from torchrun_nccl import agreement
from torchrun_nccl.agreement import (
    ALL_LISTS,
    Interface,
    NodeFacts,
    agree,
    check,
    master_candidates,
    needs_reach,
)
from torchrun_nccl.allocation import Allocation, Host
from torchrun_nccl.errors import Refused
from torchrun_nccl.options import parse
from torchrun_nccl.plan import Context, Plan, make_plan

CUDA = "CUDA_VISIBLE_DEVICES"
LO = Interface("lo", ("127.0.0.1", "::1"), True, False)
# What PBS's own hook gives to a job: the names of the GPUs of that host.
UUIDS = "GPU-1a,GPU-2b"


def eth(address: str, name: str = "eth0", **changes) -> Interface:
    return replace(Interface(name, (address,), False, False), **changes)


def plan(
    words: str = "",
    hosts: tuple[Host, ...] = (Host("n1", 0), Host("n2", 1)),
    scheduler: str = "pbs",
    hostname: str = "n1",
    given: dict[str, str] | None = None,
    **env: str,
) -> Plan:
    """given: the job's environment as the scheduler made it; env: what the launcher has."""
    context = Context(
        launch_id="LAUNCH", environment=tuple(env.items()), scheduler_environment=tuple((given or {}).items()),
        directory="/w", umask=0o022, limits=(), hostname=hostname, own_names=frozenset(), runner="/usr/bin/python3",
        door="/d.py", python="/usr/bin/python3", terminal="", find=lambda name: f"/bin/{name}",
    )  # fmt: skip
    return make_plan(parse([*shlex.split(words), "x.py"]), Allocation(scheduler, "17.pbs0", hosts, "why"), context)


def facts(index: int = 0, **changes) -> NodeFacts:
    """A node with 4 GPUs and 48 CPUs."""
    address = f"10.0.0.{index + 1}"
    found = NodeFacts(
        index=index, hostname=f"n{index + 1}", boot=f"boot{index}", interfaces=(LO, eth(address)), addresses=(address,),
        gpus=4, gpu_kind="cuda", devices=(), cpus=48, machine_cpus=48, scheduler_cpus=None,
        python=(("version", "3.11.2"), ("torch", "2.4.0"), ("cuda", "12.1")), errors=(), ports=(20001, 20002), clock=0.0,
    )  # fmt: skip
    return replace(found, **changes)


def lists(**values: str) -> tuple[tuple[str, str], ...]:
    return tuple(values.items())


REACHED = {index: {"10.0.0.1": f"10.0.0.{index + 1}"} for index in range(1, 9)}


def agreed(made: Plan, *found: NodeFacts):
    return agree(made, found or [facts(node.index) for node in made.nodes], REACHED, 0)


def why_not(made: Plan, *found: NodeFacts, reached=REACHED) -> str:
    with pytest.raises(Refused) as caught:
        agree(made, found or [facts(node.index) for node in made.nodes], reached, 0)
    return str(caught.value)


def settings(made: Plan, *found: NodeFacts) -> list[dict[str, str]]:
    """For each node what is set about devices."""
    agreement = agreed(made, *found)
    names = {*ALL_LISTS, "CUDA_DEVICE_ORDER"}
    return [{name: value for name, value in node.settings if name in names} for node in agreement.nodes]


def seen(made: Plan, *found: NodeFacts) -> list[str]:
    """For each node its processes and the devices they see."""
    return [f"{node.nproc} of {','.join(node.devices) or 'none'}" for node in agreed(made, *found).nodes]


TWO = (Host("n1", 0), Host("n2", 1))


# --- devices: whose list ---


@pytest.mark.parametrize(
    "made, own, expected, set_to",
    [
        # No list anywhere: the driver's devices.
        (plan(), ({}, {}), ["4 of 0,1,2,3"] * 2, [{}, {}]),
        # Each node's own list; the launcher's host has the scheduler's (A31).
        (
            plan(given={CUDA: UUIDS}, **{CUDA: UUIDS}),
            ({CUDA: UUIDS}, {CUDA: "GPU-3c,GPU-4d"}),
            ["2 of GPU-1a,GPU-2b", "2 of GPU-3c,GPU-4d"],
            [{}, {}],
        ),
        (plan(given={CUDA: "2,3"}, **{CUDA: "2,3"}), ({CUDA: "2,3"}, {CUDA: "0,1"}), ["2 of 2,3", "2 of 0,1"], [{}, {}]),
        # The user took the scheduler's list away: each node's own, as where nobody set one.
        (plan(given={CUDA: "0,1"}), ({}, {CUDA: "0,1"}), ["4 of 0,1,2,3", "2 of 0,1"], [{}, {}]),
        # The user's list differs from the scheduler's: it holds everywhere, being small numbers (B25: reversed, kept so).
        (
            plan(given={CUDA: "0,1,2,3"}, **{CUDA: "3,2,1,0"}),
            ({CUDA: "3,2,1,0"}, {CUDA: "0,1,2,3"}),
            ["4 of 3,2,1,0"] * 2,
            [{}, {CUDA: "3,2,1,0"}],
        ),
        (plan(**{CUDA: "1"}), ({CUDA: "1"}, {}), ["1 of 1"] * 2, [{}, {CUDA: "1"}]),
        # ... to narrow it within names is the launcher's host's affair, where there is no other node.
        (plan(hosts=TWO[:1], given={CUDA: UUIDS}, **{CUDA: "GPU-2b"}), ({CUDA: "GPU-2b"},), ["1 of GPU-2b"], [{}]),
        # An option overrules all lists.
        (
            plan("--gpus 0,1", given={CUDA: UUIDS}, **{CUDA: "3"}),
            ({CUDA: "3"}, {CUDA: "GPU-3c"}),
            ["2 of 0,1"] * 2,
            [{CUDA: "0,1"}] * 2,
        ),
        # An empty list means no device, not all (A31), on the other nodes too.
        (plan("--nproc-per-node 2", **{CUDA: ""}), ({CUDA: ""}, {}), ["2 of none"] * 2, [{}, {CUDA: ""}]),
        (plan("--nproc-per-node 2", **{CUDA: "-1"}), ({CUDA: "-1"}, {}), ["2 of none"] * 2, [{}, {CUDA: "-1"}]),
        # Fewer processes than GPUs: all stay visible (A96).
        (plan("--nproc-per-node 2"), ({CUDA: "0,1,2,3"}, {}), ["2 of 0,1,2,3"] * 2, [{}, {}]),
        # As CUDA reads a list: up to the first entry that is none.
        (plan(), ({CUDA: "0,1,-1,2"}, {CUDA: "2,9,3"}), ["2 of 0,1", "1 of 2"], [{}, {}]),
        # A value that goes with a list names no device; the user's holds on every node.
        (
            plan(given={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, CUDA_DEVICE_ORDER="FASTEST_FIRST"),
            ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
            ["4 of 0,1,2,3"] * 2,
            [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}],
        ),
    ],
)  # fmt: skip
def test_lists(made, own, expected, set_to):
    found = [facts(index, devices=lists(**values)) for index, values in enumerate(own)]
    assert (seen(made, *found), settings(made, *found)) == (expected, set_to)


@pytest.mark.parametrize("value", [UUIDS, "MIG-0a/1/0", "0,GPU-2b"])
def test_names_of_devices_never_travel(value):
    made = plan(given={CUDA: "GPU-9z"}, **{CUDA: value})
    found = (facts(0, devices=lists(**{CUDA: value})), facts(1))
    assert why_not(made, *found) == (
        f'CUDA_VISIBLE_DEVICES="{value}" was set in the job script, but means nothing on n2: '
        "give small numbers with --gpus 0,1,…, or leave it as the scheduler set it"
    )


@pytest.mark.parametrize(
    "kind, own, expected",
    [
        ("cuda", {CUDA: "0,1", "GPU_DEVICE_ORDINAL": "0"}, ["2 of 0,1"]),  # Slurm sets both; the second is AMD's
        ("cuda", {"GPU_DEVICE_ORDINAL": "0"}, ["4 of 0,1,2,3"]),
        ("cuda", {"ROCR_VISIBLE_DEVICES": "0"}, ["4 of 0,1,2,3"]),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "0,1"}, ["2 of 0,1"]),
        ("rocm", {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "2,3"}, ["1 of 0"]),
        ("", {"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, ["3 of 0.0,0.1,1.0"]),  # tiles; no driver of ours counts them
        ("", {CUDA: "NoDevFiles", "ZE_AFFINITY_MASK": "0"}, None),
    ],
)
def test_kinds_of_gpus(kind, own, expected):
    found = facts(devices=lists(**own), gpu_kind=kind, gpus=4 if kind else 0)
    if expected is None:
        assert why_not(plan(hosts=TWO[:1]), found).startswith("no GPU on n1 (by CUDA_VISIBLE_DEVICES)")
    else:
        assert seen(plan(hosts=TWO[:1]), found) == expected


# --- devices: how many ---

CPU_HINT = ": to run on CPUs say --device cpu (and how many processes with --nproc-per-node)"
NONE = {"gpus": 0, "gpu_kind": ""}


def granted(*counts: int | None) -> tuple[Host, ...]:
    return tuple(Host(f"n{index + 1}", index, 1, count) for index, count in enumerate(counts))


@pytest.mark.parametrize(
    "made, found, expected",
    [
        (plan(hosts=granted(4, 4)), [{}, {}], ["4 of 0,1,2,3"] * 2),
        # Uneven counts, each node's own (A29).
        (plan(hosts=granted(None, None)), [{}, {"gpus": 2}], ["4 of 0,1,2,3", "2 of 0,1"]),
        (plan(hosts=granted(3, 1)), [{"gpus": 3}, {"gpus": 1}], ["3 of 0,1,2", "1 of 0"]),
        # PBS granted 2 of the 4 on a shared node: a list must say which.
        (plan(hosts=granted(2)), [{"devices": lists(**{CUDA: "2,3"})}], ["2 of 2,3"]),
        (plan("--gpus 2,3", hosts=granted(2)), [{}], ["2 of 2,3"]),
        (
            plan(hosts=granted(2)),
            [{}],
            "n1: the driver shows 4 GPUs, but PBS granted 2, and no list says which; "
            "say it with --gpus 0,1,… and --nproc-per-node",
        ),
        (
            plan(hosts=granted(0)),
            [{}],
            "n1: the driver shows 4 GPUs, but PBS granted 0, and no list says which; "
            "say it with --gpus 0,1,… and --nproc-per-node",
        ),
        # Fewer than granted, by the driver or by the scheduler's list
        (
            plan(hosts=granted(4, 4)),
            [{}, {"gpus": 3}],
            "n2: 3 GPUs visible, but PBS granted 4; to go on with fewer say --gpus",
        ),
        (
            plan(hosts=granted(4, 4)),
            [{}, {"devices": lists(**{CUDA: "0"})}],
            "n2: 1 GPU visible, but PBS granted 4; to go on with fewer say --gpus",
        ),
        (
            plan("--nproc-per-node 2", hosts=granted(4, 4)),
            [{}, {"gpus": 3}],
            "n2: 3 GPUs visible, but PBS granted 4; to go on with fewer say --gpus",
        ),
        # ... but a user may run on part of what was granted: two runs in one job (A28).
        (plan("--gpus 0,1", hosts=granted(4, 4)), [{}, {}], ["2 of 0,1"] * 2),
        (
            plan(hosts=granted(4, 4), given={CUDA: "0,1,2,3"}, **{CUDA: "0,1"}),
            [{"devices": lists(**{CUDA: "0,1"})}, {}],
            ["2 of 0,1"] * 2,
        ),
        # More processes than GPUs (A96, A32)
        (
            plan("--nproc-per-node 8"),
            [{}, {}],
            "n1: 8 processes asked for, but 4 GPUs visible; ask for fewer, or say --device cpu",
        ),
        (
            plan("--nproc-per-node 8"),
            [{"gpus": 8}, {"devices": lists(**{CUDA: "5"}), "gpus": 8}],
            "n2: 8 processes asked for, but 1 GPU visible; ask for fewer, or say --device cpu",
        ),
        # No GPU
        (plan(), [NONE, NONE], f"no GPU on n[1-2]{CPU_HINT}"),
        (plan(), [{"devices": lists(**{CUDA: ""})}, NONE], f"no GPU on n[1-2] (by CUDA_VISIBLE_DEVICES){CPU_HINT}"),
        (plan(), [{"devices": lists(**{CUDA: "void"})}] * 2, f"no GPU on n[1-2] (by CUDA_VISIBLE_DEVICES){CPU_HINT}"),
        (plan("--device gpu --nproc-per-node 2"), [NONE, NONE], f"no GPU on n[1-2]{CPU_HINT}"),
        (plan("--nproc-per-node gpu"), [NONE, NONE], f"no GPU on n[1-2]{CPU_HINT}"),
        (plan(), [{}, NONE], "no GPU on n2, but on the other nodes; leave these hosts out, or say --device cpu"),
        (
            plan("--nproc-per-node 2"),
            [NONE, {}],
            "no GPU on n1, but on the other nodes; leave these hosts out, or say --device cpu",
        ),
        # ... and a count said: CPUs.
        (plan("--nproc-per-node 2"), [NONE, NONE], ["2 of none"] * 2),
        (plan(scheduler="hosts", hosts=(Host("n1", 0, 3), Host("n2", 1, 2))), [NONE, NONE], ["3 of none", "2 of none"]),
        # CPUs asked for
        (plan("--device cpu"), [{}, {}], ["1 of none"] * 2),
        (plan("--device cpu", hosts=granted(4, 4)), [{}, NONE], ["4 of none"] * 2),
        (plan("--device cpu --nproc-per-node 9"), [{}, {}], ["9 of none"] * 2),
        (plan("--nproc-per-node cpu"), [{"cpus": 48}, {"cpus": 12}], ["48 of none", "12 of none"]),
        # Pretended nodes share this machine's GPUs.
        (
            plan("--simulate 2x2", hosts=(Host("n1-sim0", 0, 2), Host("n1-sim1", 1, 2)), scheduler="simulate"),
            [{}, {}],
            ["2 of 0,1", "2 of 2,3"],
        ),
        (
            plan("--simulate 2x1", hosts=(Host("n1-sim0", 0, 1), Host("n1-sim1", 1, 1)), scheduler="simulate"),
            [{"devices": lists(**{CUDA: "5,7"}), "gpus": 8}] * 2,
            ["1 of 5", "1 of 7"],
        ),
        (
            plan("--simulate 2x3", hosts=(Host("n1-sim0", 0, 3), Host("n1-sim1", 1, 3)), scheduler="simulate"),
            [{}, {}],
            "--simulate needs 6 GPUs, but 4 visible here; say --device cpu to run on CPUs",
        ),
        (
            plan("--simulate 2x3", hosts=(Host("n1-sim0", 0, 3), Host("n1-sim1", 1, 3)), scheduler="simulate"),
            [NONE, NONE],
            ["3 of none"] * 2,
        ),
    ],
)
def test_counts(made, found, expected):
    answers = [facts(index, **changes) for index, changes in enumerate(found)]
    assert (why_not if isinstance(expected, str) else seen)(made, *answers) == expected


def test_uneven_counts_are_said_and_add_up():
    result = agreed(plan(), facts(0), facts(1, gpus=2))
    assert (result.world_size, result.warnings) == (6, ("uneven processes per node: n1 4, n2 2",))


def test_cpu_empties_every_device_list():
    own = lists(**{CUDA: "0", "ZE_AFFINITY_MASK": "0"})
    hidden = {CUDA: "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    made = plan("--device cpu")
    assert settings(made, facts(0, devices=own), facts(1)) == [{**hidden, "ZE_AFFINITY_MASK": ""}, hidden]


@pytest.mark.parametrize(
    "kind, own, expected",
    [
        ("cuda", {}, [{CUDA: "0,1"}, {CUDA: "2,3"}]),
        ("cuda", {CUDA: "4,5,6,7"}, [{CUDA: "4,5"}, {CUDA: "6,7"}]),
        ("rocm", {}, [{"HIP_VISIBLE_DEVICES": "0,1"}, {"HIP_VISIBLE_DEVICES": "2,3"}]),
        # A list inside of another one would count from 0: the one in force is cut.
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, [{"ROCR_VISIBLE_DEVICES": "4,5"}, {"ROCR_VISIBLE_DEVICES": "6,7"}]),
    ],
)
def test_simulate_cuts_the_list_in_force(kind, own, expected):
    made = plan("--simulate 2x2", hosts=(Host("n1-sim0", 0, 2), Host("n1-sim1", 1, 2)), scheduler="simulate")
    found = facts(gpu_kind=kind, gpus=8 if own else 4, devices=lists(**own))
    assert settings(made, found, found) == expected


# --- threads ---


@pytest.mark.parametrize(
    "made, changes, threads, note",
    [
        (plan("--nproc-per-node 4"), {}, "12", "12 = 48 CPUs / 4"),  # A69
        (plan("--nproc-per-node 4 --device cpu"), {"cpus": 2}, "1", "1 = 2 CPUs / 4"),
        (plan("--nproc-per-node 4", OMP_NUM_THREADS="3"), {}, None, "3 (yours)"),
        (plan("--nproc-per-node 4 --omp 5", OMP_NUM_THREADS="3"), {}, "5", "5 (--omp)"),
        # PBS sets it to the CPUs of the chunk, for one process.
        (
            plan("--nproc-per-node 4", PBS_JOBID="1", NCPUS="48", OMP_NUM_THREADS="48"),
            {},
            "12",
            "12 = 48 CPUs / 4 (PBS had 48)",
        ),
        # The whole machine is visible, but only part of it was granted: by the job, or by the node's own task.
        (plan("--nproc-per-node 1", hosts=(Host("n1", 0, 1, None, 12),)), {}, "12", "12 = 12 CPUs / 1"),
        (plan("--nproc-per-node 4", hosts=TWO[:1]), {"scheduler_cpus": 16}, "4", "4 = 16 CPUs / 4"),
        # A cpuset says more than a number: it is what this node really has.
        (plan("--nproc-per-node 4", hosts=(Host("n1", 0, 1, None, 48),)), {"cpus": 24}, "6", "6 = 24 CPUs / 4"),
        (plan("--nproc-per-node 3", hosts=(Host("n1", 0, 1, None, 96),)), {}, "16", "16 = 48 CPUs / 3"),
    ],
)
def test_threads(made, changes, threads, note):
    found = [facts(node.index, **changes) for node in made.nodes]
    for node in agreed(made, *found).nodes:
        assert (dict(node.settings).get("OMP_NUM_THREADS"), node.omp_note) == (threads, f"OMP_NUM_THREADS {note}")


def test_threads_of_uneven_nodes():
    notes = [node.omp_note for node in agreed(plan(), facts(0), facts(1, gpus=2)).nodes]
    assert notes == ["OMP_NUM_THREADS 12 = 48 CPUs / 4", "OMP_NUM_THREADS 24 = 48 CPUs / 2"]


def test_pretended_nodes_share_the_cpus():
    made = plan("--simulate 2x2", hosts=(Host("n1-sim0", 0, 2), Host("n1-sim1", 1, 2)), scheduler="simulate")
    notes = [node.omp_note for node in agreed(made, facts(cpus=8), facts(cpus=8)).nodes]
    assert notes == ["OMP_NUM_THREADS 2 = 8 CPUs / 4"] * 2


# --- network ---


@pytest.mark.parametrize(
    "interfaces, addresses, expected",
    [
        # The scheduler's name first, then the others in their order.
        ((LO, eth("10.0.0.1"), eth("10.1.0.1", "ib0")), ("10.1.0.1",), ("10.1.0.1", "10.0.0.1")),
        ((LO, eth("10.0.0.1")), ("10.0.0.1",), ("10.0.0.1",)),
        # Debian maps a host's own name to 127.0.1.1 (A25); a name that does not resolve gives nothing (A59).
        ((LO, eth("10.0.0.1")), ("127.0.1.1",), ("10.0.0.1",)),
        ((LO, eth("10.0.0.1")), (), ("10.0.0.1",)),
        # The name of an address that this host does not have
        ((LO, eth("10.0.0.1")), ("203.0.113.9",), ("10.0.0.1",)),
        # Link-local needs a scope that only this host knows (A62).
        (
            (LO, Interface("eth0", ("10.0.0.1", "fe80::1", "2001:db8::5", "169.254.1.1"), False, False)),
            (),
            ("10.0.0.1", "2001:db8::5"),
        ),
        ((LO,), ("127.0.0.1",), ()),
    ],
)
def test_master_candidates(interfaces, addresses, expected):
    assert master_candidates(plan(), facts(interfaces=interfaces, addresses=addresses)) == expected


def test_a_second_name_decides_the_address():
    """A58: the fast network's own names; nothing is guessed where they lead nowhere."""
    made = plan("--master-template %hi", hosts=(Host("me@n1.site.org", 0), Host("n2.site.org", 1)))
    assert made.master_name == "n1i"
    both = (LO, eth("10.0.0.1"), eth("10.1.0.1", "ib0"))
    assert master_candidates(made, facts(interfaces=both, addresses=("10.1.0.1",))) == ("10.1.0.1",)
    with pytest.raises(Refused) as caught:
        master_candidates(made, facts(interfaces=both, addresses=("127.0.0.1",)))
    assert str(caught.value) == (
        "me@n1.site.org: --master-template %hi: n1i means 127.0.0.1 there, no address of its that others could reach"
    )


def test_two_names_of_one_machine_are_said():
    """A54: names are compared as they are; what a machine says of itself is only a warning."""
    hosts = (Host("s1", 0), Host("s2", 1), Host("s1.site.org", 2))
    made = plan("--transport ssh", hosts=hosts, scheduler="hosts", hostname="login")
    same = {"boot": "b", "hostname": "s1"}
    found = agreed(made, facts(0, **same), facts(1, hostname="s2"), facts(2, **same))
    assert "s1, s1.site.org are one machine, s1: its GPUs would be used by each" in found.warnings


MANY = facts(interfaces=(LO, eth("172.17.0.1", "docker0"), eth("10.0.0.1"), eth("2001:db8::1", "ib0")), addresses=())
THREE = (Host("n1", 0), Host("n2", 1), Host("n3", 2))


@pytest.mark.parametrize(
    "reached, expected",
    [
        # The first that all have reached
        ({1: {"10.0.0.1": "10.0.0.2"}, 2: {"10.0.0.1": "10.0.0.3", "2001:db8::1": "2001:db8::3"}}, "10.0.0.1"),
        ({1: {"172.17.0.1": "172.17.0.2", "2001:db8::1": "2001:db8::2"}, 2: {"2001:db8::1": "2001:db8::3"}}, "2001:db8::1"),
        # One node reached nothing.
        ({1: {"10.0.0.1": "10.0.0.2"}, 2: {}}, "n3: cannot reach n1 (node 0); tried 172.17.0.1, 10.0.0.1, 2001:db8::1"),
        ({}, "n[2-3]: cannot reach n1 (node 0); tried 172.17.0.1, 10.0.0.1, 2001:db8::1"),
        # Each reached another one.
        (
            {1: {"172.17.0.1": "172.17.0.2"}, 2: {"10.0.0.1": "10.0.0.3"}},
            "n[2-3]: no one address of n1 (node 0) is reached by all; tried 172.17.0.1, 10.0.0.1, 2001:db8::1",
        ),
    ],
)
def test_master_address(reached, expected):
    made, found = plan(hosts=THREE), (MANY, facts(1), facts(2))
    if expected.startswith("n"):
        assert why_not(made, *found, reached=reached) == expected
    else:
        assert agree(made, found, reached, 0).address == expected


def test_no_network_is_said():
    made = plan()
    found = (facts(0, interfaces=(LO,), addresses=("127.0.0.1",)), facts(1))
    assert why_not(made, *found, reached={1: {}}) == (
        "n1: no network interface but loopback is up, so that no other node can reach node 0"
    )


@pytest.mark.parametrize(
    "made, expected",
    [
        (plan(), True),
        (plan(hosts=TWO[:1]), False),
        (plan(hosts=TWO[:1], hostname="elsewhere"), False),  # one node meets nobody
        (plan("--transport local"), False),
        (plan("--simulate 2x2", scheduler="simulate"), False),
    ],
)
def test_needs_reach(made, expected):
    assert needs_reach(made) is expected
    if not expected:
        # A63: works with the network down.
        found = [facts(node.index, interfaces=(LO,), addresses=()) for node in made.nodes]
        assert agree(made, found, {}, 0).address == "127.0.0.1"


def interface_names(made: Plan, found, reached) -> list[tuple[str | None, str | None]]:
    chosen = [dict(node.settings) for node in agree(made, found, reached, 0).nodes]
    return [(one.get("GLOO_SOCKET_IFNAME"), one.get("TP_SOCKET_IFNAME")) for one in chosen]


def test_each_node_has_its_own_interface_name():
    """A65: the name of the interface that owns the address each node was seen at."""
    found = (facts(0, interfaces=(LO, eth("10.0.0.1", "eno1"))), facts(1, interfaces=(LO, eth("10.0.0.2", "bond0.7"))))
    reached = {1: {"10.0.0.1": "10.0.0.2"}}
    assert interface_names(plan(), found, reached) == [("eno1", "eno1"), ("bond0.7", "bond0.7")]


@pytest.mark.parametrize(
    "env, expected",
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, (None, "eth0")),  # the user's value is carried, not changed
        ({"GLOO_SOCKET_IFNAME": ""}, (None, "eth0")),
        ({"GLOO_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": "ib1"}, (None, None)),
    ],
)
def test_the_users_interface_name_wins(env, expected):
    assert interface_names(plan(**env), (facts(0), facts(1)), REACHED) == [expected] * 2


def test_an_address_without_interface_sets_no_name():
    reached = {1: {"10.0.0.1": "192.0.2.2"}}  # a node behind address translation
    assert interface_names(plan(), (facts(0), facts(1)), reached) == [("eth0", "eth0"), (None, None)]


def test_one_machine_meets_over_loopback():
    assert interface_names(plan(hosts=TWO[:1]), (facts(0),), {}) == [("lo", "lo")]


@pytest.mark.parametrize("choice, port", [(0, 20001), (1, 20002)])
def test_port(choice, port):
    assert agree(plan(), (facts(0), facts(1)), REACHED, 0, choice).port == port


@pytest.mark.parametrize(
    "made, ports, message",
    [
        (plan(), (20001,), "n1: the rendezvous port was taken by others each time; give one with --master-port"),
        (
            plan("--master-port 4001"),
            (4001,),
            "n1: port 4001 (from --master-port) was taken by another program just before its use; give another, or none",
        ),
        (
            plan(MASTER_PORT="4001"),
            (4001,),
            "n1: port 4001 (from MASTER_PORT in the environment) was taken by another program just before its use; "
            "give another, or none",
        ),
    ],
)
def test_no_port_left(made, ports, message):
    with pytest.raises(Refused) as caught:
        agree(made, (facts(0, ports=ports), facts(1)), REACHED, 0, 1)
    assert str(caught.value) == message


# --- what forbids the start ---


def versions(torch: str | None, python: str = "3.11.2") -> tuple[tuple[str, str | None], ...]:
    return (("version", python), ("torch", torch))


FOUR = (*THREE, Host("n4", 3))


@pytest.mark.parametrize(
    "made, found, message",
    [
        (
            plan(hosts=FOUR),
            [{}, {"errors": ("no torch in /p",)}, {"errors": ("no torch in /p", "script x.py: Permission denied")}, {}],
            "n[2-3]: no torch in /p\nn3: script x.py: Permission denied",
        ),
        (
            plan(hosts=FOUR),
            [{"python": versions("2.4.0")}, {"python": versions("2.1.0")}, {"python": versions("2.4.0")},
             {"python": versions("2.1.0+cu118")}],
            "n2: torch 2.1.0, but 2.4.0 on n[1,3]; give every node the same environment\n"
            "n4: torch 2.1.0+cu118, but 2.4.0 on n[1,3]; give every node the same environment",
        ),
        # A node without torch has said so itself.
        (plan(), [{}, {"python": versions(None), "errors": ("no torch in /p",)}], "n2: no torch in /p"),
        # A18: a pbsdsh that counts something else than the lines of the host list
        (
            plan(hosts=THREE),
            [{}, {"hostname": "n3.site.org"}, {"hostname": "n2"}],
            "n2: pbsdsh started this node's part on n3.site.org, which is node 2\n"
            "n3: pbsdsh started this node's part on n2, which is node 1",
        ),
        (plan(), [{}, {"hostname": "n1"}], "n2: pbsdsh started this node's part on n1, which is node 0"),
    ],
)  # fmt: skip
def test_check(made, found, message):
    with pytest.raises(Refused) as caught:
        check(made, [facts(index, **changes) for index, changes in enumerate(found)])
    assert (str(caught.value), caught.value.exit_code) == (message, 120)


@pytest.mark.parametrize(
    "made, found",
    [
        (plan(), [{}, {}]),
        # A host's own name may be short, long, or another one altogether.
        (plan(hosts=(Host("n1.site.org", 0), Host("n2.site.org", 1))), [{}, {"hostname": "n2"}]),
        (plan(hostname="elsewhere"), [{"hostname": "n1.cluster"}, {"hostname": "n2.cluster"}]),
        (plan(), [{}, {"hostname": "ip-10-0-0-2"}]),
        (plan("--transport local"), [{}, {"hostname": "n1"}]),  # both here by intent
        (plan("--transport ssh", scheduler="hosts", hosts=(Host("me@n1", 0), Host("me@n2", 1))), [{}, {}]),
    ],
)
def test_check_passes(made, found):
    check(made, [facts(index, **changes) for index, changes in enumerate(found)])


def test_python_versions_that_differ_are_a_warning():
    found = [facts(index, python=versions("2.4.0", python)) for index, python in enumerate(["3.11.2", "3.10.1", "3.11.2"])]
    made = plan(hosts=THREE)
    assert agreed(made, *found).warnings == ("Python differs: 3.11.2 on n[1,3], 3.10.1 on n2",)


# --- the data ---


def test_facts_of_a_frame():
    """As JSON brings it: lists where tuples were."""
    frame = {
        "index": 1, "hostname": "n2", "boot": "b", "gpus": 4, "gpu_kind": "cuda", "cpus": 48, "machine_cpus": 48,
        "interfaces": [{"name": "lo", "addresses": ["127.0.0.1"], "loopback": True, "infiniband": False}],
        "addresses": ["10.0.0.2"], "devices": [[CUDA, "0,1"]], "scheduler_cpus": None, "clock": 1.5, "errors": ["no"],
        "python": {"version": "3.11.2", "torch": None}, "ports": [20001],
    }  # fmt: skip
    assert NodeFacts.of(frame) == NodeFacts(
        index=1, hostname="n2", boot="b", interfaces=(Interface("lo", ("127.0.0.1",), True, False),),
        addresses=("10.0.0.2",), gpus=4, gpu_kind="cuda", devices=((CUDA, "0,1"),), cpus=48, machine_cpus=48,
        scheduler_cpus=None, python=(("version", "3.11.2"), ("torch", None)), errors=("no",), ports=(20001,), clock=1.5,
    )  # fmt: skip


def test_node_ranks_follow_the_hosts():
    result = agree(plan(), (facts(0), facts(1)), REACHED, 3)
    assert ([node.node_rank for node in result.nodes], result.attempt, result.is_cpu) == ([0, 1], 3, False)


def test_doctests():
    assert doctest.testmod(agreement).failed == 0
