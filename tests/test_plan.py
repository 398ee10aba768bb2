"""Plans: whole ones for captured job environments, and tables for what decides them."""

from __future__ import annotations

import doctest
import json
import shlex
from dataclasses import replace
from string import Template

import cases
import pytest
from torchrun_nccl import cli, plan, transports
from torchrun_nccl.allocation import Allocation, Host
from torchrun_nccl.errors import LaunchError, Refused
from torchrun_nccl.options import parse
from torchrun_nccl.plan import Context, Plan, make_plan, to_json, to_text
from torchrun_nccl.schedulers import detect, started_many_times
from torchrun_nccl.transports import SAFE, TRANSPORTS, is_name_of_here

PROGRAMS = {
    "pbsdsh": "/opt/pbs/bin/pbsdsh",
    "pbs_tmrsh": "/opt/pbs/bin/pbs_tmrsh",
    "srun": "/usr/bin/srun",
    "qrsh": "/opt/sge/bin/qrsh",
    "blaunch": "/opt/lsf/bin/blaunch",
    "flux": "/usr/bin/flux",
    "ssh": "/usr/bin/ssh",
}
DOOR = "/apps/NCI-ai-ml/23.05/lib/python/torchrun_nccl/node/door.py"


def context(**changes) -> Context:
    given = Context(
        launch_id="LAUNCH",
        environment=(("PATH", "/usr/bin"),),
        scheduler_environment=(),
        directory="/scratch/my dir",
        umask=0o022,
        limits=(),
        hostname="elsewhere",
        own_names=frozenset({"localhost", "elsewhere"}),
        runner="/usr/bin/python3",
        door=DOOR,
        python="/home/me/venv/bin/python3",
        terminal="",
        find=PROGRAMS.get,
    )
    return replace(given, **changes)


def made(words: str, allocation: Allocation, **changes) -> Plan:
    return make_plan(parse(shlex.split(words)), allocation, context(**changes))


def pbs(*hosts: Host, **changes) -> Allocation:
    return Allocation("pbs", "17.pbs0", hosts or (Host("n1", 0), Host("n2", 1)), why="PBS_JOBID is set", **changes)


def job_of(scheduler: str, *hosts: Host) -> Allocation:
    return Allocation(scheduler, "17", hosts, why="a variable is set")


def granted(*gpus: int | None, names: str = "n1 n2 n3") -> Allocation:
    """A job of Slurm, by the GPUs of its hosts."""
    hosts = [Host(name, line, gpus=number) for line, (name, number) in enumerate(zip(names.split(), gpus))]
    return job_of("slurm", *hosts)


def listed(*hosts: str, slots: int = 0) -> Allocation:
    return Allocation("hosts", "", tuple(Host(name, i, slots) for i, name in enumerate(hosts)), why="--hosts was given")


def error(words: str, allocation: Allocation, **changes) -> str:
    with pytest.raises(LaunchError) as caught:
        made(words, allocation, **changes)
    return f"{caught.value.exit_code} {caught.value}"


# --- whole plans ---


def plan_of(name: str) -> Plan:
    env, read_text = cases.load(name)
    many = started_many_times(env)
    if many:
        raise Refused(many)
    allocation = detect(env, read_text, hostname="elsewhere", run=cases.answers(name))
    return made("train.py --name 'my run' 'a$b'", allocation, environment=tuple(env.items()))


@pytest.mark.parametrize("name", cases.names())
def test_golden_plans(golden, name):
    try:
        text = to_text(plan_of(name))
    except LaunchError as refused:
        text = f"refused with {refused.exit_code}: {refused}\n"
    golden(f"plan-{name}.txt", text)


def test_golden_json(golden):
    golden("plan-gadi-gpuvolta-2x4.json", json.dumps(to_json(plan_of("gadi-gpuvolta-2x4")), indent=2) + "\n")


def test_golden_plan_over_ssh(golden):
    words = "--max-restarts 2 --role me --monitor-interval 0.5 --log-dir logs -m pkg.mod --lr 1"
    allocation = replace(listed("n1.site.org", "me@n2.site.org", slots=2), warnings=("one thing", "another"))
    env = (("MASTER_PORT", "4001"), ("NCCL_DEBUG", "INFO"), ("FI_PROVIDER", "cxi"), ("SECRET", "tell nobody"))
    golden("plan-ssh.txt", to_text(made(words, allocation, environment=env)))


STABLE = {
    "": ("scheduler", "job_id", "transport", "nodes", "target", "directory", "environment", "warnings"),
    "nodes": ("index", "node_rank", "host", "spare", "nproc", "words", "log"),
}


