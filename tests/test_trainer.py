"""The reference trainer: exact resume, a snapshot that no kill can damage, one decision on all ranks.

`import torch` costs 2 s of CPU for each rank. So one server process imports it once and forks the ranks, each of which
runs the trainer's file as __main__. What a fork cannot show (signals during the import, the end of the interpreter,
torchrun itself) runs in real processes.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "pytorch"
TRAINER = EXAMPLES / "torchrun_example.py"
TIMEOUT = 60.0

SERVER = r"""
import ctypes, json, os, runpy, signal, sys, time, traceback
import torch, torch.distributed, torch.nn.parallel
import torch._dynamo  # the first DDP() imports it: 0.8 s of CPU

def run(request):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the server
    os.chdir(request["cwd"])
    for fd, path, flags in (0, "/dev/null", os.O_RDONLY), (1, request["out"], 0o2101), (2, request["err"], 0o2101):
        os.dup2(os.open(path, flags, 0o666), fd)
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    code = 1
    try:
        exec(request["prelude"], {"__name__": "prelude"})
        if sys.argv:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(); sys.stderr.flush()
    os._exit(code)

alive = set()
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        deadline, answer = time.monotonic() + request["timeout"], None
        while answer is None and time.monotonic() < deadline:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            if pid:
                alive.discard(pid)
                answer = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.01)
    else:
        answer = os.fork() or run(request)
        alive.add(answer)
    print(json.dumps(answer), flush=True)
for pid in alive:
    os.kill(pid, signal.SIGKILL)
"""


class Ended(NamedTuple):
    """How one rank ended."""

    code: int
    out: str
    err: str

    @property
    def epochs(self) -> list[int]:
        return [int(number) for number in re.findall(r"\] Epoch (\d+) \|", self.out)]


class Server:
    """Forks ranks from a process that has torch imported."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._count = logs, 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**_clean_environment(), "OMP_NUM_THREADS": "1"},
        )

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def run(self, ranks: list[dict[str, Any]], timeout: float = TIMEOUT) -> list[Ended]:
        """Start all ranks, wait for all; a rank that is late is killed and fails the test."""
        started = []
        for rank in ranks:
            self._count += 1
            out, err = self._logs / f"{self._count}.out", self._logs / f"{self._count}.err"
            pid = self._ask(**{"prelude": "", "env": {}, "argv": [], **rank}, out=str(out), err=str(err))
            started.append((pid, out, err))
        deadline, ended, late = time.monotonic() + timeout, [], False
        for pid, out, err in started:
            code = self._ask(wait=pid, timeout=max(0.1, deadline - time.monotonic()))
            if code is None:
                late = True
                os.kill(pid, signal.SIGKILL)
                code = self._ask(wait=pid, timeout=10)
            ended.append(Ended(code, out.read_text(), err.read_text()))
        assert not late, f"not all ranks ended in {timeout} s: {ended}"
        return ended

    def run_code(self, code: str, cwd: Path, **names: Any) -> str:
        """Run Python code in a fork, with these names defined; what it prints."""
        (ended,) = self.run([{"prelude": "".join(f"{k} = {v!r}\n" for k, v in names.items()) + code, "cwd": str(cwd)}])
        assert ended.code == 0, ended
        return ended.out

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


def _clean_environment() -> dict[str, str]:
    """Without what would make this run a part of another job."""
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED"}
    clean = {name: value for name, value in os.environ.items() if name not in names and not name.startswith("PET_")}
    return {**clean, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}  # gloo, and never off this machine


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _world(size: int, nproc: int | None = None) -> list[dict[str, str]]:
    """The variables that torchrun sets, for each rank."""
    nproc, port = nproc or size, str(_free_port())
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % nproc),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(size)
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose name holds what people's folder names hold."""
    path = tmp_path / "my run (2)"
    path.mkdir()
    return path


