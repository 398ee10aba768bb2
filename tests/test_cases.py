"""Faults that people met with launchers of this kind, each by its number in the table of README.md beside this file.

Here are those that need more than another file's test holds. A few launches serve many cases: their other nodes are
started by stand-ins for ssh, pbsdsh and srun, which drop the environment as the real ones do. Workers do not import torch.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import COMMAND, MARK, Running, for_plain_paths, job_environment
from test_launch import STUBBORN

HERE = socket.gethostname().partition(".")[0]
#: A02: no word of these may be split, expanded or run.
WORDS = (
    "a b", '{"k": "v w"}', "", "*.py", "$HOME", "it's", "x;touch pwn", "l1\nl2", "--", "-n", "back\\slash", "`touch pwn`",
)  # fmt: skip
SCRIPT = "./sub dir/t.py"
#: Each rank writes down what it is.
REPORT = """
import json, os, sys, time
seen = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "python": sys.executable,
        "cpus": len(os.sched_getaffinity(0))}
with open(f"seen.{os.environ['TORCHELASTIC_RUN_ID']}.{os.environ['RANK']}", "w") as file:
    json.dump(seen, file)
time.sleep(float(os.environ.get("SECONDS_MORE", "0")))
"""
#: A47, A48: what another launcher or an outer torchrun may have left.
STALE = {"RANK": "5", "WORLD_SIZE": "99", "OMPI_COMM_WORLD_SIZE": "8", "PMI_RANK": "3",
         "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_RDZV_ENDPOINT": "x:1"}  # fmt: skip


@dataclass(frozen=True)
class Launched:
    """A launch that is over. ranks: what each rank has seen, by its number. calls: a line for each start of a node."""

    code: int
    said: str
    ranks: tuple[dict[str, Any], ...]
    folder: Path

    @property
    def envs(self) -> list[dict[str, str]]:
        return [rank["env"] for rank in self.ranks]

    def values(self, name: str) -> list[str | None]:
        """A variable on each rank."""
        return [env.get(name) for env in self.envs]

    def file(self, name: str) -> list[str]:
        """Lines of a file that a stand-in wrote."""
        path = self.folder.parent / name
        return path.read_text().splitlines() if path.exists() else []


class Place:
    """A working directory with a bad name, stand-ins for commands, and launches there."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.mark = root, root / "my dir; $HOME", uuid.uuid4().hex
        (self.folder / "sub dir").mkdir(parents=True)
        (self.folder / SCRIPT).write_text(REPORT)
        (root / "bin").mkdir()
        self.running: list[Running] = []

    def command(self, name: str, text: str) -> None:
        """A stand-in; what it starts has of the environment only what it says, and the tests' mark."""
        path = self.root / "bin" / name
        mark = f"{MARK}={self.mark}"
        bare = f"env -i HOME=/ PATH=/usr/bin:/bin {mark}"
        path.write_text(f"#!/bin/bash\nroot={shlex.quote(str(self.root))} mark={mark} bare='{bare}'\n{text}")
        path.chmod(0o755)

    def start(self, *words: str, **env: str) -> Running:
        if "--hosts" in words and for_plain_paths.args[0]:
            pytest.skip(for_plain_paths.kwargs["reason"])
        given = job_environment(**{MARK: self.mark, **env})
        given["PATH"] = f"{self.root / 'bin'}:{given['PATH']}"
        self.running.append(Running([str(COMMAND), *words], self.folder, given))
        return self.running[-1]

    def launch(self, *words: str, seconds: float = 60.0, **env: str) -> Launched:
        run = self.start(*words, **env)
        code = run.wait(seconds)
        paths = self.folder.glob("seen.*")
        ranks = [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: int(path.suffix[1:]))]
        return Launched(code, run.stderr, tuple(ranks), self.folder)

    def clean_up(self) -> None:
        for one in self.running:
            one.clean_up()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path)
    yield one
    one.clean_up()


@pytest.fixture(scope="module")
def new_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Place]]:
    places: list[Place] = []

    def make() -> Place:
        places.append(Place(tmp_path_factory.mktemp("place")))
        return places[-1]

    yield make
    for one in places:
        one.clean_up()


# --- four launches ---