def test_json_has_the_stable_keys():
    found = to_json(plan_of("gadi-gpuvolta-2x4"))
    assert set(STABLE[""]) <= set(found)
    assert [tuple(node) for node in found["nodes"]] == [STABLE["nodes"]] * 2


def test_json_tells_no_values_of_variables():
    allocation = pbs()
    assert "hunter2" not in json.dumps(to_json(made("x.py", allocation, environment=(("PASSWORD", "hunter2"),))))


@pytest.mark.parametrize(
    "words, nproc",
    [
        ("x.py", [None, None]),  # PBS does not say, the node counts
        ("--nproc-per-node 2 x.py", [2, 2]),
        ("--nproc-per-node cpu x.py", [None, None]),  # only the node knows how many CPUs it has
        ("--device cpu x.py", [1, 1]),
        ("--gpus 0,1 x.py", [2, 2]),
    ],
)
def test_json_processes(words, nproc):
    assert [node["nproc"] for node in to_json(made(words, pbs()))["nodes"]] == nproc


# --- how a node is started ---

DOOR_WORDS = ("/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", DOOR)
SSH_WORDS = (
    "-T", "-x", "-a", "-S", "none", "-oBatchMode=yes", "-oControlMaster=no", "-oConnectTimeout=5",
    "-oRemoteCommand=none", "-oClearAllForwardings=yes", "-oPermitLocalCommand=no",
    "-oIgnoreUnknown=StdinNull,ForkAfterAuthentication,SessionType",
    "-oStdinNull=no", "-oForkAfterAuthentication=no", "-oSessionType=default",
)  # fmt: skip


@pytest.mark.parametrize(
    "words, allocation, expected",
    [
        # pbsdsh counts lines of the host list: 48 for the second host of a job with one line for each CPU.
        (
            "x.py",
            pbs(Host("n1", 0, 48), Host("n2", 48, 48)),
            [
                ("/opt/pbs/bin/pbsdsh", "-n", "0", "--", *DOOR_WORDS, "LAUNCH.0", "@LISTENER@", "5"),
                ("/opt/pbs/bin/pbsdsh", "-n", "48", "--", *DOOR_WORDS, "LAUNCH.1", "@LISTENER@", "5"),
            ],
        ),
        # pbs_tmrsh takes the exact name of the list and no --.
        (
            "--transport pbs_tmrsh --connect-timeout 7.5 x.py",
            pbs(Host("n1.site.org", 0), Host("n2.site.org", 1)),
            [
                ("/opt/pbs/bin/pbs_tmrsh", "n1.site.org", *DOOR_WORDS, "LAUNCH.0", "@LISTENER@", "7.5"),
                ("/opt/pbs/bin/pbs_tmrsh", "n2.site.org", *DOOR_WORDS, "LAUNCH.1", "@LISTENER@", "7.5"),
            ],
        ),
        (
            "x.py",
            listed("n1", "me@n2"),
            [
                ("/usr/bin/ssh", *SSH_WORDS, "n1", "exec", *DOOR_WORDS, "LAUNCH.0", "stdio", "5"),
                ("/usr/bin/ssh", *SSH_WORDS, "me@n2", "exec", *DOOR_WORDS, "LAUNCH.1", "stdio", "5"),
            ],
        ),
        # The first -o of a name wins in ssh: the user's.
        (
            "--ssh-options '-p 2222 -oBatchMode=no' --nnodes 1 x.py",
            listed("n1", "n2"),
            [
                (
                    "/usr/bin/ssh",
                    "-p",
                    "2222",
                    "-oBatchMode=no",
                    *SSH_WORDS,
                    "n1",
                    "exec",
                    *DOOR_WORDS,
                    "LAUNCH.0",
                    "stdio",
                    "5",
                ),
            ],
        ),
        # The launcher's own host needs no transport; the others keep their line.
        (
            "x.py",
            pbs(Host("n1", 0, 4), Host("elsewhere.site.org", 4, 4), Host("n3", 8, 4)),
            [
                ("/opt/pbs/bin/pbsdsh", "-n", "0", "--", *DOOR_WORDS, "LAUNCH.0", "@LISTENER@", "5"),
                (*DOOR_WORDS, "LAUNCH.1", "stdio", "5"),
                ("/opt/pbs/bin/pbsdsh", "-n", "8", "--", *DOOR_WORDS, "LAUNCH.2", "@LISTENER@", "5"),
            ],
        ),
        # ... unless the transport was asked for: then it is tried on every node.
        (
            "--transport pbsdsh x.py",
            pbs(Host("elsewhere", 3)),
            [("/opt/pbs/bin/pbsdsh", "-n", "3", "--", *DOOR_WORDS, "LAUNCH.0", "@LISTENER@", "5")],
        ),
        ("--transport local x.py", pbs(), [(*DOOR_WORDS, f"LAUNCH.{index}", "stdio", "5") for index in (0, 1)]),
        ("x.py", Allocation("local", "", (Host("box", 0),), ""), [(*DOOR_WORDS, "LAUNCH.0", "stdio", "5")]),
    ],
    ids=["pbsdsh", "pbs_tmrsh", "ssh", "ssh options", "own host", "asked for", "local", "no scheduler"],
)
def test_words(words, allocation, expected):
    assert [node.words for node in made(words, allocation).nodes] == expected


