"""The command line: where SCRIPT begins, what each option takes, and how all that compares with torchrun's own parser."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrun_nccl import options
from torchrun_nccl.errors import EXIT_CODES, UsageError
from torchrun_nccl.options import OPTIONS, REFUSED, USAGE, VARIABLES, Options, help_text, parse

ROOT = Path(__file__).parent.parent


def said(*words: str) -> dict[str, object]:
    """What differs from an empty command line."""
    given = vars(parse(words))
    return {name: value for name, value in given.items() if value != vars(Options())[name]}


def error(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    "words, target, arguments",
    [
        (["x.py"], "x.py", ()),
        (["x.py", "--nnodes", "3"], "x.py", ("--nnodes", "3")),  # all after SCRIPT is the script's
        (["x.py", "--", "-n"], "x.py", ("--", "-n")),
        (["x.py", "--"], "x.py", ("--",)),
        (["--", "x.py", "--", "-n"], "x.py", ("--", "-n")),
        (["--", "-x.py", "a"], "-x.py", ("a",)),  # the way to a script with such a name
        (["--", "--help"], "--help", ()),
        (["-m", "--", "pkg", "-v"], "pkg", ("-v",)),
        (["-m", "pkg.mod", "--nnodes", "3"], "pkg.mod", ("--nnodes", "3")),
        (["--nnodes", "2", "x.py", ""], "x.py", ("",)),
        (["--nnodes=2", "my script.py", "--help"], "my script.py", ("--help",)),
        (["--wrap", "-x", "x.py"], "x.py", ()),  # words for another program may begin with -
        (["x.py", "a b", '{"k": "v"}', "*.py", "$HOME", "it's", "l1\nl2", "\udcff"], "x.py",
         ("a b", '{"k": "v"}', "*.py", "$HOME", "it's", "l1\nl2", "\udcff")),
    ],
)  # fmt: skip
def test_script_and_arguments(words, target, arguments):
    parsed = parse(words)
    assert (parsed.target, parsed.arguments) == (target, arguments)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("-t3", {"tee": 3}),
        ("-t 3", {"tee": 3}),
        ("-t=3", {"tee": 3}),
        ("--tee 3", {"tee": 3}),
        ("--tee=3", {"tee": 3}),
        ("-r1 -t2", {"redirects": 1, "tee": 2}),
        ("-v -m", {"verbose": True, "module": True}),
        ("--nnodes 2 --nnodes 3", {"nnodes": 3}),  # the last one counts
        ("--nnodes 2:2", {"nnodes": 2}),
        ("--nproc_per_node=2", {"nproc": 2}),
        ("--nproc-per-node gpu", {"nproc": "gpu"}),
        ("--nproc_per-node auto", {"nproc": "auto"}),
        ("--nproc 2", {"nproc": 2}),  # Python 3.11's argparse finds --nproc-per-node and --nproc_per_node, and gives up
        ("--nn 2", {"nnodes": 2}),
        ("--no-py", {"no_python": True}),
        ("--dry", {"dry_run": True}),
        ("--t 3", {"tee": 3}),  # torchrun's meaning, beside our --transport
        ("--tr ssh", {"transport": "ssh"}),
        ("--max_restarts 1", {"max_restarts": 1}),
        ("--rdzv-backend=static", {}),
        ("--simulate 2x4", {"simulate": (2, 4)}),
        ("--simulate 2X4", {"simulate": (2, 4)}),
        ("--device cpu", {"device": "cpu"}),
        ("--gpus 0,2", {"gpus": "0,2"}),
        ("--gpus GPU-8f1c-aa,MIG-0a/1/0", {"gpus": "GPU-8f1c-aa,MIG-0a/1/0"}),
        ("--gpus 0.0,0.1", {"gpus": "0.0,0.1"}),
        ("--omp 6", {"omp": 6}),
        ("--hosts n[1-2]", {"hosts": "n[1-2]"}),
        ("--hostfile -", {"hostfile": "-"}),
        ("--ssh-options=-p2222", {"ssh_options": ("-p2222",)}),
        ("--ssh-options -v", {"ssh_options": ("-v",)}),  # not our -v
        ("--local-ranks-filter 0,2", {"tee_ranks": (0, 2)}),
        ("--log-dir=-logs", {"log_dir": "-logs"}),
        ("--log-dir -logs", {"log_dir": "-logs"}),  # -l is no option
        ("--role=", {"role": ""}),
        ("--master-port 65535", {"master_port": 65535}),
        ("--monitor-interval 1e-1", {"monitor_interval": 0.1}),
        ("--grace 0", {"grace": 0.0}),
        ("--grace 2.5 --connect-timeout 1 --hello-timeout 9",
         {"grace": 2.5, "connect_timeout": 1.0, "hello_timeout": 9.0}),
        ("--heartbeat .5 --lost-after 2", {"heartbeat": 0.5, "lost_after": 2.0}),
        ("--dry-run --json", {"dry_run": True, "json": ""}),
        ("--json --dry-run", {"dry_run": True, "json": ""}),
        ("--json out.json", {"json": "out.json"}),
        ("--json=out.json --dry-run", {"dry_run": True, "json": "out.json"}),
        ("--json out.json --dry-run", {"dry_run": True, "json": "out.json"}),
        ("--dry-run --json=out.json", {"dry_run": True, "json": "out.json"}),
    ],
)  # fmt: skip
def test_values(words, expected):
    assert said(*words.split(), "x.py") == {"target": "x.py", **expected}


def test_words_are_split_as_a_shell_does():
    assert parse(["--wrap", "apptainer exec --nv 'my image.sif'", "x.py"]).wrap == (
        "apptainer", "exec", "--nv", "my image.sif",
    )  # fmt: skip


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--hel"], ["--nnodes", "2", "--help", "--bad"], ["--h"]])
def test_help_needs_no_script(words):
    assert parse(words).wants_help


def test_version_needs_no_script():
    assert parse(["--version"]).wants_version


NUMBER = "a number of at least 1"
PROCESSES = NUMBER + ", or auto, gpu, cpu"
SECONDS = "a number of seconds above 0"


@pytest.mark.parametrize(
    "words, message",
    [
        ("", f"no SCRIPT given: {USAGE}; see --help"),
        ("--dry-run", f"no SCRIPT given: {USAGE}; see --help"),
        ("--", f"no SCRIPT given: {USAGE}; see --help"),
        ("- a", 'SCRIPT is "-": give a file, a module with -m, or a program with --no-python'),
        ("--bad x", "unknown option --bad; options of this command stand before SCRIPT, see --help"),
        ("--bad=1 x", "unknown option --bad; options of this command stand before SCRIPT, see --help"),
        ("-x x", "unknown option -x; options of this command stand before SCRIPT, see --help"),
        ("--= x", "unknown option --; options of this command stand before SCRIPT, see --help"),
        ("--rdzv-b c10d x", '--rdzv-b: "c10d" is not static: node ranks follow the order of the hosts, '
                            "address and port are chosen by this command"),
        ("--rd x", "option --rd could be --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf; say which"),
        ("--g 1 x", "option --g could be --gpus, --grace; say which"),
        ("--nproc-per-node 0 x", f'--nproc-per-node: "0" is not {PROCESSES}'),
        ("--nproc-per-node -1 x", f'--nproc-per-node: "-1" is not {PROCESSES}'),
        ("--nproc-per-node two x", f'--nproc-per-node: "two" is not {PROCESSES}'),
        ("--nproc_per_node=1.5 x", f'--nproc_per_node: "1.5" is not {PROCESSES}'),  # as it was typed
        ("--nproc-per-node ٣ x", f'--nproc-per-node: "٣" is not {PROCESSES}'),
        ("--nproc-per-node 9999999999 x", f'--nproc-per-node: "9999999999" is not {PROCESSES}'),
        ("--nproc-per-node= x", f'--nproc-per-node: "" is not {PROCESSES}'),
        ("--nnodes 0 x", f'--nnodes: "0" is not {NUMBER}'),
        ("--nnodes 1:4 x", '--nnodes: "1:4" is not one number: the nodes are those of the job from start to end, '
                           "there is no MIN:MAX"),
        ("--omp 0 x", f'--omp: "0" is not {NUMBER}'),
        ("--max-restarts -1 x", '--max-restarts: "-1" is not a number of at least 0'),
        ("--master-port 70000 x", '--master-port: "70000" is not a number from 1 to 65535'),
        ("--master-port 0 x", '--master-port: "0" is not a number from 1 to 65535'),
        ("--simulate 2 x", '--simulate: "2" is not NODESxPROCESSES, for example 2x4'),
        ("--simulate 0x4 x", '--simulate: "0x4" is not NODESxPROCESSES, for example 2x4'),
        ("--device tpu x", '--device: "tpu" is not one of auto, gpu, cpu'),
        ("--tee 4 x", '--tee: "4" is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both)'),
        ("-t0:1 x", '-t: "0:1" is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both)'),
        ("--local-ranks-filter 0,x x", '--local-ranks-filter: "0,x" is not local ranks separated by commas, '
                                       "for example 0,1"),
        *((f"--gpus={value} x", f'--gpus: "{value}" is not a list of different devices, for example 0,1 '
                                "(to hide all GPUs say --device cpu)") for value in ("", "0,", "-1", "void", "0,0")),
        ("--wrap= x", '--wrap: "" is not at least one word'),
        ("--wrap 'a x", '--wrap: "\'a" is not words as a shell splits them (No closing quotation)'),
        ("--python= x", '--python: "" is not a name'),
        ("--heartbeat 0 x", f'--heartbeat: "0" is not {SECONDS}'),  # it would beat without a pause
        ("--hello-timeout 0 x", f'--hello-timeout: "0" is not {SECONDS}'),
        ("--connect-timeout -1 x", '--connect-timeout: "-1" is not a number of seconds'),
        ("--grace soon x", '--grace: "soon" is not a number of seconds'),
        ("--grace nan x", '--grace: "nan" is not a number of seconds'),
        ("--grace inf x", '--grace: "inf" is not a number of seconds'),
        ("--dry-run=yes x", '--dry-run takes no value, but got "yes"'),
        ("-mpkg x", '-m takes no value, but got "pkg"'),
        ("--nnodes", "--nnodes needs a value: N"),
        ("--log-dir --dry-run x", "--log-dir needs a value (DIR), but --dry-run follows; "
                                  "if that is the value, write --log-dir=--dry-run"),
        ("--hosts -m x", "--hosts needs a value (LIST), but -m follows; if that is the value, write --hosts=-m"),
        ("--hosts -- x", "--hosts needs a value (LIST), but -- follows; if that is the value, write --hosts=--"),
        # Each by itself is right.
        ("-m --no-python x", "-m and --no-python exclude each other: SCRIPT is a module or a program"),
        ("--json= x", "--json needs a FILE to write the outcome to (without FILE it goes with --dry-run)"),
        ("--json -v x", "--json needs a FILE to write the outcome to (without FILE it goes with --dry-run)"),
        ("--simulate 2x4 --nproc-per-node 3 x",
         "--simulate 2x4 says how many processes; leave --nproc-per-node out"),
        ("--device gpu --nproc-per-node cpu x",
         "--device gpu and --nproc-per-node cpu contradict each other; leave one out"),
        ("--device cpu --nproc-per-node gpu x",
         "--device cpu and --nproc-per-node gpu contradict each other; leave one out"),
        ("--device cpu --gpus 0 x", "--device cpu and --gpus contradict each other; leave one out"),
        ("--heartbeat 8 x", "--lost-after 15 is too short for --heartbeat 8: give more than 16"),
        ("--lost-after 4 x", "--lost-after 4 is too short for --heartbeat 2: give more than 4"),
        # torchrun's options that would mean something else here
        ("--standalone x", "--standalone: say --scheduler none to run on this machine alone"),
        ("--node_rank=0 x",
         "--node_rank: start the command once per job; node ranks follow the order of the hosts"),
        ("--master_addr n1 x", "--master_addr: the first node's address that all others reach is found at the "
                               "start; leave it out"),
        ("--rdzv-endpoint n1:1 x", "--rdzv-endpoint: address, port and id of the rendezvous are chosen anew for each "
                                   "launch; leave it out"),
        ("--shutdown-t 5 x", "--shutdown-t: say --grace SECONDS"),
    ],
)  # fmt: skip
def test_bad_input(words, message):
    assert error(*words.split()) == message


def test_empty_script():
    assert error("") == 'SCRIPT is "": give a file, a module with -m, or a program with --no-python'


# --- beside torchrun's parser ---


@pytest.fixture(scope="module")
def torchruns():
    """Its argparse parser; None for a value that was not given."""
    run = pytest.importorskip("torch.distributed.run", reason="no torch in this Python")
    parser = run.get_args_parser()
    for action in parser._actions:
        action.default = None
    return parser


def names_of(parser) -> set[str]:
    return {name.replace("_", "-") for action in parser._actions for name in action.option_strings}


OURS = {name: option for option in OPTIONS for name in option.names}


def test_every_option_of_torchrun_is_own_same_or_refused(torchruns):
    """A new torch's new option fails here, by its name: it must be decided on."""
    known = {*(name for name, option in OURS.items() if option.like), *REFUSED, "-h", "--help"}
    assert names_of(torchruns) - known == set()


