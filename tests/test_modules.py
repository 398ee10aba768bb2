"""The two module files under real Lmod and real Environment Modules, in every shell that they serve."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
NAME, VERSION = "NCI-ai-ml", "23.05"

# The first of these folders that is there holds the module system's start-up files.
SYSTEMS = {
    "Lmod": ["/usr/share/lmod/lmod/init"],
    "Environment Modules": ["/opt/environment-modules/usr/share/modules/init", "/usr/share/modules/init"],
}
# Shell: its start-up file there, and how to read it.
SHELLS = {
    "bash": ("bash", "."),
    "zsh": ("zsh", "."),
    "dash": ("sh", "."),
    "ksh": ("ksh", "."),
    "tcsh": ("tcsh", "source"),
    "fish": ("fish", "source"),
}
# What the module systems and the shells keep for themselves.
NOT_OURS = re.compile(r"_?_?_?LMOD|_ModuleTable|__MODULES|MODULES|LOADEDMODULES|_LMFILES_|A__z|_AST_|_$")
# A user's own values, which no load or unload may touch.
USERS = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "3", "PYTHONPATH": "/mine", "LD_LIBRARY_PATH": "/mine"}
OURS = {"PATH", "NCI_AI_ML_ROOT", "NCI_AI_ML_BASE"}
HELP = (HERE / f"modulefiles/{NAME}/{VERSION}.lua").read_text().partition("help([[\n")[2].partition("\n]])")[0]


def make_tree(root: Path, versions=(VERSION,)) -> Path:
    """The module's tree, its command a stand-in that says where it is and what it got."""
    shutil.copytree(HERE / "modulefiles", root / "modulefiles")
    folder = root / "modulefiles" / NAME
    for version in set(versions) - {VERSION}:
        shutil.copy(folder / VERSION, folder / version)
        shutil.copy(folder / f"{VERSION}.lua", folder / f"{version}.lua")
    if VERSION not in versions:
        for name in (VERSION, f"{VERSION}.lua", ".version"):
            (folder / name).unlink()
    (root / "bin").mkdir()
    (root / "bin/torchrun_nccl.sh").write_text('#!/bin/sh\necho "ran $0 with $#: $*"\n')
    (root / "bin/torchrun_nccl.sh").chmod(0o755)
    return root


def make_venv(root: Path) -> None:
    (root / "venv/bin").mkdir(parents=True)
    (root / "venv/bin/python3").touch()


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "tree")


@pytest.fixture(params=SYSTEMS)
def system(request):
    return request.param


