"""Engine `torchrun`: the words that start torch's own launcher on one node."""

from __future__ import annotations

from collections.abc import Sequence

#: How every process of ours runs its Python: apart from the user's folder, variables and packages, bytes as they are.
ISOLATED = ("-I", "-S", "-B", "-X", "utf8")


def bracketed(address: str) -> str:
    """An address as it stands before ``:PORT``.

    >>> bracketed("2001:db8::5"), bracketed("10.0.0.1")
    ('[2001:db8::5]', '10.0.0.1')
    """
    return f"[{address}]" if ":" in address else address


def torchrun_words(
    python: str,
    nnodes: int,
    node_rank: int,
    nproc: int,
    address: str,
    port: int,
    run_id: str,
    extra: Sequence[str] = (),
) -> tuple[str, ...]:
    """torch's command line is the only interface of it that is stable over versions (2.1 to 2.14)."""
    return (
        python, "-m", "torch.distributed.run",
        f"--nnodes={nnodes}", f"--node-rank={node_rank}", f"--nproc-per-node={nproc}",
        "--rdzv-backend=static", f"--rdzv-endpoint={bracketed(address)}:{port}",
        f"--rdzv-id={run_id}", "--max-restarts=0", *extra,
    )  # fmt: skip


def starter_words(python: str, starter: str) -> tuple[str, ...]:
    """The rank starter as torchrun's program. torchrun substitutes ``$$`` and ``${local_rank}`` in arguments."""
    return ("--no-python", python, *ISOLATED, starter.replace("$", "$$"))
