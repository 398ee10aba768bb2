"""The command in jobs of a real Grid Engine, which starts the other nodes by `qrsh -inherit`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from cluster.grid_engine import GridEngine
from conftest import COMMAND
from test_clusters_launch import ENDS, TRAINER, epochs
from test_slurm_launch import TRAINS, WAITING, Job, stopped_logs

pytest_plugins = ["cluster.fixtures"]

ON_CPUS = f"{COMMAND} --device cpu --nproc-per-node 2"
#: The job's hosts in Grid Engine's order, which is its own: it follows the load and not the names.
SAY_HOSTS = "cut -d' ' -f1 $PE_HOSTFILE > hosts"
REPORT = """
import os, socket, sys
env = os.environ
print(env["RANK"], socket.gethostname(), env["TMPDIR"], os.path.isdir(env["TMPDIR"]), env["MY_VALUE"], sep="|", flush=True)
sys.exit(7 if sys.argv[1:] == [env["RANK"]] else 0)
"""


class GridEngineJob(Job):
    def __init__(self, engine: GridEngine, body: str, *options: str, worker: str = "") -> None:
        super().__init__(engine.cluster, body, worker)
        self.engine = engine
        self.id = engine.qsub(self.text, *options, cwd=self.folder)

    def hosts(self) -> list[str]:
        return self.file("hosts").split()

    def shorts(self) -> list[str]:
        return [host.partition(".")[0] for host in self.hosts()]

    def end(self, code: int, seconds: float = ENDS) -> None:
        """Its command ends with that code and leaves nothing, and the job passes the code on."""
        assert self.wait(seconds) == code, self.told
        assert self.left() == []
        self.free()
        assert self.engine.wait(self.id, 20) == (code, 0), self.told


@pytest.fixture
def engine(grid_engine: GridEngine) -> Iterator[GridEngine]:
    """Empty again after the test, whatever became of it."""
    yield grid_engine
    grid_engine.cluster.run(1, ["qdel", "-u", "user1"])
    grid_engine.cluster.clear()
    assert grid_engine.cluster.left(within=10) == []


def test_trainer_on_three_hosts(engine: GridEngine) -> None:
    job = GridEngineJob(engine, f"{SAY_HOSTS}; {ON_CPUS} {TRAINER} 2 1", "-pe", "node", "6")
    job.end(0, TRAINS)
    assert len(job.hosts()) == 3
    assert job.logs() == epochs(job.shorts(), 2, 11)
    assert (job.folder / "snapshot.pt").stat().st_uid == job.folder.stat().st_uid


def test_code_order_and_scratch_folders(engine: GridEngine) -> None:
    body = f"{SAY_HOSTS}; export MY_VALUE='a b'; {ON_CPUS} script.py 3"
    job = GridEngineJob(engine, body, "-pe", "node", "6", worker=REPORT)
    job.end(7)
    assert job.logs() == {
        short: [f"{rank}|{host}|/tmp/{job.id}.1.gpu.q|True|a b" for rank in (2 * node, 2 * node + 1)]
        for node, (short, host) in enumerate(zip(job.shorts(), job.hosts()))
    }
    assert f"rank 3 on {job.hosts()[1]}" in job.told


def test_qdel(engine: GridEngine) -> None:
    job = GridEngineJob(engine, f"{SAY_HOSTS}; {ON_CPUS} script.py", "-pe", "node", "4", worker=WAITING)
    job.wait_up(4)
    engine.qdel(job.id)
    assert engine.wait(job.id, 20).failed == 100
    assert engine.cluster.left(within=10) == []
    # It KILLs at once what is the job's, here and there: whether a rank hears of it before, by the launcher's end, is luck.
    assert sorted(job.logs()) == sorted(job.shorts())


def test_int_to_the_command(engine: GridEngine) -> None:
    job = GridEngineJob(engine, f"{SAY_HOSTS}; {ON_CPUS} script.py", "-pe", "node", "4", worker=WAITING)
    job.wait_up(4)
    os.kill(job.launcher(), signal.SIGINT)
    job.end(128 + signal.SIGINT)
    first, second = job.shorts()
    assert job.logs() == stopped_logs({first: (0, 1), second: (2, 3)})


def test_an_arrays_logs_are_apart(engine: GridEngine) -> None:
    body = f"{ON_CPUS} script.py; echo $? > code.$SGE_TASK_ID"
    worker = "import os; print(os.environ['RANK'], os.environ['SGE_TASK_ID'])"
    job = GridEngineJob(engine, body, "-t", "1-2", worker=worker)
    assert [job.wait(name=f"code.{index}") for index in (1, 2)] == [0, 0], job.told
    assert job.left() == []
    job.free()
    assert job.logs() == {index: [f"{rank} {index}" for rank in (0, 1)] for index in ("1", "2")}
