"""Who may do what: decisions are pure, effects have few places, and nothing but the standard library is imported."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lib/python/torchrun_nccl"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

# All others are pure: they get what they need as arguments and give their answer back.
WITH_EFFECTS = [
    "__main__.py", "cli.py", "commands.py", "launch.py", "relay.py", "nodes.py", "listener.py", "printer.py", "loop.py",
    "channel.py", "node/*.py",
]  # fmt: skip
NEVER_IN_PURE = [
    "os.environ*", "os.getenv", "os.getcwd", "os.listdir", "os.scandir", "os.stat", "open", "pathlib", "shutil",
    "tempfile", "subprocess", "socket", "select", "selectors", "time", "datetime", "threading", "random", "secrets",
]  # fmt: skip

# Names, and the only files that may use them.
ONLY = [
    (["subprocess", "multiprocessing", "os.system", "os.popen"], ["commands.py", "nodes.py"]),
    (["os.fork*", "os.exec*", "os.spawn*", "os.posix_spawn*"], ["node/processes.py", "node/door.py"]),
    (["os.environ*", "os.getenv"], ["cli.py", "node/*.py"]),
    (["print", "input", "sys.stdout", "sys.stderr", "sys.stdin"], ["cli.py"]),
    (["sys.argv"], ["__main__.py", "node/door.py", "node/inner.py"]),
    (["sys.exit", "exit", "quit"], ["node/door.py", "node/starter.py"]),
    (["os._exit"], ["cli.py", "nodes.py", "node/*.py"]),
    (["torchrun_nccl.cli"], ["__main__.py"]),
    (["torchrun_nccl.launch", "torchrun_nccl.relay"], ["cli.py"]),
    (["torchrun_nccl.commands"], ["cli.py", "launch.py"]),
    (["torchrun_nccl.node.agent", "torchrun_nccl.node.door"], ["node/door.py", "node/inner.py"]),
    (["pickle", "marshal", "shelve"], []),
]


@cache
def nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


@cache
def dotted(text: str) -> set[str]:
    return {ast.unparse(node) for node in nodes(text) if isinstance(node, ast.Attribute)}


def imported(text: str, file: str) -> Iterator[str]:
    """Modules, and what is taken from them, by their full names."""
    for node in nodes(text):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folders = ["torchrun_nccl", *file.split("/")[:-1]]
            parents = folders[: len(folders) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def used(text: str, file: str, patterns: list[str]) -> set[str]:
    """Those of the names imported, the dotted names and the builtins in this file that a pattern means."""
    names = {*imported(text, file), *dotted(text)}
    names |= {node.id for node in nodes(text) if isinstance(node, ast.Name) and hasattr(builtins, node.id)}
    return {name for name in names if is_one_of(name, patterns) or is_one_of(name, [f"{p}.*" for p in patterns])}


def is_one_of(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@pytest.mark.parametrize("file", [file for file in FILES if not is_one_of(file, WITH_EFFECTS)])
def test_pure_files_touch_nothing(file):
    assert used(FILES[file], file, NEVER_IN_PURE) == set()


@pytest.mark.parametrize("names, files", ONLY, ids=lambda words: " ".join(words))
def test_effects_have_their_place(names, files):
    found = {file: used(text, file, names) for file, text in FILES.items() if not is_one_of(file, files)}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize("file", FILES)
def test_only_the_standard_library(file):
    roots = {name.partition(".")[0] for name in imported(FILES[file], file)}
    assert roots <= {*sys.stdlib_module_names, "torchrun_nccl"}


def test_tables_name_files_that_exist():
    patterns = {*WITH_EFFECTS, *(pattern for _, files in ONLY for pattern in files)}
    assert {pattern for pattern in patterns if not any(fnmatchcase(file, pattern) for file in FILES)} == set()


@pytest.mark.parametrize("text, patterns, found", [
    ("import os.path, os", ["os.environ*"], set()),
    ("import os; x = dict(os.environ)", ["os.environ*"], {"os.environ"}),
    ("from os import environ", ["os.environ*"], {"os.environ"}),
    ("import subprocess as s", ["subprocess"], {"subprocess"}),
    ("def f(): from subprocess import Popen", ["subprocess"], {"subprocess", "subprocess.Popen"}),
    ("from ..launch import launch", ["torchrun_nccl.launch"], {"torchrun_nccl.launch", "torchrun_nccl.launch.launch"}),
    ("from .. import launch", ["torchrun_nccl.launch"], {"torchrun_nccl.launch"}),
    ("from . import door", ["torchrun_nccl.node.door"], {"torchrun_nccl.node.door"}),
    ("say = print", ["print"], {"print"}),
    ("time = 'print'", ["print", "time"], set()),
])  # fmt: skip
def test_the_test_sees(text, patterns, found):
    assert used(text, "node/x.py", patterns) == found
