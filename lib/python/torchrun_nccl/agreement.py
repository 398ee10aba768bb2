"""What all nodes start with: a pure function of the plan, every node's facts and the attempt number."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .environment import Pairs
from .errors import Refused
from .hostlist import fold
from .plan import PER_CPU, NodePlan, Plan

#: Device lists by whose GPUs they are; the first that is set is in force, the first of all is the one we would set.
LIST_NAMES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    "": (
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
    ),
}  # fmt: skip
ALL_LISTS = LIST_NAMES[""]
#: Lists that hide all GPUs when they are empty.
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
#: What goes with a list without naming a device: a user's value holds on every node.
LIST_SETTINGS = ("CUDA_DEVICE_ORDER",)
#: Values that mean "no device": CUDA's, NVIDIA's container toolkit's, Slurm's.
NO_DEVICES = ("", "void", "none", "-1", "NoDevFiles")
#: An index, or a tile of one (Intel): the only names of devices that mean something on another node.
_INDEX = re.compile(r"[0-9]+(\.[0-9]+)?")


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
    scheduler_cpus: int | None
    python: tuple[tuple[str, str | None], ...]
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
    """devices: the GPUs that each worker of this node sees; its own is the one at its local rank."""

    node_rank: int
    nproc: int
    settings: Pairs
    omp_note: str
    devices: tuple[str, ...] = ()


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
    """A door that runs elsewhere than it was meant to: a pbsdsh that counts differently.

    A host's own name may differ from the scheduler's, so that only another node's name proves something.
    """
    if node.transport == "local":
        return
    here = _short(fact.hostname)
    others = [other for other in plan.nodes if other.index != node.index and here == _short(other.host)]
    if others and here != _short(node.host):
        yield f"{node.transport} started this node's part on {fact.hostname}, which is node {others[0].index}"


def _short(host: str) -> str:
    return host.rpartition("@")[2].partition(".")[0]


def needs_reach(plan: Plan) -> bool:
    """Whether nodes meet over a network at all, so that its address must be tried."""
    return any(node.transport != "local" for node in plan.nodes) and len(plan.nodes) > 1


def master_candidates(plan: Plan, first: NodeFacts) -> tuple[str, ...]:
    """Addresses of node 0 that others may reach: what its scheduler's name means, then those of its interfaces.

    With --master-template only what that name means.
    """
    usable = [
        address
        for interface in first.interfaces
        if not interface.loopback
        for address in interface.addresses
        if not ipaddress.ip_address(address).is_link_local
    ]
    named = [address for address in first.addresses if address in usable]
    if not plan.master_name:
        return tuple(dict.fromkeys((*named, *usable)))
    if not named:
        found = ", ".join(first.addresses) or "nothing"
        raise Refused(
            f"{plan.nodes[0].host}: --master-template {plan.options.master_template}: {plan.master_name} means {found} "
            f"there, no address of its that others could reach"
        )
    return tuple(named)


def agree(
    plan: Plan,
    facts: Sequence[NodeFacts],
    reached: Mapping[int, Mapping[str, str]],
    attempt: int,
    port_choice: int = 0,
) -> Agreement:
    """The start of one attempt.

    reached: for each node but the first, the addresses of node 0 it has reached and its own address on that way.
    port_choice: which of node 0's tested ports; raised after a port was stolen between test and use.
    """
    check(plan, facts)
    port = _port(plan, facts[0], port_choice)
    address = _master_address(plan, facts[0], reached)
    counts, is_cpu = _processes(plan, facts)
    warnings = list(_mismatches(plan, facts))
    if len(set(counts)) > 1:
        uneven = ", ".join(f"{node.host} {count}" for node, count in zip(plan.nodes, counts))
        warnings.append(f"uneven processes per node: {uneven}")
    nodes = []
    for node, fact, nproc in zip(plan.nodes, facts, counts):
        omp, note = _omp(plan, node, fact, counts)
        own = address if node.index == 0 else reached.get(node.index, {}).get(address, address)
        devices, lists = _devices(plan, node, fact, nproc, is_cpu)
        settings = (*lists, *omp, *_network(plan, fact, own))
        nodes.append(NodeAgreement(node.index, nproc, settings, note, devices))
    return Agreement(attempt, address, port, is_cpu, tuple(nodes), tuple(warnings))


# --- network ---


def _port(plan: Plan, first: NodeFacts, choice: int) -> int:
    if choice < len(first.ports):
        return first.ports[choice]
    host = plan.nodes[0].host
    if plan.master_port is not None:
        raise Refused(
            f"{host}: port {plan.master_port} ({plan.master_port_source}) was taken by another program just before "
            f"its use; give another, or none"
        )
    raise Refused(f"{host}: the rendezvous port was taken by others each time; give one with --master-port")


def _master_address(plan: Plan, first: NodeFacts, reached: Mapping[int, Mapping[str, str]]) -> str:
    if not needs_reach(plan):
        return "127.0.0.1"
    candidates = master_candidates(plan, first)
    host, others = plan.nodes[0].host, plan.nodes[1:]
    for address in candidates:
        if all(address in reached.get(node.index, {}) for node in others):
            return address
    if not candidates:
        raise Refused(f"{host}: no network interface but loopback is up, so that no other node can reach node 0")
    tried = ", ".join(candidates)
    cut_off = [node.host for node in others if not reached.get(node.index)]
    if cut_off:
        raise Refused(f"{fold(cut_off)}: cannot reach {host} (node 0); tried {tried}")
    raise Refused(
        f"{fold(node.host for node in others)}: no one address of {host} (node 0) is reached by all; tried {tried}"
    )


def _network(plan: Plan, fact: NodeFacts, own: str) -> Pairs:
    """Gloo looks up the host's own name otherwise, which Debian maps to 127.0.1.1; a user's value is never changed."""
    name = next((one.name for one in fact.interfaces if own in one.addresses), None)
    if name is None:
        return ()
    user = dict(plan.environment)
    return tuple((variable, name) for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if variable not in user)


# --- processes and devices ---


def entries(value: str, known: int) -> tuple[str, ...]:
    """Devices of a list, up to the first that is none, as CUDA reads it. known: how many the driver shows, or 0.

    >>> entries("2,3", 0), entries("GPU-1a,GPU-2b", 8), entries("", 4), entries("0,-1,1", 4), entries("2,3,7", 4)
    (('2', '3'), ('GPU-1a', 'GPU-2b'), (), ('0',), ('2', '3'))
    """
    found = []
    for entry in (part.strip() for part in value.split(",")):
        if entry in NO_DEVICES or (known and entry.isdigit() and int(entry) >= known):
            break
        found.append(entry)
    return tuple(found)


@dataclass(frozen=True)
class _Visible:
    """The GPUs that a worker of a node could see.

    by: the list that says so, empty where the driver does. is_wish: whether that list is the user's.
    """

    devices: tuple[str, ...]
    by: str
    is_wish: bool


def _visible(plan: Plan, node: NodePlan, fact: NodeFacts) -> _Visible:
    wishes = _wishes(plan, node, fact)
    lists = {name: value for name, value in fact.devices if name in ALL_LISTS} | wishes
    for name in LIST_NAMES[fact.gpu_kind]:
        if name in lists:
            return _Visible(entries(lists[name], fact.gpus), name, name in wishes)
    return _Visible(tuple(str(number) for number in range(fact.gpus)), "", False)


def _is_changed(plan: Plan, name: str) -> bool:
    """Whether the user has set a variable that the scheduler has not, or not so."""
    return name in dict(plan.user_devices) and dict(plan.user_devices)[name] != dict(plan.scheduler_devices).get(name)


def _wishes(plan: Plan, node: NodePlan, fact: NodeFacts) -> dict[str, str]:
    """Device lists that hold on a node in place of its own: the user's, where he changed what the scheduler gave."""
    if plan.gpus is not None:
        return {LIST_NAMES[fact.gpu_kind][0]: plan.gpus}
    wishes = {}
    for name, value in plan.user_devices:
        if name not in ALL_LISTS or not _is_changed(plan, name):
            continue
        if not node.is_here and not _means_the_same_everywhere(value):
            raise Refused(
                f'{name}="{value}" was set in the job script, but means nothing on {node.host}: '
                f"give small numbers with --gpus 0,1,…, or leave it as the scheduler set it"
            )
        wishes[name] = value
    return wishes