#: `ssh OPTIONS HOST exec WORDS`: a login shell without start-up files, in which some variables cannot be set.
SSH = """
while [ "$2" != exec ]; do shift; done
host=$1; shift
echo "$host" >>"$root/calls"
"""
LOGIN = 'exec $bare bash --noprofile --norc -c "declare -rx SSH_CONNECTION=$host DISPLAY=; $*"\n'
#: Not yet let in: the job has only begun.
AT_FIRST = """
[ "$host" = 127.0.0.9 ] || [ "$(grep -c "^$host" "$root/calls")" -gt 2 ] || { echo "Access denied" >&2; exit 255; }
"""


@pytest.fixture(scope="module")
def by_ssh(new_place: Callable[[], Place]) -> Launched:
    """Two hosts, whose order as text is the other one, with one process and two."""
    place = new_place()
    place.command("ssh", SSH + AT_FIRST + LOGIN)
    place.command("hostname", "echo 127.0.1.1 10.0.0.5 fe80::1\n")
    (place.folder / "sitecustomize.py").write_text("import socket\nsocket.getfqdn = lambda *_: 'ip-1.internal.invalid'\n")
    return place.launch(
        "--hosts", "127.0.0.9:1,127.0.0.10:2", "--device", "cpu", SCRIPT, *WORDS,
        **STALE, SSH_CONNECTION="the caller's", MY_FLAG="a 'b' $c", PYTHONPATH=str(place.folder),
    )  # fmt: skip


#: `pbsdsh -n LINE -- WORDS`: a bare task, and the node file is the first node's alone. The job's cookie is in every task.
PBSDSH = """
line=$2; shift 3
rm -f "$PBS_NODEFILE"
exec $bare PBS_JOBCOOKIE="$PBS_JOBCOOKIE" PBS_NODENUM="$line" PBS_NODEFILE=/no/such CUDA_VISIBLE_DEVICES="GPU-$line" "$@"
"""


@pytest.fixture(scope="module")
def by_pbsdsh(new_place: Callable[[], Place]) -> Launched:
    place = new_place()
    place.command("pbsdsh", PBSDSH)
    nodefile = place.root / "nodefile"
    nodefile.write_text("n2\n" * 4 + "n1\n" * 4)
    return place.launch(
        "--nproc-per-node", "1", SCRIPT, *WORDS,
        **STALE, PBS_JOBID="1234[].srv", PBS_ENVIRONMENT="PBS_BATCH", PBS_NODEFILE=str(nodefile), PBS_JOBCOOKIE="C00C1E",
        PBS_O_WORKDIR="/w", MY_FLAG="a 'b' $c", LD_LIBRARY_PATH="/lib/x", VIRTUAL_ENV="/venv", CONDA_PREFIX="/conda",
        NCCL_DEBUG="WARN", CUDA_VISIBLE_DEVICES="2,3",
    )  # fmt: skip


#: This host is of the job, by a name that is not the one it has for itself.
NODES = ("n9", "127.0.0.1", "n10")
#: `srun -Nn -nn OPTIONS WORDS`: as Slurm does, it hands its environment on, waits for the GPUs of another step without
#: --overlap, and binds to one CPU without --cpu-bind=none.
SRUN = """
printf '%s\\n' "$@" >>"$root/argv"; env >"$root/env"
case "$*" in *--overlap*) ;; *) exec sleep 100 ;; esac
case "$*" in *--cpu-bind=none*) bind= ;; *) bind="taskset -c $(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')" ;; esac
tasks=1
while [ "${1#-}" != "$1" ]; do case $1 in -n*) tasks=${1#-n} ;; esac; shift; done
for ((i = 0; i < tasks; i++)); do
    env "$mark" SLURM_PROCID=$i SLURM_NODEID=$i SLURM_STEP_ID=1 $bind "$@" &
done
wait
"""
#: What a job's script may ask for, which must change nothing of the one step that we start.
ASKED = {
    "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "8(x3)",
    "SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "8", "SLURM_GPU_BIND": "closest",
    "SLURM_CPUS_PER_TASK": "32", "SLURM_TRES_PER_TASK": "cpu=32", "SLURM_CPUS_PER_GPU": "8",
    "SLURM_EXPORT_ENV": "NONE",
}  # fmt: skip


