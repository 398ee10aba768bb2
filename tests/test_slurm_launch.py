"""The command in jobs of a real Slurm: batch scripts, salloc from a login host, steps, and the ends that jobs come to.

A job that reaches its time limit is not tried: Slurm looks every 30 s, so it would take more than a minute; scancel sends
the same signals to the same processes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from cluster import Cluster
from cluster.enter import Found, HostProcess
from cluster.need import SLURM
from cluster.skip import skip_where_missing
from cluster.slurm import Slurm
from cluster.virtual import wait_until
from conftest import COMMAND
from test_clusters_launch import ENDS, TRAINER, epochs

HOSTS = tuple(f"gadi-gpu-v100-000{number}" for number in range(2, 6))  #: the nodes; 0001 is the login host
DOMAIN = "gadi.nci.org.au"
GADI = {"names": "gadi-gpu-v100-%04d", "domain": DOMAIN}
TRAINS = 90  #: seconds that the trainer may take: eight workers import torch

#: Ends at once, having said who it is and what Slurm gave the step it is in.
REPORT = """
import os, socket, sys
env = os.environ
names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_CPUS_ON_NODE", "MY_VALUE")
print(socket.gethostname(), *(env.get(name) for name in names), sep="|", flush=True)
sys.exit(7 if sys.argv[1:] == [env["RANK"]] else 0)
"""
#: Waits to be stopped, and then has something to save, which takes half a second or as many as its argument says.
WAITING = """
import os, signal, sys, time
def stop(number, frame):
    signal.signal(number, signal.SIG_IGN)
    print(signal.Signals(number).name, os.environ["RANK"], flush=True)
    time.sleep(float((sys.argv[1:] or ["0.5"])[0]))
    print("saved", os.environ["RANK"], flush=True)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
signal.signal(signal.SIGTERM, stop)
print("up", os.environ["RANK"], flush=True)
time.sleep(100)
"""
#: What such a rank leaves in a log that was told to stop and given its time.
STOPPED = ("SIGTERM", "saved", "up")

#: A job that stays after its command, so that what the command leaves is seen before the scheduler clears the hosts.
TEXT = """\
#!/bin/bash
cd '{folder}'
exec >> out 2>&1
export PATH={python}:/usr/local/bin:/usr/bin:/bin
{body}
code=$?
echo $code > code
until [ -e free ]; do sleep 0.05; done
exit $code
"""


class Job:
    """What is the same under every scheduler: a folder that all hosts see, the job's text, and what it leaves."""

    def __init__(self, cluster: Cluster, body: str, worker: str = "") -> None:
        self.cluster = cluster
        self.folder = cluster.folder(f"job {time.monotonic_ns()}")
        (self.folder / "script.py").write_text(worker)
        self.text = TEXT.format(folder=self.folder, python=Path(sys.executable).parent, body=body)

    def file(self, name: str) -> str:
        """Its text so far."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def told(self) -> str:
        return self.file("out")

    def logs(self, folder: str = ".") -> dict[str, list[str]]:
        """Sorted lines of each log, by the last part of its name: the host, or an array's index."""
        paths = (self.folder / folder).glob("output.*.log")
        return {path.name.split(".")[-2]: sorted(path.read_text().splitlines()) for path in paths}

    def wait_up(self, ranks: int) -> None:
        def is_up() -> bool:
            assert not self.file("code"), self.told
            return sum(line.startswith("up ") for lines in self.logs().values() for line in lines) == ranks

        self.until(is_up, ENDS, f"{ranks} ranks")

    def wait(self, seconds: float = ENDS, name: str = "code") -> int:
        """The command's exit code."""
        return int(self.until(lambda: self.file(name).endswith("\n") and self.file(name), seconds, name))

    def until(self, condition: Callable[[], str | bool], seconds: float, what: str) -> str | bool:
        try:
            return wait_until(condition, seconds, what)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.told}") from None

    def left(self, within: float = 1.0) -> list[str]:
        """What its user runs on any host, but for the job's own shell and what waits for that."""
        deadline = time.monotonic() + within
        while True:
            found = [one for one in self.cluster.processes(user="user1") if not self.is_own(one)]
            if not found or time.monotonic() > deadline:
                return [f"{one.host}: {' '.join(one.words)}" for one in found]
            time.sleep(0.05)

    def is_own(self, found: Found) -> bool:
        line = " ".join(found.words)
        return line == "sleep 0.05" or any(name in line for name in ("/job.sh", "/slurm_script", "/job_scripts/"))

    def free(self) -> None:
        """Let the job end; nobody is on the hosts then."""
        (self.folder / "free").touch()
        left = self.cluster.left(within=10)
        assert left == []

    def launcher(self) -> int:
        """Its number out here; there is one."""
        found = [
            one for one in self.cluster.processes(user="user1") if any(word.endswith("/__main__.py") for word in one.words)
        ]
        assert len(found) == 1, found
        return found[0].pid


