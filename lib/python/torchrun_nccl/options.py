"""The command line: one table of our options, one of torchrun's; parsing is pure.

argparse cannot serve here: its REMAINDER swallows a ``--`` that is the script's first argument.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from .errors import EXIT_CODES, UsageError


def _number(low: int, high: Optional[int] = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < low or (high is not None and int(text) > high):
            raise ValueError(f"a number from {low} to {high}" if high is not None else f"a number of at least {low}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e7:
        raise ValueError("a number of seconds")
    return value


def _processes(text: str) -> object:
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        return _number(1)(text)
    except ValueError:
        raise ValueError("a number of at least 1, or auto, gpu, cpu") from None


def _simulate(text: str) -> tuple[int, int]:
    nodes, _, processes = text.lower().partition("x")
    try:
        return _number(1, 4096)(nodes), _number(1, 4096)(processes)
    except ValueError:
        raise ValueError("NODESxPROCESSES, for example 2x4") from None


def _choice(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return text

    return read


def _streams(text: str) -> int:
    """torchrun's numbers: 0 none, 1 stdout, 2 stderr, 3 both."""
    if text not in ("0", "1", "2", "3"):
        raise ValueError("0 (none), 1 (stdout), 2 (stderr) or 3 (both)")
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(_number(0)(part.strip()) for part in text.split(","))
    except ValueError:
        raise ValueError("local ranks separated by commas") from None


def _devices(text: str) -> str:
    if not text or any(not part.strip() for part in text.split(",")):
        raise ValueError("devices separated by commas, for example 0,1")
    return ",".join(part.strip() for part in text.split(","))


def _static(text: str) -> str:
    if text != "static":
        raise ValueError("static: node ranks follow the order of the hosts, and the command picks address and port itself")
    return text


def _words(text: str) -> tuple[str, ...]:
    import shlex

    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"words as a shell splits them ({error})") from None
    if not words:
        raise ValueError("at least one word")
    return words


@dataclass(frozen=True)
class Option:
    """One option of ours. `metavar` is empty for a switch; `like` says how it compares with torchrun's of that name."""

    names: tuple[str, ...]
    field: str
    metavar: str
    read: Callable[[str], Any]
    text: str
    group: str
    like: str = ""

    @property
    def is_switch(self) -> bool:
        return not self.metavar


_WHERE, _HOW, _WHAT, _RECORD, _TIME = "where to run", "how many", "what to run", "what to record", "when to give up"


def _switch(text: str) -> bool:
    return True


OPTIONS: tuple[Option, ...] = (
    Option(("--hosts",), "hosts", "LIST", str, "run on these hosts, such as node1,gpu[03-06]", _WHERE),
    Option(("--hostfile",), "hostfile", "FILE", str, "run on the hosts of FILE: one a line, `slots=N` allowed", _WHERE),
    Option(("--simulate",), "simulate", "NxP", _simulate, "pretend N nodes with P processes each on this machine", _WHERE),
    Option(("--scheduler",), "scheduler", "NAME", str, "read this scheduler's job; `none`: this machine alone", _WHERE),
    Option(
        ("--transport",), "transport", "NAME", str, "start the nodes by local, pbsdsh, pbs_tmrsh or ssh (default: probed)", _WHERE
    ),
    Option(("--ssh-options",), "ssh_options", "WORDS", _words, "more words for ssh; they win over ours", _WHERE),
    Option(("--nnodes",), "nnodes", "N", _number(1), "use only the first N hosts", _HOW, "same"),
    Option(
        ("--nproc-per-node",), "nproc", "N|auto|gpu|cpu", _processes, "processes on each node (default: one per GPU)", _HOW, "own"
    ),
    Option(("--device",), "device", "auto|gpu|cpu", _choice("auto", "gpu", "cpu"), "cpu: hide all GPUs from the workers", _HOW),
    Option(("--gpus",), "gpus", "LIST", _devices, "use these GPUs on every node, such as 0,1", _HOW),
    Option(("--omp",), "omp", "N", _number(1), "OMP_NUM_THREADS (default: usable CPUs / processes)", _HOW),
    Option(("-m", "--module"), "module", "", _switch, "SCRIPT is a module, as in python -m", _WHAT, "same"),
    Option(("--no-python",), "no_python", "", _switch, "SCRIPT is a program to be run as it is", _WHAT, "same"),
    Option(("--python",), "python", "PATH", str, "Python of the workers (default: the first on PATH)", _WHAT),
    Option(("--wrap",), "wrap", "WORDS", _words, "put WORDS before each worker's command", _WHAT),
    Option(("--role",), "role", "NAME", str, "ROLE_NAME of the workers", _WHAT, "same"),
    Option(("--rdzv-backend",), "rdzv_backend", "static", _static, "only static", _WHAT, "own"),
    Option(
        ("--master-port",), "master_port", "PORT", _number(1, 65535), "rendezvous port on the first node (default: a free one)",
        _WHAT, "same",
    ),
    Option(("--monitor-interval",), "monitor_interval", "SECONDS", _seconds, "how often torchrun looks at its workers", _WHAT, "same"),
    Option(("--event-log-handler",), "event_log_handler", "NAME", str, "torchrun's event log", _WHAT, "same"),
    Option(
        ("--max-restarts",), "max_restarts", "N", _number(0), "start all ranks again up to N times after a failure", _WHAT, "own"
    ),
    Option(("--log-dir",), "log_dir", "DIR", str, "where output.SCRIPT.HOST.log goes (default: here)", _RECORD, "own"),
    Option(("-t", "--tee"), "tee", "0-3", _streams, "also copy 1 stdout, 2 stderr, 3 both here, lines marked [rank]", _RECORD, "own"),
    Option(("-r", "--redirects"), "redirects", "0-3", _streams, "also write one log per rank", _RECORD, "own"),
    Option(("--local-ranks-filter",), "tee_ranks", "LIST", _ranks, "copy only these local ranks with --tee", _RECORD, "own"),
    Option(("-v", "--verbose"), "verbose", "", _switch, "say more; torchrun's own words go to the log", _RECORD),
    Option(("--dry-run",), "dry_run", "", _switch, "print the plan, start nothing", _RECORD),
    Option(
        ("--json",), "json", "FILE", str, "write the outcome to FILE; with --dry-run, without FILE: the plan to stdout", _RECORD
    ),
    Option(
        ("--grace",), "grace", "SECONDS", _seconds, "between TERM and KILL (default: 5 in PBS and after a failure, else 15)", _TIME
    ),
    Option(("--connect-timeout",), "connect_timeout", "SECONDS", _seconds, "for a node to reach the launcher (default: 5)", _TIME),
    Option(("--hello-timeout",), "hello_timeout", "SECONDS", _seconds, "for a node to report, from its start (default: 60)", _TIME),
    Option(("--heartbeat",), "heartbeat", "SECONDS", _seconds, "between signs of life (default: 2)", _TIME),
    Option(("--lost-after",), "lost_after", "SECONDS", _seconds, "of silence make a node lost (default: 15)", _TIME),
)  # fmt: skip