def _means_the_same_everywhere(value: str) -> bool:
    listed = [entry.strip() for entry in value.split(",")]
    return all(entry in NO_DEVICES or _INDEX.fullmatch(entry) for entry in listed)


def _processes(plan: Plan, facts: Sequence[NodeFacts]) -> tuple[list[int], bool]:
    """Processes of each node, and whether they run on CPUs."""
    if plan.device == "cpu":
        return [fact.cpus if node.nproc == PER_CPU else node.nproc or 1 for node, fact in zip(plan.nodes, facts)], True
    seen = [_visible(plan, node, fact) for node, fact in zip(plan.nodes, facts)]
    without = [node.host for node, visible in zip(plan.nodes, seen) if not visible.devices]
    if len(without) == len(plan.nodes):
        if plan.device == "auto" and plan.is_nproc_explicit:
            return [node.nproc or 1 for node in plan.nodes], True
        raise Refused(
            f"no GPU on {fold(without)}{_hidden(seen)}: to run on CPUs say --device cpu "
            f"(and how many processes with --nproc-per-node)"
        )
    if without:
        raise Refused(f"no GPU on {fold(without)}, but on the other nodes; leave these hosts out, or say --device cpu")
    if plan.simulate:
        return _simulated(plan, len(seen[0].devices)), False
    return [_on_gpus(plan, node, visible) for node, visible in zip(plan.nodes, seen)], False