class SlurmJob(Job):
    """A batch job, or one of salloc on the login host; options as for both."""

    def __init__(self, slurm: Slurm, body: str, *options: str, worker: str = "", salloc: bool = False) -> None:
        super().__init__(slurm.cluster, body, worker)
        self.slurm = slurm
        self.id = ""
        self.process: HostProcess | None = None
        if not salloc:
            self.id = slurm.sbatch(self.text, "--output=/dev/null", *options, cwd=self.folder)
            return
        script = self.folder / "job.sh"
        script.write_text(self.text)
        with (self.folder / "out").open("ab") as out:
            streams = {"stdout": out, "stderr": out, "cwd": self.folder}
            self.process = slurm.salloc(["--quiet", *options], ["bash", str(script)], **streams)

    def end(self, code: int, seconds: float = ENDS) -> None:
        """Its command ends with that code and leaves nothing, and the job passes the code on."""
        assert self.wait(seconds) == code, self.told
        assert self.left() == []
        self.free()
        if self.process:
            assert self.process.wait(10) == code, self.told
        else:
            state = "FAILED" if code else "COMPLETED"
            assert self.slurm.wait(self.id, 20) == (state, code, 0), self.told


@pytest.fixture(scope="module")
def site() -> Iterator[Slurm]:
    """A login host, and nodes with 4, 2, 2 and 2 GPUs."""
    skip_where_missing(SLURM)
    with Cluster(5, **GADI) as cluster:
        yield Slurm(cluster, nodes=(2, 3, 4, 5), gpus=(4, 2, 2, 2))


@pytest.fixture
def slurm(site: Slurm) -> Iterator[Slurm]:
    """The same, empty again after the test, whatever became of it."""
    yield site
    site.scancel("--quiet", "--user=user1")
    site.cluster.clear()
    assert site.cluster.left(within=10) == []


def reports(counts: Mapping[str, int], tasks: str, cpus: int, value: str = "a b") -> dict[str, list[str]]:
    """The lines of REPORT, where each host has so many GPUs and each rank sees all of its host's."""
    lines: dict[str, list[str]] = {}
    for host, count in counts.items():
        devices = ",".join(map(str, range(count)))
        first, world = sum(map(len, lines.values())), sum(counts.values())
        lines[host] = [f"{host}.{DOMAIN}|{first + n}|{world}|{devices}|{tasks}|{cpus}|{value}" for n in range(count)]
    return lines


# ---- the trainer


@pytest.mark.parametrize("salloc", [False, True], ids=["sbatch", "salloc"])
def test_trainer_on_four_nodes(slurm: Slurm, salloc: bool) -> None:
    job = SlurmJob(slurm, f"{COMMAND} {TRAINER} 1 1", "--nodes=4", "--gpus-per-node=2", salloc=salloc)
    job.end(0, TRAINS)
    assert job.logs() == {host: [line for line in lines if "Epoch 0" in line] for host, lines in epochs(HOSTS, 2, 8).items()}
    assert (job.folder / "snapshot.pt").stat().st_uid == job.folder.stat().st_uid
    assert "8 processes (GPU)" in job.told


# ---- what a job may have asked for

STALE = "RANK=0 LOCAL_RANK=0 NODE_RANK=0 WORLD_SIZE=1 MASTER_ADDR=nowhere GROUP_RANK=0 SLURM_PROCID=0 SLURM_NODEID=0"
#: Each of them alone makes a plain srun fail or start another step.
HARMFUL = (
    "SLURM_EXACT=1 SLURM_NTASKS_PER_GPU=1 SLURM_HOSTFILE=/nope SLURM_LABELIO=1 SLURM_NO_KILL=1 SLURM_EXCLUSIVE=1"
    " SLURM_TRES_PER_TASK=cpu=32 SLURM_CPUS_PER_GPU=8 SLURM_EXPORT_ENV=NONE SLURM_WORKING_DIR=/nope"
)