def door(place: int | str, where: str = "@LISTENER@") -> tuple[str, ...]:
    return (*DOOR_WORDS, f"LAUNCH.{place}", where, "5")


STEP = ("--overlap", "--cpu-bind=none", "--input=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0")


def one_step(nodes: int, nodelist: str, *gpus: str) -> list[tuple[str, ...]]:
    """The words of a step for all nodes, which are those of each node."""
    count = (f"-N{nodes}", f"-n{nodes}", "--ntasks-per-node=1", f"--nodelist={nodelist}")
    return [("/usr/bin/srun", *count, *STEP, *gpus, *door("SLURM_PROCID"))] * nodes


def own_step(index: int, host: str, *gpus: str) -> tuple[str, ...]:
    return ("/usr/bin/srun", "-N1", "-n1", f"--nodelist={host}", *STEP, *gpus, *door(index))


SLURM_WORDS = {
    "even": ("x.py", granted(4, 4), one_step(2, "n1,n2", "--gpus-per-node=4")),
    # Slurm 22.05 has no word for a step with other numbers on other nodes: a step for each.
    "uneven": (
        "x.py",
        granted(4, 2, 2),
        [own_step(0, "n1", "--gpus=4"), own_step(1, "n2", "--gpus=2"), own_step(2, "n3", "--gpus=2")],
    ),
    "none on one": ("x.py", granted(4, 0), [own_step(0, "n1", "--gpus=4"), own_step(1, "n2")]),
    # None granted, or Slurm does not say: no word for them.
    "no GPUs": ("x.py", granted(0, 0), one_step(2, "n1,n2")),
    "not known": ("x.py", granted(None, None), one_step(2, "n1,n2")),
    # The nodes left out are not counted, nor do their GPUs make it uneven.
    "fewer nodes": ("--nnodes 2 x.py", granted(4, 4, 4), one_step(2, "n1,n2", "--gpus-per-node=4")),
    "fewer nodes, even": ("--nnodes 2 x.py", granted(4, 4, 2), one_step(2, "n1,n2", "--gpus-per-node=4")),
    "fewer nodes, uneven": (
        "--nnodes 2 x.py", granted(4, 2, 2), [own_step(0, "n1", "--gpus=4"), own_step(1, "n2", "--gpus=2")],
    ),
    "one host, elsewhere": ("x.py", granted(4), one_step(1, "n1", "--gpus-per-node=4")),
    "one of two, elsewhere": ("--nnodes 1 x.py", granted(4, 2), one_step(1, "n1", "--gpus-per-node=4")),
    "one host, here": ("x.py", granted(4, names="elsewhere"), [door(0, "stdio")]),
    "one of two, here": ("--nnodes 1 x.py", granted(4, 4, names="elsewhere n2"), [door(0, "stdio")]),
    "one host, here, asked for": (
        "--transport srun x.py", granted(4, names="elsewhere"), one_step(1, "elsewhere", "--gpus-per-node=4"),
    ),
    # The step starts the launcher's own host as well.
    "own host": ("x.py", granted(4, 4, names="elsewhere n2"), one_step(2, "elsewhere,n2", "--gpus-per-node=4")),
    "own host, uneven": (
        "x.py",
        granted(4, 2, names="elsewhere n2"),
        [own_step(0, "elsewhere", "--gpus=4"), own_step(1, "n2", "--gpus=2")],
    ),
    "order of the job": ("x.py", granted(1, 1, 1, names="n10 n2 m7"), one_step(3, "n10,n2,m7", "--gpus-per-node=1")),
}  # fmt: skip


