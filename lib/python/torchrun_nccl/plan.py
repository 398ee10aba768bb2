"""The plan: everything a launch will do, as data, before anything is done. `--dry-run` prints it."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import environment, transports
from .allocation import Allocation, Host
from .environment import Pairs
from .errors import Refused, UsageError
from .hostlist import fold, short_names
from .node.engine import torchrun_words
from .options import Options
from .transports import Words

#: Seconds between TERM and KILL when the end was asked for. PBS: a queue's kill_delay may be as short as 2 s, and 9 s
#: were measured between its TERM and its KILL at walltime.
GRACE = {"pbs": 5.0, "lsf": 5.0}
DEFAULT_GRACE = 15.0
#: After a failure no rank can save anything that all agree on, so there is less to wait for.
FAILURE_GRACE = 5.0
#: Stands in a node's plan for as many processes as it has CPUs.
PER_CPU = 0
_MAX_PORT = 65535
_ANY_PORT = 29500


@dataclass(frozen=True)
class NodePlan:
    """One node. nproc, gpus, cpus: None where only the node itself can say."""

    index: int
    host: str
    short: str
    spare: bool
    nproc: int | None
    gpus: int | None
    cpus: int | None
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
    find: Callable[[str], str | None]


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
    gpus: str | None
    device: str
    is_nproc_explicit: bool
    simulate: bool
    omp: int | None
    user_omp: str | None
    scheduler_omp: str | None
    master_name: str
    master_port: int | None
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
    here = [_is_here(allocation, host, context) for host in hosts]
    choice = transports.choose(allocation, options.transport, not all(here), context.find)
    label = _label(options, context.directory)
    shorts = [_file_part(name) for name in short_names([host.name for host in hosts])]
    nodes = tuple(
        _node(options, allocation, context, choice, hosts, (index, is_here), short, label)
        for index, (is_here, short) in enumerate(zip(here, shorts))
    )
    port, port_source = _master_port(options, env)
    user_omp, scheduler_omp = _omp(env)
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
        log_directory=os.path.join(context.directory, options.log_dir or "").rstrip("/") or "/",
        umask=context.umask,
        limits=context.limits,
        environment=environment.carried(context.environment),
        user_devices=_only(context.environment, environment.DEVICE_NAMES),
        scheduler_devices=_only(context.scheduler_environment, environment.DEVICE_NAMES),
        gpus=_gpus(options, len(hosts)),
        device=_device(options),
        is_nproc_explicit=_is_nproc_explicit(options, allocation, hosts),
        simulate=bool(options.simulate),
        omp=options.omp,
        user_omp=user_omp,
        scheduler_omp=scheduler_omp,
        master_name=_master_name(options, hosts[0].name),
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


# --- nodes ---


def _hosts(options: Options, allocation: Allocation) -> tuple[Host, ...]:
    hosts = allocation.hosts
    if options.nnodes is not None and options.nnodes > len(hosts):
        raise Refused(
            f"--nnodes {options.nnodes}: there {'is' if len(hosts) == 1 else 'are'} only {len(hosts)} "
            f"({fold(host.name for host in hosts)}; {allocation.why}); give at most {len(hosts)}, or run on more hosts"
        )
    return hosts[: options.nnodes]


def _is_here(allocation: Allocation, host: Host, context: Context) -> bool:
    if allocation.scheduler in ("simulate", "local"):
        return True
    return transports.is_name_of_here(host.name, context.own_names, context.hostname)


def _node(
    options: Options,
    allocation: Allocation,
    context: Context,
    choice: transports.Choice,
    hosts: tuple[Host, ...],
    place: tuple[int, bool],
    short: str,
    label: str,
) -> NodePlan:
    index, is_here = place
    host = hosts[index]
    local = transports.TRANSPORTS["local"]
    # A step that starts all nodes starts this one too.
    transport = local if is_here and options.transport is None and not choice.transport.is_step else choice.transport
    door = transports.door_words(
        context.runner,
        context.door,
        context.launch_id,
        index,
        transport,
        transports.is_shared(transport, hosts),
        options.connect_timeout,
    )
    if transport.is_shell:
        transports.check_remote_words(door)
    return NodePlan(
        index=index,
        host=host.name,
        short=short,
        spare=False,
        nproc=_nproc(options, allocation, host),
        gpus=host.gpus,
        cpus=host.cpus,
        transport=transport.name,
        is_here=is_here or transport is local,
        words=(*transport.start(choice.program, host, hosts, options.ssh_options), *door),
        log=_log_name(label, short, allocation.array_index),
    )


def _label(options: Options, directory: str) -> str:
    """What a log is called after: the file's or folder's name, or the module's."""
    if options.module:
        return options.target.replace("/", "_")
    return os.path.basename(os.path.normpath(os.path.join(directory, options.target))) or "_"


def _log_name(label: str, host: str, array_index: str) -> str:
    """
    >>> _log_name("train.py", "gadi-gpu-v100-0031", ""), _log_name("pkg.mod", "n1", "5")
    ('output.train.py.gadi-gpu-v100-0031.log', 'output.pkg.mod.n1.5.log')
    """
    return ".".join(part for part in ("output", label, host, array_index, "log") if part)


