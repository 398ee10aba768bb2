"""The plan: everything a launch will do, as data, before anything is done. `--dry-run` prints it."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from . import environment, transports
from .allocation import Allocation, Host
from .environment import Pairs
from .errors import Refused, UsageError
from .hostlist import short_names
from .node.engine import torchrun_words
from .options import Options
from .transports import Words

#: Seconds between TERM and KILL when the end was asked for. PBS: a queue's kill_delay may be as short as 2 s, and 9 s
#: were measured between its TERM and its KILL at walltime.
GRACE = {"pbs": 5.0}
DEFAULT_GRACE = 15.0
#: After a failure no rank can save anything that all agree on, so there is less to wait for.
FAILURE_GRACE = 5.0


@dataclass(frozen=True)
class NodePlan:
    """One node. nproc, gpus, cpus: None where only the node itself can say."""

    index: int
    host: str
    short: str
    spare: bool
    nproc: Optional[int]
    gpus: Optional[int]
    cpus: Optional[int]
    transport: str
    is_here: bool
    words: Words
    log: str


@dataclass(frozen=True)
class Context:
    """What the launcher found around itself; everything `make_plan` needs that is no option and no allocation."""

    launch_id: str
    environment: Pairs
    scheduler_environment: Pairs
    directory: str
    umask: int
    limits: tuple[tuple[str, int], ...]
    hostname: str
    own_names: frozenset[str]
    runner: str
    door: str
    python: str
    terminal: str
    find: Callable[[str], Optional[str]]


@dataclass(frozen=True)
class Plan:
    launch_id: str
    scheduler: str
    job_id: str
    why: str
    transport: str
    transport_why: str
    nodes: tuple[NodePlan, ...]
    target: str
    argv: Words
    script: str
    python: str
    directory: str
    log_directory: str
    umask: int
    limits: tuple[tuple[str, int], ...]
    environment: Pairs
    user_devices: Pairs
    scheduler_devices: Pairs
    gpus: Optional[str]
    device: str
    is_nproc_explicit: bool
    simulate: bool
    omp: Optional[int]
    user_omp: Optional[str]
    scheduler_omp: Optional[str]
    master_port: Optional[int]
    master_port_source: str
    torchrun: Words
    grace: float
    failure_grace: float
    terminal: str
    signal_group: bool
    options: Options
    warnings: tuple[str, ...]


def make_plan(options: Options, allocation: Allocation, context: Context) -> Plan:
    """Decide everything that can be decided here. Raises UsageError or Refused."""
    env = dict(context.environment)
    hosts = _hosts(options, allocation)
    here = [
        allocation.scheduler in ("simulate", "local")
        or transports.is_name_of_here(h.name, context.own_names, context.hostname)
        for h in hosts
    ]
    choice = transports.choose(allocation, options.transport, not all(here), context.find)
    names = short_names([host.name for host in hosts])
    label = options.target if options.module else transports.basename(options.target)
    nodes = tuple(
        _node(
            options,
            allocation,
            context,
            choice,
            index,
            host,
            is_here,
            name,
            _log_name(label, name, allocation.array_index),
        )
        for index, (host, is_here, name) in enumerate(zip(hosts, here, names))
    )
    port, port_source = _master_port(options, env)
    user_omp, scheduler_omp = _omp(allocation.scheduler, env)
    log_directory = os.path.join(context.directory, options.log_dir or "")
    return Plan(
        launch_id=context.launch_id,
        scheduler=allocation.scheduler,
        job_id=allocation.job_id,
        why=allocation.why,
        transport=choice.transport.name,
        transport_why=choice.why,
        nodes=nodes,
        target=options.target,
        argv=_argv(options, context),
        script="" if options.module or options.no_python else options.target,
        python=context.python,
        directory=context.directory,
        log_directory=log_directory.rstrip("/") or "/",
        umask=context.umask,
        limits=context.limits,
        environment=environment.carried(context.environment),
        user_devices=_only(context.environment, environment.DEVICE_NAMES),
        scheduler_devices=_only(context.scheduler_environment, environment.DEVICE_NAMES),
        gpus=options.gpus,
        device="cpu" if options.nproc == "cpu" else "gpu" if options.nproc == "gpu" else options.device,
        is_nproc_explicit=isinstance(options.nproc, int)
        or (all(node.nproc for node in nodes) and allocation.scheduler in _SLOTS_ARE_PROCESSES),
        simulate=bool(options.simulate),
        omp=options.omp,
        user_omp=user_omp,
        scheduler_omp=scheduler_omp,
        master_port=port,
        master_port_source=port_source,
        torchrun=_torchrun_extra(options),
        grace=GRACE.get(allocation.scheduler, DEFAULT_GRACE) if options.grace is None else options.grace,
        failure_grace=FAILURE_GRACE if options.grace is None else options.grace,
        terminal=context.terminal if len(hosts) == 1 else "",
        signal_group=options.no_python or bool(options.wrap),
        options=options,
        warnings=allocation.warnings,
    )


def _hosts(options: Options, allocation: Allocation) -> tuple[Host, ...]:
    hosts = allocation.hosts
    if options.nnodes is None:
        return hosts
    if options.nnodes > len(hosts):
        names = ", ".join(host.name for host in hosts[:8]) + (", …" if len(hosts) > 8 else "")
        raise Refused(f"--nnodes {options.nnodes}: only {len(hosts)} in the allocation ({allocation.why}): {names}")
    return hosts[: options.nnodes]


#: Where a host's slots are a person's wish for processes, not a scheduler's count of CPUs.
_SLOTS_ARE_PROCESSES = ("hosts", "hostfile", "simulate")


def _node(
    options: Options, allocation: Allocation, context: Context, choice: transports.Choice,
    index: int, host: Host, is_here: bool, short: str, log: str,
) -> NodePlan:  # fmt: skip
    local = transports.TRANSPORTS["local"]
    transport = local if is_here and options.transport is None else choice.transport
    door = transports.door_words(
        context.runner, context.door, context.launch_id, index, transport, options.connect_timeout
    )
    if transport.name == "ssh":
        transports.check_remote_words(door)
    words = (*transport.start(choice.program, host, options.ssh_options), *door)
    return NodePlan(
        index, host.name, short, False, _nproc(options, allocation, host), host.gpus, host.cpus, transport.name,
        is_here or transport is local, words, log,
    )  # fmt: skip


def _nproc(options: Options, allocation: Allocation, host: Host) -> Optional[int]:
    if isinstance(options.nproc, int):
        return options.nproc
    if options.nproc == "cpu":
        return 0  # as many as the node has CPUs
    if allocation.scheduler in _SLOTS_ARE_PROCESSES and host.slots:
        return host.slots
    if options.gpus is not None:
        return len(options.gpus.split(","))
    return host.gpus


def _argv(options: Options, context: Context) -> Words:
    if options.no_python:
        program: Words = (options.target,)
    elif options.module:
        program = (context.python, "-u", "-m", options.target)
    else:
        program = (context.python, "-u", options.target)  # -u as torchrun does: the last words survive a kill
    return (*options.wrap, *program, *options.arguments)


def _log_name(label: str, host: str, array_index: str) -> str:
    """
    >>> _log_name("train.py", "gadi-gpu-v100-0031", ""), _log_name("pkg.mod", "n1", "5")
    ('output.train.py.gadi-gpu-v100-0031.log', 'output.pkg.mod.n1.5.log')
    """
    parts = ("output", label, re.sub(r"[^A-Za-z0-9._-]", "_", host.rpartition("@")[2]), array_index)
    return ".".join(part for part in parts if part) + ".log"


def _master_port(options: Options, env: dict[str, str]) -> tuple[Optional[int], str]:
    if options.master_port is not None:
        return options.master_port, "from --master-port"
    text = env.get("MASTER_PORT", "")
    if not text:
        return None, "chosen by this command"
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise UsageError(f"MASTER_PORT={text} (from the environment) is no port; give 1 to 65535, or unset it")
    return int(text), "from MASTER_PORT in the environment"


def _omp(scheduler: str, env: dict[str, str]) -> tuple[Optional[str], Optional[str]]:
    """The user's OMP_NUM_THREADS, else the scheduler's: PBS sets it and NCPUS alike, to the CPUs of a chunk."""
    value = env.get("OMP_NUM_THREADS")
    if value is not None and scheduler == "pbs" and value == env.get("NCPUS"):
        return None, value
    return value, None


def _only(pairs: Pairs, names: tuple[str, ...]) -> Pairs:
    return tuple((name, value) for name, value in pairs if name in names)


def _torchrun_extra(options: Options) -> Words:
    given = (
        ("--role", options.role),
        ("--monitor-interval", options.monitor_interval),
        ("--event-log-handler", options.event_log_handler),
    )
    return tuple(f"{name}={value}" for name, value in given if value is not None)


# --- printing ---


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan with stable keys. Of the environment only names: values may be secrets."""
    return {
        "launch_id": plan.launch_id,
        "scheduler": plan.scheduler,
        "job_id": plan.job_id,
        "why": plan.why,
        "transport": plan.transport,
        "transport_why": plan.transport_why,
        "nodes": [
            {
                "index": node.index,
                "node_rank": node.index,
                "host": node.host,
                "spare": node.spare,
                "nproc": node.nproc,
                "words": list(node.words),
                "log": os.path.join(plan.log_directory, node.log),
            }
            for node in plan.nodes
        ],
        "target": list(plan.argv),
        "directory": plan.directory,
        "python": plan.python,
        "grace": plan.grace,
        "environment": [name for name, _ in plan.environment],
        "warnings": list(plan.warnings),
    }


