"""Slurm on virtual hosts: munge on all, slurmctld on host 1, slurmd on each node; GPUs are stand-in devices.

    with Cluster(4) as c:
        slurm = Slurm(c, gpus=2)
        job = slurm.sbatch("srun hostname", "--nodes=4")
        slurm.wait(job).code, slurm.output(job)
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import etc
from .enter import HostProcess
from .need import SLURM, need
from .virtual import Cluster, wait_until

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}
AuthType=auth/munge
CredType=cred/munge
SlurmUser=slurm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait={kill_wait}
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
MessageTimeout=20
PropagateResourceLimits=NONE
{nodes}
PartitionName=gpuvolta Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
{more}
"""
NODE = "NodeName={name} CPUs={cpus} RealMemory=16000 {gres}State=UNKNOWN"
GRES = "NodeName={name} Name=gpu Type=v100 File={files}"
START = """\
install -d -o munge -g munge /run/munge
install -d -o munge -g munge -m 700 /var/log/munge
install -d -o slurm /var/spool/slurmctld
install -d /var/spool/slurmd
install -o slurm /dev/null /var/log/slurmctld.log
setpriv --reuid=munge --regid=munge --clear-groups munged --key-file=/etc/munge/munge.key --seed-file=/run/munge/seed \\
    --pid-file=/run/munge/munged.pid --log-file=/var/log/munge/munged.log
"""
OVER = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)


class Ended(NamedTuple):
    """state: Slurm's word. code: the script's exit code. signal: the one that ended it, or 0."""

    state: str
    code: int
    signal: int


class Slurm:
    """Started at once; it ends with its cluster.

    nodes: numbers of the hosts that are compute nodes, default all; jobs are submitted on host 1 in any case.
    gpus, cpus: of each node, or one number per node. kill_wait: seconds from TERM to KILL. more: lines for slurm.conf.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        nodes: Sequence[int] = (),
        gpus: int | Sequence[int] = 4,
        cpus: int | Sequence[int] = 8,
        kill_wait: int = 5,
        more: str = "",
    ) -> None:
        need(SLURM)
        self.cluster = cluster
        self.nodes = tuple(nodes) or tuple(host.number for host in cluster.hosts)
        names = [cluster.host(number).name for number in self.nodes]
        counts = _each(gpus, len(names))
        devices = _make_devices(cluster.shared / "dev", max(counts))
        lines = [NODE.format(name=name, cpus=n, gres=f"Gres=gpu:v100:{g} " if g else "")
                 for name, n, g in zip(names, _each(cpus, len(names)), counts)]  # fmt: skip
        gres = [GRES.format(name=name, files=",".join(devices[:g])) for name, g in zip(names, counts) if g]
        folder = etc.replace_folder(cluster.etc / "slurm")
        (folder / "slurm.conf").write_text(CONFIGURATION.format(
            controller=cluster.host(1).name, kill_wait=kill_wait, nodes="\n".join(lines), more=more
        ))  # fmt: skip
        (folder / "gres.conf").write_text("\n".join(["AutoDetect=off", *gres, ""]))
        self._make_key()
        self._start()

    def _make_key(self) -> None:
        """Of our own: this machine's may be missing, and is nobody's business."""
        folder = etc.replace_folder(self.cluster.etc / "munge")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (folder, key):
            subprocess.run(["chown", "munge:munge", path], check=True)

    def _start(self) -> None:
        script = f"set -e\n{START}\ncase $1 in controller) slurmctld ;; esac\ncase $2 in node) slurmd ;; esac\n"
        running = [
            self.cluster.popen(
                host.number,
                ["bash", "-c", script, "sh", "controller" * (host.number == 1), "node" * (host.number in self.nodes)],
                user="root", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for host in self.cluster.hosts
        ]  # fmt: skip
        for host, process in zip(self.cluster.hosts, running):
            out, _ = process.communicate(timeout=60)
            if process.returncode:
                raise RuntimeError(f"Slurm does not start on {host.name}:\n{out}")
        wait_until(self._is_ready, 30, "idle Slurm nodes")

    def _is_ready(self) -> bool:
        return self._ask("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == str(len(self.nodes))

    # -- jobs

    def sbatch(self, script: str, *options: str, **where: Any) -> str:
        """Submit from host 1; the job's number. where: user, env, cwd, see `Cluster.run`."""
        if not script.startswith("#!"):
            script = f"#!/bin/bash\n{script}"
        done = self.cluster.run(1, ["sbatch", "--parsable", *options], stdin=script, **where)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout.strip().partition(";")[0]

    def salloc(self, options: Sequence[str], words: Sequence[str], **more: Any) -> HostProcess:
        """`salloc OPTIONS -- WORDS` on host 1, in the background; see `Cluster.popen`."""
        return self.cluster.popen(1, ["salloc", *options, "--", *words], **more)

    def wait(self, job: str, timeout: float = 90.0) -> Ended:
        """How it ended; all its nodes are free again."""
        return wait_until(lambda: self._ended(job), timeout, f"end of Slurm job {job}")

    def wait_running(self, job: str, timeout: float = 30.0) -> None:
        wait_until(lambda: self.show(job)["JobState"] != "PENDING", timeout, f"start of Slurm job {job}")

    def show(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        text = self._ask("scontrol", "show", "job", "--oneliner", job)
        return dict(re.findall(r"(\w+(?::\w+)?)=(\S*)", text))

    def output(self, job: str) -> str:
        """What the batch script wrote so far."""
        path = Path(self.show(job)["StdOut"])
        return path.read_text(errors="surrogateescape") if path.exists() else ""

    def scancel(self, *words: str) -> None:
        self.cluster.run(1, ["scancel", *words], check=True)

    def log(self) -> str:
        """What the daemons wrote, for a message."""
        paths = [self.cluster.path(1, "/var/log/slurmctld.log")]
        paths += [self.cluster.path(number, "/var/log/slurmd.log") for number in self.nodes if number in self.cluster.pids]
        return "".join(f"-- {path}\n{path.read_text(errors='replace')}" for path in paths)

    def _ended(self, job: str) -> Ended | None:
        fields = self.show(job)
        if fields["JobState"] not in OVER:
            return None
        code, _, number = fields["ExitCode"].partition(":")
        return Ended(fields["JobState"], int(code), int(number))

    def _ask(self, *words: str) -> str:
        return self.cluster.run(1, words).stdout


def _each(value: int | Sequence[int], count: int) -> list[int]:
    return list(itertools.repeat(value, count) if isinstance(value, int) else value)


def _make_devices(folder: Path, count: int) -> list[str]:
    """Twins of /dev/null: Slurm takes no plain files for GPUs."""
    folder.mkdir()
    for number in range(count):
        os.mknod(folder / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    return [str(folder / f"nvidia{number}") for number in range(count)]