def _file_part(host: str) -> str:
    """A host's name for a file's: an address may hold a colon, a name a user.

    >>> _file_part("me@n1.site.org"), _file_part("2001:db8::5")
    ('n1.site.org', '2001_db8__5')
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", host.rpartition("@")[2])


# --- processes and devices ---

#: Where a host's slots are a person's wish for processes, not a scheduler's count of CPUs.
_SLOTS_ARE_PROCESSES = ("hosts", "hostfile", "simulate")


def _nproc(options: Options, allocation: Allocation, host: Host) -> int | None:
    if isinstance(options.nproc, int):
        return options.nproc
    if options.nproc == "cpu":
        return PER_CPU
    if _has_wish(options, allocation, host):
        return host.slots
    if options.gpus is not None:
        return len(options.gpus.split(","))
    return host.gpus or (1 if _device(options) == "cpu" else None)


def _has_wish(options: Options, allocation: Allocation, host: Host) -> bool:
    """Whether the host's slots say how many processes a person wants there."""
    return allocation.scheduler in _SLOTS_ARE_PROCESSES and options.nproc in (None, "auto") and host.slots > 0


def _is_nproc_explicit(options: Options, allocation: Allocation, hosts: tuple[Host, ...]) -> bool:
    """Whether a person said how many processes: they may then run on CPUs where no node has a GPU."""
    return isinstance(options.nproc, int) or all(_has_wish(options, allocation, host) for host in hosts)


def _device(options: Options) -> str:
    return str(options.nproc) if options.nproc in ("cpu", "gpu") else options.device


def _gpus(options: Options, nodes: int) -> str | None:
    if options.gpus is not None and nodes > 1 and re.search("[A-Za-z]", options.gpus):
        raise UsageError(f"--gpus {options.gpus}: such names mean nothing on another node; give indices, as in --gpus 0,1")
    return options.gpus


def _only(pairs: Pairs, names: tuple[str, ...]) -> Pairs:
    return tuple((name, value) for name, value in pairs if name in names)


# --- the rest ---


def _argv(options: Options, context: Context) -> Words:
    if options.no_python:
        program: Words = (options.target,)
    elif options.module:
        program = (context.python, "-u", "-m", options.target)
    else:
        program = (context.python, "-u", options.target)  # -u as torchrun does: the last words survive a kill
    return (*options.wrap, *program, *options.arguments)


def _master_name(options: Options, host: str) -> str:
    """The first node's second name, empty where there is none: a site's fast network often has one for each host."""
    if options.master_template is None:
        return ""
    return options.master_template.replace("%h", host.rpartition("@")[2].partition(".")[0])


def _master_port(options: Options, env: dict[str, str]) -> tuple[int | None, str]:
    if options.master_port is not None:
        return options.master_port, "from --master-port"
    text = env.get("MASTER_PORT", "")
    if not text:
        return None, "chosen by this command"
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) <= _MAX_PORT:
        raise UsageError(f'MASTER_PORT: "{text}" (in the environment) is not a port: give 1 to {_MAX_PORT}, or unset it')
    return int(text), "from MASTER_PORT in the environment"


def _omp(env: dict[str, str]) -> tuple[str | None, str | None]:
    """The user's OMP_NUM_THREADS, else the scheduler's: PBS sets it and NCPUS alike, to the CPUs of a chunk."""
    value = env.get("OMP_NUM_THREADS")
    if not value:
        return None, None
    if env.get("PBS_JOBID") and value == env.get("NCPUS"):
        return None, value
    return value, None


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
                "nproc": node.nproc or None,
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
        ("processes", _counts(plan)),
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


_TUNING = ("NCCL_", "GLOO_", "TORCH_", "RCCL_", "FI_")


def _settings_found(plan: Plan) -> str:
    """Which tuning variables are exported: one that was assigned but not exported is easily missed."""
    names = sorted(name for name, _ in plan.environment if name.startswith(_TUNING))
    return f", among them {', '.join(names)}" if names else ""


def _counts(plan: Plan) -> str:
    counts = [node.nproc for node in plan.nodes]
    total = f"{sum(count or 0 for count in counts)} on {len(counts)} node{'s' if len(counts) > 1 else ''}"
    return (total if all(counts) else _count(plan.nodes[0])) + (", all GPUs hidden" if plan.device == "cpu" else "")


def _count(node: NodePlan) -> str:
    return {None: "one per GPU found there", PER_CPU: "one per CPU"}.get(node.nproc, str(node.nproc))


def _by_hand(plan: Plan, node: NodePlan) -> str:
    """What a person could type on each node.

    The port stands for any free one. torchrun takes `$` for a macro of its own in the words after --no-python.
    """
    address = plan.nodes[0].host.rpartition("@")[2] if plan.transport != "local" else "127.0.0.1"
    port = plan.master_port or _ANY_PORT
    words = torchrun_words(plan.python, len(plan.nodes), node.index, 0, address, port, plan.launch_id, plan.torchrun)
    nproc = {None: "gpu", PER_CPU: "cpu"}.get(node.nproc, str(node.nproc))
    shown = (f"--nproc-per-node={nproc}" if word.startswith("--nproc-per-node=") else word for word in words)
    return shlex.join((*shown, "--no-python", *(word.replace("$", "$$") for word in plan.argv)))
