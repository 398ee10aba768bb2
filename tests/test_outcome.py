"""What became of a launch: which rank failed first, with what code, and how that is told."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace

import pytest
from torchrun_nccl import diagnosis, outcome, report
from torchrun_nccl.agreement import Agreement, NodeAgreement
from torchrun_nccl.allocation import Allocation, Host
from torchrun_nccl.options import parse
from torchrun_nccl.outcome import (
    EXCERPT_BYTES,
    Attempt,
    Cause,
    NodeEnd,
    Outcome,
    RankEnd,
    decide,
    excerpt,
    first_failure,
    is_echo,
    last_words,
    to_json,
)
from torchrun_nccl.plan import Context, Plan, make_plan

TERM, INT, KILL, ABRT, SEGV, PIPE = 15, 2, 9, 6, 11, 13


def traceback(exception: str, mark: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "/w/train.py", line 7, in <module>', "    main()", exception]
    return "".join(f"{mark}{line}\n" for line in lines)


# Texts of the kinds that torch, gloo and NCCL write, shortened.
GLOO = traceback(
    "RuntimeError: [/src/gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.6.1.31]:40123", "[rank1]: "
)
GLOO_RESET = traceback(
    "RuntimeError: [/src/gloo/transport/tcp/pair.cc:446] Read error [10.6.1.31]: Connection reset by peer"
)
GLOO_TIME = traceback(
    "RuntimeError: [/src/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 9000ms for recv operation"
)
GLOO_MESH = traceback("RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error")
STORE = traceback("torch.distributed.DistNetworkError: failed to recv, got 0 bytes")
STORE_WAIT = traceback(
    "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 2/4 clients joined."
)
NCCL_REMOTE = traceback(
    "torch.distributed.DistBackendError: NCCL error in: /src/NCCLUtils.cpp:77, remote process exited or there was a network "
    "error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error.\nLast error:\nsocket closed"
)
WATCHDOG = (
    "[rank2]:[E ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE) ran for 600000 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG 0 Rank 2] Process group watchdog thread terminated with exception\n"
)
CPP = "".join(
    f"frame #{number}: c10::Something<{number}>() + 0x{number:x} (0x7f0000 in libtorch.so)\n" for number in range(400)
)
ABORT = "terminate called without an active exception\n"
VALUE = traceback("ValueError: boom", "[rank3]: ")
CUDA_ERROR = traceback("RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later.")
NCCL_OWN = traceback(
    "torch.distributed.DistBackendError: NCCL error in: /src/NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN), "
    "NCCL version 2.21.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nDuplicate GPU detected"
)
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"


def rank(number: int, code: int | None = 0, ms: float = 1000.0, tail: str = "", asked: int = 0) -> RankEnd:
    """Two ranks on each node."""
    return RankEnd(number // 2, number, number % 2, code, ms, asked, tail)


def attempt(*ranks: RankEnd, nodes: tuple[NodeEnd, ...] = (), world_size: int = 4, others: int = 0) -> Attempt:
    return Attempt(0, ranks, nodes, world_size, others)


# --- echoes ---


@pytest.mark.parametrize(
    "code, tail, expected",
    [
        (1, GLOO, True),
        (1, GLOO_RESET, True),
        (1, GLOO_TIME, True),
        (1, GLOO_MESH, True),
        (1, STORE, True),
        (1, STORE_WAIT, True),
        (1, NCCL_REMOTE, True),
        (-ABRT, WATCHDOG, True),
        (-ABRT, GLOO + ABORT, True),
        (-ABRT, ABORT, True),  # gloo's threads, when the process ends in its middle
        (134, ABORT, True),  # the same below a shell
        (-SEGV, GLOO, True),  # it fell over its own feet on the way out
        (-PIPE, "", True),
        (1, "failed to recv, got 0 bytes\n", True),
        (3, traceback("RuntimeError: Broken pipe") + "giving up\n", True),
        # A Python exception of its own, whatever else stands there
        (1, VALUE, False),
        (-ABRT, VALUE + ABORT, False),
        (-ABRT, VALUE + ABORT + CPP, False),
        (1, VALUE + GLOO, False),  # the exception of a later clean-up
        (1, VALUE + CHAIN + GLOO, False),  # ... raised while the first one was handled
        (1, GLOO + CHAIN + VALUE, True),  # and the reverse: the loss came first
        (1, traceback("__main__.Boom") + "Connection closed by peer\n", False),  # a class of the script's
        (1, traceback("KeyboardInterrupt") + ABORT, False),
        (1, traceback("torch.OutOfMemoryError: CUDA out of memory."), False),
        (1, "  File \"x.py\", line 1\n    f(\n     ^\nSyntaxError: '(' was never closed\n", False),
        (1, CUDA_ERROR + ABORT, False),
        (1, NCCL_OWN, False),  # NCCL's complaint about this rank
        (1, traceback("torch.distributed.DistNetworkError: failed to listen, port: 29500, name: EADDRINUSE"), False),
        (1, traceback("requests.exceptions.ConnectionError: [Errno 111] Connection refused"), False),  # not torch's
        (1, traceback("ConnectionResetError: [Errno 104] Connection reset by peer"), False),
        # An end that the program chose, or that came from outside
        (7, "warning: Connection refused, trying again\n", False),
        (-KILL, "warning: Connection refused, trying again\n", False),
        (-SEGV, "warning: Connection refused, trying again\n", False),
        (1, "", False),
        (1, "no data found\n", False),
        (None, "", False),
    ],
)
def test_is_echo(code, tail, expected):
    assert is_echo(rank(0, code, tail=tail)) is expected
    assert is_echo(rank(0, code, tail=excerpt("noise\n" * 9 + tail))) is expected  # the launcher keeps no more


@pytest.mark.parametrize("noise", ["", "loading\n" * 3000])
@pytest.mark.parametrize(
    "tail, start, end",
    [
        # A C++ trace longer than all we keep: the exception is kept, and how it ended.
        (VALUE + ABORT + CPP + "Aborted\n", VALUE + ABORT, "Aborted\n"),
        (VALUE + GLOO + CPP, VALUE, ""),
        (traceback("ValueError: " + "x" * 50000) + ABORT, "Traceback (most recent call last):\n", "x\n" + ABORT),
        (VALUE + CHAIN + GLOO, VALUE + CHAIN + GLOO, GLOO),
        (GLOO, GLOO, GLOO),
        (CPP, "", CPP[-500:]),
        ("short\n", "", "short\n"),
    ],
)
def test_excerpt(noise, tail, start, end):
    kept = excerpt(noise + tail)
    assert len(kept) <= EXCERPT_BYTES
    assert kept.startswith(start)
    assert kept.endswith(end)


@pytest.mark.parametrize(
    "tail, lines",
    [
        ("", []),
        ("a\n\nb  \n", ["a", "b"]),
        ("\n".join("abcdefgh"), ["d", "e", "f", "g", "h"]),
        (
            VALUE + CPP + "Aborted\n",
            ["[rank3]: ValueError: boom", "[…]", *CPP.splitlines()[-2:], "Aborted"],
        ),
        (VALUE + ABORT, [*VALUE.splitlines()[-4:], ABORT.strip()]),
        (VALUE, VALUE.splitlines()),
    ],
)
def test_last_words(tail, lines):
    assert last_words(tail, 5) == lines


# --- the first failure ---

LOST = NodeEnd(1, "lost: silent for 15 s", 2000.0)
ENGINE = NodeEnd(1, "torchrun was ended by SIGKILL while its ranks ran", 2000.0, True)


def told(given: Attempt, stopped_by: int = 0) -> tuple[str, int, str]:
    """Cause, exit code, and whose failure it is."""
    cause = decide(given, stopped_by)
    who = f"rank {cause.rank.rank}" if cause.rank else f"node {cause.node.node}" if cause.node else "nobody"
    return cause.cause, cause.exit_code, who + (", an echo" if cause.is_echo else "")


@pytest.mark.parametrize(
    "given, expected",
    [
        # (1) The earliest whose stderr is no echo, by time of death; its code unchanged.
        (attempt(rank(3, 7, 500.0), rank(0, 9, 520.0)), ("rank_exit", 7, "rank 3")),
        (attempt(rank(0, 9, 520.0), rank(3, 7, 500.0)), ("rank_exit", 7, "rank 3")),  # whatever the order of the records
        (attempt(rank(0, 1, 400.0, GLOO), rank(3, 7, 500.0)), ("rank_exit", 7, "rank 3")),  # an echo may die sooner
        (attempt(rank(0, -ABRT, 400.0, WATCHDOG), rank(3, 1, 500.0, VALUE)), ("rank_exit", 1, "rank 3")),
        (attempt(rank(2, -KILL, 500.0), rank(0, 1, 600.0, VALUE)), ("rank_signal", 137, "rank 2")),
        (attempt(rank(2, -SEGV, 500.0)), ("rank_signal", 139, "rank 2")),
        (attempt(rank(1, -ABRT, 500.0, VALUE + ABORT), rank(0, 1, 501.0, GLOO)), ("rank_signal", 134, "rank 1")),
        # ... not those that we ended, whatever their code
        (attempt(rank(0, -TERM, 300.0, asked=TERM), rank(3, 7, 500.0)), ("rank_exit", 7, "rank 3")),
        (attempt(rank(0, 1, 300.0, VALUE, TERM), rank(3, 7, 500.0)), ("rank_exit", 7, "rank 3")),
        (attempt(rank(0, -KILL, 300.0, asked=TERM), rank(3, 75, 500.0)), ("rank_exit", 75, "rank 3")),
        # A starter lost without a record is a first failure too, in its time.
        (attempt(rank(2, None, 500.0), rank(0, 1, 600.0, GLOO)), ("rank_signal", 137, "rank 2")),
        (attempt(rank(2, None, 500.0), rank(0, 7, 400.0)), ("rank_exit", 7, "rank 0")),
        # (1) before a node lost: its ranks' neighbours may have seen why.
        (attempt(rank(0, 1, 2500.0, VALUE), nodes=(LOST,)), ("rank_exit", 1, "rank 0")),
        # torchrun gone while ranks run
        (attempt(rank(0, 1, 2100.0, GLOO), nodes=(ENGINE,)), ("internal", 125, "node 1")),
        (attempt(nodes=(ENGINE,)), ("internal", 125, "node 1")),
        (attempt(rank(0, 7, 1900.0), nodes=(ENGINE,)), ("rank_exit", 7, "rank 0")),
        (attempt(rank(0, 7, 2100.0), nodes=(ENGINE,)), ("internal", 125, "node 1")),
        # (2) One that left early with 0, or a node lost, before the first echo: the earlier one
        (attempt(rank(2, 0, 400.0), rank(0, 1, 500.0, GLOO)), ("rank_exit", 1, "rank 2")),
        (attempt(rank(1, 0, 450.0), rank(2, 0, 400.0), rank(0, -ABRT, 500.0, ABORT)), ("rank_exit", 134, "rank 2")),
        (attempt(rank(0, 1, 2300.0, GLOO), nodes=(LOST,)), ("node_lost", 121, "node 1")),
        (attempt(rank(2, 0, 1900.0), rank(0, 1, 2300.0, GLOO), nodes=(LOST,)), ("rank_exit", 1, "rank 2")),
        (attempt(rank(2, 0, 2100.0), rank(0, 1, 2300.0, GLOO), nodes=(LOST,)), ("node_lost", 121, "node 1")),
        (attempt(nodes=(LOST,)), ("node_lost", 121, "node 1")),
        (attempt(rank(0), rank(1), nodes=(LOST,)), ("node_lost", 121, "node 1")),  # ends with 0 are no failure by themselves
        (attempt(nodes=(replace(LOST, ms=None),)), ("node_lost", 121, "node 1")),
        # (3) The earliest echo, said to be one
        (attempt(rank(0, 1, 500.0, GLOO), rank(1, 1, 510.0, GLOO)), ("rank_exit", 1, "rank 0, an echo")),
        (attempt(rank(0, 1, 500.0, GLOO), rank(1, 0, 510.0)), ("rank_exit", 1, "rank 0, an echo")),  # left after it
        (attempt(rank(0, 1, 500.0, GLOO), nodes=(LOST,)), ("rank_exit", 1, "rank 0, an echo")),  # lost after it
        (attempt(*(rank(n, -ABRT, 600.0 + n, WATCHDOG) for n in range(4))), ("rank_signal", 134, "rank 0, an echo")),
        # After our own stop has begun, a lost node is never the cause.
        (
            attempt(rank(0, 1, 1000.0, GLOO), nodes=(replace(LOST, ms=0.0, is_late=True),)),
            ("rank_exit", 1, "rank 0, an echo"),
        ),
        (attempt(rank(0), nodes=(replace(LOST, is_late=True),)), ("internal", 125, "nobody")),
        (attempt(), ("internal", 125, "nobody")),
    ],
)
def test_first_failure(given, expected):
    assert told(given) == expected


@pytest.mark.parametrize("given", [
    attempt(rank(0), rank(1)), attempt(rank(0, 3, asked=TERM)), attempt(nodes=(replace(LOST, is_late=True),)),
])  # fmt: skip
def test_nothing_failed_by_itself(given):
    assert first_failure(given) is None


def lost(node: int, ms: float) -> NodeEnd:
    return NodeEnd(node, "lost: silent for 15 s", ms)


@pytest.mark.parametrize(
    "nodes, others, who, message",
    [
        ((lost(1, 2000.0),), 3, 1, "lost: silent for 15 s"),
        ((lost(1, 2000.0),), 1, 1, "lost: silent for 15 s"),  # the only other one: nothing to tell it by
        ((lost(2, 3000.0), lost(1, 2000.0)), 3, 1, "lost: silent for 15 s, and 1 other node at the same time"),
        ((lost(1, 2000.0), lost(2, 60000.0)), 2, 1, "lost: silent for 15 s"),  # a minute apart
        (
            (lost(1, 2000.0), lost(2, 2500.0), lost(3, 3900.0)),
            3,
            None,
            "this host lost all 3 other nodes at once (lost: silent for 15 s): look at this host and its network",
        ),
        (
            (lost(1, 2000.0), lost(2, 2500.0), lost(3, 3900.0)),
            0,
            1,
            "lost: silent for 15 s, and 2 other nodes at the same time",
        ),
    ],
)
def test_nodes_lost_together(nodes, others, who, message):
    cause = first_failure(attempt(nodes=nodes, others=others))
    assert (cause.cause, cause.exit_code, cause.node and cause.node.node, cause.message) == ("node_lost", 121, who, message)


# --- the end of the whole ---


def all_ranks(code: int | None, asked: int = 0, tail: str = "") -> tuple[RankEnd, ...]:
    return tuple(rank(number, code, 1000.0 + number, tail, asked) for number in range(4))


@pytest.mark.parametrize(
    "given, stopped_by, expected",
    [
        (attempt(*all_ranks(0)), 0, ("done", 0, "nobody")),
        (attempt(*all_ranks(0)), TERM, ("done", 0, "nobody")),  # the signal came when all had ended
        # A record of 0 from every rank: what happens to a node after that takes nothing away (A73).
        (attempt(*all_ranks(0), nodes=(LOST,)), 0, ("done", 0, "nobody")),
        # A rank that never reported is a failure (A03).
        (attempt(*all_ranks(0)[:3]), 0, ("internal", 125, "nobody")),
        (attempt(*all_ranks(0)[:2], nodes=(LOST,)), 0, ("node_lost", 121, "node 1")),
        (attempt(*all_ranks(0)[:3], rank(3, 3)), 0, ("rank_exit", 3, "rank 3")),
        # Saved on request: all of them, or it is a failure.
        (attempt(*all_ranks(75, TERM)), TERM, ("saved", 75, "nobody")),
        (attempt(*all_ranks(75)), 0, ("saved", 75, "nobody")),  # USR1
        (attempt(*all_ranks(75)[:3], rank(3, 1, 900.0, VALUE)), 0, ("rank_exit", 1, "rank 3")),
        (attempt(*all_ranks(75, TERM)[:3], rank(3, -KILL, asked=TERM)), TERM, ("stopped", 143, "nobody")),
        (attempt(*all_ranks(75, TERM)[:3]), TERM, ("stopped", 143, "nobody")),
        # Stopped: 128 + n ...
        (attempt(*all_ranks(-TERM, TERM)), TERM, ("stopped", 143, "nobody")),
        (attempt(*all_ranks(-INT, INT)), INT, ("stopped", 130, "nobody")),
        (attempt(*all_ranks(-KILL, TERM)), TERM, ("stopped", 143, "nobody")),
        (attempt(*all_ranks(-TERM, TERM)), INT, ("stopped", 130, "nobody")),
        (attempt(*all_ranks(-TERM)), TERM, ("stopped", 143, "nobody")),  # Slurm signals the ranks itself
        (attempt(*all_ranks(0, TERM)[:2], *all_ranks(1, TERM)[2:]), TERM, ("stopped", 143, "nobody")),
        (attempt(nodes=(LOST,)), TERM, ("stopped", 143, "nobody")),  # the scheduler KILLed the nodes
        (attempt(*all_ranks(3, TERM)[:2], nodes=(LOST,)), TERM, ("stopped", 143, "nobody")),
        (attempt(*all_ranks(None, TERM)), TERM, ("stopped", 143, "nobody")),
        (attempt(), INT, ("stopped", 130, "nobody")),
        # ... unless all ranks ended by themselves with one code.
        (attempt(*all_ranks(3, TERM)), TERM, ("stopped", 3, "nobody")),
        (attempt(*all_ranks(0, TERM)), TERM, ("stopped", 0, "nobody")),
        # A failure that was there before is told beside it, the code is the signal's.
        (attempt(rank(3, 7, 500.0), *all_ranks(-TERM, TERM)[:3]), TERM, ("stopped", 143, "rank 3")),
        (attempt(rank(3, 1, 500.0, GLOO), *all_ranks(-TERM, TERM)[:3]), TERM, ("stopped", 143, "nobody")),
    ],
)
def test_decide(given, stopped_by, expected):
    assert told(given, stopped_by) == expected


@pytest.mark.parametrize("codes", [(0, 3, 0), (3, 0, 0), (0, 0, 3)])
def test_one_failure_in_any_place(codes):
    """A03: the last status is not the status."""
    given = attempt(*(rank(number, code) for number, code in enumerate(codes)), world_size=3)
    assert decide(given, 0).exit_code == 3


# --- JSON ---

HOSTS = ("n1.site.org", "n2.site.org")
KEYS = ["host", "node_rank", "rank", "local_rank", "gpu", "exit_code", "signal", "stderr_tail", "hint"]


def ended(cause: Cause, *attempts: Attempt) -> Outcome:
    return Outcome(cause, attempts, ((0, "/w/output.x.py.n1.log"), (1, "/w/output.x.py.n2.log")), 12.3456)


def test_json_of_a_failed_rank():
    given = attempt(rank(3, 7, 500.0, "boom\n"), rank(0, -TERM, 3500.0, asked=TERM), nodes=(replace(LOST, is_late=True),))
    given = replace(given, ranks=(replace(given.ranks[0], gpu="1"), given.ranks[1]))
    found = to_json(ended(decide(given, 0), attempt(), given), HOSTS, "try less")
    assert json.loads(json.dumps(found)) == {
        "exit_code": 7,
        "cause": "rank_exit",
        "message": "",
        "attempts": 2,
        "seconds": 12.346,
        "first_failure": {
            "host": "n2.site.org", "node_rank": 1, "rank": 3, "local_rank": 1, "gpu": "1", "exit_code": 7, "signal": None,
            "stderr_tail": "boom\n", "hint": "try less",
        },
        "nodes": [
            {"host": "n1.site.org", "node_rank": 0, "log": "/w/output.x.py.n1.log", "error": None},
            {"host": "n2.site.org", "node_rank": 1, "log": "/w/output.x.py.n2.log", "error": "lost: silent for 15 s"},
        ],
        "ranks": [
            {"host": "n1.site.org", "node_rank": 0, "rank": 0, "local_rank": 0, "gpu": None, "exit_code": None,
             "signal": "SIGTERM", "milliseconds": 3500.0, "ended_by": "us"},
            {"host": "n2.site.org", "node_rank": 1, "rank": 3, "local_rank": 1, "gpu": "1", "exit_code": 7,
             "signal": None, "milliseconds": 500.0, "ended_by": "itself"},
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    "given, stopped_by, expected",
    [
        (attempt(rank(2, -SEGV, 500.0)), 0, ("n2.site.org", 1, 2, 0, None, None, "SIGSEGV", "", "")),
        (attempt(rank(2, None, 500.0)), 0, ("n2.site.org", 1, 2, 0, None, None, None, "", "")),
        (attempt(rank(2, 0, 4.0), rank(0, 1, 5.0, GLOO)), 0, ("n2.site.org", 1, 2, 0, None, 0, None, "", "")),
        (attempt(nodes=(LOST,)), 0, ("n2.site.org", 1, None, None, None, None, None, "", "")),
        (attempt(nodes=(replace(ENGINE, tail="bad"),)), 0, ("n2.site.org", 1, None, None, None, None, None, "bad", "")),
        (attempt(*all_ranks(0)), 0, None),
        (attempt(*all_ranks(75)), 0, None),
        (attempt(*all_ranks(-TERM, TERM)), TERM, None),
    ],
)
def test_json_first_failure(given, stopped_by, expected):
    found = to_json(ended(decide(given, stopped_by), given), HOSTS, "")["first_failure"]
    assert found == (dict(zip(KEYS, expected)) if expected else None)


def test_json_before_the_start():
    found = to_json(Outcome(Cause("refused", 120, message="n2: no torch"), ()), HOSTS, "")
    assert (found["cause"], found["exit_code"], found["message"], found["ranks"]) == ("refused", 120, "n2: no torch", [])


# --- what a person reads ---


def plan(
    words: str = "", scheduler: str = "pbs", hosts: tuple[str, ...] = HOSTS, job: str = "17.pbs0", index: str = ""
) -> Plan:
    context = Context(
        launch_id="LAUNCH", environment=(), scheduler_environment=(), directory="/w", umask=0o022, limits=(),
        hostname="elsewhere" if scheduler != "local" else hosts[0], own_names=frozenset(), runner="/usr/bin/python3",
        door="/d.py", python="/usr/bin/python3", terminal="", find=lambda name: f"/bin/{name}",
    )  # fmt: skip
    places = tuple(Host(host, line) for line, host in enumerate(hosts))
    return make_plan(parse([*words.split(), "x.py"]), Allocation(scheduler, job, places, "why", index), context)


def on(*counts: int, note: str = "OMP_NUM_THREADS 12 = 48 CPUs / 4", is_cpu: bool = False) -> Agreement:
    nodes = tuple(NodeAgreement(index, count, (), note) for index, count in enumerate(counts))
    return Agreement(0, "10.0.0.1", 20001, is_cpu, nodes, ())


@pytest.mark.parametrize(
    "made, agreed, expected",
    [
        (
            plan(),
            on(4, 4, note="OMP_NUM_THREADS 12 = 48 CPUs / 4 (PBS had 48)"),
            "2 nodes x 4 = 8 processes (GPU), PBS job 17.pbs0 by pbsdsh, OMP_NUM_THREADS 12 = 48 CPUs / 4 (PBS had 48), "
            "logs output.x.py.HOST.log",
        ),
        (
            plan(scheduler="local", hosts=("box",), job=""),
            on(2, is_cpu=True),
            "1 node x 2 = 2 processes (CPU), local, OMP_NUM_THREADS 12 = 48 CPUs / 4, log output.x.py.box.log",
        ),
        (
            plan(scheduler="hosts", job=""),
            on(4, 2),
            "2 nodes x (4+2) = 6 processes (GPU), hosts by ssh, OMP_NUM_THREADS 12 = 48 CPUs / 4, logs output.x.py.HOST.log",
        ),
        (
            plan("--log-dir logs", index="3"),
            on(1, 1),
            "2 nodes x 1 = 2 processes (GPU), PBS job 17.pbs0 by pbsdsh, OMP_NUM_THREADS 12 = 48 CPUs / 4, "
            "logs /w/logs/output.x.py.HOST.3.log",
        ),
        (
            plan(hosts=("x.site.org", "py.site.org")),  # a host called as a part of the script's name
            on(1, 1),
            "2 nodes x 1 = 2 processes (GPU), PBS job 17.pbs0 by pbsdsh, OMP_NUM_THREADS 12 = 48 CPUs / 4, "
            "logs output.x.py.HOST.log",
        ),
    ],
)
def test_header(made, agreed, expected):
    assert report.header(made, agreed) == expected


def test_header_of_many_uneven_nodes():
    hosts = tuple(f"n{index}" for index in range(20))
    line = report.header(plan(hosts=hosts), on(*([4] * 19), 2))
    assert line.startswith("20 nodes x (4+4+4+4+4+4+4+4+4+4+4+4+4+4+4+4+…) = 78 processes")


def test_header_tells_where_the_threads_hold():
    agreed = replace(on(4, 2), nodes=(on(4).nodes[0], replace(on(2).nodes[0], omp_note="OMP_NUM_THREADS 24 = 48 CPUs / 2")))
    assert "OMP_NUM_THREADS 12 = 48 CPUs / 4 on n1.site.org, logs" in report.header(plan(), agreed)


def with_gpu(end: RankEnd, gpu: str) -> RankEnd:
    return replace(end, gpu=gpu)


LAST = "{cause}, exit code {code}, 12.3 s"


@pytest.mark.parametrize(
    "given, stopped_by, lines",
    [
        (attempt(*all_ranks(0)), 0, ["done, exit code 0, 12.3 s"]),
        (attempt(*all_ranks(75)), 0, ["every rank saved its state and left", "saved, exit code 75, 12.3 s"]),
        (attempt(*all_ranks(-TERM, TERM)), TERM, ["stopped by SIGTERM", "stopped, exit code 143, 12.3 s"]),
        (
            attempt(with_gpu(rank(3, 7, 500.0, "loading\nboom\n"), "1"), rank(0, 9, 520.0), rank(1, 1, 530.0, GLOO)),
            0,
            [
                "later: ranks 0, 1 on n1.site.org failed too",
                "first failure: rank 3 on n2.site.org (node 1, local rank 1, GPU 1) exited with 7 after 0.5 s",
                "  | loading",
                "  | boom",
                "log: /w/output.x.py.n2.log",
                "rank_exit, exit code 7, 12.3 s",
            ],
        ),
        (
            attempt(rank(2, -KILL, 61000.0)),
            0,
            [
                "first failure: rank 2 on n2.site.org (node 1, local rank 0) ended by SIGKILL after 61.0 s",
                "log: /w/output.x.py.n2.log",
                "hint: killed from outside: often the memory limit of the job (look at the scheduler's report)",
                "rank_signal, exit code 137, 12.3 s",
            ],
        ),
        (
            attempt(rank(2, None, 500.0)),
            0,
            [
                "first failure: rank 2 on n2.site.org (node 1, local rank 0) lost with its starter, killed from outside "
                "after 0.5 s",
                "log: /w/output.x.py.n2.log",
                "rank_signal, exit code 137, 12.3 s",
            ],
        ),
        (
            attempt(rank(1, -ABRT, 500.0, "[rank1]: ValueError: boom\n" + CPP)),
            0,
            [
                "first failure: rank 1 on n1.site.org (node 0, local rank 1) ended by SIGABRT after 0.5 s",
                "  | [rank1]: ValueError: boom",
                "  | […]",
                *(f"  | {line}" for line in CPP.splitlines()[-3:]),
                "log: /w/output.x.py.n1.log",
                "rank_signal, exit code 134, 12.3 s",
            ],
        ),
        # Its own end says nothing: the first rank that could not go on does.
        (
            attempt(rank(2, 0, 400.0), rank(0, 1, 500.0, "failed to recv, got 0 bytes\n")),
            0,
            [
                "later: rank 0 on n1.site.org failed too",
                "rank 0 exited with 1:",
                "  | failed to recv, got 0 bytes",
                "first failure: rank 2 on n2.site.org (node 1, local rank 0) exited with 0 after 0.4 s: "
                "it left early, while others still needed it",
                "log: /w/output.x.py.n2.log",
                "rank_exit, exit code 1, 12.3 s",
            ],
        ),
        (
            attempt(rank(1, 1, 500.0, "failed to recv, got 0 bytes\n")),
            0,
            [
                "first failure seen, likely the echo of another: rank 1 on n1.site.org (node 0, local rank 1) exited with 1 "
                "after 0.5 s",
                "  | failed to recv, got 0 bytes",
                "log: /w/output.x.py.n1.log",
                "rank_exit, exit code 1, 12.3 s",
            ],
        ),
        (
            attempt(rank(3, 7, 500.0, "boom\n"), *all_ranks(-TERM, TERM)[:3]),
            TERM,
            [
                "stopped by SIGTERM",
                "first failure: rank 3 on n2.site.org (node 1, local rank 1) exited with 7 after 0.5 s",
                "  | boom",
                "log: /w/output.x.py.n2.log",
                "stopped, exit code 143, 12.3 s",
            ],
        ),
        (
            attempt(nodes=(LOST,)),
            0,
            [
                "n2.site.org (node 1): lost: silent for 15 s",
                "log: /w/output.x.py.n2.log",
                "node_lost, exit code 121, 12.3 s",
            ],
        ),
        (
            attempt(nodes=(replace(ENGINE, tail="Traceback…\nModuleNotFoundError: No module named 'torch'\n"),)),
            0,
            [
                "n2.site.org (node 1): torchrun was ended by SIGKILL while its ranks ran",
                "  | Traceback…",
                "  | ModuleNotFoundError: No module named 'torch'",
                "log: /w/output.x.py.n2.log",
                "hint: a package is missing in that node's environment",
                "internal, exit code 125, 12.3 s",
            ],
        ),
    ],
)
def test_summary(given, stopped_by, lines):
    assert report.summary(plan(), ended(decide(given, stopped_by), given)) == lines


def test_summary_of_many_attempts_and_ranks():
    given = attempt(*(rank(number, 1, 1000.0 + number, VALUE) for number in range(4)))
    lines = report.summary(plan(), ended(decide(given, 0), attempt(), given))
    assert (lines[0], lines[-1]) == (
        "later: ranks 1, 2, 3 on n[1-2].site.org failed too",
        "rank_exit, exit code 1, 12.3 s, 2 attempts",
    )


def test_summary_before_the_start():
    result = Outcome(Cause("refused", 120, message="n1: no torch\nn2: no disk"), (), (), 0.44)
    assert report.summary(plan(), result) == ["n1: no torch", "n2: no disk", "refused, exit code 120, 0.4 s"]


# --- hints ---

FULL = "the GPU's memory is full: a smaller batch or model, or more GPUs"
BUILD = "this torch was not built for the GPUs of this node: install a build that lists its architecture"
PORT = "a port is taken by another program on that node"
NAME = "a host name does not resolve on that node"
LOADER = "a DataLoader worker was killed: too little memory or /dev/shm"
SHM = "/dev/shm is full or too small on that node"


@pytest.mark.parametrize(
    "tail, number, expected",
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", 0, FULL),
        ("torch.cuda.OutOfMemoryError: HIP out of memory.", 0, FULL),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", 0, BUILD),
        ("Tesla V100 with CUDA capability sm_70 is not compatible with the current PyTorch installation.", 0, BUILD),
        ("DistNetworkError: The server socket has failed to listen, port: 29500, name: EADDRINUSE", 0, PORT),
        ("OSError: [Errno 98] Address already in use", 0, PORT),
        ("message: address already in use", 0, PORT),
        ("socket.gaierror: [Errno -2] Name or service not known", 0, NAME),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", 0, NAME),
        ("RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed.", 0, LOADER),
        ("RuntimeError: DataLoader worker (pid(s) 17, 18) exited unexpectedly", 0, LOADER),
        ("RuntimeError: unable to open shared memory object </torch_17> in read-write mode", 0, SHM),
        ("Fatal Python error: Bus error", 7, SHM),
        ("OSError: [Errno 28] No space left on device", 0, "a disk is full on that node"),
        ("OSError: [Errno 122] Disk quota exceeded", 0, "your quota is used up"),
        ("ModuleNotFoundError: No module named 'foo'", 0, "a package is missing in that node's environment"),
        # By the signal, where nothing was said
        ("", 9, "killed from outside: often the memory limit of the job (look at the scheduler's report)"),
        ("", 11, "a crash in compiled code"),
        ("", 7, "/dev/shm is full or too small on that node, or a file on a lost file system was mapped"),
        ("CUDA out of memory", 9, FULL),
        ("", 15, ""),
        ("ValueError: boom", 0, ""),
        ("", 0, ""),
    ],
)
def test_hints(tail, number, expected):
    assert diagnosis.hint(tail, number) == expected


@pytest.mark.parametrize("module", [outcome, diagnosis, report])
def test_doctests(module):
    assert doctest.testmod(module).failed == 0