#: Of torch 2.14, or gone since 2.1; the torch under test has all others.
OTHER_VERSIONS = {"--log-line-prefix-template"}


def test_no_option_is_torchruns_in_our_table_only(torchruns):
    table = {*(name for name, option in OURS.items() if option.like), *REFUSED}
    assert table - names_of(torchruns) - OTHER_VERSIONS == set()


def test_no_option_of_ours_bears_a_name_of_torchruns_with_another_meaning(torchruns):
    assert {name for name, option in OURS.items() if not option.like} & names_of(torchruns) == set()


def test_refused_and_ours_are_disjoint():
    assert set(REFUSED) & set(OURS) == set()


def test_switches_agree(torchruns):
    nothing = {name: action.nargs == 0 for action in torchruns._actions for name in action.option_strings}
    assert {name: option.is_switch for name, option in OURS.items() if option.like} == {
        name: nothing[name] for name, option in OURS.items() if option.like
    }


# Option, torchrun's name of the value, values that both know.
SHARED = [
    ("--nnodes", "nnodes", ["1", "16"]),
    ("--nproc-per-node", "nproc_per_node", ["4", "gpu", "auto"]),
    ("--rdzv-backend", "rdzv_backend", ["static"]),
    ("--max-restarts", "max_restarts", ["0", "3"]),
    ("--monitor-interval", "monitor_interval", ["0.5", "1e-1", "30"]),
    ("--event-log-handler", "event_log_handler", ["null", "a b"]),
    ("--role", "role", ["me", ""]),
    ("--module", "module", []),
    ("--log-dir", "log_dir", ["logs", "/a b/c", "x=y"]),
    ("--redirects", "redirects", ["0", "3"]),
    ("--tee", "tee", ["1", "2"]),
    ("--local-ranks-filter", "local_ranks_filter", ["0", "1,2"]),
    ("--master-port", "master_port", ["29500"]),
]
SHORT = {"--module": "-m", "--redirects": "-r", "--tee": "-t"}


