"""What all nodes start with: a pure function of the plan, every node's facts and the attempt number."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from .environment import Pairs
from .errors import Refused
from .hostlist import fold
from .plan import NodePlan, Plan

Settings = tuple[tuple[str, Optional[str]], ...]

#: Device lists by whose GPUs they are; the first is the one we would set.
LIST_NAMES = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    "": (
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "GPU_DEVICE_ORDINAL",
    ),
}
ALL_LISTS = LIST_NAMES[""]
#: Values that mean "no device": CUDA's, NVIDIA's container toolkit's, Slurm's.
NO_DEVICES = ("", "void", "none", "-1", "NoDevFiles")


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    loopback: bool
    infiniband: bool


@dataclass(frozen=True)
class NodeFacts:
    """What a node said of itself; node/facts.py tells where each value is read."""

    index: int
    hostname: str
    boot: str
    interfaces: tuple[Interface, ...]
    addresses: tuple[str, ...]
    gpus: int
    gpu_kind: str
    devices: Pairs
    cpus: int
    machine_cpus: int
    scheduler_cpus: Optional[int]
    python: tuple[tuple[str, Optional[str]], ...]
    errors: tuple[str, ...]
    ports: tuple[int, ...]
    clock: float

    @staticmethod
    def of(frame: Mapping[str, Any]) -> NodeFacts:
        return NodeFacts(
            **{
                **frame,
                "interfaces": tuple(
                    Interface(**{**one, "addresses": tuple(one["addresses"])}) for one in frame["interfaces"]
                ),
                "addresses": tuple(frame["addresses"]),
                "devices": tuple((name, value) for name, value in frame["devices"]),
                "python": tuple(frame["python"].items()),
                "errors": tuple(frame["errors"]),
                "ports": tuple(frame["ports"]),
            }
        )


@dataclass(frozen=True)
class NodeAgreement:
    node_rank: int
    nproc: int
    settings: Settings
    omp_note: str


@dataclass(frozen=True)
class Agreement:
    attempt: int
    address: str
    port: int
    is_cpu: bool
    nodes: tuple[NodeAgreement, ...]
    warnings: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return sum(node.nproc for node in self.nodes)


def check(plan: Plan, facts: Sequence[NodeFacts]) -> None:
    """Refused, with every reason and the nodes it holds for, unless all nodes can start."""
    reasons: dict[str, list[str]] = {}
    for node, fact in zip(plan.nodes, facts):
        for error in (*fact.errors, *_misplaced(plan, node, fact)):
            reasons.setdefault(error, []).append(node.host)
    for reason, hosts in _torch_versions(plan, facts):
        reasons.setdefault(reason, []).extend(hosts)
    if reasons:
        raise Refused("\n".join(f"{fold(hosts)}: {reason}" for reason, hosts in reasons.items()))


def _misplaced(plan: Plan, node: NodePlan, fact: NodeFacts) -> Iterable[str]:
    """A door that runs on another node of the plan than it was meant for: a pbsdsh that counts differently."""
    here = fact.hostname.partition(".")[0]
    others = {other.host.partition(".")[0]: other for other in plan.nodes if other.index != node.index}
    if node.transport != "local" and here in others and here != node.host.partition(".")[0]:
        yield f"{plan.transport} started this node's part on {fact.hostname}, which is node {others[here].index}"


def needs_reach(plan: Plan) -> bool:
    """Whether nodes meet over a network at all, so that its address must be tried."""
    return any(node.transport != "local" for node in plan.nodes) and len(plan.nodes) > 1


def master_candidates(first: NodeFacts) -> tuple[str, ...]:
    """Addresses of node 0 that others may reach: what its scheduler's name means first, then its interfaces' in order."""
    usable = [
        address
        for interface in first.interfaces
        if not interface.loopback
        for address in interface.addresses
        if not ipaddress.ip_address(address).is_link_local
    ]
    named = [address for address in first.addresses if address in usable]
    return tuple(dict.fromkeys((*named, *usable)))


def agree(
    plan: Plan, facts: Sequence[NodeFacts], reached: Mapping[int, Mapping[str, str]], attempt: int, port_choice: int = 0
) -> Agreement:
    """The start of one attempt.

    reached: for each node but the first, the addresses of node 0 it has reached and its own address on that way.
    port_choice: which of node 0's tested ports; raised after a port was stolen between test and use.
    """
    check(plan, facts)
    first = facts[0]
    if port_choice >= len(first.ports):
        raise Refused(
            f"{plan.nodes[0].host}: the rendezvous port was taken by others each time; give one with --master-port"
        )
    address = _master_address(plan, first, reached)
    counts, is_cpu = _processes(plan, facts)
    warnings = list(_mismatches(plan, facts))
    if len(set(counts)) > 1:
        warnings.append("uneven processes per node: " + ", ".join(f"{n.host} {c}" for n, c in zip(plan.nodes, counts)))
    nodes = []
    for node, fact, nproc in zip(plan.nodes, facts, counts):
        omp, note = _omp(plan, node, fact, nproc)
        own = address if node.index == 0 else reached.get(node.index, {}).get(address, address)
        settings = (*_devices(plan, node, fact, nproc, is_cpu), *omp, *_network(plan, fact, own))
        nodes.append(NodeAgreement(node.index, nproc, settings, note))
    return Agreement(attempt, address, first.ports[port_choice], is_cpu, tuple(nodes), tuple(warnings))


# --- network ---


def _master_address(plan: Plan, first: NodeFacts, reached: Mapping[int, Mapping[str, str]]) -> str:
    if not needs_reach(plan):
        return "127.0.0.1"
    candidates = master_candidates(first)
    for address in candidates:
        if all(address in reached.get(node.index, {}) for node in plan.nodes[1:]):
            return address
    failed = [node.host for node in plan.nodes[1:] if not reached.get(node.index)]
    tried = ", ".join(candidates) or "it has none but loopback"
    raise Refused(
        f"{fold(failed or [node.host for node in plan.nodes[1:]])}: cannot reach {plan.nodes[0].host} (node 0) "
        f"at any one address; tried {tried}"
    )


def _network(plan: Plan, fact: NodeFacts, own: str) -> Settings:
    """Gloo looks up the host's own name otherwise, which Debian maps to 127.0.1.1; a user's value is never changed."""
    name = next((one.name for one in fact.interfaces if own in one.addresses), None)
    if name is None:
        return ()
    user = dict(plan.environment)
    return tuple((variable, name) for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if variable not in user)


# --- processes and devices ---


def entries(value: str, known: int) -> tuple[str, ...]:
    """Devices of a list, up to the first that is none, as CUDA reads it. `known`: how many the driver shows, 0: unknown.

    >>> entries("2,3", 0), entries("GPU-1a,GPU-2b", 8), entries("", 4), entries("0,-1,1", 4), entries("2,3,7", 4)
    (('2', '3'), ('GPU-1a', 'GPU-2b'), (), ('0',), ('2', '3'))
    """
    found = []
    for entry in value.split(","):
        if entry.strip() in NO_DEVICES or (known and entry.strip().isdigit() and int(entry) >= known):
            break
        found.append(entry.strip())
    return tuple(found)


def _lists(plan: Plan, node: NodePlan, fact: NodeFacts) -> dict[str, str]:
    """The device lists in force on a node: its own, or the user's where he changed what the scheduler gave."""
    lists = {name: value for name, value in fact.devices if name in ALL_LISTS}
    if plan.gpus is not None:
        return {LIST_NAMES[fact.gpu_kind][0]: plan.gpus}
    given = dict(plan.scheduler_devices)
    for name, value in plan.user_devices:
        if name not in ALL_LISTS or given.get(name) == value:
            continue
        if node.is_here or all(entry.strip().isdigit() for entry in value.split(",")):
            lists[name] = value
        else:
            raise Refused(
                f"{name}={value} was set in the job script, but such names mean nothing on {node.host}; "
                f"give a list of small numbers with --gpus, or leave it unset"
            )
    return lists


