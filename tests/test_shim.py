"""bin/torchrun_nccl.sh in a tree of its own, whose Python part only tells what reached it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = Path(__file__).parent.parent / "bin/torchrun_nccl.sh"
PYTHON = os.path.realpath(sys.executable)
PATH = f"{os.path.dirname(PYTHON)}:/usr/bin:/bin"
REFUSED = 120

TELL = """
import json, os, sys
text = lambda raw: os.fsencode(raw).decode("latin-1")
print(json.dumps({
    "argv": [text(word) for word in sys.argv[1:]],
    "environ": {text(name): text(value) for name, value in os.environ.items()},
    "python": sys.executable,
    "file": text(__file__),
    "flags": [sys.flags.isolated, sys.flags.no_site, sys.flags.dont_write_bytecode],
    "pid": os.getpid(), "cwd": text(os.getcwd()), "umask": os.umask(0), "stdin": sys.stdin.read(),
}))
"""


def needs(command: str) -> str:
    return shutil.which(command) or pytest.skip(f"{command} is not installed")


def make_tree(root: Path) -> Path:
    main = root / "lib/python/torchrun_nccl/__main__.py"
    main.parent.mkdir(parents=True)
    main.write_text(TELL)
    (root / "bin").mkdir()
    return Path(shutil.copy(SHIM, root / "bin"))


def make_python(folder: Path, script: str | None = None) -> None:
    """A python3 in a folder of its own: the real one, or a script that stands for it."""
    folder.mkdir(parents=True)
    if script is None:
        (folder / "python3").symlink_to(PYTHON)
    else:
        (folder / "python3").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "python3").chmod(0o755)


@pytest.fixture
def shim(tmp_path):
    return make_tree(tmp_path / "tree")


@pytest.fixture
def tools(tmp_path):
    """A PATH with all that the shim may count on, and no Python."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/readlink").symlink_to(shutil.which("readlink"))
    return tmp_path / "tools"


@pytest.fixture(params=["", "dash", "bash --posix", "bash", "busybox sh", "ksh"], ids=lambda name: name or "kernel")
def shell(request):
    """The words before the shim: none (its first line decides), or one of those that sites call sh."""
    name, *options = request.param.split() or [""]
    return [needs(name), *options] if name else []


def run(*words, **kwargs):
    kwargs = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 30, "env": {"PATH": PATH}, **kwargs}
    return subprocess.run([os.fsencode(word) for word in words], check=False, **kwargs)


def told(*words, **kwargs) -> dict:
    done = run(*words, **kwargs)
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)


def test_is_short_and_plain():
    lines = SHIM.read_text().splitlines()
    assert len(lines) <= 15
    assert lines[0] == "#!/bin/sh"
    assert os.access(SHIM, os.X_OK)


def test_arguments_pass_byte_for_byte(shell, shim):
    words = [b"a b", b"", b"*.py", b"*", b"$HOME", b"a$$b", b"${local_rank}", b"it's", b'{"k": "v w"}', b"x;touch pwn"]
    words += [b"two\nlines\n", b"--", b"-n", b"-c", b"a\\nb\\", "é".encode(), b"\xff\xfe", b"`id`", b"--nnodes", b"3"]
    assert [word.encode("latin-1") for word in told(*shell, shim, *words)["argv"]] == words


def test_environment_passes_unchanged(shell, shim, tmp_path):
    """Also where the caller has exported the very names that the shim uses."""
    used = set(re.findall(r"\b(\w+)(?:=| in )", SHIM.read_text()))
    assert {"dir", "exe", "ask", "found"} <= used
    used -= {"IFS", "TORCHRUN_NCCL_PYTHON", "_torchrun_nccl", "_torchrun_nccl_py"}
    given = dict.fromkeys(used | {"py", "PYTHONPATH", "PYTHONHOME", "ENV", "CDPATH"}, "mine")
    given |= {"PATH": PATH, "HOME": str(tmp_path)}
    given |= {"TEXT": "a\nb\n", "EMPTY": "", "RAW": os.fsdecode(b"\xff\n")}
    # Not every shell can hold such names; one that carries them carries them whole.
    odd = {"a.b": "1", "BASH_FUNC_f%%": "() {  :\n}"}
    got = told(*shell, shim, env={**given, **odd}, cwd=tmp_path)["environ"]
    got = {name: os.fsdecode(value.encode("latin-1")) for name, value in got.items()}
    for name in ("_", "PWD", "OLDPWD", "SHLVL", "A__z", "LC_CTYPE"):  # the shells' own, and Python's
        got.pop(name, None)
    assert {name: value for name, value in got.items() if name not in odd} == given
    assert odd == {**odd, **{name: got[name] for name in odd if name in got}}