def _hidden(seen: Sequence[_Visible]) -> str:
    """An empty list hides GPUs that are there; that it did should be said."""
    names = dict.fromkeys(visible.by for visible in seen if visible.by)
    return f" (by {', '.join(names)})" if names else ""


def _on_gpus(plan: Plan, node: NodePlan, visible: _Visible) -> int:
    """Processes of a node that has GPUs."""
    found, granted, scheduler = len(visible.devices), node.gpus, plan.scheduler.upper()
    if granted is not None and not visible.is_wish:
        if found < granted:
            raise Refused(
                f"{node.host}: {found} GPU{'s' * (found > 1)} visible, but {scheduler} granted {granted}; "
                f"to go on with fewer say --gpus"
            )
        if found > granted and not visible.by:
            raise Refused(
                f"{node.host}: the driver shows {found} GPUs, but {scheduler} granted {granted}, and no list says "
                f"which; say it with --gpus 0,1,… and --nproc-per-node"
            )
    if node.nproc is None or not plan.is_nproc_explicit:
        return found
    if node.nproc > found:
        raise Refused(
            f"{node.host}: {node.nproc} processes asked for, but {found} GPU{'s' * (found > 1)} visible; "
            f"ask for fewer, or say --device cpu"
        )
    return node.nproc


def _simulated(plan: Plan, available: int) -> list[int]:
    wanted = [node.nproc or 1 for node in plan.nodes]
    if sum(wanted) > available:
        raise Refused(f"--simulate needs {sum(wanted)} GPUs, but {available} visible here; say --device cpu to run on CPUs")
    return wanted


def _devices(plan: Plan, node: NodePlan, fact: NodeFacts, nproc: int, is_cpu: bool) -> tuple[tuple[str, ...], Pairs]:
    """The GPUs that the workers of a node see, and what must be set for that."""
    own = dict(fact.devices)
    if plan.device == "cpu":
        return (), tuple((name, "") for name in ALL_LISTS if name in HIDING or name in own)
    visible = _visible(plan, node, fact)
    if plan.simulate and not is_cpu:
        first = sum(other.nproc or 1 for other in plan.nodes[: node.index])
        cut = visible.devices[first : first + nproc]
        return cut, ((visible.by or LIST_NAMES[fact.gpu_kind][0], ",".join(cut)),)
    settings = [(name, value) for name, value in plan.user_devices if name in LIST_SETTINGS and _is_changed(plan, name)]
    return visible.devices, tuple(
        (name, value) for name, value in (*_wishes(plan, node, fact).items(), *settings) if own.get(name) != value
    )


# --- CPUs ---


def _omp(plan: Plan, node: NodePlan, fact: NodeFacts, counts: Sequence[int]) -> tuple[Pairs, str]:
    """OMP_NUM_THREADS: usable CPUs shared among the workers on them, unless the user said a number."""
    if plan.omp is not None:
        return (("OMP_NUM_THREADS", str(plan.omp)),), f"OMP_NUM_THREADS {plan.omp} (--omp)"
    if plan.user_omp is not None:
        return (), f"OMP_NUM_THREADS {plan.user_omp} (yours)"
    usable = fact.cpus
    share = node.cpus or fact.scheduler_cpus
    if share and usable >= fact.machine_cpus:
        usable = min(usable, share)
    # Pretended nodes share the CPUs of this machine.
    sharing = [count for other, count in zip(plan.nodes, counts) if other is node or (other.is_here and node.is_here)]
    threads = max(1, usable // sum(sharing))
    had = f" (PBS had {plan.scheduler_omp})" if plan.scheduler_omp else ""
    return (("OMP_NUM_THREADS", str(threads)),), f"OMP_NUM_THREADS {threads} = {usable} CPUs / {sum(sharing)}{had}"


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
        most, where = versions[0]
        yield f"torch {version}, but {most} on {fold(where)}; give every node the same environment", hosts


def _mismatches(plan: Plan, facts: Sequence[NodeFacts]) -> Iterable[str]:
    machines: dict[tuple[str, str], list[str]] = {}
    for node, fact in zip(plan.nodes, facts):
        if node.transport != "local":
            machines.setdefault((fact.boot, fact.hostname), []).append(node.host)
    for (_, name), hosts in machines.items():
        if len(hosts) > 1:
            yield f"{', '.join(hosts)} are one machine, {name}: its GPUs would be used by each"
    versions = _by_value(plan, facts, "version")
    if len(versions) > 1:
        yield "Python differs: " + ", ".join(f"{version} on {fold(hosts)}" for version, hosts in versions)