@pytest.fixture(scope="module")
def by_srun(new_place: Callable[[], Place]) -> Launched:
    place = new_place()
    place.command("srun", SRUN)
    place.command("scontrol", "exit 1\n")
    return place.launch(
        "--device", "cpu", "--nproc-per-node", "1", "--hello-timeout", "20", SCRIPT, *WORDS,
        **ASKED, SLURM_JOB_ID="42", SLURM_JOB_NODELIST=",".join(NODES), SLURM_NNODES="3",
        SLURM_PROCID="0", SLURM_NODEID="0", RANK="0", MYVAR="1",
    )  # fmt: skip


JOBS = ("1001.srv", "11001[5].srv", "11001[6].srv")


@pytest.fixture(scope="module")
def jobs(new_place: Callable[[], Place]) -> list[Launched]:
    """Three jobs at once on this host, of which the first ends first."""
    place = new_place()
    (place.root / "nodefile").write_text(f"{HERE}\n")
    fixed = {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": str(place.root / "nodefile")}
    words = ("--device", "cpu", SCRIPT)
    runs = [place.start(*words, **fixed, PBS_JOBID=job, SECONDS_MORE=str(3 * n)) for n, job in enumerate(JOBS)]
    codes = [run.wait() for run in runs]
    seen = [json.loads(path.read_text()) for path in place.folder.glob("seen.*")]
    return [
        Launched(code, run.stderr, tuple(one for one in seen if one["env"]["PBS_JOBID"] == job), place.folder)
        for code, run, job in zip(codes, runs, JOBS)
    ]


# --- the cases ---


def test_the_table_names_tests_that_exist() -> None:
    """And each test here is in it."""
    folder = Path(__file__).parent
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (folder / "README.md").read_text())
    assert named
    for file, test in named:
        assert re.search(rf"^def {test}\(", (folder / file).read_text(), re.M), test
    own = re.findall(r"^def (test_a\w+)\(", Path(__file__).read_text(), re.M)
    assert set(own) <= {test for file, test in named if file == "test_cases.py"}


@pytest.mark.parametrize("how, ranks", [("by_ssh", 3), ("by_pbsdsh", 2), ("by_srun", 3)])
def test_a02_words_arrive_as_typed_on_every_node(request: pytest.FixtureRequest, how: str, ranks: int) -> None:
    launched: Launched = request.getfixturevalue(how)
    assert launched.code == 0, launched.said
    assert [rank["argv"] for rank in launched.ranks] == [list(WORDS)] * ranks
    assert not list(launched.folder.rglob("pwn"))


def test_a05_rank_0_is_on_the_first_host_of_the_list(by_ssh: Launched) -> None:
    """The stand-in says in SSH_CONNECTION, which is a host's own, for which host it was called."""
    assert by_ssh.values("SSH_CONNECTION") == ["127.0.0.9", "127.0.0.10", "127.0.0.10"]
    assert by_ssh.values("GROUP_RANK") == ["0", "1", "1"]
    assert by_ssh.values("LOCAL_RANK") == ["0", "0", "1"]


def test_a07_jobs_on_one_host_share_no_port_and_outlive_each_other(jobs: list[Launched]) -> None:
    assert [job.code for job in jobs] == [0, 0, 0], [job.said for job in jobs]
    assert len({job.envs[0]["MASTER_PORT"] for job in jobs}) == 3


def test_a08_two_launches_of_one_job_have_ids_of_their_own(
    place: Place, by_ssh: Launched, by_pbsdsh: Launched, by_srun: Launched
) -> None:
    ids = []
    for _ in range(2):
        run = place.start("--scheduler", "none", "--dry-run", "--json", SCRIPT, PBS_JOBID="1001.srv")
        assert run.wait() == 0, run.stderr
        ids.append(json.loads(run.stdout)["launch_id"])
    assert ids[0] != ids[1]
    for launched in (by_ssh, by_pbsdsh, by_srun):
        assert len(set(launched.values("TORCHELASTIC_RUN_ID"))) == 1