@pytest.mark.parametrize("name", SLURM_WORDS)
def test_slurm_words(name):
    words, allocation, expected = SLURM_WORDS[name]
    plan = made(words, allocation)
    assert [node.words for node in plan.nodes] == expected
    transport = "local" if expected == [door(0, "stdio")] else "srun"
    assert [plan.transport, *(node.transport for node in plan.nodes)] == [transport] * (1 + len(expected))
    assert [node.is_here for node in plan.nodes] == [node.host == "elsewhere" for node in plan.nodes]


@pytest.mark.parametrize("task", [
    {"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "8(x2)"},
    {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "closest"},
    {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_EXACT": "1"},
    {"SLURM_CPUS_PER_TASK": "32", "SLURM_TRES_PER_TASK": "cpu=32", "SLURM_CPUS_PER_GPU": "8"},
    {"SLURM_EXPORT_ENV": "NONE"},
])  # fmt: skip
def test_what_the_job_asked_for_changes_no_step(task):
    expected = one_step(2, "n1,n2", "--gpus-per-node=8")
    assert [node.words for node in made("x.py", granted(8, 8), environment=tuple(task.items())).nodes] == expected
    assert not set(task) & set(TRANSPORTS["srun"].passes)


OTHER_WORDS = {
    # The exact name of the host file; the words become a line for a shell.
    "qrsh": (
        "x.py",
        job_of("sge", Host("n1.site", 0, 8), Host("elsewhere.site", 1, 8), Host("n3.site", 2, 4)),
        [
            ("/opt/sge/bin/qrsh", "-inherit", "n1.site", "exec", *door(0, "stdio")),
            door(1, "stdio"),
            ("/opt/sge/bin/qrsh", "-inherit", "n3.site", "exec", *door(2, "stdio")),
        ],
    ),
    "blaunch": (
        "x.py",
        job_of("lsf", Host("h2", 1, 42), Host("elsewhere", 43, 42), Host("h1", 85, 42)),
        [
            ("/opt/lsf/bin/blaunch", "-no-shell", "-z", "h2", *door(0)),
            door(1, "stdio"),
            ("/opt/lsf/bin/blaunch", "-no-shell", "-z", "h1", *door(2)),
        ],
    ),
    # The rank of a broker, not of a node.
    "flux": (
        "--nnodes 2 x.py",
        job_of("flux", Host("t3", 0), Host("t1", 2), Host("t2", 3)),
        [("/usr/bin/flux", "exec", "-r", "0", *door(0)), ("/usr/bin/flux", "exec", "-r", "2", *door(1))],
    ),
    "flux, own host": (
        "x.py",
        job_of("flux", Host("elsewhere", 0), Host("t1", 1)),
        [door(0, "stdio"), ("/usr/bin/flux", "exec", "-r", "1", *door(1))],
    ),
}


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_words_of_other_schedulers(name):
    words, allocation, expected = OTHER_WORDS[name]
    plan = made(words, allocation)
    assert [node.words for node in plan.nodes] == expected
    transport = name.partition(",")[0]
    assert [node.transport for node in plan.nodes] == ["local" if node.is_here else transport for node in plan.nodes]
    assert plan.transport == transport


@pytest.mark.parametrize("runner, door", [
    ("/home/me/my venv/bin/python3", DOOR),
    ("/usr/bin/python3", "/home/o'neil/door.py"),
    ("/usr/bin/python3", "/home/é/door.py"),
    ("/usr/bin/python3", "/apps/$USER/door.py"),
])  # fmt: skip
def test_a_shell_takes_plain_words_only(runner, door):
    """csh, fish and sh agree on nothing else; the others have no shell and take every word."""
    (bad,) = {runner, door} - {"/usr/bin/python3", DOOR}
    message = (
        f"120 no login shell can be trusted with {bad!r}: install this package, and have its Python, "
        "under a path of plain characters, or use another transport"
    )
    host = Host("n1", 0)
    for allocation in (listed("n1"), job_of("sge", host)):
        assert error("x.py", allocation, runner=runner, door=door) == message
    for allocation in (pbs(host), granted(4), job_of("lsf", host), job_of("flux", host)):
        words = made("x.py", allocation, runner=runner, door=door).nodes[0].words
        assert words[-10:-3] == (runner, "-I", "-S", "-B", "-X", "utf8", door)


@pytest.mark.parametrize("allocation", [listed("n1", "n2"), job_of("sge", Host("n1", 0), Host("n2", 1))])
def test_words_for_a_shell_are_safe(allocation):
    for node in made("x.py", allocation).nodes:
        remote = node.words[node.words.index("exec") :]
        assert set("".join(remote)) <= SAFE


SEARCHED = ", nor in $PBS_EXEC/bin, /opt/pbs/bin, /opt/pbs/default/bin, /usr/local/bin"


@pytest.mark.parametrize(
    "asked, allocation, found, expected",
    [
        ("", pbs(), "pbsdsh pbs_tmrsh ssh", ("pbsdsh", "found /bin/pbsdsh")),
        ("", pbs(), "pbs_tmrsh ssh", ("pbs_tmrsh", "found /bin/pbs_tmrsh; no pbsdsh on PATH")),
        ("", pbs(), "ssh", ("ssh", "found /bin/ssh; no pbsdsh, pbs_tmrsh on PATH")),
        ("", pbs(Host("elsewhere", 0)), "", ("local", "every node is on this machine")),
        ("", listed("n1"), "pbsdsh ssh", ("ssh", "found /bin/ssh")),  # a line of --hosts is none of pbsdsh's
        ("", granted(4, 4), "srun ssh", ("srun", "found /bin/srun")),
        ("", granted(4, names="elsewhere"), "", ("local", "every node is on this machine")),
        ("", job_of("sge", Host("n1", 0)), "qrsh ssh", ("qrsh", "found /bin/qrsh")),
        ("", job_of("sge", Host("n1", 0)), "ssh", ("ssh", "found /bin/ssh; no qrsh on PATH")),
        ("", job_of("lsf", Host("n1", 0)), "blaunch ssh", ("blaunch", "found /bin/blaunch")),
        ("", job_of("lsf", Host("n1", 0)), "ssh", ("ssh", "found /bin/ssh; no blaunch on PATH")),
        ("", job_of("flux", Host("n1", 0)), "flux srun ssh", ("flux", "found /bin/flux")),
        ("--transport ssh", pbs(), "pbsdsh ssh", ("ssh", "asked for by --transport")),
        ("--transport ssh", granted(4, 4), "srun ssh", ("ssh", "asked for by --transport")),
        ("--transport pbs_tmrsh", listed("n1"), "pbs_tmrsh", ("pbs_tmrsh", "asked for by --transport")),
        ("--transport local", pbs(), "", ("local", "asked for by --transport")),
        (
            "",
            pbs(),
            "",
            "120 no way to start the other nodes: pbsdsh or pbs_tmrsh or ssh is needed, but not on PATH" + SEARCHED,
        ),
        ("", listed("n1"), "pbsdsh", "120 no way to start the other nodes: ssh is needed, but not on PATH"),
        # In jobs of Slurm and Flux no ssh takes their place.
        ("", granted(4, 4), "ssh", "120 no way to start the other nodes: srun is needed, but not on PATH"),
        ("", job_of("flux", Host("n1", 0)), "ssh", "120 no way to start the other nodes: flux is needed, but not on PATH"),
        (
            "",
            job_of("sge", Host("n1", 0)),
            "",
            "120 no way to start the other nodes: qrsh or ssh is needed, but not on PATH",
        ),
        (
            "",
            job_of("lsf", Host("n1", 0)),
            "",
            "120 no way to start the other nodes: blaunch or ssh is needed, but not on PATH",
        ),
        ("--transport ssh", pbs(), "pbsdsh", "120 --transport ssh: ssh is not on PATH"),
        ("--transport srun", granted(4, 4), "ssh", "120 --transport srun: srun is not on PATH"),
        ("--transport pbsdsh", pbs(), "ssh", "120 --transport pbsdsh: pbsdsh is not on PATH" + SEARCHED),
        (
            "--transport rsh",
            pbs(),
            "",
            '2 --transport: "rsh" is none of local, pbsdsh, pbs_tmrsh, srun, qrsh, blaunch, flux, ssh, openmpi, mpich',
        ),
        (
            "--transport pbsdsh",
            listed("n1"),
            "pbsdsh",
            "2 --transport pbsdsh starts the hosts of a job of its own scheduler, but --hosts was given; take another",
        ),
    ],
)
def test_transport(asked, allocation, found, expected):
    find = {name: f"/bin/{name}" for name in found.split()}.get
    if isinstance(expected, str):
        assert error(f"{asked} x.py", allocation, find=find) == expected
    else:
        plan = made(f"{asked} x.py", allocation, find=find)
        assert (plan.transport, plan.transport_why) == expected


def test_every_transport_has_its_name():
    assert {name: transport.name for name, transport in TRANSPORTS.items()} == {name: name for name in TRANSPORTS}


def test_what_a_transport_is():
    back = {"pbsdsh", "pbs_tmrsh", "srun", "blaunch", "flux", "openmpi", "mpich"}
    assert {one.name for one in TRANSPORTS.values() if one.is_tcp} == back
    assert {one.name for one in TRANSPORTS.values() if one.is_step} == {"srun"}
    assert {one.name for one in TRANSPORTS.values() if one.is_shell} == {"qrsh", "ssh"}
    bare = {"srun": ("PATH", "HOME", "SLURM_JOB_ID", "SLURM_CONF")}
    assert {one.name: one.passes for one in TRANSPORTS.values() if one.passes is not None} == bare


@pytest.mark.parametrize(
    "name, hostname, expected",
    [
        ("n1", "n1", True),
        ("n1.site.org", "n1.site.org", True),
        ("n1.site.org", "n1", True),  # PBS writes the full name where `hostname` says the short one
        ("n1", "n1.site.org", True),
        ("n1.east", "n1.west", False),
        ("n11", "n1", False),
        ("n1", "n11", False),
        ("localhost", "n1", True),
        ("10.0.0.7", "n1", True),  # an address of ours
        ("10.0.0.8", "n1", False),
        ("10.0.0.8", "10", False),  # a number before a dot is no short name
        ("me@n1", "n1", False),  # another user's work, perhaps
    ],
)
def test_is_name_of_here(name, hostname, expected):
    assert is_name_of_here(name, frozenset({"localhost", "10.0.0.7"}), hostname) is expected


# --- options ---


@pytest.mark.parametrize(
    "words, allocation, message",
    [
        (
            "--nnodes 3 x.py",
            pbs(),
            "120 --nnodes 3: there are only 2 (n[1-2]; PBS_JOBID is set); give at most 2, or run on more hosts",
        ),
        (
            "--nnodes 2 x.py",
            Allocation("local", "", (Host("box", 0),), "no scheduler variables found"),
            "120 --nnodes 2: there is only 1 (box; no scheduler variables found); give at most 1, or run on more hosts",
        ),
        (
            "--gpus GPU-8f1c,GPU-77aa x.py",
            pbs(),
            "2 --gpus GPU-8f1c,GPU-77aa: such names mean nothing on another node; give indices, as in --gpus 0,1",
        ),
    ],
)
def test_refused(words, allocation, message):
    assert error(words, allocation) == message


def test_fewer_nodes():
    assert [node.host for node in made("--nnodes 1 x.py", pbs()).nodes] == ["n1"]


@pytest.mark.parametrize(
    "value, option, expected",
    [
        (None, "", (None, "chosen by this command")),
        ("", "", (None, "chosen by this command")),
        ("4001", "", (4001, "from MASTER_PORT in the environment")),
        ("4001", "--master-port 4002", (4002, "from --master-port")),
        ("x", "--master-port 4002", (4002, "from --master-port")),
    ],
)
def test_master_port(value, option, expected):
    env = (("MASTER_PORT", value),) if value is not None else ()
    plan = made(f"{option} x.py", pbs(), environment=env)
    assert (plan.master_port, plan.master_port_source) == expected


@pytest.mark.parametrize("value", ["x", "0", "65536", "-1", "29500 ", "٣", "123456789"])
def test_bad_master_port(value):
    message = f'2 MASTER_PORT: "{value}" (in the environment) is not a port: give 1 to 65535, or unset it'
    assert error("x.py", pbs(), environment=(("MASTER_PORT", value),)) == message


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"PBS_JOBID": "1", "NCPUS": "48", "OMP_NUM_THREADS": "48"}, (None, "48")),  # PBS sets both alike
        ({"PBS_JOBID": "1", "NCPUS": "48", "OMP_NUM_THREADS": "6"}, ("6", None)),
        ({"NCPUS": "48", "OMP_NUM_THREADS": "48"}, ("48", None)),  # no PBS: a person set it
        ({"PBS_JOBID": "1", "OMP_NUM_THREADS": "48"}, ("48", None)),
        ({"PBS_JOBID": "1", "NCPUS": "48"}, (None, None)),
        ({"OMP_NUM_THREADS": ""}, (None, None)),
    ],
)
def test_omp_is_whose(variables, expected):
    # --hosts inside of a PBS job does not make PBS's value the user's.
    plan = made("x.py", listed("elsewhere"), environment=tuple(variables.items()))
    assert (plan.user_omp, plan.scheduler_omp) == expected


