"""The command on hosts with networks, names and files of their own, started as a user would start it there."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, ssh
from cluster.enter import Found
from cluster.etc import USERS
from cluster.need import SSH
from cluster.pbs_hosts import HostsJob
from cluster.skip import skip_where_missing
from cluster.virtual import wait_until
from conftest import COMMAND, MARK, ROOT

pytest_plugins = ["cluster.fixtures"]

TRAINER = ROOT / "examples" / "pytorch" / "torchrun_example.py"
ORDER = ("node3", "node1", "node2", "node4")  #: neither that of the names nor that of the addresses
ON_FOUR = ("--hosts", ",".join(ORDER), "--device", "cpu", "--nproc-per-node", "2")
ONE_EACH = ("--device", "cpu", "--nproc-per-node", "1")

#: Says who it is, and waits: for the end of its time, or for being stopped.
WAITING = """
import os, socket, sys, time
print("up", os.environ["RANK"], socket.gethostname(), flush=True)
time.sleep(float(sys.argv[1]))
"""
FAILING = """
import os, sys, time
if os.environ["RANK"] == "5":
    time.sleep(0.5)
    print("no more", file=sys.stderr)
    sys.exit(7)
time.sleep(60)
"""
ENDS = 30  #: seconds that a launch may take to its end


class Launch:
    """One call of the command on node1, in a folder of its own that all hosts see."""

    def __init__(self, cluster: Cluster, folder: Path, *words: str, user: str = "user1") -> None:
        self.cluster, self.folder, self.user, self.id = cluster, folder, user, uuid.uuid4().hex
        env = {MARK: self.id, "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            streams = {"stdout": out, "stderr": err}
            self.process = cluster.popen("node1", [str(COMMAND), *words], user=user, cwd=folder, env=env, **streams)

    @property
    def told(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def wait(self, seconds: float = ENDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.told}") from None

    def logs(self) -> dict[str, list[str]]:
        """Sorted lines of each log, by the host in its name."""
        paths = self.folder.glob("output.*.log")
        return {path.name.split(".")[-2]: sorted(path.read_text().splitlines()) for path in paths}

    def wait_up(self, ranks: int) -> None:
        """Until each rank has said so in its log."""

        def is_up() -> bool:
            assert self.process.poll() is None, self.told
            return sum(line.startswith("up ") for lines in self.logs().values() for line in lines) == ranks

        wait_until(is_up, ENDS, f"{ranks} ranks")

    def hosts(self) -> set[str]:
        """Where any of its processes is."""
        return {found.host for found in self.cluster.processes(f"{MARK}={self.id}")}

    def left(self, within: float) -> list[str]:
        """What its user still runs on any host, whoever started it.

        But for sshd's own process of a connection whose other end has vanished: that waits for hours.
        """
        deadline = time.monotonic() + within
        while True:
            found = [one for one in self.cluster.processes(user=self.user) if not is_sshd(one)]
            if not found or time.monotonic() > deadline:
                return [f"{one.host}: {' '.join(one.words)}" for one in found]
            time.sleep(0.05)


def is_sshd(found: Found) -> bool:
    return bool(found.words) and found.words[0].startswith("sshd:")


Begin = Callable[..., Launch]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """begin(cluster, "--hosts", …, script=text) -> Launch on node1; nothing of it outlives the test."""
    clusters: set[Cluster] = set()

    def start(cluster: Cluster, *words: str, script: str = "", user: str = "user1") -> Launch:
        clusters.add(cluster)
        folder = cluster.folder(f"work {uuid.uuid4().hex[:8]}", user)
        (folder / "script.py").write_text(script)
        return Launch(cluster, folder, *words, user=user)

    yield start
    for cluster in clusters:
        cluster.clear()


@contextlib.contextmanager
def fresh(*arguments: Any, **options: Any) -> Iterator[Cluster]:
    """Hosts of its own for a test that breaks them."""
    skip_where_missing(SSH)
    with Cluster(*arguments, **options) as cluster:
        ssh.start(cluster)
        yield cluster


def epochs(hosts: Sequence[str], per_node: int, steps: int) -> dict[str, list[str]]:
    """What two epochs of the trainer leave in the logs."""
    return {
        host: sorted(
            f"[GPU{node * per_node + local}] Epoch {epoch} | Batchsize: 32 | Steps: {steps}"
            for local in range(per_node)
            for epoch in (0, 1)
        )
        for node, host in enumerate(hosts)
    }


def test_trainer_on_four_hosts_by_ssh(begin: Begin, ssh_cluster: Cluster) -> None:
    launch = begin(ssh_cluster, *ON_FOUR, str(TRAINER), "2", "1")
    assert launch.wait(120) == 0, launch.told
    assert launch.logs() == epochs(ORDER, 2, 8)
    assert (launch.folder / "snapshot.pt").stat().st_uid == launch.folder.stat().st_uid
    assert launch.left(0.5) == []


def test_ranks_follow_the_hosts_as_given(begin: Begin, ssh_cluster: Cluster) -> None:
    launch = begin(ssh_cluster, *ON_FOUR, "script.py", "0", script=WAITING)
    assert launch.wait() == 0, launch.told
    assert launch.logs() == {
        host: [f"up {rank} {host}.cluster.test" for rank in (2 * node, 2 * node + 1)] for node, host in enumerate(ORDER)
    }
    assert launch.left(0.5) == []


def test_the_first_failures_code_passes(begin: Begin, ssh_cluster: Cluster) -> None:
    launch = begin(ssh_cluster, *ON_FOUR, "script.py", script=FAILING)
    assert launch.wait() == 7, launch.told
    for words in ("rank 5", "node2", "no more"):
        assert words in launch.told
    assert launch.left(0.5) == []


@pytest.mark.parametrize("name, code", [("TERM", 143), ("INT", 130), ("KILL", -9)])
def test_nothing_is_left_after_the_launchers_end(begin: Begin, ssh_cluster: Cluster, name: str, code: int) -> None:
    launch = begin(ssh_cluster, *ON_FOUR, "script.py", "100", script=WAITING)
    launch.wait_up(8)
    assert launch.hosts() == set(ORDER)
    sent = time.monotonic()
    launch.process.send_signal(signal.Signals[f"SIG{name}"])
    assert launch.wait() == code, launch.told
    assert launch.left(10) == []
    assert time.monotonic() - sent < 10


def test_two_users_launch_on_the_same_hosts_at_once(begin: Begin, ssh_cluster: Cluster) -> None:
    users = ("user1", "user1", "user2")
    launches = [begin(ssh_cluster, *ON_FOUR, "script.py", "3", script=WAITING, user=user) for user in users]
    for launch in launches:
        assert launch.wait(60) == 0, launch.told
        assert [len(lines) for lines in launch.logs().values()] == [2, 2, 2, 2]
        assert {path.stat().st_uid for path in launch.folder.glob("output.*")} == {USERS[launch.user]}
    assert launches[0].left(0.5) + launches[2].left(0.5) == []


def test_hosts_whose_own_name_is_loopback_and_with_networks_that_lead_nowhere(begin: Begin) -> None:
    with fresh(3, loopback={1, 2, 3}, private={1, 3}, interfaces=("eth0", "ens3", "eno1")) as cluster:
        hosts = ("node2", "node1", "node3")
        launch = begin(cluster, "--hosts", ",".join(hosts), *ONE_EACH, str(TRAINER), "2", "1")
        assert launch.wait(90) == 0, launch.told
        assert launch.logs() == epochs(hosts, 1, 22)


def test_a_host_that_answers_slowly(begin: Begin) -> None:
    with fresh(2) as cluster:
        cluster.delay(2, 0.1)
        launch = begin(cluster, "--hosts", "node1,node2", *ONE_EACH, "script.py", "0", script=WAITING)
        assert launch.wait() == 0, launch.told
        assert sorted(launch.logs()) == ["node1", "node2"]


@pytest.mark.parametrize("how, within", [("kill", 5), ("cut", 20)])
def test_a_lost_host_is_named_and_the_others_stop(begin: Begin, how: str, within: float) -> None:
    with fresh(3) as cluster:
        launch = begin(cluster, "--hosts", "node1,node2,node3", *ONE_EACH, "script.py", "100", script=WAITING)
        launch.wait_up(3)
        lost = time.monotonic()
        getattr(cluster, how)("node2")
        assert launch.wait() == 121, launch.told
        assert time.monotonic() - lost < within
        assert "node2" in launch.told
        # A host that is cut off stops by itself, in the same time and a grace.
        assert launch.left(20) == []


def test_a_host_that_is_not_there(begin: Begin, ssh_cluster: Cluster) -> None:
    """Its name is unknown: said at once, and nothing has started elsewhere."""
    launch = begin(ssh_cluster, "--hosts", "node1,node9", *ONE_EACH, "script.py", "0", script=WAITING)
    assert launch.wait(15) in (120, 121), launch.told
    assert "node9" in launch.told
    assert launch.logs() == {}
    assert launch.left(2) == []


def test_trainer_on_four_hosts_by_pbs(pbs_cluster: Cluster) -> None:
    words = f"{COMMAND} --device cpu --nproc-per-node 2 {TRAINER} 2 1"
    script = f'export PATH={Path(sys.executable).parent}:"$PATH"\ncd "$PBS_O_WORKDIR"\n{words}'
    folder = pbs_cluster.folder("work")
    with HostsJob(pbs_cluster, script, hosts=[3, 1, 2, 4], workdir=folder) as job:
        assert job.wait(120) == 0, job.stdout() + job.stderr()
        logs = {path.name.split(".")[-2]: sorted(path.read_text().splitlines()) for path in folder.glob("output.*.log")}
        assert logs == epochs([f"gadi-gpu-v100-000{number}" for number in (3, 1, 2, 4)], 2, 8)
        assert pbs_cluster.left(within=1) == []


@pytest.mark.parametrize("end", ["exit 7", "qdel"])
def test_ends_of_a_pbs_job_leave_nothing_on_any_host(pbs_cluster: Cluster, end: str) -> None:
    folder = pbs_cluster.folder(end.replace(" ", "-"))
    (folder / "script.py").write_text(FAILING if end == "exit 7" else WAITING)
    words = f"{COMMAND} --device cpu --nproc-per-node 2 script.py 60"
    script = f'export PATH={Path(sys.executable).parent}:"$PATH"\ncd "$PBS_O_WORKDIR"\n{words}'
    with HostsJob(pbs_cluster, script, hosts=[3, 1, 2, 4], workdir=folder) as job:
        if end == "qdel":
            wait_until(lambda: sum(p.read_text().count("up ") for p in folder.glob("output.*.log")) == 8, 60, "ranks")
            job.qdel()
        code = job.wait(60)
        assert pbs_cluster.left(within=5) == []
    if end == "exit 7":
        assert code == 7
        assert "first failure: rank 5 on gadi-gpu-v100-0002" in job.stderr()
