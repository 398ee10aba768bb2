"""Virtual hosts at a desk, as root:

    python tests/cluster up 4               node1 to node4, with sshd; --slurm, --grid-engine: with a scheduler
    python tests/cluster shell              an ordinary user's shell on node1; `ssh node2` works there
    python tests/cluster shell node3 id     a command on another
    python tests/cluster down
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster import Cluster, Missing, ssh
from cluster.grid_engine import GridEngine
from cluster.slurm import Slurm
from cluster.virtual import REPOSITORY, wait_until

STATE = Path("/run/virtual-hosts.json")  #: what is up: one cluster at a desk
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start hosts; they stay until `down`")
    up.add_argument("count", type=int, nargs="?", default=4, metavar="N", help="how many (4)")
    up.add_argument("--names", default="node%d", metavar="FORMAT", help="of the hosts (node%%d)")
    up.add_argument("--domain", default="cluster.test", help="of the hosts (cluster.test)")
    up.add_argument("--slurm", action="store_true", help="Slurm, with 4 stand-in GPUs on each")
    up.add_argument("--grid-engine", action="store_true", help="Grid Engine, with 2 slots on each")
    up.set_defaults(command=start)
    shell = commands.add_parser("shell", help="a shell, or a command, on a host")
    shell.add_argument("host", nargs="?", help="name or number (1)", default="1")
    shell.add_argument("words", nargs=argparse.REMAINDER, metavar="WORD", help="the command")
    shell.set_defaults(command=enter)
    commands.add_parser("down", help="end them").set_defaults(command=end)
    options = parser.parse_args(words)
    return int(options.command(options))


def start(options: argparse.Namespace) -> int:
    if holder():
        return complain(f"up already: {sys.argv[0]} down ends them")
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        hold(options, writing)
    os.close(writing)
    said = os.read(reading, 10000).decode()
    print(said, end="", file=sys.stdout if holder() else sys.stderr)
    return 0 if holder() else 1


def hold(options: argparse.Namespace, report: int) -> NoReturn:
    """In the background: the hosts end with this process."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        with Cluster(options.count, names=options.names, domain=options.domain) as cluster:
            ssh.start(cluster)
            if options.slurm:
                Slurm(cluster)
            if options.grid_engine:
                GridEngine(cluster)
            STATE.write_text(json.dumps({"holder": os.getpid(), "hosts": entries(cluster)}))
            os.write(report, "".join(f"{host.address} {host.full_name}\n" for host in cluster.hosts).encode())
            os.close(report)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            signal.sigwait(ENDS)
    except (Missing, RuntimeError, TimeoutError) as error:
        os.write(report, f"{error}\n".encode())
    STATE.unlink(missing_ok=True)
    os._exit(0)


def entries(cluster: Cluster) -> list[dict[str, Any]]:
    """For `shell`, in another process: how each host is entered."""
    path = f"{REPOSITORY}/.venv/bin:{REPOSITORY}/bin:/usr/local/bin:/usr/bin:/bin"
    env = {"PATH": path, "TERM": os.environ.get("TERM", "dumb")}
    return [
        {"names": [str(host.number), host.name, host.full_name], "words": cluster.words(host.number, [], env=env)}
        for host in cluster.hosts
    ]


def holder() -> int:
    """The process that holds the hosts; 0 where none are up."""
    if not STATE.exists():
        return 0
    pid = int(json.loads(STATE.read_text())["holder"])
    is_ours = Path(f"/proc/{pid}/cmdline").exists() and b"cluster" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return pid if is_ours else 0


def enter(options: argparse.Namespace) -> int:
    if not holder():
        return complain(f"no hosts are up: {sys.argv[0]} up")
    for host in json.loads(STATE.read_text())["hosts"]:
        if options.host in host["names"]:
            words = [*host["words"], *(options.words or ["bash"])]
            os.execv(words[0], words)
    return complain(f"no host {options.host}")


def end(options: argparse.Namespace) -> int:
    pid = holder()
    if pid:
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not holder(), 20, "end of the hosts")
    STATE.unlink(missing_ok=True)
    return 0


def complain(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
