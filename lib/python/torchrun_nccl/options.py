"""The command line: one table of our options, one of torchrun's; parsing is pure.

argparse cannot serve here: its REMAINDER swallows a ``--`` that is the script's first argument.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .errors import EXIT_CODES, UsageError

_MAX_NUMBER: Final = 999_999_999
_MAX_SECONDS: Final = 1e7
_MAX_PORT: Final = 65535
#: A device: an index, a tile of one (Intel), a UUID or a MIG id.
_DEVICE: Final = re.compile(r"[0-9]+(\.[0-9]+)?|(GPU|MIG)-\S+")


def _number(low: int, high: int = _MAX_NUMBER) -> Callable[[str], int]:
    wanted = f"a number of at least {low}" if high == _MAX_NUMBER else f"a number from {low} to {high}"

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
            raise ValueError(wanted)
        return int(text)

    return read


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < _MAX_SECONDS:
        raise ValueError("a number of seconds")
    return value


def _some_seconds(text: str) -> float:
    value = _seconds(text)
    if not value:
        raise ValueError("a number of seconds above 0")
    return value


def _nodes(text: str) -> int:
    """torchrun's MIN:MAX is taken where both are one number."""
    low, _, high = text.partition(":")
    if high and high != low:
        raise ValueError("one number: the nodes are those of the job from start to end, there is no MIN:MAX")
    return _number(1)(low)


def _processes(text: str) -> int | str:
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
        raise ValueError("local ranks separated by commas, for example 0,1") from None


def _devices(text: str) -> str:
    devices = [part.strip() for part in text.split(",")]
    if not all(_DEVICE.fullmatch(device) for device in devices) or len(set(devices)) < len(devices):
        raise ValueError("a list of different devices, for example 0,1 (to hide all GPUs say --device cpu)")
    return ",".join(devices)


def _static(text: str) -> str:
    if text != "static":
        raise ValueError("static: node ranks follow the order of the hosts, address and port are chosen by this command")
    return text


def _template(text: str) -> str:
    if "%h" not in text or not re.fullmatch(r"[A-Za-z0-9._%-]+", text) or "%" in text.replace("%h", ""):
        raise ValueError("a host name with %h for the first node's short name, as in %hi or %h.hsn.site.org")
    return text


def _words(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"words as a shell splits them ({error})") from None
    if not words:
        raise ValueError("at least one word")
    return words


def _text(text: str) -> str:
    if not text:
        raise ValueError("a name")
    return text


def _switch(text: str) -> bool:
    return True


@dataclass(frozen=True)
class Option:
    """One option of ours. `metavar` is empty for a switch.

    like: how it compares with torchrun's option of that name: "same", "own" (our meaning), or empty: torchrun has none.
    """

    names: tuple[str, ...]
    field: str
    metavar: str
    read: Callable[[str], Any]
    text: str
    like: str = ""

    @property
    def is_switch(self) -> bool:
        return not self.metavar


def _one(names: str, metavar: str, read: Callable[[str], Any], text: str, like: str = "", field: str = "") -> Option:
    each = tuple(names.split(", "))
    return Option(each, field or each[-1][2:].replace("-", "_"), metavar, read, text, like)


