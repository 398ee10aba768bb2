"""What several test files share: running the command, finding what it left, comparing with golden files."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ROOT / "bin" / "torchrun_nccl.sh"
GOLDEN = Path(__file__).parent / "golden"
#: Set by the test for one launch; every process of it, on whatever pretended node, has it in its environment.
MARK = "TEST_LAUNCH_MARK"
sys.path.insert(0, str(ROOT / "lib" / "python"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/golden anew; git diff is the review")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if os.environ.get("CI") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("skipped in CI, where everything is installed: that is a failure", red=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A skip says that this desk lacks something; CI lacks nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and exitstatus == 0 and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = 1


def processes_with(name: str, value: str) -> list[int]:
    """Living processes whose environment holds NAME=value."""
    wanted = f"{name}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (
                    wanted in (folder / "environ").read_bytes().split(b"\0")
                    and "State:\tZ" not in (folder / "status").read_text()
                ):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


class Running:
    """One call of the command, in the background."""

    def __init__(self, words: list[str], cwd: Path, env: dict[str, str], **options: Any) -> None:
        self.mark, self.cwd = env[MARK], cwd
        self.out, self.err = cwd / f".out-{self.mark}", cwd / f".err-{self.mark}"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                words,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=default_signals,
                **options,
            )

    @property
    def stdout(self) -> str:
        return self.out.read_text(errors="surrogateescape")

    @property
    def stderr(self) -> str:
        return self.err.read_text(errors="surrogateescape")

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit code; the test fails, with what it said, where it takes longer."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.stderr}") from None

    def left(self, seconds: float = 0.0) -> list[str]:
        """Command lines of what is still there, after at most `seconds` more."""
        deadline = time.monotonic() + seconds
        while True:
            pids = [pid for pid in processes_with(MARK, self.mark) if pid != self.process.pid]
            if not pids or time.monotonic() > deadline:
                return [command_line(pid) for pid in pids]
            time.sleep(0.05)

    def wait_for(self, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        """The first true value of `condition`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            assert self.process.poll() is None, f"ended early with {self.process.returncode}:\n{self.stderr}"
            time.sleep(0.02)
        raise AssertionError(f"not within {seconds} s; it said:\n{self.stderr}")

    def processes(self) -> list[tuple[int, int, str]]:
        """pid, parent's pid and command line of all its processes."""
        found = [(pid, status(pid)) for pid in processes_with(MARK, self.mark)]
        return [(pid, int(fields["PPid"]), command_line(pid)) for pid, fields in found if fields]

    def parts(self) -> dict[str, int]:
        """What the first node's part of it consists of; a door's child without an exec of its own is the agent."""
        rows = self.processes()

        def below(parent: int, word: str) -> int:
            return next(pid for pid, above, line in rows if above == parent and word in line)

        door = below(self.process.pid, ".0 ")
        agent = below(door, ".0 ")
        torchrun = below(agent, "torch.distributed.run")
        return {"door": door, "agent": agent, "torchrun": torchrun, "starter": below(torchrun, "starter.py")}

    def logs(self) -> dict[str, str]:
        """Text of each log of the working directory, by name."""
        return {path.name: path.read_text(errors="surrogateescape") for path in sorted(self.cwd.glob("output.*.log"))}

    def clean_up(self) -> None:
        for pid in processes_with(MARK, self.mark):
            with_suppressed_kill(pid)
        self.process.wait()


def default_signals() -> None:
    """A test run in the background of a shell has INT ignored; the command must not inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def with_suppressed_kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def status(pid: int) -> dict[str, str]:
    """Fields of /proc/PID/status; empty where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def job_environment(**more: str) -> dict[str, str]:
    """A quiet environment with the tests' Python first, and a mark of its own."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8", MARK: uuid.uuid4().hex, **more}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working directory whose name is as bad as names get."""
    folder = tmp_path / "my dir; touch x 'q' $HOME"
    folder.mkdir()
    return folder


@pytest.fixture
def start(work: Path) -> Iterator[Callable[..., Running]]:
    """start("--simulate", "2x2", "script.py", env={…}, cwd=…) -> Running; nothing outlives the test."""
    launched: list[Running] = []

    def begin(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None, **options: Any) -> Running:
        one = Running([str(COMMAND), *words], cwd or work, job_environment(**(env or {})), **options)
        launched.append(one)
        return one

    yield begin
    for one in launched:
        one.clean_up()


@pytest.fixture
def script(work: Path) -> Callable[..., str]:
    """script("import os…") writes a Python script into the working directory and gives its name."""

    def write(text: str, name: str = "job script.py") -> str:
        (work / name).write_text(text)
        return name

    return write


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden("plan-x.txt", text): compare; only --rewrite-golden writes, a missing file fails."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--rewrite-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: `make golden` writes it, git diff is the review"
        assert text == path.read_text(), f"differs from {path}: accept with `make golden`"

    return compare


#: ssh's words pass through a login shell, which takes plain characters only: so must the tree's path be for its tests.
for_plain_paths = pytest.mark.skipif(
    not re.fullmatch(r"[A-Za-z0-9_./:=,@%+-]+", f"{ROOT}{sys.executable}"),
    reason="ssh cannot start a tree whose path has other characters than plain ones",
)