def spellings(name: str, others: set[str]) -> list[str]:
    """As it is, with underscores, and the abbreviations that argparse takes: no other option or spelling begins so."""
    every = {name, name.replace("-", "_").replace("__", "--", 1)}
    cut = [name[:end] for end in range(len("--x"), len(name))]
    return [*every, *(short for short in cut if sum(one.startswith(short) for one in others) == 1)]


def one_option(parser):
    """Words for one shared option, torchrun's name for it, its value."""
    every = {name for action in parser._actions for name in action.option_strings} | OTHER_VERSIONS

    def words(entry, spelling, value, is_joined):
        _, field, values = entry
        if not values:
            return [spelling], field, True
        if not spelling.startswith("--"):
            return ([spelling + value] if is_joined and value else [spelling, value]), field, value
        return ([f"{spelling}={value}"] if is_joined else [spelling, value]), field, value

    def spelled(entry):
        choices = [*spellings(entry[0], every), *filter(None, [SHORT.get(entry[0])])]
        return st.builds(words, st.just(entry), st.sampled_from(choices), st.sampled_from(entry[2] or [""]), st.booleans())

    return st.sampled_from(SHARED).flatmap(spelled)


#: The argparse of Python 3.9 to 3.12 drops the first `--` of the arguments: we keep it, so it is not compared.
ARGUMENT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6) | st.sampled_from(
    ["--nnodes", "3", "-t3", "--tee=3", "-m", "-", "--help", "a b", "--no_python", "-n"]
)
SCRIPT = st.sampled_from(["x.py", "./a b/x.py", "3", "pkg.mod", "gpu"])


