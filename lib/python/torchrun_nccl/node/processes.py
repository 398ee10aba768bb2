"""Processes on one node: subreapers, trees, death signals. Linux only, by prctl(2) and /proc.

`subprocess` is not used in a subreaper: its ``waitpid(pid)`` beside our ``waitpid(-1)`` would return 0 for a child
that ended with 7.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

FOLDER_PREFIX = "torchrun_nccl-"

_libc = ctypes.CDLL(None, use_errno=True)

#: Signals of which Python ignores SIGPIPE and SIGXFSZ at its start; a program we start must find them at default.
RESTORED = tuple(
    s for s in range(1, signal.NSIG) if s not in (signal.SIGKILL, signal.SIGSTOP) and not 32 <= s < signal.SIGRTMIN
)


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int, parent: int) -> None:
    """Get signal `number` when `parent` (our parent, by its pid) ends; at once if it has ended already."""
    _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def spawn(
    words: Iterable[str],
    environment: dict[str, str],
    prepare: Callable[[], None],
    ignored: Iterable[int] = (),
) -> int:
    """Fork, run `prepare` in the child, exec `words` (found on the PATH of `environment`); the child's pid.

    A child that cannot run the words says so on its stderr and ends with 127 (not found) or 126, as shells do.
    """
    argv, parent = list(words), os.getpid()
    # A signal for the child that comes before its handlers are reset must not be lost in ours.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, RESTORED)
    try:
        pid = os.fork()
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid:
        return pid
    try:
        prepare()
        signal.set_wakeup_fd(-1)
        for number in RESTORED:
            signal.signal(number, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(argv[0], argv, environment)
    except BaseException as error:
        _fail_exec(argv[0], error)


def _fail_exec(program: str, error: BaseException) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) else repr(error)
    # Of a program looked for on PATH, the last folder tried says nothing.
    path = os.fsdecode(getattr(error, "filename", None) or program) if "/" in program else program
    os.write(2, os.fsencode(f"torchrun_nccl: cannot run {path}: {reason}\n"))
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def set_soft_limits(limits: Iterable[tuple[str, int]]) -> None:
    """The soft limits of another process, as far as the hard ones here allow; by their names in `resource`."""
    for name, soft in limits:
        kind = getattr(resource, name, None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else _lower(soft, hard), hard))


def _lower(soft: int, hard: int) -> int:
    return hard if soft == resource.RLIM_INFINITY else min(soft, hard)


def reap() -> list[tuple[int, int]]:
    """Every child that has ended, as (pid, code); code is negative for a signal. The one wait of a subreaper."""
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            continue  # a child that asked to be traced has stopped, not ended
        ended.append((pid, -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)))
    return ended


def parents() -> dict[int, int]:
    """Parent of every process that is visible and no zombie.

    /proc/PID/stat: ``4711 (a name) of) S 4700 ...``; the name may hold anything, the last bracket ends it.
    """
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in (b"Z", b"X"):
                found[int(name)] = int(parent)
    return found


def descendants(root: int, table: dict[int, int] | None = None) -> list[int]:
    """All living processes below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for pid, parent in (parents() if table is None else table).items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    level = [root]
    while level:
        level = [child for pid in level for child in children.get(pid, ())]
        found += level
    return found


def send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def minds_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, or ignores it.

    /proc/PID/status: ``SigIgn:\t0000000001001000``, ``SigCgt:\t0000000000000200``; bit number-1.
    """
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigIgn:", "SigCgt:"))]
    except OSError:
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)


def kill_tree(root: int, seconds: float = 5.0, note: Callable[[int, int], None] | None = None) -> list[int]:
    """KILL all below `root` until nothing is left, reaping our own children; what is left after `seconds`.

    Several rounds, because a process may fork between our look and our signal. `note(pid, code)` hears of each child reaped.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = descendants(root)
        # The farthest first: should we be killed meanwhile, every starter that is left still sweeps its own part.
        for pid in reversed(left):
            send_signal(pid, signal.SIGKILL)
        for pid, code in reap():
            if note:
                note(pid, code)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


def kill_marked(mark: Iterable[bytes]) -> None:
    """KILL every process of ours whose initial environment holds all of `mark` (entries NAME=value).

    Reaches what no subreaper of the launch sees any more. The mark is torchrun's own run id and node rank, so a
    worker needs no variable more than torchrun gives it.
    """
    wanted = set(mark)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted <= set(file.read().split(b"\0")):
                        send_signal(int(name), signal.SIGKILL)
            except OSError:
                continue


def launch_mark(launch_id: str, node_rank: int) -> tuple[bytes, bytes]:
    """What torchrun itself puts into the environment of each worker of this node of this launch."""
    return f"TORCHELASTIC_RUN_ID={launch_id}".encode(), f"GROUP_RANK={node_rank}".encode()


def launch_folder(launch_id: str, index: int) -> str:
    """The one folder a node's part of a launch may make in node-local scratch."""
    return f"{os.environ.get('TMPDIR') or '/tmp'}/{FOLDER_PREFIX}{launch_id}-{index}"


def remove_launch_folder(launch_id: str, index: int) -> None:
    remove_folder(launch_folder(launch_id, index))


def remove_folder(path: str) -> None:
    """Remove a launch's folder; any other path is left alone."""
    import shutil  # 20 ms, and only ends need it

    if os.path.basename(path).startswith(FOLDER_PREFIX):
        for _ in range(20):  # others, torchrun itself too, may be clearing it at the same moment
            shutil.rmtree(path, ignore_errors=True)
            if not os.path.exists(path):
                return
            time.sleep(0.05)