def test_a09_members_of_an_array_have_ids_that_are_names(jobs: list[Launched]) -> None:
    envs = [job.envs[0] for job in jobs]
    assert len({env["TORCHELASTIC_RUN_ID"] for env in envs}) == 3
    for env in envs:
        # In the node's scratch torchrun has a folder of its own.
        for part in (env["TORCHELASTIC_RUN_ID"], *Path(env["TORCHELASTIC_ERROR_FILE"]).parts[1:]):
            assert re.fullmatch("[A-Za-z0-9._-]+", part)
    assert sorted(path.name for path in jobs[0].folder.glob("output.*")) == [
        f"output.t.py.{HERE}{member}.log" for member in (".5", ".6", "")
    ]


def test_a12_one_task_on_each_node_whatever_the_job_asked_for(by_srun: Launched) -> None:
    assert by_srun.code == 0, by_srun.said
    argv = by_srun.file("argv")
    assert argv[:4] == ["-N3", "-n3", "--ntasks-per-node=1", f"--nodelist={','.join(NODES)}"]
    assert by_srun.values("WORLD_SIZE") == ["3"] * 3


def test_a13_a_node_is_told_its_place_there_not_here(by_srun: Launched) -> None:
    assert by_srun.values("SLURM_PROCID") == by_srun.values("GROUP_RANK") == by_srun.values("RANK") == ["0", "1", "2"]
    logs = sorted(path.name for path in by_srun.folder.glob("output.*"))
    assert logs == sorted(f"output.t.py.{host}.log" for host in NODES)


def test_a15_the_launchers_death_ends_workers_that_ignore_term_on_other_hosts(place: Place) -> None:
    """As behind a real ssh no node's process is a child of the launcher's: the end of the channel is all that it sees."""
    (place.folder / "stubborn.py").write_text(STUBBORN + "time.sleep(300)")
    place.command("ssh", SSH + 'exec setsid --fork --wait $bare bash -c "$*"\n')
    run = place.start("--hosts", "n1:1,n2:1", "--device", "cpu", "--grace", "2", "stubborn.py")
    run.wait_for(lambda: len(list(place.folder.glob(".here-*"))) == 2)
    run.wait_for(lambda: sum("sleep 30" in line for _, _, line in run.processes()) >= 4)
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    assert run.left(10.0) == []


def test_a16_a_bare_task_gets_the_callers_environment(by_pbsdsh: Launched) -> None:
    assert by_pbsdsh.code == 0, by_pbsdsh.said
    python = str(Path(sys.executable).with_name("python3"))
    for rank in by_pbsdsh.ranks:
        env = rank["env"]
        assert (rank["python"], rank["cwd"]) == (python, str(by_pbsdsh.folder))
        assert (env["MY_FLAG"], env["LD_LIBRARY_PATH"], env["NCCL_DEBUG"]) == ("a 'b' $c", "/lib/x", "WARN")
        assert (env["VIRTUAL_ENV"], env["CONDA_PREFIX"]) == ("/venv", "/conda")
        assert env["PATH"].startswith(f"{by_pbsdsh.folder.parent}/bin:")


def test_a18_pbsdsh_is_given_the_first_line_of_each_host(by_pbsdsh: Launched) -> None:
    assert by_pbsdsh.values("PBS_NODENUM") == ["0", "4"]
    assert sorted(path.name for path in by_pbsdsh.folder.glob("output.*")) == ["output.t.py.n1.log", "output.t.py.n2.log"]


def test_a24_nodes_without_a_list_are_an_error_at_once(place: Place) -> None:
    """Never this host alone: the others would wait, or train by themselves."""
    began = time.monotonic()
    launched = place.launch("--device", "cpu", SCRIPT, SLURM_JOB_ID="42", SLURM_NNODES="2", SLURM_JOB_NODELIST="")
    assert (launched.code, launched.ranks) == (120, ())
    assert time.monotonic() - began < 5
    assert "neither SLURM_JOB_NODELIST nor SLURM_NODELIST names a host here" in launched.said


def test_a25_no_loopback_address_and_no_words_of_hostname_become_the_master(by_ssh: Launched) -> None:
    """The first host's name is a loopback address, and the command `hostname` would answer three."""
    assert by_ssh.code == 0, by_ssh.said
    for address in by_ssh.values("MASTER_ADDR"):
        found = ipaddress.ip_address(address or "")
        assert not found.is_loopback
        assert not found.is_link_local