#: What this command takes, by the question it answers, as `--help` prints it.
GROUPS: Final[tuple[tuple[str, tuple[Option, ...]], ...]] = (
    ("where to run", (
        _one("--hosts", "LIST", str, "run on these hosts, such as node1,gpu[03-06]"),
        _one("--hostfile", "FILE", str, "run on the hosts of FILE: one a line, `slots=N` allowed"),
        _one("--simulate", "NxP", _simulate, "pretend N nodes with P processes each on this machine"),
        _one("--scheduler", "NAME", str, "read this scheduler's job; `none`: this machine alone"),
        _one("--transport", "NAME", str, "how to start the nodes: srun, pbsdsh, ssh, … (default: probed)"),
        _one("--ssh-options", "WORDS", _words, "more words for ssh; they win over ours"),
    )),
    ("how many", (
        _one("--nnodes", "N", _nodes, "use only the first N hosts", "own"),
        _one("--nproc-per-node", "N|auto|gpu|cpu", _processes, "on each node (default: one per GPU)", "own", "nproc"),
        _one("--device", "auto|gpu|cpu", _choice("auto", "gpu", "cpu"), "cpu: hide all GPUs from the workers"),
        _one("--gpus", "LIST", _devices, "use these GPUs on every node, such as 0,1"),
        _one("--omp", "N", _number(1), "OMP_NUM_THREADS (default: usable CPUs / processes)"),
    )),
    ("what to run", (
        _one("-m, --module", "", _switch, "SCRIPT is a module, as in python -m", "same"),
        _one("--no-python", "", _switch, "SCRIPT is a program to be run as it is", "same"),
        _one("--python", "PATH", _text, "Python of the workers (default: the first on PATH)"),
        _one("--wrap", "WORDS", _words, "put WORDS before each worker's command"),
        _one("--role", "NAME", str, "ROLE_NAME of the workers", "same"),
        _one("--rdzv-backend", "static", _static, "only static", "own"),
        _one("--master-template", "NAME", _template, "the first node's name for the others, as %hi (%h: its short name)"),
        _one("--master-port", "PORT", _number(1, _MAX_PORT), "of the rendezvous (default: a free one)", "same"),
        _one("--monitor-interval", "SECONDS", _some_seconds, "between two looks of torchrun at its workers", "same"),
        _one("--event-log-handler", "NAME", str, "torchrun's event log", "same"),
        _one("--max-restarts", "N", _number(0), "start all ranks again up to N times after a failure", "own"),
    )),
    ("what to record", (
        _one("--log-dir", "DIR", str, "where output.SCRIPT.HOST.log goes (default: here)", "own"),
        _one("-t, --tee", "0-3", _streams, "also copy 1 stdout, 2 stderr, 3 both here, lines marked [rank]", "own"),
        _one("-r, --redirects", "0-3", _streams, "also write one log per rank", "own"),
        _one("--local-ranks-filter", "LIST", _ranks, "copy only these local ranks with --tee", "own", "tee_ranks"),
        _one("-v, --verbose", "", _switch, "say more; torchrun's own words go to the log"),
        _one("--dry-run", "", _switch, "print the plan, start nothing"),
        _one("--json", "FILE", str, "write the outcome to FILE; --dry-run --json: the plan to stdout"),
    )),
    ("when to give up", (
        _one("--grace", "SECONDS", _seconds, "between TERM and KILL (default: 5 in PBS and after a failure, else 15)"),
        _one("--connect-timeout", "SECONDS", _some_seconds, "for a node to reach the launcher (default: 5)"),
        _one("--hello-timeout", "SECONDS", _some_seconds, "for a node to report, from its start (default: 60)"),
        _one("--heartbeat", "SECONDS", _some_seconds, "between signs of life (default: 2)"),
        _one("--lost-after", "SECONDS", _some_seconds, "of silence make a node lost (default: 15)"),
    )),
)  # fmt: skip
OPTIONS: Final = tuple(option for _, group in GROUPS for option in group)

_RENDEZVOUS: Final = "address, port and id of the rendezvous are chosen anew for each launch; leave it out"

#: Options of torchrun (torch 2.1 to 2.14) that cannot mean here what they mean there, each with the way out.
REFUSED: Final[dict[str, str]] = {
    "--rdzv-endpoint": _RENDEZVOUS,
    "--rdzv-id": _RENDEZVOUS,
    "--rdzv-conf": _RENDEZVOUS,
    "--standalone": "say --scheduler none to run on this machine alone",
    "--node-rank": "start the command once per job; node ranks follow the order of the hosts",
    "--master-addr": "the first node's address that all others reach is found at the start; leave it out",
    "--local-addr": "each node's address is found at the start; leave it out",
    "--start-method": "it has no effect on programs; leave it out",
    "--run-path": "the script runs as `python SCRIPT`; leave it out",
    "--logs-specs": "logs are written by this command; see --log-dir, --tee and --redirects",
    "--duplicate-stdout-filters": "not available; see --tee and --local-ranks-filter",
    "--duplicate-stderr-filters": "not available; see --tee and --local-ranks-filter",
    "--log-line-prefix-template": "not available; lines copied by --tee are marked [rank]",
    "--numa-binding": "not available in this version; leave it out",
    "--signals-to-handle": "TERM, INT and HUP stop the launch, USR1 and USR2 are forwarded; leave it out",
    "--shutdown-timeout": "say --grace SECONDS",
    "--virtual-local-rank": "not available; LOCAL_RANK is the rank on the node",
}