def _visible(plan: Plan, node: NodePlan, fact: NodeFacts) -> tuple[tuple[str, ...], bool]:
    """The GPUs a worker on this node could see, and whether a list says so (else the driver does)."""
    lists = _lists(plan, node, fact)
    for name in LIST_NAMES[fact.gpu_kind]:
        if name in lists:
            return entries(lists[name], fact.gpus), True
    return tuple(str(number) for number in range(fact.gpus)), False


def _processes(plan: Plan, facts: Sequence[NodeFacts]) -> tuple[list[int], bool]:
    """Processes of each node, and whether they run on CPUs."""
    if plan.device == "cpu":
        return [_cpu_processes(node, fact) for node, fact in zip(plan.nodes, facts)], True
    seen = [_visible(plan, node, fact) for node, fact in zip(plan.nodes, facts)]
    asked = [node.nproc for node in plan.nodes]
    if not any(devices for devices, _ in seen):
        if plan.device == "auto" and plan.is_nproc_explicit:
            return [nproc or 1 for nproc in asked], True
        raise Refused(
            f"no GPU on {fold([node.host for node in plan.nodes])}: to run on CPUs say --device cpu "
            f"(and how many processes with --nproc-per-node)"
        )
    without = [node.host for node, (devices, _) in zip(plan.nodes, seen) if not devices]
    if without:
        raise Refused(f"no GPU on {fold(without)}, but on other nodes; leave these hosts out, or say --device cpu")
    if plan.simulate:
        return _simulated(plan, len(seen[0][0])), False
    counts = []
    for node, (devices, is_listed) in zip(plan.nodes, seen):
        granted = node.gpus
        if granted is not None and len(devices) < granted:
            raise Refused(f"{node.host}: {len(devices)} GPUs are visible, {plan.scheduler} granted {granted}")
        if granted is not None and len(devices) > granted and not is_listed:
            raise Refused(
                f"{node.host}: the driver shows {len(devices)} GPUs, {plan.scheduler} granted {granted}, and no list says which; "
                f"say it with --gpus 0,1,… and --nproc-per-node"
            )
        if node.nproc is not None and plan.is_nproc_explicit:
            if node.nproc > len(devices):
                raise Refused(f"{node.host}: {node.nproc} processes asked for, {len(devices)} GPUs visible")
            counts.append(node.nproc)
        else:
            counts.append(len(devices))
    return counts, False