class Train:
    """Runs the trainer on `size` ranks and looks at snapshots."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self.folder = server, folder

    def __call__(
        self, size: int, *words: str, prelude: str = "", nproc: int | None = None, cwds: tuple[Path, ...] = ()
    ) -> list[Ended]:
        return self._server.run(
            [
                {
                    "argv": [str(TRAINER), *words],
                    "env": env,
                    "cwd": str(cwds[rank] if cwds else self.folder),
                    "prelude": prelude,
                }
                for rank, env in enumerate(_world(size, nproc))
            ]
        )

    def snapshot(self, name: str = "snapshot.pt") -> dict[str, Any]:
        """Contents as plain lists and numbers; JSON keeps every bit of a float."""
        return dict(json.loads(self._server.run_code(SHOW_SNAPSHOT, self.folder, name=name)))


SHOW_SNAPSHOT = """
import json, torch
def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
print(json.dumps(plain(torch.load(name, weights_only=True))))
"""


@pytest.fixture
def train(server: Server, folder: Path) -> Train:
    return Train(server, folder)


def _codes(ended: list[Ended]) -> list[int]:
    return [rank.code for rank in ended]


def _is_close(a: Any, b: Any) -> bool:
    """Equal but for the rounding of sums taken in another order."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(_is_close(x, y) for x, y in zip(a, b))
    return a == b or (isinstance(a, float) and abs(a - b) <= 1e-6)


# Sends signal NAME to rank `rank` from itself once it has done `after` steps: the same moment in every run.
SIGNAL_AFTER_STEPS = """
import os, signal, torch
count, step = 0, torch.optim.SGD.step
def counted(self, *args, **kwargs):
    global count
    step(self, *args, **kwargs)
    count += 1
    if count == {after} and os.environ["RANK"] in {ranks}:
        os.kill(os.getpid(), signal.SIG{name})
torch.optim.SGD.step = counted
"""


# Every step draws a random number, as dropout does: a snapshot without the RNG is then found out.
DRAW_IN_EVERY_STEP = """
import torch
zero_grad = torch.optim.SGD.zero_grad
def drawn(self, *args, **kwargs):
    torch.rand(1)
    zero_grad(self, *args, **kwargs)
torch.optim.SGD.zero_grad = drawn
"""


# ---- Arguments and output


@pytest.mark.parametrize(
    "words, message",
    [
        (("0", "1"), "argument total_epochs: '0' is not a whole number above 0"),
        (("-1", "1"), "argument total_epochs: '-1' is not"),
        (("ten", "1"), "argument total_epochs: 'ten' is not"),
        (("2", "0"), "argument save_every: '0' is not"),
        (("2", "1.5"), "argument save_every: '1.5' is not"),
        (("2", "²"), "argument save_every: '²' is not"),  # a digit for str.isdigit, none for int
        (("2", "1", "--batch-size", "0"), "argument --batch-size: '0' is not"),
        (("2",), "the following arguments are required: save_every"),
        (("2", "1", "3"), "unrecognized arguments: 3"),
        # Said at the start and not after hours, at the first save.
        (("2", "1", "--snapshot", "no such folder/x.pt"), "argument --snapshot: there is no folder"),
    ],
)
def test_bad_arguments(train: Train, words: tuple[str, ...], message: str) -> None:
    (ended,) = train(1, *words)
    assert ended.code == 2
    assert message in ended.err
    assert list(train.folder.iterdir()) == []


def test_line_of_eight_ranks(train: Train) -> None:
    ended = train(8, "1", "1", nproc=4)
    assert [rank.out for rank in ended] == [f"[GPU{n}] Epoch 0 | Batchsize: 32 | Steps: 8\n" for n in range(8)]
    assert _codes(ended) == [0] * 8