def test_becomes_python_and_changes_nothing_else(shell, shim, tmp_path):
    kwargs = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {"PATH": PATH}}
    with subprocess.Popen([*shell, shim], cwd=tmp_path, umask=0o27, **kwargs) as process:
        out, _ = process.communicate(b"all of it", timeout=30)
    got = json.loads(out)
    assert (got["pid"], got["cwd"], got["umask"]) == (process.pid, str(tmp_path), 0o27)
    assert (got["stdin"], got["flags"]) == ("all of it", [1, 1, 1])


@pytest.mark.parametrize("links", [
    {"link": "tree/bin/torchrun_nccl.sh"},
    {"link": "{here}/tree/bin/torchrun_nccl.sh"},
    {"link": "tree/bin/../bin/torchrun_nccl.sh"},
    {"link": "site/bin/other", "site/bin/other": "../run", "site/run": "{here}/tree/bin/torchrun_nccl.sh"},
    {"folder": "tree/bin", "link": "folder/torchrun_nccl.sh"},
    {"root": "tree", "link": "root/bin/torchrun_nccl.sh"},
], ids=lambda links: " ".join(links.values()))  # fmt: skip
def test_finds_its_root_through_links(shim, tmp_path, links):
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target.format(here=tmp_path))
    main = str(tmp_path / "tree/lib/python/torchrun_nccl/__main__.py")
    assert told(tmp_path / "link", cwd="/")["file"] == main
    assert told("./link", cwd=tmp_path)["file"] == main
    assert told("env", "link", cwd="/", env={"PATH": f"{tmp_path}:{PATH}"})["file"] == main
    assert told("env", "link", cwd=tmp_path, env={"PATH": f".:{PATH}"})["file"] == main


@pytest.mark.parametrize("name", ["a b", "it's \"$HOME\":`id`;touch pwn\\n*é", "two\nlines\n", "-n"])
def test_root_may_have_any_name(shell, tmp_path, name):
    shim = make_tree(tmp_path / name)
    main = str(tmp_path / name / "lib/python/torchrun_nccl/__main__.py")
    assert told(*shell, shim, cwd=tmp_path)["file"].encode("latin-1").decode() == main
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["sh", "dash", "bash", "ksh", "zsh", "csh", "tcsh", "fish"])
def test_is_called_by_name_from_scripts_of_any_shell(shim, tmp_path, name):
    (tmp_path / "job").write_text("torchrun_nccl.sh 'a b' '$HOME' '*' ''\n")
    env = {"PATH": f"{shim.parent}:{PATH}", "HOME": str(tmp_path)}
    assert told(needs(name), tmp_path / "job", cwd=tmp_path, env=env)["argv"] == ["a b", "$HOME", "*", ""]


def test_is_found_by_a_shell_that_is_given_its_name(shim, tmp_path):
    """A shell looks for its script in the working directory; bash on PATH as well."""
    tree = str(tmp_path / "tree/lib")
    assert told("sh", shim.name, cwd=shim.parent)["file"].startswith(tree)
    env = {"PATH": f"{shim.parent}:{PATH}"}
    assert told(needs("bash"), shim.name, cwd=tmp_path, env=env)["file"].startswith(tree)


FIRST = os.fsdecode(b"a first \xff")
# Stand-ins for a python3 that is run as `python3 -ISX utf8 -c CODE`.
OLD = f"""exec {PYTHON} -c 'import sys
sys.version_info, sys.version = (3, 8, 10), "3.8.10 (default)"
exec(sys.argv[1])' "$4" """
TWO = "echo Unknown option: -I >&2; exit 2"
PYENV = f'PATH=/pyenv:$PATH PYENV_VERSION=3.11; export PATH PYENV_VERSION; exec {PYTHON} "$@"'
CONTAINER = f'case $* in *executable*) echo /inside/python3;; *) exec {PYTHON} "$@";; esac'
NAMELESS = f'case $* in *executable*) read line; :;; *) exec {PYTHON} "$@";; esac'


