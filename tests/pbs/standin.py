"""A job under PBS on this machine, for tests and for a try at a desk.

    with PbsJob(tmp_path, "pbsdsh -- hostname", nodefile=["n1.site.org"] * 48 + ["n2.site.org"] * 48) as job:
        assert job.wait() == 0
        print(job.stdout(), job.stderr(), job.survivors())

The script runs under a login shell, tasks are started by a small daemon (`mom.py`) that plays the MoM of every host.
Leaving the block kills all of the job, also what PBS would have let live.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pwd
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pbs import mom, proc
from pbs.job import Job

EXEC = Path(__file__).resolve().parent  #: what PBS_EXEC is at a site: the commands are in its bin/
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
POLL = 0.01
END_TIME = 20.0


class Process(NamedTuple):
    pid: int
    words: tuple[str, ...]


class Spawn(NamedTuple):
    """One task that was started: `line` is what pbsdsh calls the logical node."""

    host: str
    line: int
    words: tuple[str, ...]


class PbsJob:
    """One job, started at once.

    tmp_path: several jobs may share it, and then the home directory.
    script: shell text; without `#!` the login shell runs it.
    nodefile: its lines. mother: the host that runs the script, where it is not the first line's (mpiprocs=0 there).
    ncpus: of every chunk, or one number per line.
    variables: what the site adds in the script only (PBS_NGPUS, ...).
    qsub_v: what `qsub -v` carries, to script and tasks.
    host_variables: per host, what a launch hook sets in script and tasks there (CUDA_VISIBLE_DEVICES, ...).
    resources: more for qstat's Resource_List. join: `-j oe`.
    addresses: the hosts' IPs as pbsdsh and pbs_tmrsh take them, default 10.77.0.11, ...
    uts: whether each host's processes see its own host name: "auto" where this user may, True, False;
    short_names: they see it without the domain.
    enter: from a host to the words put before every command there (`nsenter ...`), for hosts with a network of their
    own: they execute the words after them, with the same environment, fork or not. Such a host has its own name.
    kill_delay: seconds from TERM to KILL.

    Faults:
    spawn_delay: seconds that each spawn takes more.
    lost_hosts: pbsdsh to one hangs, pbs_tmrsh fails.
    argument_newline_cut: a TM that drops all after the first newline of each argument.
    index_counts_hosts: a TM whose `-n` counts hosts, not lines.
    """

    def __init__(
        self,
        tmp_path: Path,
        script: str,
        *,
        nodefile: Sequence[str] = ("gadi-gpu-v100-0031.gadi.nci.org.au",),
        mother: str | None = None,
        ncpus: int | Sequence[int] = 4,
        job_id: str | None = None,
        job_name: str = "t1.sh",
        queue: str = "workq",
        walltime: float | None = None,
        kill_delay: float = 10.0,
        variables: Mapping[str, str] | None = None,
        qsub_v: Mapping[str, str] | None = None,
        host_variables: Mapping[str, Mapping[str, str]] | None = None,
        resources: Mapping[str, Any] | None = None,
        join: bool = False,
        home: Path | None = None,
        workdir: Path | None = None,
        addresses: Mapping[str, str] | None = None,
        uts: bool | str = "auto",
        short_names: bool = False,
        enter: Callable[[str], Sequence[str]] | None = None,
        spawn_delay: float = 0.0,
        lost_hosts: Iterable[str] = (),
        argument_newline_cut: bool = False,
        index_counts_hosts: bool = False,
    ) -> None:
        home = home or tmp_path / "home"
        job_id = job_id or f"{random.randrange(10**8, 10**9)}.gadi-pbs"
        mother = mother or nodefile[0]
        hosts = tuple(dict.fromkeys((mother, *nodefile)))
        own_addresses = {host: f"10.77.{number // 256}.{number % 256}" for number, host in enumerate(hosts, 11)}
        self.job = Job(
            root=str(tmp_path / f"pbs.{job_id}"),
            job_id=job_id,
            cookie=secrets.token_hex(16).upper(),
            lines=tuple(nodefile),
            mother=mother,
            ncpus=(ncpus,) * len(nodefile) if isinstance(ncpus, int) else tuple(ncpus),
            user=pwd.getpwuid(os.getuid()).pw_name,
            home=str(home),
            workdir=str(workdir or home / "w"),
            path=f"{EXEC}/bin:{DEFAULT_PATH}",  # PBS has it last; Grid Engine, if installed, has a qdel too
            pbs_exec=str(EXEC),
            name=job_name,
            queue=queue,
            walltime=walltime,
            kill_delay=kill_delay,
            join=join,
            variables=tuple((variables or {}).items()),
            qsub_v=tuple((qsub_v or {}).items()),
            host_variables=tuple((host, tuple(pairs.items())) for host, pairs in (host_variables or {}).items()),
            resources=tuple((resources or {}).items()),
            addresses=tuple({**own_addresses, **(addresses or {})}.items()),
            uts=uts if isinstance(uts, str) else ("yes" if uts else "no"),
            short_names=short_names,
            enter=tuple((host, tuple(enter(host))) for host in hosts) if enter else (),
            spawn_delay=spawn_delay,
            lost=tuple(lost_hosts),
            cut_newlines=argument_newline_cut,
            index_hosts=index_counts_hosts,
        )
        self.status: int | None = None
        self.uts = False
        self._script = script
        self._events = b""

    # -- where things are

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def cookie(self) -> str:
        return self.job.cookie

    @property
    def home(self) -> Path:
        return Path(self.job.home)

    @property
    def workdir(self) -> Path:
        return Path(self.job.workdir)

    @property
    def nodefile(self) -> Path:
        return Path(self.job.nodefile)

    def tmpdir(self, host: str) -> Path:
        return Path(self.job.tmpdir(host))

    # -- life

    def __enter__(self) -> PbsJob:
        self._make_files()
        ours, theirs = socket.socketpair()
        with theirs, Path(self.job.root, "mom.log").open("wb") as log:
            words = [*mom.PYTHON, "mom", str(theirs.fileno())]
            self._daemon = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": DEFAULT_PATH},  # as MoM's own: nothing of the test's
            )
        self._control = ours
        try:
            self._send(self.job.to_json())
            hello = self._event(END_TIME)
            if "failed" in hello:
                raise RuntimeError(hello["failed"])
            self.uts = hello["uts"]
            self._event(END_TIME)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def wait(self, timeout: float = 30.0) -> int:
        """The job's Exit_status: the script's; 256+N if signal N ended the login shell; -29 after walltime."""
        if self.status is None:
            self.status = self._event(timeout)["over"]
        return self.status

    def wait_for(self, text: str, timeout: float = 10.0) -> None:
        """Until the job's output holds this text."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {text!r} within {timeout} s\n{self._told()}")
            time.sleep(POLL)

    def qdel(self) -> None:
        self._send({"op": "delete"})

    def qsig(self, name: str) -> None:
        """`qsig -s NAME`: to all processes on the first host. USR1, USR2, HUP, TERM end the login shell: job over."""
        self._send({"op": "signal", "signal": int(signal.Signals[f"SIG{name}"])})

    # -- what there is to see

    def stdout(self) -> str:
        return Path(self.job.output).read_bytes().decode(errors="surrogateescape")

    def stderr(self) -> str:
        return Path(self.job.error).read_bytes().decode(errors="surrogateescape")

    def spawns(self) -> list[Spawn]:
        """The tasks that were started, in order."""
        *lines, _ = Path(f"{self.job.root}/spawns").read_text().split("\n")
        return [
            Spawn(host, line, tuple(os.fsdecode(word.encode("latin-1")) for word in words))
            for host, line, words in map(json.loads, lines)
        ]

    def survivors(self, within: float = 0.0) -> list[Process]:
        """Living processes of the job, known by the job's cookie in their environment or because MoM inherited them.

        within: wait up to so many seconds for them to end.
        """
        deadline = time.monotonic() + within
        while (found := self._processes()) and time.monotonic() < deadline:
            time.sleep(POLL)
        return found

    # -- inside

    def _processes(self) -> list[Process]:
        pids = proc.marked(f"PBS_JOBCOOKIE={self.job.cookie}")
        if self._daemon.poll() is None:
            pids |= proc.descendants(self._daemon.pid)
        return [Process(pid, proc.words(pid)) for pid in sorted(pids)]

    def _make_files(self) -> None:
        """What server and MoM have made when a job starts, with the modes seen there."""
        for path in (self.job.home, self.job.workdir):
            Path(path).mkdir(parents=True, exist_ok=True)
        Path(self.job.root).mkdir()
        for host in self.job.hosts:
            Path(self.job.tmpdir(host)).mkdir(parents=True, mode=0o700)
        texts = {
            self.job.nodefile: ("".join(f"{line}\n" for line in self.job.lines), 0o644),
            self.job.script: (self._script, 0o700),
            self.job.output: ("", 0o600),
            self.job.error: ("", 0o600),
            f"{self.job.root}/spawns": ("", 0o600),
        }
        for path, (text, mode) in texts.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
            Path(path).chmod(mode)

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the daemon's end is told by _event
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _event(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._events:
            ready, _, _ = select.select([self._control], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"job {self.job_id} is not over after {timeout} s\n{self._told()}")
            data = self._control.recv(1 << 16)
            if not data:
                raise RuntimeError(f"the stand-in has ended\n{Path(f'{self.job.root}/mom.log').read_text()}")
            self._events += data
        line, _, self._events = self._events.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _told(self) -> str:
        return f"-- output\n{self.stdout()}-- error\n{self.stderr()}-- processes\n{self._processes()}"

    def _end(self) -> None:
        """The end of the control socket tells the daemon to kill all that is left and to end."""
        self._control.close()
        try:
            self._daemon.wait(END_TIME)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        # Nothing is found here unless the daemon itself was killed.
        for pid in proc.marked(f"PBS_JOBCOOKIE={self.job.cookie}"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


# ---- the command line


def main(words: list[str]) -> int:
    options = _options(words)
    with tempfile.TemporaryDirectory(prefix="pbs-standin-") as folder, _job(options, Path(folder)) as job:
        status = _follow(job)
        for process in job.survivors():
            print(f"left after the job's end, now killed: {process}", file=sys.stderr)
    print(f"Exit_status {status}", file=sys.stderr)
    return status % 256


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run SCRIPT as a PBS job on pretended hosts, all on this machine. ^C is qdel.",
        epilog="example: standin.py --hosts n1:48,n2:48 -- job.pbs",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--nodefile", type=Path, help="its lines are the job's nodefile")
    where.add_argument("--hosts", help="the same in words: NAME:LINES,NAME:LINES")
    parser.add_argument("--ncpus", type=int, default=4, help="CPUs of every chunk")
    parser.add_argument("--walltime", type=float, metavar="SECONDS", help="the job's limit")
    parser.add_argument("--kill-delay", type=float, default=10.0, metavar="SECONDS", help="from TERM to KILL")
    parser.add_argument("--job-id", help="the job's number and server; made up if not given")
    parser.add_argument("-v", "--variable", action="append", default=[], metavar="NAME=VALUE", help="as qsub -v")
    parser.add_argument("--no-uts", action="store_true", help="all hosts keep this machine's host name")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="the job script")
    return parser.parse_args(words)


def _job(options: argparse.Namespace, folder: Path) -> PbsJob:
    return PbsJob(
        folder,
        options.script.read_text(),
        nodefile=_lines(options),
        job_name=options.script.name,
        job_id=options.job_id,
        ncpus=options.ncpus,
        walltime=options.walltime,
        kill_delay=options.kill_delay,
        qsub_v=dict(pair.split("=", 1) for pair in options.variable),
        home=Path.home(),
        workdir=Path.cwd(),
        uts=False if options.no_uts else "auto",
    )


def _lines(options: argparse.Namespace) -> list[str]:
    if options.nodefile:
        return str(options.nodefile.read_text()).split()
    pairs = (term.partition(":") for term in options.hosts.split(","))
    return list(itertools.chain.from_iterable([name] * int(count or 1) for name, _, count in pairs))


def _follow(job: PbsJob) -> int:
    """Show what the job writes while it runs."""
    with Path(job.job.output).open("rb") as output, Path(job.job.error).open("rb") as error:
        while True:
            try:
                over = None
                with contextlib.suppress(TimeoutError):
                    over = job.wait(0.1)
                for file, stream in ((output, sys.stdout), (error, sys.stderr)):
                    stream.buffer.write(file.read())
                    stream.flush()
                if over is not None:
                    return over
            except KeyboardInterrupt:
                job.qdel()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
