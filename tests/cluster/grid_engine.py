"""Grid Engine on virtual hosts: qmaster on host 1, execd on all, one queue, parallel environments `mpi` and `node`.

    with Cluster(3) as c:
        engine = GridEngine(c, slots=2)
        job = engine.qsub("qrsh -inherit $(tail -1 $PE_HOSTFILE | cut -d' ' -f1) hostname", "-pe", "node", "6")
        engine.wait(job).code, engine.output(job)
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .need import GRID_ENGINE, need
from .virtual import Cluster, wait_until

ROOT = "/var/lib/gridengine"
CELL = f"{ROOT}/default/common"
SPOOL = "/var/spool/gridengine"
SET_UP = f"""\
set -e
mount --bind "$1" {ROOT}
install -d -o sgeadmin -g sgeadmin /run/gridengine {SPOOL} {SPOOL}/execd {SPOOL}/qmaster {SPOOL}/spooldb
"""
QMASTER = f"""\
set -e
/usr/share/gridengine/scripts/init_cluster {ROOT} default {SPOOL}/spooldb root
chown -R sgeadmin:sgeadmin {SPOOL}
sge_qmaster
"""
SETTINGS = {"SGE_ROOT": ROOT, "SGE_CELL": "default", "SGE_MASTER_PIDFILE": "/run/gridengine/qmaster.pid"}

PARALLEL = """\
pe_name {name}
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule {rule}
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary TRUE
qsort_args NONE
"""
QUEUE = {
    "qname": "gpu.q",
    "hostlist": "@allhosts",
    # This machine's load is not the hosts'; with the default a busy one takes no job.
    "load_thresholds": "NONE",
    "pe_list": "mpi node",
    "shell_start_mode": "unix_behavior",
    "shell": "/bin/bash",
}
SCHEDULER = {
    "schedule_interval": "0:0:1",
    "job_load_adjustments": "NONE",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
}


#: How an ended job is seen: by its line in the accounting file.
GLOBAL = {"reporting_params": "accounting=true reporting=false flush_time=00:00:01 accounting_flush_time=00:00:00"}
#: Fields of that line, see accounting(5).
JOB_NUMBER, FAILED, EXIT_STATUS = 5, 11, 12


class Ended(NamedTuple):
    """code: the script's; failed: Grid Engine's own number, 0 where it is content (100: killed by a signal)."""

    code: int
    failed: int


class GridEngine:
    """Started at once; it ends with its cluster. slots: of each host."""

    def __init__(self, cluster: Cluster, *, slots: int = 2) -> None:
        need(GRID_ENGINE)
        self.cluster = cluster
        self.slots = slots
        self._outputs: dict[str, Path] = {}
        self._make_cell()
        self.cluster.run_all(["bash", "-c", SET_UP, "sh", str(self._folder)], user="root")
        self._root(["bash", "-c", QMASTER])
        wait_until(lambda: self._answers(), 30, "answer of the Grid Engine master")
        self._configure()
        self.cluster.run_all(["sge_execd"], user="root", env=SETTINGS)
        wait_until(self._is_ready, 60, "Grid Engine hosts")

    @property
    def _folder(self) -> Path:
        return self.cluster.shared / "gridengine"

    def _make_cell(self) -> None:
        subprocess.run(["cp", "-a", ROOT, self._folder], check=True)
        common = self._folder / "default" / "common"
        for path in (common, *common.iterdir()):
            if path.is_file():
                path.unlink()
        common.mkdir(parents=True, exist_ok=True)
        bootstrap = Path("/usr/share/gridengine/default-bootstrap").read_text()
        # Hosts are compared by their short names.
        (common / "bootstrap").write_text(re.sub(r"(?m)^(ignore_fqdn\s+)\S+", r"\1true", bootstrap))
        (common / "act_qmaster").write_text(self.cluster.host(1).full_name + "\n")
        subprocess.run(["chown", "-R", "sgeadmin:sgeadmin", self._folder / "default"], check=True)

    def _configure(self) -> None:
        names = [host.full_name for host in self.cluster.hosts]
        # Without it jobs wait for ever: "sgeadmin must be manager".
        self._qconf("-am", "sgeadmin")
        self._qconf("-ah", ",".join(names))
        self._qconf("-as", ",".join(names))
        self._qconf_file("-Ahgrp", f"group_name @allhosts\nhostlist {' '.join(names)}\n")
        self._qconf_file("-Ap", PARALLEL.format(name="mpi", rule="$fill_up"))
        self._qconf_file("-Ap", PARALLEL.format(name="node", rule=self.slots))
        self._qconf_file("-Aq", _changed(self._qconf("-sq"), {**QUEUE, "slots": str(self.slots)}))
        self._qconf_file("-Msconf", _changed(self._qconf("-ssconf"), SCHEDULER))
        self._qconf_file("-Mconf", _changed(self._qconf("-sconf"), GLOBAL), "global")

    def _qconf(self, *words: str) -> str:
        return self._root(["qconf", *words])

    def _qconf_file(self, option: str, text: str, name: str = "qconf") -> None:
        path = self._folder / name
        path.write_text(text)
        self._qconf(option, str(path))

    def _root(self, words: list[str]) -> str:
        return self.cluster.run(1, words, user="root", env=SETTINGS, check=True).stdout

    def _answers(self) -> bool:
        return self.cluster.run(1, ["qconf", "-sh"], user="root", env=SETTINGS).returncode == 0

    def _is_ready(self) -> bool:
        """Each host has said what it is."""
        return self.cluster.run(1, ["qstat", "-f"]).stdout.count(" lx-") == len(self.cluster.hosts)

    # -- jobs

    def qsub(self, script: str, *options: str, user: str = "user1", cwd: str | Path | None = None, **more: Any) -> str:
        """Submit from host 1, to run in `cwd`, default the user's home; the job's number. more: see `Cluster.run`."""
        folder = str(cwd or self.cluster.home(user))
        script = script if script.startswith("#!") else f"#!/bin/bash\n{script}"
        files = ["-N", "job", "-wd", folder, "-j", "yes", "-o", f"{folder}/$JOB_NAME.$JOB_ID.out"]
        done = self.cluster.run(1, ["qsub", "-terse", *files, *options], stdin=script, cwd=folder, user=user, **more)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        job = done.stdout.strip()
        self._outputs[job] = Path(folder, f"job.{job}.out")
        return job

    def wait(self, job: str, timeout: float = 90.0) -> Ended:
        return wait_until(lambda: self._ended(job), timeout, f"end of Grid Engine job {job}")

    def wait_running(self, job: str, timeout: float = 30.0) -> None:
        wait_until(self._outputs[job].exists, timeout, f"start of Grid Engine job {job}")

    def output(self, job: str) -> str:
        """What the script and its `qrsh` calls wrote so far."""
        path = self._outputs[job]
        return path.read_text(errors="surrogateescape") if path.exists() else ""

    def qdel(self, job: str) -> None:
        self.cluster.run(1, ["qdel", job], check=True)

    def _ended(self, job: str) -> Ended | None:
        """From the accounting file, which gets one line, with the slave tasks' added, when all is over."""
        path = self._folder / "default" / "common" / "accounting"
        for line in path.read_text().splitlines() if path.exists() else ():
            fields = line.split(":")
            if not line.startswith("#") and fields[JOB_NUMBER] == job:
                return Ended(int(fields[EXIT_STATUS]), int(fields[FAILED]))
        return None


def _changed(text: str, changes: Mapping[str, str]) -> str:
    """A configuration of `name value` lines with other values; long values go on after a backslash."""
    lines = text.replace("\\\n", " ").splitlines()
    pairs = dict(line.split(None, 1) for line in lines if line.strip() and not line.startswith("#"))
    return "".join(f"{name} {value}\n" for name, value in {**pairs, **changes}.items())