def test_a29_uneven_nodes_make_one_world_of_ranks_in_a_row(by_ssh: Launched) -> None:
    assert by_ssh.values("WORLD_SIZE") == ["3"] * 3
    assert by_ssh.values("RANK") == ["0", "1", "2"]
    assert by_ssh.values("LOCAL_WORLD_SIZE") == ["1", "2", "2"]
    assert "uneven processes per node: 127.0.0.9 1, 127.0.0.10 2" in by_ssh.said


def test_a31_each_node_keeps_its_own_list_of_gpus(by_pbsdsh: Launched) -> None:
    assert by_pbsdsh.values("CUDA_VISIBLE_DEVICES") == ["GPU-0", "GPU-4"]


def test_a32_the_step_has_all_gpus_of_its_nodes(by_srun: Launched) -> None:
    assert "--gpus-per-node=8" in by_srun.file("argv")


@pytest.mark.parametrize("names", [
    ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),  # A12
    ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"),  # A32
    ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_GPU"),  # A34
    ("SLURM_EXPORT_ENV",),  # A35
], ids=["a12", "a32", "a34", "a35"])  # fmt: skip
def test_a12_a32_a34_a35_srun_sees_nothing_of_what_the_job_asked_for(by_srun: Launched, names: tuple[str, ...]) -> None:
    seen = {line.partition("=")[0] for line in by_srun.file("env")}
    assert "SLURM_JOB_ID" in seen
    assert not seen & set(names)


def test_a33_a_step_beside_another_does_not_wait_for_its_gpus(by_srun: Launched) -> None:
    assert by_srun.code == 0, by_srun.said


def test_a34_workers_may_use_every_cpu(by_srun: Launched) -> None:
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this machine has one CPU")
    assert [rank["cpus"] for rank in by_srun.ranks] == [len(os.sched_getaffinity(0))] * 3


def test_a35_a_closed_environment_reaches_the_workers_whole(by_srun: Launched) -> None:
    assert by_srun.values("MYVAR") == ["1"] * 3


HOST_KEY = "Host key verification failed."


@pytest.mark.parametrize("text, options, code, said", [
    (f"echo {HOST_KEY} >&2; exit 255\n", (), 121, ("n1: ssh ended", HOST_KEY)),
    ("exec sleep 100\n", ("--hello-timeout", "2"), 124, ("n1: no report within 2 s",)),
    # A38: let in neither now nor later.
    ("echo Access denied >&2; exit 255\n", (), 121, ("n1: ssh ended", "(tried 4 times): Access denied")),
], ids=["a37-host-key", "a37-asleep", "a38"])  # fmt: skip
def test_a37_a38_hosts_that_ssh_cannot_reach_are_named_in_time(
    place: Place, text: str, options: tuple[str, ...], code: int, said: tuple[str, ...]
) -> None:
    place.command("ssh", SSH + text)
    launched = place.launch("--hosts", "n1", "--device", "cpu", *options, SCRIPT, seconds=20)
    assert launched.code == code, launched.said
    for words in said:
        assert words in launched.said
    assert len(launched.file("calls")) == (4 if "denied" in text else 1)
    assert place.running[0].left(2.0) == []


def test_a38_a_host_that_lets_nobody_in_at_first_is_tried_again(by_ssh: Launched) -> None:
    assert by_ssh.code == 0, by_ssh.said
    assert sorted(by_ssh.file("calls")) == ["127.0.0.10"] * 3 + ["127.0.0.9"]


def test_a38_nothing_is_tried_again_once_the_node_has_answered(place: Place) -> None:
    place.command("ssh", SSH + '$bare bash -c "$*" </dev/null; exit 255\n')
    launched = place.launch("--hosts", "n1", "--device", "cpu", SCRIPT, seconds=20)
    assert (launched.code, launched.ranks, launched.file("calls")) == (121, (), ["n1"])
    assert "n1: " in launched.said


def test_a41_every_node_runs_the_callers_python(by_ssh: Launched) -> None:
    """The login shell's PATH is /usr/bin:/bin; the caller's environment is another one."""
    assert {rank["python"] for rank in by_ssh.ranks} == {str(Path(sys.executable).with_name("python3"))}


