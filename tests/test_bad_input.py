"""What a person gets wrong: the message names value, source and way out, in seconds, and nothing of his is started."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import COMMAND, for_plain_paths, job_environment

HOST = socket.gethostname()
PBS = {"PBS_JOBID": "17.pbs0", "PBS_ENVIRONMENT": "PBS_BATCH"}
CPU = ("--scheduler", "none", "--device", "cpu")

CASES: dict[str, tuple[tuple[str, ...], dict[str, str], int, tuple[str, ...]]] = {
    # name: words, environment, exit code, what the message holds
    "no script": ((), {}, 2, ("no SCRIPT given", "torchrun_nccl.sh [OPTIONS] SCRIPT")),
    "script missing": (("nosuch.py",), {}, 127, ("nosuch.py", "no such file in {cwd}")),
    "script a directory": (("folder",), {}, 126, ("folder", "is a directory")),
    "unknown option": (("--nosuch", "ok.py"), {}, 2, ("--nosuch", "--help")),
    "option of torchrun that cannot be": (("--rdzv-backend", "c10d", "ok.py"), {}, 2, ("--rdzv-backend", "c10d", "static")),
    "node rank": (("--node_rank=1", "ok.py"), {}, 2, ("--node_rank", "once per job")),
    "nproc 0": (("--nproc-per-node", "0", "ok.py"), {}, 2, ("--nproc-per-node", "0", "at least 1")),
    "nproc -1": (("--nproc-per-node", "-1", "ok.py"), {}, 2, ("--nproc-per-node", "-1", "at least 1")),
    "nproc two": (("--nproc-per-node", "two", "ok.py"), {}, 2, ("--nproc-per-node", "two", "at least 1")),
    "option without its value": (("--nproc-per-node",), {}, 2, ("--nproc-per-node", "value")),
    "hostfile with a bad line": (("--hostfile", "bad.txt", "ok.py"), {}, 2, ("bad.txt line 3", "n2 lots=8", "slots=N")),
    "hostfile empty": (("--hostfile", "empty.txt", "ok.py"), {}, 2, ("empty.txt", "names no host")),
    "hostfile missing": (("--hostfile", "nosuch.txt", "ok.py"), {}, 2, ("nosuch.txt", "No such file")),
    "host list": (("--hosts", "n[1-", "ok.py"), {}, 2, ("--hosts", "[1-", "character 2")),
    "nodefile unset": (("ok.py",), PBS, 120, ("17.pbs0", "PBS_NODEFILE", "job script", "--hosts")),
    "nodefile missing": (("ok.py",), {**PBS, "PBS_NODEFILE": "/no/such"}, 120, ("PBS_NODEFILE=/no/such", "--hosts")),
    "nodefile empty": (("ok.py",), {**PBS, "PBS_NODEFILE": "{cwd}/empty.txt"}, 120, ("PBS_NODEFILE", "empty", "--hosts")),
    "more nodes than allocated": (
        ("--nnodes", "3", "ok.py"), {**PBS, "PBS_NODEFILE": "{cwd}/two.txt"}, 120, ("--nnodes 3", "only 2", "n[1-2]"),
    ),
    "no torch": ((*CPU, "ok.py"), {"PATH": "{bare}:/usr/bin:/bin"}, 120, ("no torch in {bare}/python3", "--python", HOST)),
    "no python": ((*CPU, "--python", "/no/python", "ok.py"), {}, 2, ("--python", "/no/python")),
    "no GPU and CPU not asked for": (("--scheduler", "none", "ok.py"), {}, 120, ("no GPU", HOST, "--device cpu")),
    "more processes than GPUs": (
        ("--scheduler", "none", "--nproc-per-node", "8", "ok.py"),
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 120, ("8", "4", HOST),
    ),
    "log directory missing": ((*CPU, "--log-dir", "nosuch", "ok.py"), {}, 120, ("{cwd}/nosuch", "no such directory", HOST)),
    "port busy": ((*CPU, "ok.py"), {"MASTER_PORT": "{busy}"}, 120, ("{busy}", "MASTER_PORT", "in use", HOST)),
    "port no number": ((*CPU, "ok.py"), {"MASTER_PORT": "http"}, 2, ("MASTER_PORT", "http", "65535")),
    "started by pbsdsh": (
        ("ok.py",), {**PBS, "PBS_TASKNUM": "40000001"}, 120, ("pbsdsh", "PBS_TASKNUM=40000001", "once per job"),
    ),
    "started by srun": (
        ("ok.py",), {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, 120, ("srun", "once per job"),
    ),
    "started by mpirun": (
        ("ok.py",), {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, 120,
        ("mpirun", "OMPI_COMM_WORLD_SIZE=4", "once per job"),
    ),
    "a scheduler that cannot be read": (
        ("ok.py",), {"OAR_JOB_ID": "42"}, 120, ("OAR job 42", "cannot read such a job", "--hosts", "--scheduler none"),
    ),
    "unknown scheduler": (("--scheduler", "moab", "ok.py"), {}, 2, ("moab", "pbs")),
    "unknown transport": (("--transport", "rsh", "ok.py"), {}, 2, ("--transport", "rsh", "pbsdsh")),
    "a host that does not exist": (
        ("--hosts", "no-such-host.invalid", "--nproc-per-node", "1", "ok.py"), {}, 121, ("no-such-host.invalid",),
    ),
    "program missing": ((*CPU, "--no-python", "no-such-program"), {}, 127, ("no-such-program", "not found")),
    "program not executable": ((*CPU, "--no-python", "./ok.py"), {}, 126, ("./ok.py", "not executable")),
}  # fmt: skip


@pytest.fixture
def place(work: Path) -> Path:
    (work / "ok.py").write_text("open('STARTED', 'w')")
    (work / "folder").mkdir()
    (work / "bad.txt").write_text("n1\n# a comment\nn2 lots=8\n")
    (work / "empty.txt").write_text("")
    (work / "two.txt").write_text("n1\nn1\nn2\nn2\n")
    return work


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=for_plain_paths) if "--hosts" in CASES[name][0] else name for name in CASES]
)
def test_the_message_says_what_where_and_what_to_do(place: Path, tmp_path: Path, name: str) -> None:
    words, env, code, parts = CASES[name]
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "python3").symlink_to("/usr/bin/python3")
    with socket.create_server(("", 0)) as listener:
        known = {"cwd": str(place), "bare": str(bare), "busy": str(listener.getsockname()[1])}
        if (
            name == "no torch"
            and subprocess.run([bare / "python3", "-c", "import torch"], capture_output=True, check=False).returncode == 0
        ):
            (bare / "python3").unlink()
            (bare / "python3").write_text('#!/bin/sh\nexec /usr/bin/python3 -S "$@"\n')
            (bare / "python3").chmod(0o755)
        began = time.monotonic()
        run = subprocess.run(
            [str(COMMAND), *words],
            cwd=place,
            env=job_environment(**{key: value.format(**known) for key, value in env.items()}),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert run.returncode == code, run.stderr
    assert time.monotonic() - began < 5
    for part in parts:
        assert part.format(**known) in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
    assert not (place / "STARTED").exists()
    assert not list(place.glob("output.*"))


@pytest.fixture
def as_ordinary_user(place: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Root reads and writes everything, so these cases are tried as nobody."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    user = pwd.getpwnam("nobody")
    for folder in (place, *place.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        env = job_environment(PATH="/usr/local/bin:/usr/bin:/bin", TMPDIR="/tmp")
        return subprocess.run(
            [*become, str(COMMAND), *words], cwd=place, env=env, capture_output=True, text=True, timeout=20, check=False
        )

    return call


def test_a_script_or_directory_that_the_user_may_not_use(
    place: Path, as_ordinary_user: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (place / "ok.py").chmod(0o600)
    run = as_ordinary_user(*CPU, "ok.py")
    assert (run.returncode, "ok.py: not readable" in run.stderr) == (126, True), run.stderr
    (place / "ok.py").chmod(0o644)
    run = as_ordinary_user(*CPU, "ok.py")
    assert run.returncode == 120
    assert f"log directory {place}: not writable" in run.stderr
    assert not list(place.glob("output.*"))