@pytest.mark.parametrize(
    "words, allocation, expected",
    [
        # words: device, processes of each node (0: one for each CPU; None: the node says), asked for by a person?
        ("x.py", pbs(Host("n1", 0, 48, 4), Host("n2", 48, 48, 4)), ("auto", [4, 4], False)),
        ("x.py", pbs(Host("n1", 0, 48), Host("n2", 48, 48)), ("auto", [None, None], False)),  # lines are no processes
        ("x.py", pbs(Host("n1", 0, 4, 0)), ("auto", [None], False)),  # no GPU granted is not one for each CPU
        ("--device cpu x.py", pbs(Host("n1", 0, 4, 0)), ("cpu", [1], False)),
        ("--device cpu x.py", pbs(Host("n1", 0, 48, 4)), ("cpu", [4], False)),
        ("--nproc-per-node 3 x.py", pbs(Host("n1", 0, 48, 4)), ("auto", [3], True)),
        ("--nproc-per-node cpu x.py", pbs(Host("n1", 0, 48, 4)), ("cpu", [0], False)),
        ("--nproc-per-node gpu x.py", listed("n1", slots=3), ("gpu", [None], False)),
        ("--nproc-per-node auto x.py", listed("n1", slots=3), ("auto", [3], True)),
        ("x.py", listed("n1", slots=3), ("auto", [3], True)),
        ("x.py", listed("n1"), ("auto", [None], False)),  # --hosts n1 does not mean one process
        ("--gpus 2,3 x.py", pbs(Host("n1", 0, 48, 4)), ("auto", [2], False)),
        ("--gpus 2,3 --nproc-per-node 1 x.py", pbs(), ("auto", [1, 1], True)),
    ],
)
def test_processes(words, allocation, expected):
    plan = made(words, allocation)
    assert (plan.device, [node.nproc for node in plan.nodes], plan.is_nproc_explicit) == expected