def _cpu_processes(node: NodePlan, fact: NodeFacts) -> int:
    return fact.cpus if node.nproc == 0 else node.nproc or 1


def _simulated(plan: Plan, available: int) -> list[int]:
    wanted = [node.nproc or 1 for node in plan.nodes]
    if sum(wanted) > available:
        raise Refused(
            f"--simulate needs {sum(wanted)} GPUs, {available} are visible here; say --device cpu to run on CPUs"
        )
    return wanted


def _devices(plan: Plan, node: NodePlan, fact: NodeFacts, nproc: int, is_cpu: bool) -> Settings:
    if plan.device == "cpu":
        return tuple((name, "") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
    if plan.simulate and not is_cpu:
        devices, _ = _visible(plan, node, fact)
        first = sum(other.nproc or 1 for other in plan.nodes[: node.index])
        return ((LIST_NAMES[fact.gpu_kind][0], ",".join(devices[first : first + nproc])),)
    own = dict(fact.devices)
    return tuple((name, value) for name, value in _lists(plan, node, fact).items() if own.get(name) != value)


# --- CPUs ---


def _omp(plan: Plan, node: NodePlan, fact: NodeFacts, nproc: int) -> tuple[Settings, str]:
    """OMP_NUM_THREADS: usable CPUs shared among the node's workers, unless the user said a number."""
    if plan.omp is not None:
        return (("OMP_NUM_THREADS", str(plan.omp)),), f"OMP_NUM_THREADS {plan.omp} (--omp)"
    if plan.user_omp is not None:
        return (), f"OMP_NUM_THREADS {plan.user_omp} (yours)"
    usable = fact.cpus
    share = node.cpus or fact.scheduler_cpus
    if share and usable >= fact.machine_cpus:
        usable = min(usable, share)
    here = sum(1 for other in plan.nodes if other.is_here) if plan.simulate else 1
    threads = max(1, usable // (nproc * here))
    workers = f"{nproc * here}"
    had = f" ({plan.scheduler.upper()} had {plan.scheduler_omp})" if plan.scheduler_omp else ""
    return (("OMP_NUM_THREADS", str(threads)),), f"OMP_NUM_THREADS {threads} = {usable} CPUs / {workers}{had}"


# --- mismatches ---


def _by_value(plan: Plan, facts: Sequence[NodeFacts], name: str) -> list[tuple[str, list[str]]]:
    """Values of one fact about Python with the hosts that have it, the most common first."""
    values: dict[str, list[str]] = {}
    for node, fact in zip(plan.nodes, facts):
        value = dict(fact.python).get(name)
        if value is not None:
            values.setdefault(value, []).append(node.host)
    return sorted(values.items(), key=lambda item: -len(item[1]))


def _torch_versions(plan: Plan, facts: Sequence[NodeFacts]) -> Iterable[tuple[str, list[str]]]:
    """Two torch versions in one job fail late and obscurely, so they are refused."""
    versions = _by_value(plan, facts, "torch")
    for version, hosts in versions[1:]:
        yield (
            f"torch {version}, but {versions[0][0]} on {fold(versions[0][1])}; every node must run the same environment",
            hosts,
        )


def _mismatches(plan: Plan, facts: Sequence[NodeFacts]) -> Iterable[str]:
    versions = _by_value(plan, facts, "version")
    if len(versions) > 1:
        yield "Python differs: " + ", ".join(f"{version} on {fold(hosts)}" for version, hosts in versions)
