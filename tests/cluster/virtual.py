"""N virtual hosts on this machine: own network, name, processes and files, and one shared folder.

    with Cluster(4) as c:
        c.run(2, ["hostname"]).stdout            # node2.cluster.test
        with c.popen("node3", ["sleep", "100"]): …
        c.cut(4); c.heal(4); c.kill(4)
        c.folder("work")                         # a new folder that all hosts see, at the same path as out here

Nothing of this machine is changed: no interface, no mount and no name is made outside the namespaces of the hosts.
Leaving the block kills PID 1 of each host, and with it all that ran there; so does the end of this process, whatever it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pbs import proc

from . import enter, etc, network, switch
from .enter import Found, HostProcess
from .need import UNSHARE, need

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PID_1 = (*switch.PYTHON, str(Path(__file__).with_name("host.py")))
POLL = 0.02

Done = subprocess.CompletedProcess[str]

Value = TypeVar("Value")


@dataclass(frozen=True)
class Host:
    """number: from 1, also the last part of its address; name: the short one."""

    number: int
    name: str
    domain: str
    interface: str = "eth0"
    has_private: bool = False
    is_loopback: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.name}.{self.domain}" if self.domain else self.name

    @property
    def address(self) -> str:
        return network.address(self.number)


class Cluster:
    """hosts: how many, or their names in the order of their numbers.

    names: their format, where `hosts` is a number. domain: may be empty; `hostname` says the full name.
    interfaces: names of the hosts' own, in turn. loopback: numbers of hosts whose own name is 127.0.1.1 to themselves.
    private: numbers of hosts with a second network, 192.168.77.0/24, on which nobody answers.
    """

    def __init__(
        self,
        hosts: int | Sequence[str] = 4,
        *,
        names: str = "node%d",
        domain: str = "cluster.test",
        interfaces: Sequence[str] = ("eth0",),
        loopback: Collection[int] = (),
        private: Collection[int] = (),
    ) -> None:
        short = [names % number for number in range(1, hosts + 1)] if isinstance(hosts, int) else list(hosts)
        self.hosts = tuple(
            Host(number, name, domain, interfaces[(number - 1) % len(interfaces)], number in private, number in loopback)
            for number, name in enumerate(short, 1)
        )
        #: Set by `up`: what holds all files of the cluster; what all hosts see as /etc.
        self.top = self.etc = Path()
        self._folders: list[Path] = []
        self.pids: dict[int, int] = {}  # of each host's PID 1, as seen out here; without those that were killed
        self._namespaces: dict[str, str] = {}  # host names by PID namespace, also of those that were killed
        self._holders: dict[int, subprocess.Popen[str]] = {}  # `unshare`, by host
        self._switch: switch.Switch | None = None

    # -- life

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        need()
        self.top = self._new_folder(tempfile.gettempdir())
        # /etc has a thousand small files: copied and removed in memory, that is ten times as fast as on a busy disk.
        self.etc = self._new_folder("/dev/shm") / "etc"
        self.shared.mkdir()
        try:
            etc.make(self.etc, self.shared / "home")
            self._start_hosts()
        except BaseException:
            self.down()
            raise

    def _start_hosts(self) -> None:
        self._switch = switch.Switch(self.top / "switch.log")
        for host in self.hosts:
            self._holders[host.number] = switch.start_held([*UNSHARE, *PID_1], self._log(host))
            self._tell(host, self._plan(host))
        for host in self.hosts:
            pid = self.pids[host.number] = int(self._answer(host))
            self._namespaces[enter.namespace(pid)] = host.name
        wires = [self._wire(host) for host in self.hosts]
        self._switch.plug_in(wires)
        for host, wire in zip(self.hosts, wires):
            self._tell(host, network.host_lines(wire))
        for host in self.hosts:
            self._answer(host)

    def down(self) -> None:
        try:
            self._end_processes()
        finally:
            while self._folders:
                shutil.rmtree(self._folders.pop(), ignore_errors=True)

    def _end_processes(self) -> None:
        # All first, then wait: the end of a host's mounts takes the kernel a moment each.
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        self.pids.clear()
        # `unshare` ends when it has reaped PID 1.
        switch.end_held(list(self._holders.values()))
        if self._switch:
            self._switch.end()

    # -- where things are

    @property
    def shared(self) -> Path:
        """Seen by all hosts, at this path; the users' homes are in it."""
        return self.top / "shared"

    def host(self, which: int | str) -> Host:
        """By number, short name, full name or address."""
        for host in self.hosts:
            if which in (host.number, host.name, host.full_name, host.address):
                return host
        raise KeyError(which)

    def home(self, user: str = "user1") -> Path:
        return self.shared / "home" / user

    def folder(self, name: str, user: str = "user1") -> Path:
        """A new folder of that user's on the shared file system."""
        path = self.shared / name
        path.mkdir()
        os.chown(path, etc.USERS[user], etc.USERS[user])
        return path

    def path(self, which: int | str, path: str) -> Path:
        """A file as that host sees it, for reading from out here: logs of daemons, for one."""
        return Path(f"/proc/{self.pids[self.host(which).number]}/root{path}")

    # -- commands

    def enter(self, which: int | str) -> list[str]:
        """Words that run the words after them on that host, as root, with the same environment."""
        return enter.enter_words(self.pids[self.host(which).number])

    def words(
        self,
        which: int | str,
        words: Sequence[str],
        *,
        user: str = "user1",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> list[str]:
        """`words` on that host as that user, in its home, with a plain login's environment and `env`."""
        home = "/root" if user == "root" else str(self.home(user))
        login = {
            "PATH": enter.ROOT_PATH if user == "root" else enter.PATH,
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
        }
        pairs = {**login, **(env or {})}
        return [*self.enter(which), *enter.user_words(user), *enter.environment_words(pairs, str(cwd or home)), *words]

    def popen(self, which: int | str, words: Sequence[str], **options: Any) -> HostProcess:
        """In the background; options: user, env, cwd, and those of Popen. A signal sent to it is for the command there."""
        where = {name: options.pop(name) for name in ("user", "env", "cwd") if name in options}
        return HostProcess(self.words(which, words, **where), **{"stdin": subprocess.DEVNULL, "cwd": "/", **options})

    def run(
        self,
        which: int | str,
        words: Sequence[str],
        *,
        timeout: float = 60,
        check: bool = False,
        stdin: str = "",
        **where: Any,
    ) -> Done:
        """Its result with both streams. where: user, env, cwd. check: raise where it fails."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(which, words, **pipes, **where) as process:
            return self._finish(which, process, words, stdin, timeout, check)

    def run_all(self, words: Sequence[str], *, on: Iterable[int] = (), timeout: float = 60, **where: Any) -> list[Done]:
        """On all hosts at once, or those `on`; raise where one fails."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        numbers = list(on) or [host.number for host in self.hosts]
        running = [self.popen(number, words, **pipes, **where) for number in numbers]
        return [self._finish(number, one, words, None, timeout, True) for number, one in zip(numbers, running)]

    def _finish(
        self, which: int | str, process: HostProcess, words: Sequence[str], stdin: str | None, timeout: float, check: bool
    ) -> Done:
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if check and process.returncode:
            told = f"{out}{err or ''}"
            raise RuntimeError(f"{self.host(which).name}: {' '.join(words)}: exit code {process.returncode}\n{told}")
        return Done(list(words), process.returncode, out, err or "")

    # -- what runs

    def processes(self, mark: str = "", user: str = "") -> list[Found]:
        """Living processes on all hosts, PID 1s left out, as seen from out here.

        mark: only those with `NAME=value` in their environment. user: only that user's.
        """
        found = []
        for host, pid in enter.processes_in(self._namespaces):
            if pid in self.pids.values():
                continue
            if (not mark or enter.has_mark(pid, mark)) and (not user or enter.owner(pid) == etc.USERS.get(user, 0)):
                found.append(Found(host, pid, proc.words(pid)))
        return found

    def clear(self) -> None:
        """KILL whatever the test users run anywhere."""
        for user in etc.USERS:
            for found in self.processes(user=user):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found.pid, signal.SIGKILL)

    def left(self, mark: str = "", user: str = "user1", within: float = 0.0) -> list[Found]:
        """The same, after at most so many seconds for them to end."""
        deadline = time.monotonic() + within
        while (found := self.processes(mark, user)) and time.monotonic() < deadline:
            time.sleep(POLL)
        return found

    # -- faults

    def cut(self, which: int | str) -> None:
        """Pull the host's plug out of the switch: nothing is refused, nothing arrives."""
        assert self._switch
        self._switch.set_link(self.host(which).number, "down")

    def heal(self, which: int | str) -> None:
        assert self._switch
        self._switch.set_link(self.host(which).number, "up")

    def delay(self, which: int | str, seconds: float) -> None:
        """Every frame from and to that host takes so much longer, until its end."""
        assert self._switch
        self._switch.delay(self._wire(self.host(which)), seconds)

    def kill(self, which: int | str) -> None:
        """The host dies: every process at once, and its network."""
        number = self.host(which).number
        pid = self.pids.pop(number, None)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self._holders[number].wait()

    # -- inside

    def _plan(self, host: Host) -> dict[str, Any]:
        names = {one.address: tuple(dict.fromkeys((one.full_name, one.name))) for one in self.hosts}
        visible = _outermost([self.shared, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)])
        return {
            "hostname": host.full_name,
            "etc": str(self.etc),
            "hosts": etc.hosts_text(host.address, names, host.is_loopback),
            "covered": sorted({str(closed) for path in visible if (closed := _closed_ancestor(path))}),
            "visible": [str(path) for path in visible],
        }

    def _new_folder(self, parent: str) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=parent)).resolve()
        self._folders.append(folder)
        folder.chmod(0o755)
        return folder

    def _wire(self, host: Host) -> network.Wire:
        return network.Wire(host.number, self.pids[host.number], host.interface, host.has_private)

    def _log(self, host: Host) -> Path:
        return self.top / f"{host.number}.log"

    def _tell(self, host: Host, what: Any) -> None:
        stdin = self._holders[host.number].stdin
        assert stdin
        with contextlib.suppress(BrokenPipeError):  # the missing answer is what is told
            stdin.write(json.dumps(what) + "\n")
            stdin.flush()

    def _answer(self, host: Host) -> str:
        return switch.read_answer(self._holders[host.number], host.name, self._log(host))


def wait_until(condition: Callable[[], Value | None], seconds: float, what: str) -> Value:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        time.sleep(POLL)
    return value


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Without those that lie in another of them, and without /usr, which every host has."""
    unique = sorted({path.resolve() for path in paths if not path.resolve().is_relative_to("/usr")})
    return [path for path in unique if not any(path != other and path.is_relative_to(other) for other in unique)]


def _closed_ancestor(path: Path) -> Path | None:
    """The outermost folder above it that an ordinary user may not pass."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            return parent
    return None