@pytest.mark.parametrize(
    "options, exported, gpus, tasks, cpus",
    [
        # A12, A13: eight tasks a node, and ranks of another launcher in the caller's environment.
        (("--ntasks-per-node=8", "--gpus-per-node=2"), STALE, (2, 2), "1(x2)", 8),
        # A32, A34: a plain step would have one GPU and one CPU.
        (
            ("--ntasks-per-node=2", "--gpus-per-task=1", "--gpu-bind=closest", "--cpus-per-task=2"),
            HARMFUL, (2, 2), "1(x2)", 4,
        ),
        # A35: nothing of the submitting shell, and srun's default would pass nothing on.
        (("--gres=gpu:2", "--export=NONE"), "OTHER=1", (2, 2), "1(x2)", 1),
        # A29: no single step can have them all.
        (("--ntasks=6", "--gpus-per-task=1"), "OTHER=1", (4, 2), "1", 0),
    ],
    ids=["ntasks", "gpus-per-task", "export-none", "uneven"],
)  # fmt: skip
def test_all_gpus_and_cpus_whatever_the_job_asked_for(
    slurm: Slurm, options: tuple[str, ...], exported: str, gpus: tuple[int, ...], tasks: str, cpus: int
) -> None:
    body = f"export MY_VALUE='a b' {exported}; {COMMAND} script.py"
    job = SlurmJob(slurm, body, "--nodes=2", *options, worker=REPORT)
    job.end(0)
    logs = job.logs()
    if not cpus:  # as many as the host has tasks
        logs = {host: [line.replace(f"|1|{len(lines)}|", "|1|0|") for line in lines] for host, lines in logs.items()}
    assert logs == reports(dict(zip(HOSTS, gpus)), tasks, cpus)


# ---- where it is called


def test_a_failed_ranks_code_and_lines_pass_through_the_login_host(slurm: Slurm) -> None:
    body = f"export MY_VALUE='a b'; {COMMAND} --tee 3 script.py 3"
    job = SlurmJob(slurm, body, "--nodes=2", "--gres=gpu:2", worker=REPORT, salloc=True)
    job.end(7)
    expected = reports(dict(zip(HOSTS, (2, 2))), "1(x2)", 1)
    assert job.logs() == expected
    for text in (f"the command runs on {HOSTS[0]}", f"[0]{expected[HOSTS[0]][0]}", f"rank 3 on {HOSTS[1]}"):
        assert text in job.told.replace("[0] ", "[0]")


def test_two_launches_at_once_one_from_inside_a_step(slurm: Slurm) -> None:
    """A33: also beside a step that holds all CPUs and GPUs of the job."""
    body = f"""
        srun sleep 60 & held=$!
        until squeue --steps --noheader --job $SLURM_JOB_ID | grep -q '{chr(92)}.0 '; do sleep 0.1; done
        (mkdir one; cd one; {COMMAND} ../script.py 3; echo $? > code) &
        first=$!
        (mkdir two; cd two; srun -N1 -n1 --overlap {COMMAND} ../script.py; echo $? > code) &
        wait $first $!
        kill $held; wait $held; true"""
    job = SlurmJob(slurm, body, "--nodes=2", "--gpus-per-node=2", worker=REPORT)
    job.end(0)
    assert (job.file("one/code"), job.file("two/code")) == ("7\n", "0\n"), job.told
    for name in ("one", "two"):
        assert job.logs(name) == reports(dict(zip(HOSTS, (2, 2))), "1(x2)", 1, "None")