def test_a42_a_relative_script_in_a_folder_with_spaces(by_ssh: Launched) -> None:
    assert by_ssh.code == 0, by_ssh.said
    assert {rank["cwd"] for rank in by_ssh.ranks} == {str(by_ssh.folder)}


def test_a42_a_node_without_the_folder_is_named(place: Place) -> None:
    """The second host sees an empty file system in the place of the folder's parent."""
    hidden = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs none "$0" && exec sh -c "$1"')
    probe = [*hidden, str(place.folder), "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace of its own is not allowed here")
    on_two = f'[ "$host" = n2 ] && exec $bare {shlex.join(hidden)} "$root" "$*"\n'
    place.command("ssh", SSH + on_two + 'exec $bare bash -c "$*"\n')
    launched = place.launch("--hosts", "n1,n2", "--device", "cpu", SCRIPT, seconds=30)
    assert (launched.code, launched.ranks) == (120, ())
    assert f"n2: working directory {place.folder}: No such file or directory" in launched.said
    assert not list(place.folder.glob("output.*"))


def test_a43_nodes_need_no_start_up_files_and_no_module_command(by_ssh: Launched) -> None:
    assert by_ssh.code == 0, by_ssh.said
    assert by_ssh.values("MY_FLAG") == ["a 'b' $c"] * 3


def test_a45_what_cannot_be_set_on_a_node_keeps_its_own_value(by_ssh: Launched) -> None:
    assert by_ssh.code == 0, by_ssh.said
    assert "the caller's" not in by_ssh.values("SSH_CONNECTION")


@pytest.mark.parametrize("how, ranks", [("by_ssh", 3), ("by_pbsdsh", 2), ("by_srun", 3)])
def test_a47_a48_another_launchers_variables_are_gone(request: pytest.FixtureRequest, how: str, ranks: int) -> None:
    launched: Launched = request.getfixturevalue(how)
    assert launched.values("RANK") == [str(rank) for rank in range(ranks)]
    assert launched.values("WORLD_SIZE") == [str(ranks)] * ranks
    for env in launched.envs:
        assert [name for name in env if name.startswith(("OMPI_", "PMI_", "PET_"))] == []


def test_a49_only_the_calling_node_reads_the_node_file(by_pbsdsh: Launched) -> None:
    """It is gone when the first task starts."""
    assert not (by_pbsdsh.folder.parent / "nodefile").exists()
    assert (by_pbsdsh.code, by_pbsdsh.values("WORLD_SIZE")) == (0, ["2", "2"]), by_pbsdsh.said


def test_a50_the_jobs_variables_are_there_on_every_node(by_pbsdsh: Launched) -> None:
    assert by_pbsdsh.values("PBS_JOBID") == ["1234[].srv"] * 2
    assert by_pbsdsh.values("PBS_O_WORKDIR") == ["/w"] * 2


def test_a59_nobody_is_told_the_name_that_a_node_has_for_itself(by_ssh: Launched) -> None:
    """In torchrun's own Python `getfqdn` gives a name that does not resolve, as on some clouds."""
    assert by_ssh.code == 0, by_ssh.said
    assert "ip-1.internal.invalid" not in by_ssh.values("MASTER_ADDR")
    for address in by_ssh.values("MASTER_ADDR"):
        assert ipaddress.ip_address(address or "")


@pytest.mark.parametrize("how", ["by_ssh", "by_pbsdsh", "by_srun"])
def test_a60_all_nodes_are_told_one_address(request: pytest.FixtureRequest, how: str) -> None:
    launched: Launched = request.getfixturevalue(how)
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in launched.envs}) == 1


@pytest.mark.parametrize("hosts, code, said", [
    ("2001:db8::5,2001:db8::6", 0, "'--rdzv-endpoint=[2001:db8::5]:4001'"),
    ("fe80::1,2001:db8::6", 2, '--hosts: "fe80::1" at character 1 is a link-local address'),
])  # fmt: skip
def test_a62_an_ipv6_address_stands_in_brackets_before_a_port(place: Place, hosts: str, code: int, said: str) -> None:
    run = place.start("--hosts", hosts, "--master-port", "4001", "--nproc-per-node", "1", "--dry-run", SCRIPT)
    assert run.wait() == code, run.stderr
    assert said in run.stdout + run.stderr
