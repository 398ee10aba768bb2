"""The /etc of all hosts of one cluster: a copy of this machine's, with ordinary users and without name servers.

A copy, and not files bound over single ones: whoever replaces /etc/passwd out here would take the bound file away.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

#: Test users and their numbers; all have bash and a home in the shared folder.
USERS = {"user1": 7001, "user2": 7002}


def make(etc: Path, homes: Path) -> None:
    subprocess.run(["cp", "-a", "/etc", etc], check=True)
    for name in ("resolv.conf", "hosts", "hostname"):
        (etc / name).unlink(missing_ok=True)  # links to elsewhere, at times
        (etc / name).touch()
    _names_from_files_only(etc / "nsswitch.conf")
    for user, number in USERS.items():
        home = homes / user
        home.mkdir(mode=0o700, parents=True)
        os.chown(home, number, number)
        _append(etc / "passwd", f"{user}:x:{number}:{number}:{user}:{home}:/bin/bash")
        _append(etc / "group", f"{user}:x:{number}:")
        # Not `!`, which sshd takes for a locked account.
        _append(etc / "shadow", f"{user}:*:19000:0:99999:7:::")


def hosts_text(own: str, names: dict[str, tuple[str, ...]], own_is_loopback: bool) -> str:
    """/etc/hosts of the host with the address `own`; names: by address, the full one first.

    own_is_loopback: as Debian's installer writes it.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for address, aliases in names.items():
        lines.append(" ".join(["127.0.1.1" if own_is_loopback and address == own else address, *aliases]))
    return "\n".join(lines) + "\n"


def _append(path: Path, line: str) -> None:
    """In place of any line of the same name."""
    name = line.partition(":")[0] + ":"
    kept = [old for old in path.read_text().splitlines() if not old.startswith(name)]
    mode, owner = path.stat().st_mode, path.stat()
    path.write_text("\n".join([*kept, line]) + "\n")
    path.chmod(mode & 0o7777)
    os.chown(path, owner.st_uid, owner.st_gid)


def _names_from_files_only(path: Path) -> None:
    """An unknown name fails at once, and an address without a name too."""
    text = path.read_text() if path.exists() else ""
    path.write_text(re.sub(r"(?m)^hosts:.*\n?", "", text) + "hosts: files\n")


def replace_folder(path: Path) -> Path:
    """An empty folder in its place."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path
