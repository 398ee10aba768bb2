"""sshd on every host, and keys with which every test user gets from each host to each other with no question asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from . import etc
from .need import SSH, need
from .virtual import Cluster, wait_until

SERVER = """\
Port 22
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
UsePAM no
UseDNS no
MaxStartups 500
MaxSessions 100
PasswordAuthentication no
AcceptEnv LANG LC_*
PrintMotd no
Subsystem sftp internal-sftp
"""
CLIENT = """\
Host *
  SendEnv LANG LC_*
"""


def start(cluster: Cluster) -> None:
    """Returns when each answers."""
    need(SSH)
    folder = etc.replace_folder(cluster.etc / "ssh")
    key = folder / "ssh_host_ed25519_key"
    _make_key(key)
    kind, public = key.with_suffix(".pub").read_text().split()[:2]
    names = (f"{host.full_name},{host.name},{host.address} {kind} {public}\n" for host in cluster.hosts)
    (folder / "ssh_known_hosts").write_text("".join(names))
    (folder / "sshd_config").write_text(SERVER)
    (folder / "ssh_config").write_text(CLIENT)
    _let_in(cluster)
    cluster.run_all(["/usr/sbin/sshd", "-E", "/var/log/sshd.log"], user="root")
    for host in cluster.hosts:
        # It writes the file once it listens.
        wait_until(cluster.path(host.number, "/run/sshd.pid").exists, 10, f"sshd on {host.name}")


def _let_in(cluster: Cluster) -> None:
    """One pair of keys for all users: which of them it is, sshd knows by the account."""
    common = cluster.top / "id_ed25519"
    _make_key(common)
    for user, number in etc.USERS.items():
        folder = cluster.home(user) / ".ssh"
        folder.mkdir(mode=0o700)
        private, public = common.read_bytes(), common.with_suffix(".pub").read_bytes()
        for name, content in (("id_ed25519", private), ("id_ed25519.pub", public), ("authorized_keys", public)):
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)
            os.chown(folder / name, number, number)
        os.chown(folder, number, number)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path], check=True)