# --- the command of a worker ---

PYTHON = "/home/me/venv/bin/python3"


@pytest.mark.parametrize(
    "words, argv, script",
    [
        (["x.py"], (PYTHON, "-u", "x.py"), "x.py"),
        (["./my dir/x.py", "", "a b", "--"], (PYTHON, "-u", "./my dir/x.py", "", "a b", "--"), "./my dir/x.py"),
        (["-m", "pkg.mod", "--nnodes", "3"], (PYTHON, "-u", "-m", "pkg.mod", "--nnodes", "3"), ""),
        (["--no-python", "./run", "-m"], ("./run", "-m"), ""),
        (
            ["--wrap", "apptainer exec --nv 'my image.sif'", "x.py", "-n"],
            ("apptainer", "exec", "--nv", "my image.sif", PYTHON, "-u", "x.py", "-n"),
            "x.py",
        ),
    ],
)
def test_argv(words, argv, script):
    plan = make_plan(parse(words), pbs(), context())
    assert (plan.argv, plan.script) == (argv, script)


@pytest.mark.parametrize("words, is_group", [("x.py", False), ("--no-python x", True), ("--wrap env x.py", True)])
def test_signals_go_to_the_group_of_a_program_only(words, is_group):
    assert made(words, pbs()).signal_group is is_group