@pytest.mark.parametrize("first, chosen", [
    (None, FIRST + "/python3"),
    (OLD, "last/python3"),
    (TWO, "last/python3"),
    ("kill -SEGV $$", "last/python3"),
    (PYENV, PYTHON),      # through the wrapper all ranks would get its variables
    (CONTAINER, PYTHON),  # what it ran is not there outside, so it is run itself
    (NAMELESS, PYTHON),
], ids=["good", "3.8", "2", "dies", "pyenv", "container", "nameless"])  # fmt: skip
def test_takes_the_first_python_on_path_that_will_do(shell, shim, tmp_path, tools, first, chosen):
    make_python(tmp_path / FIRST, first)
    make_python(tmp_path / "last")
    (tmp_path / "folder/python3").mkdir(parents=True)
    (tmp_path / "in").write_text("all of it")
    folders = [tmp_path / name for name in ("none", "l*", "folder", FIRST, "tools", "last")]
    path = ":".join(["", *map(str, folders)])
    with open(tmp_path / "in") as stdin:
        got = told(*shell, shim, env={"PATH": path, "LC_ALL": "C.UTF-8"}, cwd="/", stdin=stdin)
    assert (got["python"], got["stdin"]) == (str(tmp_path / chosen), "all of it")
    assert os.fsdecode(got["environ"]["PATH"].encode("latin-1")) == path
    assert "PYENV_VERSION" not in got["environ"]


def test_takes_the_modules_own_python_last(shim, tmp_path, tools):
    make_python(tmp_path / "tree/venv/bin")
    make_python(tmp_path / "old", OLD)
    own = str(tmp_path / "tree/venv/bin/python3")
    assert told(shim, env={"PATH": f"{tmp_path}/old:{tools}"})["python"] == own
    make_python(tmp_path / "good")
    assert told(shim, env={"PATH": f"{tools}:{tmp_path}/good"})["python"] == str(tmp_path / "good/python3")


@pytest.mark.parametrize("value, chosen", [
    ("{here}/my own:py/python3", "my own:py/python3"),
    ("my own:py/python3", "my own:py/python3"),
    ("python3", "first/python3"),
    ("", "first/python3"),
])  # fmt: skip
def test_torchrun_nccl_python_wins(shell, shim, tmp_path, tools, value, chosen):
    make_python(tmp_path / "my own:py")
    make_python(tmp_path / "first")
    env = {"PATH": f"{tmp_path}/first:{tools}", "TORCHRUN_NCCL_PYTHON": value.format(here=tmp_path)}
    assert told(*shell, shim, env=env, cwd=tmp_path)["python"] == str(tmp_path / chosen)


WAY_OUT = "but needs 3.9 or newer, on PATH or in TORCHRUN_NCCL_PYTHON"


@pytest.mark.parametrize("value, path, message", [
    (None, "", "found no Python,"),
    (None, "{here}/old", "found {here}/old/python3 (3.8.10),"),
    (None, "{here}/two:{here}/old", "found {here}/two/python3 (not usable), {here}/old/python3 (3.8.10),"),
    ("{here}/old/python3", "{here}/good", "found TORCHRUN_NCCL_PYTHON: {here}/old/python3 (3.8.10),"),
    ("/no/such", "{here}/good", "found TORCHRUN_NCCL_PYTHON: /no/such (not usable),"),
    ("{here}", "{here}/good", "found TORCHRUN_NCCL_PYTHON: {here} (not usable),"),
    ("python9", "{here}/good", "found TORCHRUN_NCCL_PYTHON: python9 (not usable),"),
])  # fmt: skip
def test_says_what_it_found_where_no_python_will_do(shell, shim, tmp_path, tools, value, path, message):
    for name, script in {"old": OLD, "two": TWO, "good": None}.items():
        make_python(tmp_path / name, script)
    env = {"PATH": f"{tools}:{path}".format(here=tmp_path)}
    env |= {} if value is None else {"TORCHRUN_NCCL_PYTHON": value.format(here=tmp_path)}
    done = run(*shell, shim, "--help", env=env, cwd="/")
    assert (done.returncode, done.stdout) == (REFUSED, b"")
    assert done.stderr.decode() == f"torchrun_nccl: {message.format(here=tmp_path)} {WAY_OUT}\n"