def test_parsers_agree(torchruns):
    @settings(max_examples=120, derandomize=True, deadline=None, database=None)
    @given(st.lists(one_option(torchruns), max_size=4), SCRIPT, st.lists(ARGUMENT.filter(lambda a: a != "--"), max_size=4))
    def agree(chosen, script, arguments):
        line = [word for words, _, _ in chosen for word in words] + [script, *arguments]
        theirs, ours = torchruns.parse_args(line), parse(line)
        assert (ours.target, list(ours.arguments)) == (theirs.training_script, theirs.training_script_args)
        for _, field, _ in chosen:
            assert seen(ours, field) == str(getattr(theirs, field))

    agree()


def seen(ours: Options, field: str) -> str:
    """Our value in the text form of torchrun's."""
    value = getattr(ours, {"nproc_per_node": "nproc", "local_ranks_filter": "tee_ranks"}.get(field, field))
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_options_are_refused(torchruns, name):
    actions = {name: action for action in torchruns._actions for name in action.option_strings}
    if name not in actions:
        assert name in OTHER_VERSIONS
        return
    value = (actions[name].choices or ["1"])[0]
    assert torchruns.parse_args([name, *([] if actions[name].nargs == 0 else [value]), "x.py"])
    for typed in (name, name.replace("-", "_").replace("__", "--", 1)):
        assert error(typed, value, "x.py") == f"{typed}: {REFUSED[name]}"