_OURS = "this command chooses it itself; leave it out"
_RENDEZVOUS = "the rendezvous is always static and its address, port and id are chosen anew for each launch; leave it out"

#: Options of torchrun (torch 2.1 to 2.14) that cannot mean here what they mean there, each with the way out.
REFUSED: dict[str, tuple[bool, str]] = {
    # name: (takes a value, why)
    "--rdzv-endpoint": (True, _RENDEZVOUS),
    "--rdzv-id": (True, _RENDEZVOUS),
    "--rdzv-conf": (True, _RENDEZVOUS),
    "--standalone": (False, "say --scheduler none to run on this machine alone"),
    "--node-rank": (True, "start the command once per job; node ranks follow the order of the hosts"),
    "--master-addr": (True, "the address of the first node that all others reach is found at the start; leave it out"),
    "--local-addr": (True, _OURS),
    "--start-method": (True, "it has no effect on programs; leave it out"),
    "--run-path": (False, "the script runs as `python SCRIPT`; leave it out"),
    "--logs-specs": (True, "logs are written by this command; see --log-dir, --tee and --redirects"),
    "--duplicate-stdout-filters": (True, "not available; see --tee and --local-ranks-filter"),
    "--duplicate-stderr-filters": (True, "not available; see --tee and --local-ranks-filter"),
    "--numa-binding": (True, "not available in this version"),
    "--signals-to-handle": (True, "TERM, INT and HUP stop the launch, USR1 and USR2 are forwarded; leave it out"),
    "--shutdown-timeout": (True, "say --grace SECONDS"),
    "--virtual-local-rank": (False, "not available; LOCAL_RANK is the rank on the node"),
}


@dataclass(frozen=True)
class Options:
    """The command line as data; None means "not said"."""

    target: str = ""
    arguments: tuple[str, ...] = ()
    hosts: Optional[str] = None
    hostfile: Optional[str] = None
    simulate: Optional[tuple[int, int]] = None
    scheduler: Optional[str] = None
    transport: Optional[str] = None
    ssh_options: tuple[str, ...] = ()
    nnodes: Optional[int] = None
    nproc: object = None
    device: str = "auto"
    gpus: Optional[str] = None
    omp: Optional[int] = None
    module: bool = False
    no_python: bool = False
    python: Optional[str] = None
    wrap: tuple[str, ...] = ()
    role: Optional[str] = None
    rdzv_backend: str = "static"
    master_port: Optional[int] = None
    monitor_interval: Optional[float] = None
    event_log_handler: Optional[str] = None
    max_restarts: int = 0
    log_dir: Optional[str] = None
    tee: int = 0
    redirects: int = 0
    tee_ranks: tuple[int, ...] = ()
    verbose: bool = False
    dry_run: bool = False
    json: Optional[str] = None
    grace: Optional[float] = None
    connect_timeout: float = 5.0
    hello_timeout: float = 60.0
    heartbeat: float = 2.0
    lost_after: float = 15.0
    wants_help: bool = False
    wants_version: bool = False


