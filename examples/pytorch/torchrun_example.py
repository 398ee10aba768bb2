"""Train a small model on every GPU of every node; a run that was stopped goes on where it was.

Start it with one of
    torchrun_nccl.sh torchrun_example.py 50 10              every GPU of every node of the job
    torchrun --nproc-per-node=4 torchrun_example.py 50 10   four processes on this machine
    python torchrun_example.py 50 10                        one process
"""
# ruff: noqa: E402  torch is imported after the signal handlers are set

from __future__ import annotations

import argparse
import os
import signal
import sys
import zipfile
from pathlib import Path
from typing import Any, NoReturn, TextIO

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOPPED_AND_SAVED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run it again
stop_requested = False


def request_stop(signum: int, frame: Any) -> None:
    global stop_requested
    stop_requested = True


# Before torch, whose import can take a minute on a cold file system: a signal in that time must not kill us.
for stop_signal in STOP_SIGNALS:
    signal.signal(stop_signal, request_stop)

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 2048
USE_GPU = torch.cuda.is_available()
CONTENTS = {"model", "optimizer", "epochs_done", "samples_done", "world_size", "rng"}  # of a snapshot


def parse_arguments() -> argparse.Namespace:
    def above_zero(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
        return int(text)

    parser = argparse.ArgumentParser(description="Train a small model on every GPU of every node.")
    parser.add_argument("total_epochs", type=above_zero, help="epochs to train in all, those of earlier runs included")
    parser.add_argument("save_every", type=above_zero, help="epochs from one snapshot to the next")
    parser.add_argument("--batch-size", type=above_zero, default=32, help="samples per step and process (32)")
    parser.add_argument("--features", type=above_zero, default=20, help="inputs of the linear layer (20)")
    parser.add_argument("--snapshot", type=Path, default="snapshot.pt", help="on a shared file system (snapshot.pt)")
    args = parser.parse_args()
    args.snapshot = args.snapshot.resolve()  # through links, so that a save replaces the file and not the link
    if not args.snapshot.parent.is_dir():  # said now, not at the first save
        parser.error(f"argument --snapshot: there is no folder {args.snapshot.parent}")
    return args


def say(text: str, stream: TextIO = sys.stdout) -> None:
    # One write for a whole line: print() under `python -u` makes two, and the lines of two ranks mix.
    stream.write(f"[GPU{dist.get_rank()}] {text}\n")
    stream.flush()


def gather(values: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """The values of all ranks, in rank order, on every rank."""
    mine = values.to(device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return [each.cpu() for each in everyones]


def is_any_rank_told_to_stop(device: torch.device) -> bool:
    # A signal may reach one rank only. If it left alone, the others would wait for it forever.
    flag = torch.tensor(int(stop_requested), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def leave(code: int, text: str) -> NoReturn:
    """End on all ranks together."""
    for stop_signal in STOP_SIGNALS:  # all is decided; a second TERM must not change the exit code
        signal.signal(stop_signal, signal.SIG_IGN)
    # Rank 0 saves and holds the store that the others need: nobody goes before all are here.
    dist.barrier(device_ids=[torch.cuda.current_device()] if USE_GPU else None)
    if text:
        say(text, sys.stdout if code in (0, STOPPED_AND_SAVED) else sys.stderr)
    dist.destroy_process_group()
    # Not sys.exit(): while the interpreter is torn down, a thread of gloo's that still ends can abort the process
    # ("terminate called without an active exception"; about one rank in a hundred on a busy machine).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def save_snapshot(path: Path, snapshot: dict[str, Any]) -> None:
    """Whoever is killed at whatever moment leaves the old snapshot or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")  # a fixed name: the next save overwrites what a killed one left
    with temporary.open("wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())  # the contents reach the disk before the name does
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def load_snapshot(path: Path) -> dict[str, Any] | None:
    """The snapshot; None where there is no file; what is no whole snapshot of ours raises."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save writes a zip file; torch.load checks none of its checksums
            broken = archive.testzip()
    except FileNotFoundError:
        return None
    if broken:
        raise ValueError(f"wrong checksum of {broken}")
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(snapshot, dict) or set(snapshot) != CONTENTS:
        raise ValueError(f"it does not hold just {', '.join(sorted(CONTENTS))}")
    return snapshot


def get_rng_state() -> torch.Tensor:
    return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state()]) if USE_GPU else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    cpu_bytes = torch.get_rng_state().numel()
    torch.set_rng_state(state[:cpu_bytes])
    if USE_GPU and state.numel() > cpu_bytes:
        torch.cuda.set_rng_state(state[cpu_bytes:])


def resume(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[bool, int, int]:
    """Load the snapshot on all ranks or on none: was there one, epochs done, samples done in the epoch after them."""
    found, epochs_done, samples_done, problem = 0, 0, 0, ""
    try:
        snapshot = load_snapshot(path)
        if snapshot is not None:
            model.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            if snapshot["world_size"] == dist.get_world_size():  # else the states are not one for each rank
                set_rng_state(snapshot["rng"][dist.get_rank()])
            found, epochs_done, samples_done = 1, int(snapshot["epochs_done"]), int(snapshot["samples_done"])
    except Exception as error:  # a damaged file makes torch.load raise half a dozen kinds, some of them wordy
        found, problem = -1, " ".join(f"{type(error).__name__}: {error}".split()).split(". ")[0].rstrip(":.")

    # Who cannot read it must tell the others: they would go on without it, or wait for it.
    views = [view.tolist() for view in gather(torch.tensor([found, epochs_done, samples_done]), device)]
    for rank, view in enumerate(views):
        if view[0] == -1:
            problem = problem or f"rank {rank} cannot read it"
            cure = "Put a good copy in its place, or move it away to start from epoch 0."
            leave(1, f"ERROR: {path} is damaged, or no snapshot of this model ({problem}). {cure}")
        if view != views[0]:
            first, other = (f"epoch {v[1]}, sample {v[2]}" if v[0] else "no file" for v in (views[0], view))
            cure = "Use --snapshot PATH with a path on a file system that all nodes share."
            leave(1, f"ERROR: {path} differs from node to node: rank 0 has {first}, rank {rank} has {other}. {cure}")
    return bool(found), epochs_done, samples_done


def train(args: argparse.Namespace, local_rank: int) -> tuple[int, str]:
    """The exit code, the same on all ranks, and what to say with it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank) if USE_GPU else torch.device("cpu")

    # The data, the same on every rank; the sampler deals them out. The loader has a generator of its own,
    # so that it draws nothing from the RNG whose state is in the snapshot.
    data_rng = torch.Generator().manual_seed(0)
    inputs = torch.rand(SAMPLES, args.features, generator=data_rng)
    dataset = TensorDataset(inputs, torch.rand(SAMPLES, 1, generator=data_rng))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, generator=torch.Generator())

    # The model. DDP gives every rank the weights of rank 0 and averages the gradients of all ranks in backward().
    torch.manual_seed(rank)
    model: torch.nn.Module = torch.nn.Linear(args.features, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found, epochs_done, samples_done = resume(args.snapshot, model, optimizer, device)
    if epochs_done >= args.total_epochs:
        return 0, f"Nothing to do: {args.snapshot} has {epochs_done} epochs done, {args.total_epochs} were asked for"
    samples_per_step = args.batch_size * world_size
    first_step = samples_done // samples_per_step  # rounded down: with another world size some are seen twice, all once
    if found:
        say(f"Resuming from {args.snapshot} at epoch {epochs_done}, step {first_step}")
    ddp_model = DDP(model, device_ids=[local_rank] if USE_GPU else None)

    def save(epochs_done: int, samples_done: int) -> None:
        rng = gather(get_rng_state(), device)  # all ranks take part, one writes
        if rank == 0:
            snapshot = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epochs_done": epochs_done,
                "samples_done": samples_done,
                "world_size": world_size,
                "rng": rng,
            }
            save_snapshot(args.snapshot, snapshot)

    for epoch in range(epochs_done, args.total_epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        for step, (batch, targets) in enumerate(loader):
            if step < first_step:
                continue  # trained before the stop
            if is_any_rank_told_to_stop(device):
                save(epoch, step * samples_per_step)
                return STOPPED_AND_SAVED, f"Stopped and saved at epoch {epoch}, step {step}; run again to go on"
            optimizer.zero_grad()
            mse_loss(ddp_model(batch.to(device)), targets.to(device)).backward()
            optimizer.step()
        first_step = 0
        say(f"Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(loader)}")
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs:
            save(epoch + 1, samples_done=0)
    return 0, ""


def main() -> None:
    args = parse_arguments()
    # torchrun says in the environment who we are; without torchrun we are a world of one.
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    local_rank = int(os.environ["LOCAL_RANK"])
    if USE_GPU:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if USE_GPU else "gloo")
    code, text = train(args, local_rank)
    # train() has returned and its DDP is gone. A DDP that outlives the group can hang its process at the end for good
    # (pytorch issue 56297; with gloo about one run in fifty).
    leave(code, text)


if __name__ == "__main__":
    main()
