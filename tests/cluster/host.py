"""PID 1 of a virtual host: makes the host's own view of the files, takes its network, reaps, ends with its owner.

    unshare --mount --uts --ipc --net --pid --fork --kill-child python -I -S -B host.py

Line 1 of stdin is what to be (see `Plan`), the answer our number as it is outside; line 2 is for `ip -batch`, the answer
"up". The end of stdin is the owner's end, and with it ours, and with ours that of every process on the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import TypedDict

MS_BIND = 4096  # linux/mount.h
EMPTY = {"/run": "mode=755", "/tmp": "mode=1777", "/dev/shm": "mode=1777", "/var/spool": "mode=755", "/var/log": "mode=755"}
NEEDED = ("/run/lock", "/run/sshd")

_libc = ctypes.CDLL(None, use_errno=True)


class Plan(TypedDict):
    """etc: the folder that is /etc here. hosts: text of /etc/hosts. covered: folders to hide, as nobody else may enter
    them. visible: folders to see at their own path all the same."""

    hostname: str
    etc: str
    hosts: str
    covered: list[str]
    visible: list[str]


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def make_view(plan: Plan) -> None:
    # Held open, for they may lie below what is hidden next.
    held = {path: os.open(path, os.O_PATH) for path in plan["visible"]}
    etc = os.open(plan["etc"], os.O_PATH)
    for folder in plan["covered"]:
        mount("none", folder, "tmpfs", data="mode=755")
    for folder, options in EMPTY.items():
        mount("none", folder, "tmpfs", data=options)
    for folder in NEEDED:
        os.makedirs(folder)
    for path, descriptor in [*held.items(), ("/etc", etc)]:
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, flags=MS_BIND)
        os.close(descriptor)
    for name, text in (("hosts", plan["hosts"]), ("hostname", plan["hostname"] + "\n")):
        with open(f"/run/{name}", "w") as file:
            file.write(text)
        mount(f"/run/{name}", f"/etc/{name}", flags=MS_BIND)
    # Last: until now /proc/self was the one outside.
    mount("proc", "/proc", "proc")


def serve() -> None:
    """Reap whatever lost its parent, until stdin ends."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([0, reading], [], [])
        if 0 in ready:
            return
        os.read(reading, 4096)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def main() -> None:
    os.umask(0o022)
    outside = os.readlink("/proc/self")
    plan: Plan = json.loads(sys.stdin.readline())
    socket.sethostname(plan["hostname"])
    make_view(plan)
    os.write(1, f"{outside}\n".encode())
    lines = json.loads(sys.stdin.readline())
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
    os.write(1, b"up\n")
    serve()


if __name__ == "__main__":
    main()