def test_two_jobs_of_an_array_on_one_host(slurm: Slurm) -> None:
    """Both at once in one folder: each has a log, a GPU and a port of its own."""
    meet = (
        "import os, pathlib, time\npathlib.Path('met', os.environ['SLURM_ARRAY_TASK_ID']).touch()\n"
        "while len(list(pathlib.Path('met').iterdir())) < 2: time.sleep(0.05)\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    body = f"mkdir -p met; {COMMAND} script.py; echo $? > code.$SLURM_ARRAY_TASK_ID"
    options = ("--array=3,4", "--nodes=1", "--gpus-per-node=1", f"--nodelist={HOSTS[1]}")
    job = SlurmJob(slurm, body, *options, worker=meet)
    assert [job.wait(name=f"code.{index}") for index in (3, 4)] == [0, 0], job.told
    assert job.left() == []
    job.free()
    assert job.logs() == {"3": ["0 1 0"], "4": ["0 1 1"]}


def test_a_heterogeneous_job_is_refused() -> None:
    """Slurm has such jobs under another of its schedulers only; of two values in its configuration it takes the last."""
    skip_where_missing(SLURM)
    with Cluster(2, **GADI) as cluster:
        slurm = Slurm(
            cluster, gpus=2, more="SchedulerType=sched/backfill\nSchedulerParameters=batch_sched_delay=0,bf_interval=1"
        )
        job = SlurmJob(slurm, f"{COMMAND} script.py", "--gpus-per-node=2", ":", "--nodes=1", worker=REPORT)
        job.end(120)
        for text in ("heterogeneous", "component 0 is gadi-gpu-v100-0001, component 1 is gadi-gpu-v100-0002", "--hosts"):
            assert text in job.told
        assert job.logs() == {}


# ---- how it ends


def stopped_logs(ranks: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    return {host: sorted(f"{word} {rank}" for word in STOPPED for rank in own) for host, own in ranks.items()}


ON_TWO = {HOSTS[0]: (0, 1), HOSTS[1]: (2, 3)}


def test_scancel(slurm: Slurm) -> None:
    job = SlurmJob(slurm, f"{COMMAND} script.py", "--nodes=2", "--gpus-per-node=2", worker=WAITING)
    job.wait_up(4)
    slurm.scancel(job.id)
    assert slurm.wait(job.id, 15).state == "CANCELLED"
    assert slurm.cluster.left(within=5) == []
    assert job.logs() == stopped_logs(ON_TWO)


@pytest.mark.parametrize("presses, saving", [(1, "0.5"), (2, "60")])
def test_ctrl_c_in_a_terminal(slurm: Slurm, presses: int, saving: str) -> None:
    """The key's signal goes to the terminal's foreground group: to an srun in it, twice would mean KILL."""
    job = Job(slurm.cluster, "", WAITING)
    master, terminal = os.openpty()
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
    salloc = ("salloc", "--nodes=2", "--gpus-per-node=2", "--", str(COMMAND), "script.py", saving)
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with slurm.cluster.popen(1, ["setsid", "--ctty", "--wait", *salloc], env=env, cwd=job.folder, **streams) as process:
        os.close(terminal)
        job.wait_up(4)
        for _ in range(presses):
            os.write(master, b"\x03")
            time.sleep(0.3)
        assert process.wait(15) == 130, os.read(master, 65536).decode()
    os.close(master)
    assert slurm.cluster.left(within=2) == []
    expected = stopped_logs(ON_TWO)
    if presses == 2:
        expected = {host: [line for line in lines if "saved" not in line] for host, lines in expected.items()}
    assert job.logs() == expected


def test_a_killed_launchers_ranks_get_their_grace(slurm: Slurm) -> None:
    job = SlurmJob(slurm, f"{COMMAND} script.py", "--nodes=2", "--gpus-per-node=2", worker=WAITING)
    job.wait_up(4)
    os.kill(job.launcher(), signal.SIGKILL)
    assert job.wait() == 128 + signal.SIGKILL, job.told
    assert job.left(within=10) == []
    assert job.logs() == stopped_logs(ON_TWO)
    job.free()


def test_a_killed_node_is_named_and_the_others_stop() -> None:
    skip_where_missing(SLURM)
    with Cluster(3, **GADI) as cluster:
        first, lost, other = (host.name for host in cluster.hosts)
        job = SlurmJob(Slurm(cluster, gpus=1), f"{COMMAND} script.py", "--nodes=3", "--gpus-per-node=1", worker=WAITING)
        job.wait_up(3)
        killed = time.monotonic()
        cluster.kill(lost)
        assert job.wait(20) == 121, job.told
        # Its connections are closed with it, so that this takes no 15 s of silence.
        assert time.monotonic() - killed < 10
        assert f"{lost} (node 1): lost" in job.told
        assert job.left(within=2) == []
        assert {host: lines for host, lines in job.logs().items() if host != lost} == stopped_logs(
            {first: (0,), other: (2,)}
        )
        job.free()


def test_a_directory_that_only_the_login_host_has(slurm: Slurm) -> None:
    body = f"mkdir /tmp/only; cp script.py /tmp/only; (cd /tmp/only; {COMMAND} script.py)"
    job = SlurmJob(slurm, body, "--nodes=2", "--gpus-per-node=2", worker=REPORT, salloc=True)
    job.end(120)
    assert f"{HOSTS[0]}.{DOMAIN}: directory /tmp/only" in job.told