def test_by_hand_is_what_torchrun_hands_on():
    """torchrun substitutes `$` in the words after --no-python as string.Template does."""
    argv = ("a$$b", "${local_rank}", "$HOME", "it's", "l1\nl2", "")
    text = to_text(make_plan(parse(["--no-python", "./run", *argv]), pbs(), context()))
    words = shlex.split(text.partition("by hand:")[2].partition("\n\nnode 1")[0])
    assert words[words.index("--no-python") + 1 :] == ["./run", *(word.replace("$", "$$") for word in argv)]
    assert tuple(Template(word).safe_substitute(local_rank="0") for word in words[-len(argv) :]) == argv


@pytest.mark.parametrize("words, nproc", [
    ("--nproc-per-node 3", "3"), ("--nproc-per-node cpu", "cpu"), ("--device cpu", "1"), ("", "gpu"),
])  # fmt: skip
def test_by_hand_processes(words, nproc):
    assert f" --nproc-per-node={nproc} " in to_text(made(f"{words} x.py", pbs(Host("n1", 0))))


def test_torchruns_own_options():
    plan = made("--role me --monitor-interval 0.5 --event-log-handler null x.py", pbs())
    assert plan.torchrun == ("--role=me", "--monitor-interval=0.5", "--event-log-handler=null")


