"""The command: reads the world once, decides by pure functions, launches, reports. The only place that exits."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import shutil
import socket
import sys
import traceback
from pathlib import Path
from typing import IO, NoReturn

from . import __version__, commands, launch, options, outcome, plan, relay, report, schedulers
from .allocation import Allocation
from .environment import Pairs
from .errors import LaunchError, Refused, TargetNotFound, TargetNotRunnable, UsageError
from .node import facts
from .options import Options
from .plan import Context, Plan
from .printer import Writer
from .schedulers.steps import started_many_times
from .transports import PBS_FOLDERS, TRANSPORTS, passed

#: Tells the command that a relay started it, whatever its host calls itself.
RELAYED_VARIABLE = "TORCHRUN_NCCL_RELAYED"
DOOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "node", "door.py")


#: What is still to be said at the end may take this long.
TALK_SECONDS = 3.0
_talk = Writer(sys.stderr.buffer)


def main(argv: list[str]) -> NoReturn:
    try:
        code = _run(argv)
    except LaunchError as error:
        for line in str(error).splitlines():
            say(line)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # --help | head
        code = 141
    except Exception:
        for line in traceback.format_exc().splitlines():
            say(line)
        say("this is a fault of torchrun_nccl itself; please report the lines above")
        code = 125
    _talk.finish(TALK_SECONDS)
    os._exit(code)


def say(line: str) -> None:
    """Talk goes to stderr; stdout is for what was asked for. A reader that stalls stalls neither of us."""
    _talk.put(os.fsencode(f"torchrun_nccl: {line}\n"))


def _run(argv: list[str]) -> int:
    asked = options.parse(argv)
    if asked.wants_help:
        _print(options.help_text())
        return 0
    if asked.wants_version:
        _print(f"torchrun_nccl {__version__}\n")
        return 0
    caller = _initial_environment("self")
    env = dict(caller)
    many = started_many_times(env)
    if many and not (asked.hosts or asked.hostfile or asked.simulate or asked.scheduler):
        raise Refused(many)
    _directory()
    _check_target(asked, env)
    allocation = _detect(asked, env)
    made = plan.make_plan(asked, allocation, _context(asked, allocation, caller))
    if asked.dry_run:
        return _print_plan(made, asked)
    if _is_outside(allocation, made, caller):
        return _relay(argv, asked, made, caller)
    result = launch.launch(made, caller, say, sys.stdout.buffer)
    for line in report.summary(made, result):
        say(line)
    if asked.json:
        _write_json(asked.json, outcome.to_json(result, [node.host for node in made.nodes], report.hint_of(result.cause)))
    return result.cause.exit_code


def _is_outside(allocation: Allocation, made: Plan, caller: Pairs) -> bool:
    """A Slurm job's command on a host that is not of the job: salloc from a login node."""
    if RELAYED_VARIABLE in dict(caller):
        return False
    return allocation.scheduler == "slurm" and made.transport == "srun" and not any(node.is_here for node in made.nodes)


def _relay(argv: list[str], asked: Options, made: Plan, caller: Pairs) -> int:
    first = made.nodes[0]
    program = first.words[0]
    inner = os.path.join(os.path.dirname(DOOR), "inner.py")
    call = relay.Call(
        launch_id=made.launch_id,
        host=first.host,
        words=relay.relay_words(program, first.host, sys.executable, inner, made.launch_id, asked.connect_timeout),
        argv=tuple(argv),
        environment=(*caller, (RELAYED_VARIABLE, first.host)),
        passed=passed(TRANSPORTS["srun"], caller, made.job_id),
        directory=made.directory,
        umask=made.umask,
        limits=made.limits,
        options=asked,
    )
    say(f"this host is not of the job; the command runs on {first.host}")
    return relay.relay(call, lambda stream, data: _show(sys.stdout.buffer if stream == 1 else sys.stderr.buffer, data))