USAGE = "torchrun_nccl.sh [OPTIONS] SCRIPT [ARGUMENTS]"
_BY_NAME = {name: option for option in OPTIONS for name in option.names}


def _resolve(name: str) -> str:
    """The full name of an option typed with underscores or cut short, as torchrun allows both."""
    plain = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    known = [*_BY_NAME, *REFUSED, "--help", "-h", "--version"]
    if plain in known:
        return plain
    found = [full for full in known if full.startswith(plain)] if plain.startswith("--") and len(plain) > 2 else []
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"option {name} could be {', '.join(found)}; say which")
    raise UsageError(f"unknown option {name}; options of this command stand before SCRIPT, see --help")


def parse(argv: Sequence[str]) -> Options:
    """Options up to SCRIPT, then SCRIPT, then its arguments, untouched.

    >>> parse(["--nproc_per_node=2", "train.py", "--", "-n"]).arguments
    ('--', '-n')
    """
    words = list(argv)
    values: dict[str, Any] = {}
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        _take_option(words, values)
    if words and words[0] == "--":
        words.pop(0)
    if values.get("wants_help") or values.get("wants_version"):
        return Options(**values)
    if values.get("json") == "" and not values.get("dry_run"):
        raise UsageError("--json needs a FILE to write the outcome to (without FILE it goes with --dry-run)")
    if values.get("module") and values.get("no_python"):
        raise UsageError("-m and --no-python exclude each other")
    if not words:
        raise UsageError(f"no SCRIPT given: {USAGE}")
    if words[0] in ("-", ""):
        raise UsageError(f'SCRIPT is "{words[0]}": give a file, a module with -m, or a program with --no-python')
    return Options(target=words[0], arguments=tuple(words[1:]), **values)


def _take_option(words: list[str], values: dict[str, Any]) -> None:
    word = words.pop(0)
    if word.startswith("--"):
        typed, has_value, value = word.partition("=")
    else:
        typed, value = word[:2], word[2:].removeprefix("=")
        has_value = "=" if value else ""
    name = _resolve(typed)
    if name in ("--help", "-h", "--version"):
        values["wants_version" if name == "--version" else "wants_help"] = True
        return
    if name in REFUSED:
        raise UsageError(f"{typed}: {REFUSED[name][1]}")
    option = _BY_NAME[name]
    if option.is_switch:
        if has_value:
            raise UsageError(f"{typed} takes no value, but got {value!r}")
        values[option.field] = True
        return
    if not has_value:
        if option.field == "json" and (values.get("dry_run") or not words or words[0].startswith("-")):
            value = ""
        elif not words:
            raise UsageError(f"{typed} needs a value: {option.metavar}")
        else:
            value = words.pop(0)
    try:
        values[option.field] = option.read(value)
    except ValueError as error:
        raise UsageError(f"{typed} {value!r} is not {error}") from None


def help_text() -> str:
    lines = [
        "Run a PyTorch script on every GPU of every node of this job, or of this machine.",
        "",
        f"  {USAGE}",
        "",
        "Example, in a PBS job script or on a laptop:",
        "  torchrun_nccl.sh train.py --epochs 50",
        "  torchrun_nccl.sh --simulate 2x2 --device cpu train.py --epochs 50",
        "",
        "Each node writes output.SCRIPT.HOST.log into the working directory. All words after SCRIPT are the script's.",
    ]
    for group in dict.fromkeys(option.group for option in OPTIONS):
        lines += ["", f"{group}:"]
        for option in OPTIONS:
            if option.group == group:
                head = ", ".join(option.names) + (f" {option.metavar}" if option.metavar else "")
                lines.append(f"  {head:<30} {option.text}" if len(head) < 30 else f"  {head}\n{'':33}{option.text}")
    lines += ["", "others:", f"  {'-h, --help':<30} this text", f"  {'--version':<30} the version", "", "environment:"]
    lines += [f"  {name:<30} {text}" for name, text in VARIABLES]
    lines += ["", "signals: " + SIGNALS, "", "exit codes:"]
    lines += [f"  {code:<30} {text}" for code, text in EXIT_CODES]
    lines += ["", "Options of torchrun are taken in either spelling, --nproc-per-node or --nproc_per_node; these are refused, with the",
              "reason: " + ", ".join(sorted(REFUSED)) + "."]  # fmt: skip
    return "\n".join(lines) + "\n"


#: Every variable of the user's that changes what this command does.
VARIABLES: tuple[tuple[str, str], ...] = (
    ("TORCHRUN_NCCL_PYTHON", "Python that runs this command itself (3.9 or newer)"),
    ("MASTER_PORT", "rendezvous port, as --master-port"),
    ("OMP_NUM_THREADS", "kept as it is, unless PBS set it (equal to NCPUS)"),
)
SIGNALS = "TERM, INT and HUP stop all ranks (TERM, grace, KILL), a second INT at once; USR1 and USR2 go to all ranks."


def signal_name(number: int) -> str:
    """
    >>> signal_name(9), signal_name(99)
    ('SIGKILL', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

