"""What a virtual cluster needs of this machine, and the words for what is missing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable

#: Program: the Debian package that has it.
HOSTS = {"nsenter": "util-linux", "unshare": "util-linux", "setpriv": "util-linux", "ip": "iproute2"}
SSH = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
SLURM = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
GRID_ENGINE = {
    "sge_qmaster": "gridengine-master",
    "sge_execd": "gridengine-exec",
    "qsub": "gridengine-client",
}
FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


#: Before a command: it is PID 1 of a new host, with nothing on it yet.
UNSHARE = ("unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child")


class Missing(Exception):
    """This machine cannot give what was asked for; the text says why."""


def missing(*tables: dict[str, str]) -> str:
    """Why there can be no cluster with these programs; empty where there can."""
    if os.geteuid() != 0:
        return "virtual hosts are for root"
    packages = sorted({package for table in (HOSTS, *tables) for package in _absent(table)})
    return f"not installed: {' '.join(packages)}" if packages else _refusal()


@functools.cache
def _refusal() -> str:
    """In most containers root may not have namespaces."""
    tried = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True, text=True)
    return f"no virtual hosts here: {tried.stderr.strip()}" if tried.returncode else ""


def need(*tables: dict[str, str]) -> None:
    """Raise Missing with the reason."""
    if reason := missing(*tables):
        raise Missing(reason)


def _absent(table: dict[str, str]) -> Iterable[str]:
    return (package for program, package in table.items() if not shutil.which(program, path=FOLDERS))