def _show(stream: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.write(data)
        stream.flush()


def _detect(asked: Options, env: dict[str, str]) -> Allocation:
    return schedulers.detect(
        env,
        lambda path: Path(path).read_text(errors="surrogateescape"),
        hostname=socket.gethostname(),
        scheduler=asked.scheduler,
        hosts=asked.hosts,
        hostfile=asked.hostfile,
        simulate=asked.simulate,
        run=commands.answer,
    )


def _context(asked: Options, allocation: Allocation, caller: Pairs) -> Context:
    env = dict(caller)
    path = env.get("PATH", os.defpath)
    directory = _directory()
    hostname = socket.gethostname()
    addresses = [address for one in facts.interfaces() for address in one["addresses"]]
    folders = [os.path.expandvars(folder) for folder in PBS_FOLDERS]
    umask = os.umask(0o077)
    os.umask(umask)
    if umask & 0o700:
        raise Refused(f"umask {umask:03o} forbids you your own files; set one such as 022 or 077")
    return Context(
        launch_id=_launch_id(allocation),
        environment=caller,
        scheduler_environment=_scheduler_environment(env),
        directory=_logical(directory, env),
        umask=umask,
        limits=tuple((name, resource.getrlimit(getattr(resource, name))[0]) for name in LIMITS if hasattr(resource, name)),
        hostname=hostname,
        own_names=frozenset(("localhost", hostname, *addresses)),
        runner=sys.executable,
        door=DOOR,
        python=_python(asked, path),
        terminal=_terminal(),
        find=lambda name: shutil.which(name, path=os.pathsep.join((path, *folders))),
    )


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise Refused(f"the working directory is gone: {error.strerror}; change to one that exists") from None


LIMITS = (
    "RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_CPU", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE",
    "RLIMIT_NPROC", "RLIMIT_RSS", "RLIMIT_STACK", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_SIGPENDING",
)  # fmt: skip


def _initial_environment(process: str) -> Pairs:
    """As exec gave it: Python itself adds LC_CTYPE to os.environ where the locale is C."""
    try:
        raw = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return tuple(os.environ.items())
    pairs = (os.fsdecode(entry).partition("=") for entry in raw.split(b"\0"))
    return tuple((name, value) for name, sign, value in pairs if name and sign)


#: Names a job by its scheduler's own id: in the environment of all its processes.
JOB_VARIABLES = ("PBS_JOBID", "SLURM_JOB_ID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")


def _scheduler_environment(env: dict[str, str]) -> Pairs:
    """What the scheduler gave the job on this host: the environment of our oldest ancestor inside the job.

    It tells a device list that the user changed from the scheduler's own.
    """
    job = [(name, env[name]) for name in JOB_VARIABLES if name in env]
    found: Pairs = ()
    pid = os.getpid()
    while job and pid > 1:
        pairs = _initial_environment(str(pid)) if os.access(f"/proc/{pid}/environ", os.R_OK) else ()
        if not set(job) <= set(pairs):
            break
        found = pairs
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def _launch_id(allocation: Allocation) -> str:
    """Unique for each launch, in characters that suit a path and a torchrun id: 75-0.pbs0-1f0c…"""
    job = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in allocation.job_id.replace("]", ""))
    return f"{(job or allocation.scheduler).strip('-.')[:64]}-{secrets.token_hex(6)}"


def _logical(directory: str, env: dict[str, str]) -> str:
    """The shell's name for the working directory where it is the same place: other nodes may mount it by that one."""
    named = env.get("PWD", "")
    try:
        if os.path.isabs(named) and os.path.samestat(os.stat(named), os.stat(directory)):
            return named
    except OSError:
        pass
    return directory


def _python(asked: Options, path: str) -> str:
    """The workers' Python: --python, else the first on PATH; links are kept, a venv is known by its path."""
    wanted = asked.python
    if wanted is not None:
        found = shutil.which(wanted, path=path)
        if found is None:
            raise UsageError(f"--python {wanted}: no such program")
        return os.path.abspath(found)
    for folder in path.split(os.pathsep):
        for name in ("python3", "python"):
            found = shutil.which(os.path.join(folder or ".", name))
            if found:
                return os.path.abspath(found)
    raise Refused("no python3 on PATH for the workers: activate an environment with torch, or give --python PATH")


def _check_target(asked: Options, env: dict[str, str]) -> None:
    target = asked.target
    if asked.module:
        return
    if asked.no_python:
        found = shutil.which(target, path=env.get("PATH", os.defpath))
        if found is None and os.path.exists(target) and os.path.dirname(target):
            raise TargetNotRunnable(f"program {target}: not executable")
        if found is None:
            raise TargetNotFound(f"program {target}: not found")
        return
    if not os.path.exists(target):
        hint = (
            "; other programs than Python scripts need --no-python"
            if os.path.basename(target) == target and shutil.which(target)
            else ""
        )
        raise TargetNotFound(f"script {target}: no such file in {os.getcwd()}{hint}")
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise TargetNotRunnable(f"script {target}: is a directory")
    if not os.access(target, os.R_OK):
        raise TargetNotRunnable(f"script {target}: not readable")
    if not os.path.isfile(target) and not os.path.isdir(target):
        raise TargetNotRunnable(f"script {target}: no regular file; each rank must read all of it")


def _terminal() -> str:
    """The terminal's path where both our stdin and stdout are one."""
    try:
        return os.ttyname(0) if os.isatty(0) and os.isatty(1) else ""
    except OSError:
        return ""


def _print_plan(made: Plan, asked: Options) -> int:
    if asked.json is None:
        _print(plan.to_text(made))
    elif asked.json == "":
        _print(json.dumps(plan.to_json(made), indent=2) + "\n")
    else:
        _write_json(asked.json, plan.to_json(made))
    return 0


def _print(text: str) -> None:
    """A path or an argument may hold bytes that are no text."""
    try:
        sys.stdout.buffer.write(os.fsencode(text))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LaunchError(f"cannot write to standard output: {error.strerror}") from None


def _write_json(path: str, content: object) -> None:
    try:
        Path(path).write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        say(f"--json {path}: {error.strerror}")
