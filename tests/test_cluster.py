"""The virtual hosts that other tests stand on: what they are to each other, what they leave, and the schedulers on them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from cluster.enter import Found
from cluster.grid_engine import GridEngine
from cluster.pbs_hosts import HostsJob
from cluster.skip import skip_where_missing
from cluster.slurm import Slurm
from cluster.virtual import wait_until

pytest_plugins = ["cluster.fixtures"]

QUICKLY = ("ssh", "-oBatchMode=yes", "-oConnectTimeout=1")


@pytest.fixture(scope="module")
def odd() -> Iterator[Cluster]:
    """Hosts whose numbers, names and networks differ."""
    skip_where_missing()
    with Cluster(["n3", "n1", "n2"], domain="", interfaces=("eth0", "ib0"), loopback={2}, private={3}) as cluster:
        yield cluster


def said(cluster: Cluster, host: int | str, *words: str, **where: Any) -> str:
    return cluster.run(host, words, check=True, **where).stdout.strip()


# ---- hosts


def test_hosts_have_names_addresses_and_files_of_their_own(ssh_cluster: Cluster) -> None:
    c = ssh_cluster
    assert [said(c, number, "hostname") for number in (1, 4)] == ["node1.cluster.test", "node4.cluster.test"]
    assert said(c, 1, "hostname", "-s") == "node1"
    assert said(c, 2, "getent", "hosts", "node3").split() == ["10.77.0.3", "node3.cluster.test", "node3"]
    assert "10.77.0.2/24" in said(c, 2, "ip", "-br", "address", "show", "eth0")
    assert said(c, 1, "id", "-un") == "user1"
    for folder in ("/tmp", "/dev/shm"):
        said(c, 1, "touch", f"{folder}/mine")
        assert "mine" not in said(c, 2, "ls", folder)
        assert not Path(folder, "mine").exists()
    assert c.run(1, ["getent", "hosts", "nosuch.org"]).returncode == 2


def test_all_hosts_see_one_shared_folder_and_this_repository(ssh_cluster: Cluster) -> None:
    c = ssh_cluster
    folder = c.folder("a b")
    said(c, 1, "sh", "-c", "echo hello > file", cwd=str(folder))
    assert said(c, 4, "cat", f"{folder}/file") == (folder / "file").read_text().strip() == "hello"
    assert said(c, 3, sys.executable, "-c", "import sys; print(sys.prefix)") == sys.prefix
    assert said(c, 3, "test", "-x", str(Path(__file__).parent.parent / "bin" / "torchrun_nccl.sh")) == ""


@pytest.mark.parametrize("below", ["/var/tmp", "/tmp"])
def test_a_repository_where_only_root_may_go(monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    skip_where_missing()
    with tempfile.TemporaryDirectory(dir=below) as closed:
        repository = Path(closed, "my repository")
        repository.mkdir()
        (repository / "file").write_text("hello")
        monkeypatch.setattr("cluster.virtual.REPOSITORY", repository)
        with Cluster(1) as c:
            assert said(c, 1, "cat", f"{repository}/file") == "hello"


def test_ssh_asks_nothing(ssh_cluster: Cluster) -> None:
    assert said(ssh_cluster, 1, *QUICKLY, "node2", "hostname; id -un") == "node2.cluster.test\nuser1"
    assert said(ssh_cluster, 3, *QUICKLY, "node1.cluster.test", "id -un", user="user2") == "user2"
    assert said(ssh_cluster, 4, *QUICKLY, "10.77.0.4", "hostname") == "node4.cluster.test"
    assert ssh_cluster.run(1, [*QUICKLY, "node2", "exit 7"]).returncode == 7


def test_a_cut_host_is_silent_until_healed(ssh_cluster: Cluster) -> None:
    ssh_cluster.cut(3)
    assert "timed out" in ssh_cluster.run(1, [*QUICKLY, "node3", "true"]).stderr
    ssh_cluster.heal(3)
    assert said(ssh_cluster, 1, *QUICKLY, "node3", "hostname") == "node3.cluster.test"


def test_commands_take_signals_and_are_seen_from_outside(ssh_cluster: Cluster) -> None:
    with ssh_cluster.popen("node2", ["sleep", "60"], env={"MARK": "a b"}) as process:
        found = wait_until(lambda: asleep(ssh_cluster, "MARK=a b"), 5, "sleep")
        assert [one.host for one in found] == ["node2"]
        assert ssh_cluster.processes(user="user1") == found
        process.terminate()
        assert process.wait(10) == -15
    assert ssh_cluster.left("MARK=a b", within=1) == []


def test_names_loopback_and_a_network_that_leads_nowhere(odd: Cluster) -> None:
    assert {host.name: host.address for host in odd.hosts} == {"n3": "10.77.0.1", "n1": "10.77.0.2", "n2": "10.77.0.3"}
    assert said(odd, "n1", "hostname") == "n1"
    assert said(odd, "n1", "getent", "hosts", "n1").split()[0] == "127.0.1.1"
    assert said(odd, "n2", "getent", "hosts", "n1").split()[0] == "10.77.0.2"
    interfaces = {line.split()[0].partition("@")[0]: line for line in said(odd, "n2", "ip", "-br", "address").splitlines()}
    assert list(interfaces) == ["lo", "priv0", "eth0"]
    assert "192.168.77.3/24" in interfaces["priv0"]
    assert "ib0" in said(odd, "n1", "ip", "-br", "address")


def test_a_slow_host_answers_late_and_whole() -> None:
    skip_where_missing()
    serve = "import socket; s = socket.create_server(('', 99)).accept()[0]; s.sendall(bytes(3000000))"
    fetch = "import socket; s = socket.create_connection(('node2', 99)); print(len(s.makefile('rb').read()))"
    with Cluster(2) as c, c.popen(2, ["python3", "-c", serve], user="root"):
        c.delay(2, 0.1)
        until_open = f"import time\nwhile True:\n  try:\n    {fetch}; break\n  except ConnectionError: time.sleep(0.05)"
        started = time.monotonic()
        assert said(c, 1, "python3", "-c", until_open) == "3000000"
        assert time.monotonic() - started > 0.4


# ---- life


def test_two_clusters_at_once_do_not_meet(ssh_cluster: Cluster) -> None:
    with Cluster(1) as other, other.popen(1, ["sleep", "60"], env={"MARK": "other"}):
        assert [found.host for found in wait_until(lambda: other.processes("MARK=other"), 5, "sleep")] == ["node1"]
        assert ssh_cluster.processes("MARK=other") == []
        assert other.run(1, ["sh", "-c", "exec 3<>/dev/tcp/10.77.0.2/22"]).returncode != 0
        assert not (ssh_cluster.shared / other.top.name).exists()


def interfaces_and_mounts() -> tuple[set[str], set[str]]:
    links = {name for _, name in socket.if_nameindex()}
    return links, set(Path("/proc/self/mounts").read_text().splitlines())


def of_namespaces(names: set[str]) -> list[str]:
    """Processes anywhere that live in one of these namespaces."""
    found = []
    for kind in ("pid", "net", "mnt"):
        for path in Path("/proc").glob(f"[0-9]*/ns/{kind}"):
            try:
                found += [str(path)] if os.readlink(path) in names else []
            except OSError:
                continue
    return found


@pytest.mark.parametrize("how", ["down", "error", "one host killed before"])
def test_nothing_is_left(how: str) -> None:
    skip_where_missing()
    before = interfaces_and_mounts()
    c = Cluster(2, private={1})
    try:
        with c:
            assert interfaces_and_mounts() == before
            folders = [c.top, c.etc]
            namespaces = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in c.pids.values() for kind in ("pid", "net", "mnt")}
            c.popen(1, ["sh", "-c", "setsid sleep 60 & trap '' TERM HUP; sleep 60"])
            wait_until(lambda: len(c.processes(user="user1")) == 3, 5, "three processes")
            if how == "one host killed before":
                c.kill(1)
                assert c.processes() == []
            if how == "error":
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert how == "error"
    wait_until(lambda: of_namespaces(namespaces) == [], 5, "end of all processes")
    assert interfaces_and_mounts() == before
    assert [path for path in folders if path.exists()] == []


def test_hosts_end_with_the_process_that_holds_them() -> None:
    skip_where_missing()
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\nfrom cluster import Cluster\n"
        "with Cluster(1) as c: print(c.pids[1], c.top, c.etc.parent, flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", program, str(Path(__file__).parent)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid, *folders = process.stdout.readline().split()
        process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 5, "end of the host")
    for folder in folders:  # only files are left, as nobody could remove them
        subprocess.run(["rm", "-r", folder], check=True)


# ---- schedulers


def test_slurm_runs_on_all_nodes_as_the_user_with_gpus(slurm: Slurm) -> None:
    script = 'srun --label sh -c \'echo "$(hostname -s) $(id -un) $CUDA_VISIBLE_DEVICES"\' | sort\nexit 7'
    job = slurm.sbatch(script, "--nodes=4", "--gpus-per-node=2")
    assert slurm.wait(job) == ("FAILED", 7, 0), slurm.log()
    assert slurm.output(job).splitlines() == [f"{n}: gadi-gpu-v100-000{n + 1} user1 0,1" for n in range(4)]


def test_slurm_cancels(slurm: Slurm) -> None:
    job = slurm.sbatch("srun sleep 60", "--nodes=2", env={"MARK": "cancelled"})
    wait_until(lambda: len(asleep(slurm.cluster, "MARK=cancelled")) == 2, 20, "processes of the job")
    slurm.scancel(job)
    assert slurm.wait(job).state == "CANCELLED"
    assert slurm.cluster.left(within=2) == []


def test_salloc(slurm: Slurm) -> None:
    process = slurm.salloc(["--nodes=2"], ["sh", "-c", "srun hostname -s; exit 5"], stdout=subprocess.PIPE)
    assert sorted(process.communicate(timeout=30)[0].split()) == ["gadi-gpu-v100-0001", "gadi-gpu-v100-0002"]
    assert process.returncode == 5


def test_grid_engine_runs_and_reaches_all_hosts(grid_engine: GridEngine) -> None:
    script = (
        "cut -d' ' -f1,2 $PE_HOSTFILE; id -un\n"
        "for host in $(cut -d' ' -f1 $PE_HOSTFILE); do qrsh -inherit $host hostname; done; exit 7"
    )
    job = grid_engine.qsub(script, "-pe", "node", "6")
    assert grid_engine.wait(job) == (7, 0)
    lines = grid_engine.output(job).splitlines()
    hosts = [line.split()[0] for line in lines[:3]]
    assert sorted(hosts) == [host.full_name for host in grid_engine.cluster.hosts]
    assert lines == [*(f"{host} 2" for host in hosts), "user1", *hosts]


def test_grid_engine_deletes(grid_engine: GridEngine) -> None:
    script = "for host in $(cut -d' ' -f1 $PE_HOSTFILE); do qrsh -inherit $host sleep 60 & done; wait"
    job = grid_engine.qsub(script, "-pe", "node", "6")
    wait_until(lambda: len({found.host for found in asleep(grid_engine.cluster)}) == 3, 20, "processes of the job")
    grid_engine.qdel(job)
    assert grid_engine.wait(job).failed == 100
    assert grid_engine.cluster.left(within=5) == []


def asleep(cluster: Cluster, mark: str = "") -> list[Found]:
    return [found for found in cluster.processes(mark, "user1") if found.words and found.words[0].endswith("sleep")]


def test_pbs_standin_runs_on_the_hosts(pbs_cluster: Cluster) -> None:
    script = "id -un; hostname\npbsdsh -- sh -c 'echo \"$(hostname -s) $(id -un)\"'; exit 7"
    with HostsJob(pbs_cluster, script, hosts=[3, 1, 2], slots=1) as job:
        assert job.wait() == 7, job.stderr()
        first, second, *rest = job.stdout().splitlines()
        assert (first, second) == ("user1", "gadi-gpu-v100-0003.gadi.nci.org.au")
        assert sorted(rest) == [f"gadi-gpu-v100-000{number} user1" for number in (1, 2, 3)]
        assert [spawn.host[-17] for spawn in job.spawns()] == ["3", "1", "2"]
    assert pbs_cluster.left() == []