def to_text(plan: Plan) -> str:
    """For a person: what would start where, and the plain torchrun line of each node."""
    rows = [
        ("launch", plan.launch_id),
        ("job", f"{plan.scheduler} {plan.job_id}".strip() + f" ({plan.why})"),
        ("transport", f"{plan.transport} ({plan.transport_why})"),
        ("directory", plan.directory),
        ("python", plan.python),
        ("target", shlex.join(plan.argv)),
        (
            "processes",
            "CPUs only" if plan.device == "cpu" else "one per GPU" if not plan.is_nproc_explicit else "as given",
        ),
        ("grace", f"{plan.grace:g} s after TERM, {plan.failure_grace:g} s after a failure"),
        ("environment", f"{len(plan.environment)} variables carried" + _settings_found(plan)),
        *(("warning", text) for text in plan.warnings),
    ]
    lines = [f"{name + ':':<13} {value}" for name, value in rows]
    for node in plan.nodes:
        lines += [
            "",
            f"node {node.index}: {node.host}",
            f"  processes:  {_count(node)}",
            f"  log:        {os.path.join(plan.log_directory, node.log)}",
            f"  started by: {shlex.join(node.words)}",
            f"  by hand:    {_by_hand(plan, node)}",
        ]
    return "\n".join(lines) + "\n"


def _settings_found(plan: Plan) -> str:
    """Which tuning variables are exported: one that was assigned but not exported is easily missed."""
    names = sorted(
        name for name, _ in plan.environment if name.startswith(("NCCL_", "GLOO_", "TORCH_", "RCCL_", "FI_"))
    )
    return f", among them {', '.join(names)}" if names else ""


def _count(node: NodePlan) -> str:
    return "one per CPU" if node.nproc == 0 else "one per GPU found there" if node.nproc is None else str(node.nproc)


def _by_hand(plan: Plan, node: NodePlan) -> str:
    """What a person could type on each node; the port stands for any free one, processes not known yet for all GPUs."""
    address = plan.nodes[0].host.rpartition("@")[2] if plan.transport != "local" else "127.0.0.1"
    words = torchrun_words(
        plan.python,
        len(plan.nodes),
        node.index,
        node.nproc or 0,
        address,
        plan.master_port or 29500,
        plan.launch_id,
        plan.torchrun,
    )
    shown = tuple("--nproc-per-node=gpu" if word == "--nproc-per-node=0" else word for word in words)
    return shlex.join((*shown, "--no-python", *plan.argv))
