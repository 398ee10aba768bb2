"""The command in a PBS job, by the stand-in: hosts, ranks, what reaches the tasks, and every way such a job ends."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import COMMAND, ROOT
from pbs.standin import PbsJob
from test_launch import HOSTILE, STUBBORN, TOGETHER

ONE, TWO = "gadi-gpu-v100-0031.gadi.nci.org.au", "gadi-gpu-v100-0032.gadi.nci.org.au"
GADI = [ONE] * 48 + [TWO] * 48
NCI = {
    "PBS_NCPUS": "96",
    "PBS_NGPUS": "8",
    "PBS_NNODES": "2",
    "PBS_NCI_NCPUS_PER_NODE": "48",
    "PBS_NCI_STORAGE": "gdata/dk92",
    "PROJECT": "dk92",
}
PYTHON = str(Path(sys.executable).with_name("python3"))
TRAINER = ROOT / "examples" / "pytorch" / "torchrun_example.py"

Begin = Callable[..., PbsJob]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """begin("the command's words", script text or none, …) -> a running job whose script calls the command."""
    with contextlib.ExitStack() as jobs:

        def start(
            words: str, worker: str = "", *, before: str = "", runner: str = "", after: str = "", **options: Any
        ) -> PbsJob:
            folder = tmp_path / "my work dir"
            folder.mkdir(exist_ok=True)
            (folder / "train.py").write_text(worker)
            # A venv that is active in the job script alone, as users have it.
            script = (
                f'cd {shlex.quote(str(folder))}\nexport PATH={shlex.quote(str(Path(PYTHON).parent))}:"$PATH"\n{before}\n'
                f"{runner} {shlex.quote(str(COMMAND))} {words} 2>err.txt\ncode=$?\n{after}\nexit $code\n"
            )
            return jobs.enter_context(
                PbsJob(tmp_path, script, **{"nodefile": GADI, "variables": NCI, "ncpus": 48, "workdir": folder, **options})
            )

        yield start


def told(job: PbsJob) -> str:
    return (job.workdir / "err.txt").read_text(errors="replace") + job.stdout() + job.stderr()


def finish(job: PbsJob, timeout: float = 90.0) -> int:
    code = job.wait(timeout)
    assert job.survivors(0.5) == [], told(job)
    return code


def wait_until(job: PbsJob, condition: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told(job)
        time.sleep(0.05)


def doors(job: PbsJob) -> list[tuple[str, int]]:
    """Host and nodefile line of each task the job spawned."""
    return [(spawn.host, spawn.line) for spawn in job.spawns()]


def logs(job: PbsJob) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in sorted(job.workdir.glob("output.*.log"))}


LINE = "import os; print('[GPU' + os.environ['RANK'] + ']')"
EIGHT = {
    "output.train.py.gadi-gpu-v100-0031.log": ["[GPU0]", "[GPU1]", "[GPU2]", "[GPU3]"],
    "output.train.py.gadi-gpu-v100-0032.log": ["[GPU4]", "[GPU5]", "[GPU6]", "[GPU7]"],
}


@pytest.mark.parametrize("words, options, spawned", [
    # Own names for the hosts: the job script's host starts its own part itself.
    ("", {}, [(TWO, 48)]),
    # The host's own name unknown: one door per host, by the index of its first line.
    ("", {"uts": False}, [(ONE, 0), (TWO, 48)]),
    ("--transport pbsdsh", {}, [(ONE, 0), (TWO, 48)]),
    ("--transport pbs_tmrsh", {}, [(ONE, 0), (TWO, 48)]),
    ("", {"nodefile": [ONE, TWO], "uts": False}, [(ONE, 0), (TWO, 1)]),
    # Two chunks on each host.
    ("", {"nodefile": [ONE, ONE, TWO, TWO], "uts": False, "ncpus": 24}, [(ONE, 0), (TWO, 2)]),
    ("", {"nodefile": [ONE, TWO, ONE, TWO], "uts": False, "ncpus": 24}, [(ONE, 0), (TWO, 1)]),
    # Plain OpenPBS, which says nothing of GPUs, so the number is given.
    ("--nproc-per-node 4", {"variables": {}, "uts": False}, [(ONE, 0), (TWO, 48)]),
], ids=str)  # fmt: skip
def test_one_door_per_host_and_ranks_in_the_order_of_the_nodefile(
    begin: Begin, words: str, options: dict[str, Any], spawned: list[tuple[str, int]]
) -> None:
    job = begin(f"--device cpu {words} train.py", LINE, **options)
    assert finish(job) == 0, told(job)
    assert {name: sorted(lines) for name, lines in logs(job).items()} == EIGHT
    # As an ordinary user no host has its own name, so that none is known as this one.
    assert sorted(doors(job)) == (spawned if job.uts or len(spawned) > 1 else [(ONE, 0), *spawned])
    assert f"by {'pbs_tmrsh' if 'tmrsh' in words else 'pbsdsh'}" in told(job)


def test_the_job_scripts_host_may_be_absent_from_the_nodefile(begin: Begin) -> None:
    job = begin("--device cpu train.py", LINE, mother="gadi-login-01.gadi.nci.org.au")
    assert finish(job) == 0, told(job)
    assert {name: sorted(lines) for name, lines in logs(job).items()} == EIGHT
    assert sorted(doors(job)) == [(ONE, 0), (TWO, 48)]


SEEN = """
import json, os, resource, sys
os.umask(umask := os.umask(0))
pairs = [e.split(b"=", 1) for e in open("/proc/self/environ", "rb").read().split(b"\\0") if e]
seen = {k.decode("latin-1"): v.decode("latin-1") for k, v in pairs}
print(json.dumps({"argv": sys.argv, "env": seen, "cwd": os.getcwd(), "umask": umask, "python": sys.executable,
                  "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "hup": __import__("signal").getsignal(1)}))
"""


def test_the_callers_place_reaches_both_hosts_although_tasks_start_bare(begin: Begin) -> None:
    before = """
export MY_FLAG='a  "b" $c' EMPTY= MULTI='l1
l2' NCCL_DEBUG=WARN PYTHONPATH=/nowhere HOSTNAME=$(hostname) PET_NNODES=2 RANK=5
umask 027; ulimit -S -n 555
"""
    hosts = {ONE: {"CUDA_VISIBLE_DEVICES": "GPU-one-a,GPU-one-b"}, TWO: {"CUDA_VISIBLE_DEVICES": "GPU-two-a,GPU-two-b"}}
    arguments = [word for word in HOSTILE if "\udcff" not in word]
    job = begin(
        f"train.py {shlex.join(arguments)}",
        SEEN,
        before=before,
        host_variables=hosts,
        variables={},
        after="env -0 > env.txt",
    )
    assert finish(job) == 0, told(job)
    script = dict(entry.partition("=")[::2] for entry in (job.workdir / "env.txt").read_text().split("\0") if entry)
    for index, (host, lines) in enumerate(zip((ONE, TWO), logs(job).values())):
        for seen in map(json.loads, lines):
            assert seen["argv"] == ["train.py", *arguments]
            assert (seen["cwd"], seen["umask"], seen["files"], seen["python"], seen["hup"]) == (
                str(job.workdir),
                0o027,
                555,
                PYTHON,
                0,
            )
            env = seen["env"]
            # Each node's own, not the first one's.
            assert env["CUDA_VISIBLE_DEVICES"] == hosts[host]["CUDA_VISIBLE_DEVICES"]
            assert env["TMPDIR"] == str(job.tmpdir(host))
            assert env["PBS_NODENUM"] == str(index)
            assert env.get("HOSTNAME") == (host if job.uts else socket.gethostname())
            for name in (
                "MY_FLAG",
                "EMPTY",
                "MULTI",
                "NCCL_DEBUG",
                "PYTHONPATH",
                "PATH",
                "HOME",
                "USER",
                "PBS_JOBID",
                "PBS_O_WORKDIR",
                "PBS_NODEFILE",
            ):
                assert env[name] == script[name], name
            assert "PET_NNODES" not in env
            assert env["WORLD_SIZE"] == "4"


def test_the_trainer_on_two_hosts(begin: Begin) -> None:
    job = begin(f"--device cpu {shlex.quote(str(TRAINER))} 1 1")
    assert finish(job, 120) == 0, told(job)
    for first, lines in zip((0, 4), logs(job).values()):
        steps = sorted(line for line in lines if line.startswith("[GPU") and "Steps" in line)
        assert steps == [f"[GPU{rank}] Epoch 0 | Batchsize: 32 | Steps: 8" for rank in range(first, first + 4)]
    assert (job.workdir / "snapshot.pt").exists()


def test_an_exit_code_of_the_second_node_ends_the_job_with_it(begin: Begin) -> None:
    job = begin(
        "--device cpu train.py",
        TOGETHER + "together()\nif rank == 6: sys.stderr.write('the reason\\n'); sys.exit(7)\ntime.sleep(300)",
    )
    began = time.monotonic()
    assert finish(job, 40) == 7, told(job)
    assert time.monotonic() - began < 25  # eight interpreters on two cores start slowly; the stop itself takes seconds
    for word in ("rank 6", TWO, "the reason", "exited with 7"):
        assert word in told(job)


@pytest.mark.parametrize("uts", [True, False])
@pytest.mark.parametrize("fault", ["exit 7", "kill launcher"])
def test_stubborn_workers_with_hidden_children_leave_nothing(begin: Begin, fault: str, uts: bool) -> None:
    """uts: the first host's door is the launcher's own child; else both come from pbsdsh."""
    if uts and os.geteuid() != 0:
        pytest.skip("a host name of its own needs root")
    worker = STUBBORN + "\nif rank == 3 and sys.argv[1] == 'exit 7': sys.exit(7)\ntime.sleep(300)"
    # Through sh -c: its pid becomes the launcher's.
    job = begin(f"--nproc-per-node 2 train.py '{fault}'", worker, variables={}, uts=uts, after="sleep 8",
                runner="""sh -c 'echo $$ >launcher.pid; exec "$@"' sh""")  # fmt: skip
    wait_until(job, lambda: len(list(job.workdir.glob(".here-*"))) == 4)
    if fault == "kill launcher":
        time.sleep(0.5)
        os.kill(int((job.workdir / "launcher.pid").read_text()), signal.SIGKILL)
    # The job script stays for 8 s more: what is gone by then was not PBS's doing.
    wait_until(
        job,
        lambda: not [p for p in job.survivors() if "301" in p.words or "302" in p.words or "train.py" in p.words],
        12,
    )
    assert finish(job, 60) == (7 if fault == "exit 7" else 137), told(job)


@pytest.mark.parametrize("kill_delay", [2, 10])
@pytest.mark.parametrize("end", ["qdel", "walltime"])
def test_the_end_of_the_job_gives_all_ranks_time_and_leaves_nothing(begin: Begin, end: str, kill_delay: float) -> None:
    """Ranks of both hosts hear TERM once, even where PBS tells only the first host's processes."""
    worker = TOGETHER + (
        "import signal\nheard = []\n"
        "def save(*_): heard.append(1); time.sleep(1); print('saved', len(heard), flush=True); os._exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\ntogether()\nprint('ready', flush=True)\ntime.sleep(100)"
    )
    job = begin(
        "--nproc-per-node 2 train.py",
        worker,
        variables={},
        uts=False,
        kill_delay=kill_delay,
        **({"walltime": 15} if end == "walltime" else {}),
    )
    wait_until(job, lambda: sum(lines.count("ready") for lines in logs(job).values()) == 4)
    if end == "qdel":
        job.qdel()
    job.wait(60)
    assert job.survivors(1.0) == [], told(job)
    for lines in logs(job).values():
        assert lines == ["ready", "ready", "saved 1", "saved 1"], told(job)


def test_workers_that_ignore_term_are_gone_before_pbs_kills(begin: Begin) -> None:
    job = begin("--nproc-per-node 2 train.py", STUBBORN + "time.sleep(300)", variables={}, uts=False)
    wait_until(job, lambda: len(list(job.workdir.glob(".here-*"))) == 4)
    job.qdel()
    wait_until(job, lambda: not job.survivors(), 9.5)
    assert "SIGTERM: stopping all ranks" in told(job)


def test_a_host_that_never_answers_is_named_within_the_deadline(begin: Begin) -> None:
    job = begin("--device cpu --hello-timeout 3 train.py", LINE, lost_hosts=[TWO])
    began = time.monotonic()
    assert finish(job) == 124, told(job)
    assert time.monotonic() - began < 12
    assert TWO in told(job)
    assert not logs(job)


def test_a_missing_log_directory_starts_nothing(begin: Begin) -> None:
    job = begin("--device cpu --log-dir logs train.py", LINE)
    assert finish(job) == 120, told(job)
    assert f"gadi-gpu-v100-[0031-0032].gadi.nci.org.au: log directory {job.workdir}/logs: no such directory" in told(job)
    assert not logs(job)


def test_a_tm_that_counts_hosts_instead_of_lines_is_noticed(begin: Begin) -> None:
    if os.geteuid() != 0:
        pytest.skip("hosts with names of their own need root")
    job = begin("--device cpu --transport pbsdsh train.py", LINE, index_counts_hosts=True, nodefile=[ONE] * 2 + [TWO] * 2)
    assert finish(job) == 120, told(job)
    assert "started this node's part on" in told(job)


def test_a_tm_that_cuts_arguments_at_newlines_does_no_harm(begin: Begin) -> None:
    job = begin(
        "--nproc-per-node 1 train.py 'l1\nl2'",
        "import sys; print(sys.argv[1:])",
        variables={},
        uts=False,
        argument_newline_cut=True,
    )
    assert finish(job) == 0, told(job)
    assert list(logs(job).values()) == [["['l1\\nl2']"]] * 2


def test_two_launches_in_one_job(begin: Begin) -> None:
    worker = (
        TOGETHER.replace(".here-", ".here-{sys.argv[1]}-") + "import time; time.sleep(int(sys.argv[2])); print(sys.argv[1])"
    )
    job = begin(
        "--nproc-per-node 1 train.py b 1 & two=$!; wait $one && wait $two", worker, variables={}, uts=False,
        before=f"{shlex.quote(str(COMMAND))} --nproc-per-node 1 train.py a 3 2>err-a.txt & one=$!",
    )  # fmt: skip
    assert finish(job) == 0, told(job)
    assert sorted("".join(lines) for lines in logs(job).values()) == ["a", "a", "b", "b"]


def test_an_array_job_keeps_its_logs_apart(begin: Begin) -> None:
    job = begin("--nproc-per-node 1 train.py", LINE, variables={}, nodefile=[ONE], job_id="75[3].gadi-pbs")
    assert finish(job) == 0, told(job)
    assert list(logs(job)) == ["output.train.py.gadi-gpu-v100-0031.3.log"]


def test_started_by_pbsdsh_itself_it_refuses(begin: Begin) -> None:
    job = begin(
        "--version",
        after=f"pbsdsh -n 48 -- {shlex.quote(str(COMMAND))} x.py; sleep 1",
    )
    job.wait(30)
    assert "started by pbsdsh (PBS_TASKNUM=" in told(job)


def test_the_loss_of_one_hosts_task_stops_all_and_is_said(begin: Begin) -> None:
    """TERM to a pbsdsh alone: it relays it to its task, whose door has the agent stop its ranks and leave."""
    job = begin("--nproc-per-node 1 train.py", TOGETHER + "together()\ntime.sleep(300)", variables={}, uts=False)
    wait_until(job, lambda: len(list(job.workdir.glob(".here-*"))) == 2)
    (pid,) = [process.pid for process in job.survivors() if "pbsdsh" in str(process.words) and "48" in process.words]
    os.kill(pid, signal.SIGTERM)
    assert finish(job, 30) == 121, told(job)
    assert f"{TWO}: stopping: told to stop by SIGTERM" in told(job)