@dataclass(frozen=True)
class Options:
    """The command line as data; None means "not said"."""

    target: str = ""
    arguments: tuple[str, ...] = ()
    hosts: str | None = None
    hostfile: str | None = None
    simulate: tuple[int, int] | None = None
    scheduler: str | None = None
    transport: str | None = None
    ssh_options: tuple[str, ...] = ()
    nnodes: int | None = None
    nproc: int | str | None = None
    device: str = "auto"
    gpus: str | None = None
    omp: int | None = None
    module: bool = False
    no_python: bool = False
    python: str | None = None
    wrap: tuple[str, ...] = ()
    role: str | None = None
    rdzv_backend: str = "static"
    master_template: str | None = None
    master_port: int | None = None
    monitor_interval: float | None = None
    event_log_handler: str | None = None
    max_restarts: int = 0
    log_dir: str | None = None
    tee: int = 0
    redirects: int = 0
    tee_ranks: tuple[int, ...] = ()
    verbose: bool = False
    dry_run: bool = False
    json: str | None = None
    grace: float | None = None
    connect_timeout: float = 5.0
    hello_timeout: float = 60.0
    heartbeat: float = 2.0
    lost_after: float = 15.0
    wants_help: bool = False
    wants_version: bool = False


USAGE: Final = "torchrun_nccl.sh [OPTIONS] SCRIPT [ARGUMENTS]"
_BY_NAME: Final = {name: option for option in OPTIONS for name in option.names}
_KNOWN: Final = (*_BY_NAME, *REFUSED, "--help", "-h", "--version")
_TORCHRUNS: Final = {*(name for name, option in _BY_NAME.items() if option.like), *REFUSED, "--help", "-h"}


def parse(argv: Sequence[str]) -> Options:
    """Options up to SCRIPT, then SCRIPT, then its arguments, untouched.

    >>> parse(["--nproc_per_node=2", "train.py", "--", "-n"]).arguments
    ('--', '-n')
    """
    words = list(argv)
    values: dict[str, Any] = {}
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        _take_option(words, values)
        if values.get("wants_help") or values.get("wants_version"):
            return Options(**values)
    if words and words[0] == "--":
        words.pop(0)
    if not words:
        raise UsageError(f"no SCRIPT given: {USAGE}; see --help")
    if words[0] in ("-", ""):
        raise UsageError(f'SCRIPT is "{words[0]}": give a file, a module with -m, or a program with --no-python')
    options = Options(target=words[0], arguments=tuple(words[1:]), **values)
    _check_together(options)
    return options


def _take_option(words: list[str], values: dict[str, Any]) -> None:
    word = words.pop(0)
    typed, has_value, value = _cut(word)
    name = _resolve(typed)
    if name in ("--help", "-h", "--version"):
        values["wants_version" if name == "--version" else "wants_help"] = True
        return
    if name in REFUSED:
        raise UsageError(f"{typed}: {REFUSED[name]}")
    option = _BY_NAME[name]
    if option.is_switch and has_value:
        raise UsageError(f'{typed} takes no value, but got "{value}"')
    if not option.is_switch and not has_value:
        value = _next_value(option, typed, words, bool(values.get("dry_run")))
    try:
        values[option.field] = option.read(value)
    except ValueError as error:
        raise UsageError(f'{typed}: "{value}" is not {error}') from None


def _cut(word: str) -> tuple[str, bool, str]:
    """The option as typed, whether a value is joined to it, and that value: --tee=3, -t3, -t=3."""
    if word.startswith("--"):
        typed, sign, value = word.partition("=")
        return typed, bool(sign), value
    return word[:2], len(word) > len("-t"), word[2:].removeprefix("=")


def _resolve(typed: str) -> str:
    """The full name of an option typed with underscores or cut short, as torchrun allows both."""
    name = typed.replace("_", "-") if typed.startswith("--") else typed
    if name in _KNOWN:
        return name
    found = [full for full in _KNOWN if full.startswith(name)] if name.startswith("--") and name != "--" else []
    # What torchrun takes for an abbreviation of its own keeps that meaning: --t is --tee, beside our --transport.
    for choice in ([full for full in found if full in _TORCHRUNS], found):
        if len(choice) == 1:
            return choice[0]
    if found:
        raise UsageError(f"option {typed} could be {', '.join(found)}; say which")
    raise UsageError(f"unknown option {typed}; options of this command stand before SCRIPT, see --help")