def test_under_torchrun_itself(folder: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={_free_port()}"]
    done = subprocess.run(
        [*words, str(TRAINER), "2", "1"],
        cwd=folder,
        env=_clean_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    # Both ranks share one pipe and run unbuffered: every line must still be whole.
    expected = [f"[GPU{rank}] Epoch {epoch} | Batchsize: 32 | Steps: 32" for epoch in (0, 1) for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


def test_plain_python_is_a_world_of_one(server: Server, folder: Path) -> None:
    (ended,) = server.run([{"argv": [str(TRAINER), "2", "1"], "cwd": str(folder)}])
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == [f"[GPU0] Epoch {epoch} | Batchsize: 32 | Steps: 64" for epoch in (0, 1)]


# ---- Resume


def test_two_and_two_epochs_equal_four(train: Train) -> None:
    straight = train(2, "4", "4", "--snapshot", "straight.pt", prelude=DRAW_IN_EVERY_STEP)
    first, second = (train(2, total, "1", prelude=DRAW_IN_EVERY_STEP) for total in ("2", "4"))
    assert [rank.epochs for rank in straight] == [[0, 1, 2, 3]] * 2
    assert [a.epochs + b.epochs for a, b in zip(first, second)] == [[0, 1, 2, 3]] * 2
    assert f"Resuming from {train.folder / 'snapshot.pt'} at epoch 2, step 0" in second[1].out
    whole = train.snapshot("straight.pt")
    assert train.snapshot() == whole  # weights, momentum, RNG of both ranks: every bit
    assert set(whole) == {"model", "optimizer", "epochs_done", "samples_done", "world_size", "rng"}
    assert (whole["epochs_done"], whole["world_size"], len(whole["rng"])) == (4, 2, 2)
    assert whole["rng"][0] != whole["rng"][1]
    assert any(any(row) for row in whole["optimizer"]["state"]["0"]["momentum_buffer"])


def test_total_already_done(train: Train) -> None:
    assert _codes(train(2, "2", "1")) == [0, 0]
    before = (train.folder / "snapshot.pt").stat()
    for total in "2", "1":
        ended = train(2, total, "1")
        assert _codes(ended) == [0, 0]
        assert all("Nothing to do" in rank.out and rank.epochs == [] for rank in ended)
    assert (train.folder / "snapshot.pt").stat().st_mtime_ns == before.st_mtime_ns


def test_last_epoch_is_saved_whatever_save_every_says(train: Train) -> None:
    assert _codes(train(1, "3", "2")) == [0]
    assert train.snapshot()["epochs_done"] == 3


@pytest.mark.parametrize("before, after", [(4, 2), (2, 4)])
@pytest.mark.parametrize("stop_after_steps", [None, 35])  # at the end of epoch 1; 3 steps into it
def test_resume_with_another_number_of_processes(
    train: Train, before: int, after: int, stop_after_steps: int | None
) -> None:
    """With the same samples in every step the weights come out alike, so none was left out or seen twice."""
    batch = {2: "32", 4: "16"}
    assert _codes(train(2, "3", "3", "--batch-size", batch[2], "--snapshot", "straight.pt")) == [0, 0]
    if stop_after_steps is None:
        first = train(before, "2", "2", "--batch-size", batch[before])
        epoch, step = 2, 0
    else:
        prelude = SIGNAL_AFTER_STEPS.format(after=stop_after_steps, ranks="'01'", name="TERM")
        first = train(before, "3", "3", "--batch-size", batch[before], prelude=prelude)
        epoch, step = divmod(stop_after_steps, 32)
    assert _codes(first) == [75 if stop_after_steps else 0] * before
    second = train(after, "3", "3", "--batch-size", batch[after])
    assert _codes(second) == [0] * after
    assert all(rank.out.startswith(f"[GPU{n}] Resuming from") for n, rank in enumerate(second))
    assert all(f"at epoch {epoch}, step {step}\n" in rank.out for rank in second)
    ours, straight = train.snapshot(), train.snapshot("straight.pt")
    assert _is_close(ours["model"], straight["model"])
    assert _is_close(ours["optimizer"], straight["optimizer"])
    assert ours["world_size"] == after


LOG_INDICES = """
import os
from torch.utils.data.distributed import DistributedSampler
order = DistributedSampler.__iter__
def logged(self):
    indices = list(order(self))
    print("ORDER", self.epoch, os.environ["RANK"], *indices)
    return iter(indices)
DistributedSampler.__iter__ = logged
"""


def test_every_epoch_has_an_order_of_its_own_and_resume_keeps_it(train: Train) -> None:
    def orders(ended: list[Ended]) -> dict[tuple[int, int], list[int]]:
        lines = [line.split()[1:] for rank in ended for line in rank.out.splitlines() if line.startswith("ORDER")]
        return {(int(epoch), int(rank)): [int(index) for index in rest] for epoch, rank, *rest in lines}

    straight = orders(train(2, "3", "3", "--snapshot", "straight.pt", prelude=LOG_INDICES))
    for epoch in range(3):
        assert sorted(straight[epoch, 0] + straight[epoch, 1]) == list(range(2048))
    assert straight[0, 0] != straight[1, 0] != straight[2, 0] != straight[0, 0]
    parts = {**orders(train(2, "1", "1", prelude=LOG_INDICES)), **orders(train(2, "3", "1", prelude=LOG_INDICES))}
    assert parts == straight


# ---- What is on disk when something is wrong


DAMAGE = {
    "empty": ("p.write_bytes(b'')", "BadZipFile: File is not a zip file)"),
    "truncated": ("p.write_bytes(p.read_bytes()[:2000])", "BadZipFile"),
    "garbage": ("p.write_bytes(os.urandom(5000))", "BadZipFile"),
    "one byte of the weights": (
        "b = bytearray(p.read_bytes()); b[b.index(w)] ^= 1; p.write_bytes(b)",
        "ValueError: wrong checksum of",
    ),
    "a key lacks": ("del s['rng']; torch.save(s, p)", "ValueError: it does not hold just"),
    "a key of others": ("s['MODEL_STATE'] = 1; torch.save(s, p)", "ValueError: it does not hold just"),
    "no dict": ("torch.save(torch.zeros(2), p)", "ValueError: it does not hold just"),
    "no number": ("s['epochs_done'] = 'two'; torch.save(s, p)", "ValueError: invalid literal"),
    "other model": ("s['model'] = {'weight': torch.zeros(1, 9)}; torch.save(s, p)", "RuntimeError: Error(s) in load"),
    "code": ("torch.save({k: Path for k in s}, p)", "UnpicklingError"),  # a snapshot must not run code
    "a folder": ("p.unlink(); p.mkdir()", "IsADirectoryError"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_snapshot_is_an_error_on_all_ranks(train: Train, server: Server, damage: str) -> None:
    assert _codes(train(1, "1", "1")) == [0]
    code, reason = DAMAGE[damage]
    prepare = "import os, torch\nfrom pathlib import Path\np = Path('snapshot.pt'); s = torch.load(p)\n"
    server.run_code(prepare + "w = bytes(s['model']['weight'].view(torch.uint8)[0].tolist())\n" + code, train.folder)
    path = train.folder / "snapshot.pt"
    before = path.read_bytes() if path.is_file() else None
    for rank, ended in enumerate(train(2, "2", "1")):
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"[GPU{rank}] ERROR: {path} is damaged, or no snapshot of this model ({reason}")
        assert "move it away to start from epoch 0" in ended.err
        assert "Traceback" not in ended.err
    assert (path.read_bytes() if path.is_file() else None) == before


def test_working_directory_that_nodes_do_not_share(train: Train, tmp_path: Path) -> None:
    """Each node would resume from its own file, or only one of them: said, not trained."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    assert _codes(train(2, "1", "1", cwds=(here, there))) == [0, 0]
    assert not (there / "snapshot.pt").exists()
    for cwds, seen in [
        ((here, there), "rank 0 has epoch 1, sample 0, rank 1 has no file"),
        ((there, here), "rank 0 has no file, rank 1 has epoch 1, sample 0"),
    ]:
        ended = train(2, "2", "1", cwds=cwds)
        assert _codes(ended) == [1, 1]
        assert all(seen in rank.err and "file system that all nodes share" in rank.err for rank in ended)
    (there / "snapshot.pt").write_bytes(b"x")
    ended = train(2, "2", "1", cwds=(here, there))
    assert _codes(ended) == [1, 1]
    assert "(rank 1 cannot read it)" in ended[0].err  # the rank that could read it ends too, and says why
    assert "(rank 1 cannot read it)" not in ended[1].err


def test_full_disk_keeps_the_old_snapshot(train: Train) -> None:
    assert _codes(train(1, "1", "1")) == [0]
    before = (train.folder / "snapshot.pt").read_bytes()
    (train.folder / "snapshot.pt.tmp").symlink_to("/dev/full")
    (ended,) = train(1, "2", "1")
    assert ended.code == 1
    assert "No space left on device" in ended.err
    assert (train.folder / "snapshot.pt").read_bytes() == before


def test_snapshot_that_is_a_link(train: Train) -> None:
    """Links into a scratch folder are common: the file behind is replaced, the link stays."""
    (train.folder / "scratch").mkdir()
    (train.folder / "snapshot.pt").symlink_to("scratch/real.pt")
    assert _codes(train(1, "1", "1")) == [0]
    assert (train.folder / "snapshot.pt").is_symlink()
    assert [path.name for path in (train.folder / "scratch").iterdir()] == ["real.pt"]


LOG_WRITES = """
import os, sys
def hook(event, args):
    if event == "open" and "snapshot" in str(args[0]) and args[2] & (os.O_WRONLY | os.O_RDWR):
        os.write(2, f"open {os.path.basename(args[0])}\\n".encode())
    if event in ("os.rename", "os.remove", "os.truncate"):
        os.write(2, f"{event} {' '.join(os.path.basename(str(arg)) for arg in args[:2])}\\n".encode())
sys.addaudithook(hook)
"""


def test_one_rank_writes(train: Train) -> None:
    """Two nodes of two: local rank 0 of the second node must not write the file that it shares with the first."""
    ended = train(4, "4", "2", prelude=LOG_WRITES, nproc=2)
    assert _codes(ended) == [0] * 4
    save = ["open snapshot.pt.tmp", "os.rename snapshot.pt.tmp snapshot.pt"]
    assert ended[0].err.splitlines() == save * 2
    assert [rank.err for rank in ended[1:]] == [""] * 3
    assert [path.name for path in train.folder.iterdir()] == ["snapshot.pt"]


# ---- Kills during a save

SAVING = """
import importlib.util, io, mmap, os, random, signal, sys, time
from pathlib import Path
import torch
spec = importlib.util.spec_from_file_location("trainer", trainer_path)
trainer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trainer)
path = Path("snapshot.pt").resolve()

def contents(epochs):  # 5 MB, as model and momentum of 640,000 weights
    fill = torch.full((640_000,), float(epochs))
    known = {"model": {"weight": fill}, "optimizer": {"momentum": fill + 1}, "epochs_done": epochs}
    return {**dict.fromkeys(trainer.CONTENTS, 0), **known}

def loaded():
    snapshot = trainer.load_snapshot(path)
    epochs = snapshot["epochs_done"]
    assert torch.equal(snapshot["optimizer"]["momentum"], contents(epochs)["optimizer"]["momentum"])
    return epochs

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def killed(run):
    pid = os.fork()
    if pid == 0:
        run()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

DIE_AT = {
    # A save stops at this point; then the folder holds these names and the snapshot has this epoch.
    "half-way through the write": (
        "torch.save = lambda s, f: (save(s, b), f.write(b.getvalue()[:3_000_000]), die())",
        1,
    ),
    "before the file's fsync": ("os.fsync = die", 1),
    "before the rename": ("sys.addaudithook(lambda event, args: event == 'os.rename' and die())", 1),
    "after the rename": ("os.fsync = lambda fd: fsync(fd) if os.path.isfile(f'/proc/self/fd/{fd}') else die()", 2),
}


@pytest.mark.parametrize("point", DIE_AT)
def test_killed_at_each_point_of_a_save(server: Server, folder: Path, point: str) -> None:
    hook, epoch = DIE_AT[point]
    code = """
trainer.save_snapshot(path, contents(1))
def run():
    global save, fsync, b
    save, fsync, b = torch.save, os.fsync, io.BytesIO()
    exec(hook, globals())
    trainer.save_snapshot(path, contents(2))
assert killed(run) == -signal.SIGKILL
assert loaded() == epoch, loaded()
assert ("snapshot.pt.tmp" in os.listdir()) == (epoch == 1)
trainer.save_snapshot(path, contents(3))
assert loaded() == 3
assert os.listdir() == ["snapshot.pt"], os.listdir()
"""
    server.run_code(SAVING + code, folder, trainer_path=str(TRAINER), hook=hook, epoch=epoch)


def test_killed_at_fifty_random_moments(server: Server, folder: Path) -> None:
    code = """
progress = mmap.mmap(-1, 16)  # shared with the forks: the last save begun, the last one finished
def note(at, epochs):
    progress[at:at + 8] = epochs.to_bytes(8, "little")
def noted(at):
    return int.from_bytes(progress[at:at + 8], "little")

moments, strays = random.Random(79), 0
trainer.save_snapshot(path, contents(1))
note(0, 1); note(8, 1)
for _ in range(50):
    epochs = loaded()
    pid = os.fork()
    while pid == 0:
        epochs += 1
        note(0, epochs)
        trainer.save_snapshot(path, contents(epochs))
        note(8, epochs)
    time.sleep(moments.uniform(0, 0.06))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert noted(8) <= loaded() <= noted(0), (noted(8), loaded(), noted(0))
    strays += "snapshot.pt.tmp" in os.listdir()
    assert set(os.listdir()) <= {"snapshot.pt", "snapshot.pt.tmp"}
trainer.save_snapshot(path, contents(0))
assert os.listdir() == ["snapshot.pt"]
print(strays, noted(8))
"""
    strays, saves = server.run_code(SAVING + code, folder, trainer_path=str(TRAINER)).split()
    assert int(strays) > 0, "no kill came during a save: the moments prove nothing"
    assert int(saves) > 1, "no save came to its end: the moments prove nothing"


# ---- TERM and USR1


@pytest.mark.parametrize(
    "size, ranks, name, after",
    [
        (2, "1", "TERM", 40),
        (2, "0", "USR1", 40),
        (4, "2", "TERM", 21),
        (4, "0123", "TERM", 21),
        (2, "1", "USR1", 64),  # on the last step of an epoch: the next boundary is in the next epoch
    ],
)
def test_a_signal_to_any_rank_stops_all_at_one_step(train: Train, size: int, ranks: str, name: str, after: int) -> None:
    signalled = SIGNAL_AFTER_STEPS.format(after=after, ranks=repr(ranks), name=name)
    ended = train(size, "4", "4", prelude=DRAW_IN_EVERY_STEP + signalled)
    epoch, step = divmod(after, 64 // size)
    stopped = f"Stopped and saved at epoch {epoch}, step {step}; run again to go on"
    assert _codes(ended) == [75] * size
    assert [rank.out.splitlines()[-1] for rank in ended] == [f"[GPU{n}] {stopped}" for n in range(size)]
    assert [path.name for path in train.folder.iterdir()] == ["snapshot.pt"]

    resumed = train(size, "4", "4", prelude=DRAW_IN_EVERY_STEP)
    straight = train(size, "4", "4", "--snapshot", "straight.pt", prelude=DRAW_IN_EVERY_STEP)
    assert _codes(resumed) == _codes(straight) == [0] * size
    assert [a.epochs + b.epochs for a, b in zip(ended, resumed)] == [[0, 1, 2, 3]] * size
    assert train.snapshot() == train.snapshot("straight.pt")  # not a sample lost or seen twice, to the last bit


def test_a_signal_after_the_last_boundary_changes_nothing(train: Train) -> None:
    ended = train(2, "2", "2", prelude=SIGNAL_AFTER_STEPS.format(after=64, ranks="'1'", name="TERM"))
    assert _codes(ended) == [0, 0]
    assert train.snapshot()["epochs_done"] == 2


def test_a_signal_during_a_save_lets_the_save_end(train: Train) -> None:
    prelude = """
import os, signal
fsync = os.fsync
def signalled(fd):
    os.kill(os.getpid(), signal.SIGTERM)
    fsync(fd)
os.fsync = signalled
"""
    ended = train(2, "3", "1", prelude=prelude)
    assert _codes(ended) == [75, 75]
    assert ended[0].epochs == [0]
    assert train.snapshot()["epochs_done"] == 1


@contextlib.contextmanager
def _real_ranks(folder: Path, size: int, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks as processes of their own: with the import of torch and the end of the interpreter."""
    started = [
        subprocess.Popen(
            [sys.executable, str(TRAINER), *words],
            cwd=folder,
            env={**_clean_environment(), "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for env in _world(size)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _catches_term(pid: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_terms_before_torch_is_imported_and_until_the_very_end(train: Train) -> None:
    """One rank gets TERM while it imports torch; from then on both get it again and again, up to their last breath."""
    with _real_ranks(train.folder, 2, "100000", "100000") as ranks:
        deadline = time.monotonic() + TIMEOUT
        while not all(_catches_term(rank.pid) for rank in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "torch" not in Path(f"/proc/{ranks[1].pid}/maps").read_text(), "the handlers came after the import"
        ranks[1].send_signal(signal.SIGTERM)
        while any(rank.poll() is None for rank in ranks):
            assert time.monotonic() < deadline
            if (train.folder / "snapshot.pt").exists():
                for rank in ranks:
                    rank.send_signal(signal.SIGTERM)
            time.sleep(0.005)
        ended = [Ended(rank.returncode, *rank.communicate()) for rank in ranks]
    assert _codes(ended) == [75, 75], ended
    assert [rank.out for rank in ended] == [
        f"[GPU{n}] Stopped and saved at epoch 0, step 0; run again to go on\n" for n in (0, 1)
    ]
    assert _codes(train(2, "1", "1")) == [0, 0]


# ---- The files beside it


def test_trainer_stands_alone() -> None:
    """It runs in the user's Python: 3.8 or later, torch and the standard library."""
    tree = ast.parse(TRAINER.read_text(), feature_version=(3, 8))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    tops = {module.split(".")[0] for module in modules}
    assert tops <= {"torch", "__future__"} | set(sys.stdlib_module_names)


def test_job_script() -> None:
    text = (EXAMPLES / "job.pbs").read_text()
    directives = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("#PBS")]
    assert [line for line in directives if "storage" not in line] == [
        "-q gpuvolta",
        "-l ncpus=96",
        "-l ngpus=8",
        "-l mem=760GB",
        "-l jobfs=800GB",
        "-l walltime=00:30:00",
        "-l wd",
    ]
    assert sum(line.startswith("-l storage=") for line in directives) == 1
    # PBS stops reading directives at the first command.
    assert text.rindex("#PBS") < text.index("\nmodule use ") < text.index("\nmodule load NCI-ai-ml\n")
    last = 'torchrun_nccl.sh "${NCI_AI_ML_ROOT}/examples/pytorch/torchrun_example.py" 50 10'
    assert text.splitlines()[-1] == last  # its exit code is the job's
    for shell in "bash", "sh":
        subprocess.run([shell, "-n", EXAMPLES / "job.pbs"], check=True)


def test_job_script_runs(tmp_path: Path) -> None:
    """With stand-ins for `module` and the command: the words arrive whole and the exit code comes back."""
    command = tmp_path / "torchrun_nccl.sh"
    command.write_text('#!/bin/sh\nprintf "<%s>\\n" "$@"\nexit 75\n')
    command.chmod(0o755)
    module = 'module() { echo module "$@"; }; export NCI_AI_ML_ROOT=\'/opt/with space\'; . "$0"'
    for shell in "bash", "sh":
        done = subprocess.run(
            [shell, "-c", module, str(EXAMPLES / "job.pbs")],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 75
        assert done.stdout.splitlines()[1:] == [
            "module load NCI-ai-ml",
            "</opt/with space/examples/pytorch/torchrun_example.py>",
            "<50>",
            "<10>",
        ]


def test_readme_shows_the_trainers_own_lines() -> None:
    """Every Python block is a run of lines of the trainer, but for the indentation of the whole block."""

    def bare(text: str) -> list[str]:
        return [line.strip() for line in text.splitlines()]

    source = bare(TRAINER.read_text())
    blocks = [bare(block) for block in re.findall(r"```python\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.S)]
    assert len(blocks) >= 5
    for block in blocks:
        runs = [source[at : at + len(block)] for at in range(len(source))]
        assert block in runs, "\n".join(block)


def test_readme_names_what_a_run_needs_and_leaves() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for fact in (
        "output.torchrun_example.py.HOST.log",
        "[GPU3] Epoch 0 | Batchsize: 32 | Steps: 8",
        "torchrun_nccl.sh --simulate 2x2 --device cpu examples/pytorch/torchrun_example.py 50 10",
        "exit code 75",
    ):
        assert fact in text