@pytest.fixture
def session(system, tmp_path):
    """Run lines in a new shell that has the module system; give all it said, and the environment at each `dump`."""
    folder = next((folder for folder in SYSTEMS[system] if os.path.exists(f"{folder}/bash")), None)
    if folder is None:
        pytest.skip(f"{system} is not installed")

    def run(*lines: str, shell: str = "bash"):
        program = shutil.which(shell) or pytest.skip(f"{shell} is not installed")
        start, read = SHELLS[shell]
        dumps = [tmp_path / f"dump{number}" for number, line in enumerate(lines) if line == "dump"]
        names = iter(dumps)
        lines = [f"env -0 > {next(names)}" if line == "dump" else line for line in lines]
        (tmp_path / "script").write_text("\n".join([f"{read} {folder}/{start}", *lines, ""]))
        (tmp_path / "home").mkdir(exist_ok=True)
        env = {"HOME": str(tmp_path / "home"), "PATH": "/mine:/usr/bin:/bin", "USER": "me", **USERS}
        done = subprocess.run(
            [program, tmp_path / "script"], cwd=tmp_path / "home", env=env, text=True, timeout=120, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        said = re.sub(r".*: local: not found\n", "", done.stdout)  # Lmod's own code under ksh93
        return said, *(environment(dump.read_bytes()) for dump in dumps)

    return run


def environment(dump: bytes) -> dict[str, str]:
    pairs = (os.fsdecode(pair).partition("=") for pair in dump.split(b"\0") if pair)
    return {name: value for name, _, value in pairs if not NOT_OURS.match(name)}


def use(root: Path, *more: str) -> list[str]:
    return [f"module use {root}/modulefiles", *more]


LOAD, UNLOAD = f"module load {NAME}", f"module unload {NAME}"


@pytest.mark.parametrize("shell", SHELLS)
def test_load_run_unload_in_every_shell(session, tree, shell):
    """From an empty folder; a second load is silent, an unload leaves everything as it was."""
    twice = ["echo again", LOAD, "echo said", "dump"]
    lines = use(tree, "dump", LOAD, "dump", *twice, "torchrun_nccl.sh 'a b' '$X'", UNLOAD, "dump")
    said, before, loaded, again, after = session(*lines, shell=shell)
    assert f"ran {tree}/bin/torchrun_nccl.sh with 2: a b $X\n" in said
    assert "again\nsaid\n" in said
    assert loaded == {
        **before,
        "PATH": f"{tree}/bin:/mine:/usr/bin:/bin",
        "NCI_AI_ML_ROOT": str(tree),
        "NCI_AI_ML_BASE": str(tree),
    }
    assert again == loaded
    assert after == before
    assert USERS.items() <= after.items()


def test_tree_with_a_python_environment(session, tree):
    """It comes behind our own bin; a load and an unload agree although it appears or goes in between."""
    make_venv(tree)
    remove, make = f"rm -r {tree}/venv", f"mkdir -p {tree}/venv/bin; touch {tree}/venv/bin/python3"
    lines = ["dump", LOAD, "dump", remove, UNLOAD, "dump", LOAD, make, UNLOAD, "dump"]
    _, before, loaded, gone, come = session(*use(tree, *lines))
    assert loaded["PATH"] == f"{tree}/bin:{tree}/venv/bin:{before['PATH']}"
    assert gone == before
    assert come == before


def test_default_version(session, tmp_path):
    """The one that .version names, not the highest."""
    tree = make_tree(tmp_path / "both", [VERSION, "24.11"])
    said, env = session(*use(tree, LOAD, "module -t list", "dump"))
    assert f"{NAME}/{VERSION}" in said
    assert f"{NAME}/24.11" not in said
    assert env["NCI_AI_ML_ROOT"] == str(tree)


@pytest.fixture
def two(tree, tmp_path):
    """Two versions, each in a tree of its own."""
    new = make_tree(tmp_path / "new", ["24.11"])
    return new, [*use(tree), *use(new), f"module load {NAME}/{VERSION}"]


def test_swap(session, two):
    new, lines = two
    _, env, after = session(*lines, f"module swap {NAME} {NAME}/24.11", "dump", UNLOAD, "dump")
    assert (env["NCI_AI_ML_ROOT"], env["PATH"]) == (str(new), f"{new}/bin:/mine:/usr/bin:/bin")
    assert (after["PATH"], OURS & after.keys()) == ("/mine:/usr/bin:/bin", {"PATH"})


def test_load_over_another_version(session, system, tree, two):
    """Lmod swaps and says so, Environment Modules refuses and says so; never a mixture of both."""
    new, lines = two
    said, env = session(*lines, f"module load {NAME}/24.11", "echo rc=$?", "dump")
    code, words, root = {
        "Lmod": (0, f"{NAME}/{VERSION} => {NAME}/24.11", new),
        "Environment Modules": (1, "cannot be loaded due to a conflict", tree),
    }[system]
    assert f"rc={code}\n" in said
    assert words in said
    assert (env["NCI_AI_ML_ROOT"], env["PATH"]) == (str(root), f"{root}/bin:/mine:/usr/bin:/bin")


@pytest.mark.parametrize("link, target", [
    ("site/mods/NCI-ai-ml/23.05{}", "{tree}/modulefiles/NCI-ai-ml/23.05{}"),
    ("site/mods/NCI-ai-ml/23.05{}", "../../../{name}/modulefiles/NCI-ai-ml/23.05{}"),
    ("site/mods/NCI-ai-ml", "{tree}/modulefiles/NCI-ai-ml"),
    ("site/mods", "{tree}/modulefiles"),
    ("site", "{name}"),
], ids=["files", "files-relative", "folder", "modulefiles", "root"])  # fmt: skip
@pytest.mark.parametrize("name", ["tree2", "it's a \"$HOME\";x&é"])
def test_root_is_found_through_links(session, tmp_path, name, link, target):
    if " " in name and link == "site":
        name = "it's;x&é"  # MODULEPATH itself may not hold every name
    tree = make_tree(tmp_path / name)
    for ending in ("", ".lua"):
        path = tmp_path / link.format(ending)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(target.format(ending, tree=tree, name=name))
    folder = tmp_path / ("site/modulefiles" if link == "site" else "site/mods")
    said, before, loaded, after = session(
        f"module use {folder}", "dump", LOAD, "dump", "torchrun_nccl.sh", UNLOAD, "dump"
    )
    assert (loaded["NCI_AI_ML_ROOT"], loaded["PATH"]) == (str(tree), f"{tree}/bin:{before['PATH']}")
    assert f"ran {tree}/bin/torchrun_nccl.sh with 0" in said
    assert after == before


def test_tree_that_was_moved(session, tree, tmp_path):
    tree.rename(tmp_path / "moved")
    _, env = session(*use(tmp_path / "moved", LOAD, "dump"))
    assert env["NCI_AI_ML_ROOT"] == str(tmp_path / "moved")


def test_damaged_tree_is_a_clear_error(session, tree):
    """Nothing is set, and help and avail still work; a tree damaged after the load can be unloaded."""
    remove = f"rm {tree}/bin/torchrun_nccl.sh"
    lines = [remove, "dump", LOAD, "echo rc=$?", "dump", f"module help {NAME}", "module -t avail"]
    said, before, after = session(*use(tree, *lines))
    words = " ".join(said.split())
    assert f"{NAME}/{VERSION}: '{tree}/bin/torchrun_nccl.sh' is missing;" in words
    assert "Install the whole tree, and link module files into other trees, never copy them." in words
    assert "while executing" not in said
    assert "rc=1\n" in said
    assert HELP in said
    assert f"{NAME}/{VERSION}" in said.partition(HELP)[2]
    assert after == before

    (tree / "bin/torchrun_nccl.sh").touch()
    _, before, after = session(*use(tree, "dump", LOAD, remove, UNLOAD, "dump"))
    assert after == before


def test_copied_module_file_is_a_clear_error(session, tmp_path):
    shutil.copytree(HERE / "modulefiles" / NAME, tmp_path / "elsewhere" / NAME)
    said, before, after = session(f"module use {tmp_path}/elsewhere", "dump", LOAD, "echo rc=$?", "dump")
    assert "link module files into other trees, never copy them." in " ".join(said.split())
    assert "rc=1\n" in said
    assert after == before


def test_help_and_lists(session, tree):
    lines = [f"module help {NAME}", f"module whatis {NAME}", f"module show {NAME}", "module -t avail"]
    (said,) = session(*use(tree, *lines))
    assert len(HELP.splitlines()) <= 8
    assert HELP in said
    assert re.search(rf"{NAME}/{VERSION}\s*: Version: {VERSION}\n", said)
    assert "NCI_AI_ML_ROOT" in said
    assert len(re.findall(rf"^{NAME}/{VERSION}(?:\(default\))?\s*$", said, re.MULTILINE)) == 1


@pytest.mark.parametrize("system", ["Lmod"])  # Environment Modules has no spider
def test_spider(session, tree):
    (said,) = session(*use(tree, f"module spider {NAME}", f"module spider {NAME}/{VERSION}"))
    words = " ".join(said.split())
    assert words.count("Runs any PyTorch script, unmodified, on every GPU of every node of a batch job") == 2
    assert "Lmod has detected" not in said


def test_help_begins_as_the_readme_does():
    _, first, *_ = (HERE / "README.md").read_text().replace("`", "").split("\n\n")
    assert HELP.partition(":\n")[0] in " ".join(first.split())


def test_the_readmes_lines_train_from_an_empty_directory(session, tmp_path):
    """The real tree; a pretended second node and CPUs, for want of a cluster. The user's environment has torch."""
    block = (HERE / "README.md").read_text().split("module use /apps/NCI-ai-ml/modulefiles")[1].partition("```")[0]
    lines = [line for line in block.splitlines() if line.strip()]
    assert lines[0] == "module load NCI-ai-ml"
    command = lines[1].replace("torchrun_nccl.sh", "torchrun_nccl.sh --simulate 2x1 --device cpu").replace("50 10", "2 1")
    empty = tmp_path / "empty"
    empty.mkdir()
    (said,) = session(
        f"cd '{empty}'",
        f"export PATH='{Path(sys.executable).parent}':\"$PATH\"",
        f"module use '{HERE / 'modulefiles'}'",
        lines[0],
        command,
        "echo code $?",
    )
    assert "code 0" in said, said
    host = socket.gethostname().partition(".")[0]
    for node in (0, 1):
        text = (empty / f"output.torchrun_example.py.{host}-sim{node}.log").read_text()
        assert f"[GPU{node}] Epoch 1 | Batchsize: 32 | Steps: 32" in text
    assert (empty / "snapshot.pt").exists()