def _next_value(option: Option, typed: str, words: list[str], is_dry_run: bool) -> str:
    """The word that follows; an option in its place means that the value was forgotten."""
    is_free = option.read is not _words  # words for another program may well begin with -
    if option.field == "json" and (is_dry_run or not words or _is_option(words[0])):
        return ""
    if not words:
        raise UsageError(f"{typed} needs a value: {option.metavar}")
    if is_free and _is_option(words[0]):
        raise UsageError(
            f"{typed} needs a value ({option.metavar}), but {words[0]} follows; "
            f"if that is the value, write {typed}={words[0]}"
        )
    return words.pop(0)


def _is_option(word: str) -> bool:
    return word.startswith("--") or (word[:1] == "-" and word[:2] in _KNOWN)


def _check_together(options: Options) -> None:
    """What each option allows, but not all of them together."""
    if options.json == "" and not options.dry_run:
        raise UsageError("--json needs a FILE to write the outcome to (without FILE it goes with --dry-run)")
    if options.module and options.no_python:
        raise UsageError("-m and --no-python exclude each other: SCRIPT is a module or a program")
    if options.simulate and options.nproc is not None:
        nodes, processes = options.simulate
        raise UsageError(f"--simulate {nodes}x{processes} says how many processes; leave --nproc-per-node out")
    devices = {
        "--device cpu": options.device == "cpu",
        "--device gpu": options.device == "gpu",
        "--nproc-per-node cpu": options.nproc == "cpu",
        "--nproc-per-node gpu": options.nproc == "gpu",
        "--gpus": options.gpus is not None,
    }
    said = [name for name, is_said in devices.items() if is_said]
    if len({name.endswith("cpu") for name in said}) > 1:
        raise UsageError(f"{' and '.join(said)} contradict each other; leave one out")
    if options.lost_after <= 2 * options.heartbeat:
        raise UsageError(
            f"--lost-after {options.lost_after:g} is too short for --heartbeat {options.heartbeat:g}: "
            f"give more than {2 * options.heartbeat:g}"
        )


_COLUMN: Final = 33


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
    for title, group in GROUPS:
        lines += ["", f"{title}:"]
        lines += [_row(f"{', '.join(one.names)} {one.metavar}".rstrip(), one.text) for one in group]
    lines += ["", "others:", _row("-h, --help", "this text"), _row("--version", "the version")]
    lines += ["", "environment:", *(_row(name, text) for name, text in VARIABLES)]
    lines += ["", "signals:", *(_row(names, text) for names, text in SIGNALS)]
    lines += ["", "exit codes:", *(_row(code, text) for code, text in EXIT_CODES)]
    lines += [
        "",
        "Options of torchrun are taken in either spelling, --nproc-per-node or --nproc_per_node, and cut short.",
    ]
    lines += ["Refused, because they cannot mean here what they mean there:"]
    lines += [_row(name, text) for name, text in sorted(REFUSED.items())]
    return "\n".join(lines) + "\n"


def _row(head: str, text: str) -> str:
    return f"  {head:<{_COLUMN - 1}} {text}"


#: Variables that change what this command does.
VARIABLES: Final[tuple[tuple[str, str], ...]] = (
    ("TORCHRUN_NCCL_PYTHON", "Python that runs this command itself (3.9 or newer)"),
    ("MASTER_PORT", "rendezvous port, as --master-port"),
    ("OMP_NUM_THREADS", "kept as it is, unless PBS set it (equal to NCPUS)"),
    ("CUDA_VISIBLE_DEVICES", "changed in the job script: for all nodes if it holds small numbers; also HIP_, ROCR_"),
    ("GLOO_SOCKET_IFNAME", "kept as it is; else the interface of each node's own address; also TP_"),
    ("TORCHRUN_NCCL_KEY", "of this command's own, as TORCHRUN_NCCL_AGENT, TORCHRUN_NCCL_RELAYED: leave unset"),
)
SIGNALS: Final[tuple[tuple[str, str], ...]] = (
    ("TERM, INT, HUP", "stop all ranks: TERM, grace, KILL; a second INT: KILL at once"),
    ("USR1, USR2", "go to all ranks"),
)


def signal_name(number: int) -> str:
    """
    >>> signal_name(9), signal_name(99)
    ('SIGKILL', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