# --- logs ---


@pytest.mark.parametrize(
    "words, hosts, expected",
    [
        ("a/train.py", ["n1.site.org"], ["output.train.py.n1.log"]),
        ("a/train.py", ["n1.east", "n1.west", "n2.west"], [
            "output.train.py.n1.east.log", "output.train.py.n1.west.log", "output.train.py.n2.log",
        ]),  # the short name where it is unique
        ("-m pkg.mod", ["n1"], ["output.pkg.mod.n1.log"]),
        ("-m ../x", ["n1"], ["output..._x.n1.log"]),  # no log outside of its folder
        ("--no-python /opt/app/run.sh", ["n1"], ["output.run.sh.n1.log"]),
        (".", ["n1"], ["output.my dir.n1.log"]),  # a folder with a __main__.py
        ("pkg/", ["n1"], ["output.pkg.n1.log"]),
        ("x.py", ["me@n1.site.org"], ["output.x.py.n1.log"]),
        ("x.py", ["2001:db8::5", "10.0.0.1"], ["output.x.py.2001_db8__5.log", "output.x.py.10.0.0.1.log"]),
    ],
)  # fmt: skip
def test_log_names(words, hosts, expected):
    assert [node.log for node in made(words, listed(*hosts)).nodes] == expected


def test_log_of_an_array_job():
    allocation = replace(pbs(Host("n1", 0)), job_id="75[3].pbs0", array_index="3")
    assert made("x.py", allocation).nodes[0].log == "output.x.py.n1.3.log"


@pytest.mark.parametrize("option, folder", [
    ("", "/scratch/my dir"), ("--log-dir logs", "/scratch/my dir/logs"), ("--log-dir /var/log/", "/var/log"),
    ("--log-dir=", "/scratch/my dir"), ("--log-dir /", "/"),
])  # fmt: skip
def test_log_directory(option, folder):
    assert made(f"{option} x.py", pbs()).log_directory == folder


# --- the rest ---


@pytest.mark.parametrize("allocation, option, expected", [
    (pbs(), "", (5.0, 5.0)),
    (listed("n1"), "", (15.0, 5.0)),
    (pbs(), "--grace 0", (0.0, 0.0)),
    (listed("n1"), "--grace 60", (60.0, 60.0)),
])  # fmt: skip
def test_grace(allocation, option, expected):
    plan = made(f"{option} x.py", allocation)
    assert (plan.grace, plan.failure_grace) == expected


def test_terminal_is_for_one_node():
    allocation = Allocation("local", "", (Host("box", 0),), "")
    assert made("x.py", allocation, terminal="/dev/pts/3").terminal == "/dev/pts/3"
    assert made("x.py", pbs(), terminal="/dev/pts/3").terminal == ""


@pytest.mark.parametrize(
    "job_id, start",
    [
        ("1234[5].srv", "1234-5.srv-"),  # array jobs: brackets are globs in a shell and no part of a path of torchrun
        ("1234[6].srv", "1234-6.srv-"),
        ("1234[].srv", "1234-.srv-"),
        ("1234.srv", "1234.srv-"),
        ("1234", "1234-"),
        ("174170283.gadi-pbs", "174170283.gadi-pbs-"),
        ("", "local-"),
        ("a/b c$é", "a-b-c-"),
    ],
)
def test_launch_id(job_id, start):
    allocation = Allocation("local", job_id, (), "")
    first, second = cli._launch_id(allocation), cli._launch_id(allocation)
    assert [one[:-12] for one in (first, second)] == [start, start]
    assert set(first) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    assert first != second  # two launches of one job never meet


@pytest.mark.parametrize("module", [plan, transports])
def test_doctests(module):
    assert doctest.testmod(module).failed == 0


def test_plan_is_data():
    """Frozen, and tuples all the way down: what was printed is what is launched."""
    assert hash(plan_of("gadi-gpuvolta-2x4"))


@pytest.mark.parametrize("name, words", [
    ("openmpi", "-n 1 --host n7:1 --mca orte_keep_fqdn_hostnames 1 --bind-to none -x TORCHRUN_NCCL_KEY"),
    ("mpich", "-n 1 -hosts n7"),
])  # fmt: skip
def test_words_of_mpi(name, words):
    """A start for each host: over several, Open MPI begins with its own host whatever the order given."""
    transport = TRANSPORTS[name]
    assert transport.start("/bin/m", Host("n7", 0), (Host("n7", 0), Host("n2", 1)), ()) == ("/bin/m", *words.split())