# --- help ---


def test_help(golden):
    golden("help.txt", help_text())


def test_help_is_narrow():
    assert max(map(len, help_text().splitlines())) <= 120


@pytest.mark.parametrize("name", [*OURS, *REFUSED, "-h", "--help", "--version", *(code for code, _ in EXIT_CODES)])
def test_help_names_every_option_and_exit_code(name):
    assert re.search(rf"^  (?:.*, )?{re.escape(name)}[ ,]", help_text(), re.MULTILINE)


def test_help_names_every_variable_of_ours():
    files = [path for folder in ("lib", "bin") for path in (ROOT / folder).rglob("*") if path.suffix in ("", ".py", ".sh")]
    used = {name for path in files if path.is_file() for name in re.findall(r"TORCHRUN_NCCL_[A-Z_]*[A-Z]", path.read_text())}
    assert used >= {"TORCHRUN_NCCL_PYTHON"}
    assert {name for name in used if name not in help_text()} == set()


def test_variables_have_one_row_each():
    assert len(dict(VARIABLES)) == len(VARIABLES)


def test_every_field_has_its_option():
    fields = {option.field for option in OPTIONS}
    assert set(vars(Options())) == {*fields, "target", "arguments", "wants_help", "wants_version"}
    assert len(fields) == len(OPTIONS)


def test_defaults_in_the_help_are_those_of_the_parser():
    texts = {option.field: option.text for option in OPTIONS}
    for field in ("connect_timeout", "hello_timeout", "heartbeat", "lost_after"):
        assert f"(default: {getattr(Options(), field):g})" in texts[field]


def test_doctests():
    assert doctest.testmod(options).failed == 0
