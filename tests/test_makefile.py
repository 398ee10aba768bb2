"""make, as an ordinary user, in a copy of the tree whose path has a space."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import cache_from_source
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
PARTS = ["bin", "lib", "examples", "modulefiles", "README.md", "CHANGELOG.md", "LICENSE"]
PYTHON = os.path.realpath(sys.executable)
NOBODY = 65534
CHECKED_HASH = b"\3\0\0\0"


@pytest.fixture
def place():
    """A folder that an ordinary user can enter and fill, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="a place ") as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.fixture
def tree(place):
    """As a clone made under umask 077 looks to its owner, with leftovers of a run."""
    tree = place / "source tree"
    tree.mkdir()
    for part in [*PARTS, "Makefile", "requirements-dev.txt"]:
        (shutil.copytree if (HERE / part).is_dir() else shutil.copy)(HERE / part, tree / part)
    (tree / "lib/python/torchrun_nccl/__pycache__").mkdir(exist_ok=True)
    (tree / "lib/python/torchrun_nccl/__pycache__/stale.pyc").touch()
    for path in [tree, *tree.rglob("*")]:
        path.chmod(path.stat().st_mode & 0o700)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
    return tree


def run(*words, **kwargs):
    if os.geteuid() == 0:
        words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *words]
    env = {"PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir(), "PIP_NO_CACHE_DIR": "1", "PYTHON": PYTHON}
    kwargs = {"text": True, "capture_output": True, "timeout": 200, "umask": 0o77, **kwargs}
    return subprocess.run(words, env=env, check=False, **kwargs)


def install(tree, prefix, torch="", **more):
    more = {"PREFIX": prefix, "TORCH": torch, **more}
    return run("make", "install", *(f"{name}={value}" for name, value in more.items()), cwd=tree)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_help_comes_first_and_lists_every_target():
    done = subprocess.run(["make"], cwd=HERE, text=True, capture_output=True, timeout=20, check=True)
    listed = re.findall(r"^  make (\w+) +\S", done.stdout, re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)", (HERE / "Makefile").read_text(), re.MULTILINE)
    assert listed == phony.split()
    assert {"help", "run", "test", "lint", "golden", "bench", "install", "clean"} <= set(listed)


def test_tools_are_installed_once(tree):
    """What make test needs first; with nothing pinned, so that nothing is fetched."""
    (tree / "requirements-dev.txt").write_text("# none\n")
    made = run("make", ".venv/done", cwd=tree)
    assert made.returncode == 0, made.stderr
    assert run("make", ".venv/done", cwd=tree).stdout == "make: '.venv/done' is up to date.\n"
    later = time.time() + 5  # by the clock of the file system, which may lag
    os.utime(tree / "requirements-dev.txt", (later, later))
    assert run("make", "--question", ".venv/done", cwd=tree).returncode == 1
    assert run("make", "clean", cwd=tree).returncode == 0
    assert not (tree / ".venv").exists()
    assert not list(tree.rglob("__pycache__"))


def test_install_upgrade_and_failed_upgrade(tree, place):
    prefix = place / "apps" / "ai ml's"
    done = install(tree, prefix)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"module use {prefix}/modulefiles" in done.stdout
    for path in [prefix, *prefix.rglob("*")]:  # by all users, and the command by all to run
        assert path.stat().st_mode & 0o055 >= (0o055 if path.is_dir() else 0o044), path
    assert (prefix / "bin/torchrun_nccl.sh").stat().st_mode & 0o777 == 0o755
    assert {path.name for path in prefix.iterdir()} == set(PARTS)
    assert not list(prefix.rglob("stale.pyc"))
    first = files(prefix)
    helped = run(prefix / "bin/torchrun_nccl.sh", "--help", cwd="/")
    assert helped.returncode == 0, helped.stderr
    assert files(prefix) == first

    # Bytecode is there for all of it, and holds whatever times a copy of the tree may get.
    sources = list((prefix / "lib").rglob("*.py"))
    assert prefix / "lib/python/torchrun_nccl/__main__.py" in sources
    for path in sources:
        assert Path(cache_from_source(str(path))).read_bytes()[4:8] == CHECKED_HASH

    # An upgrade takes away what the new release no longer has, and nothing of anyone else's.
    for name, kept in {"bin/of-the-site": True, "lib/python/torchrun_nccl/gone.py": False}.items():
        (prefix / name).touch()
        (tree / "LICENSE").write_text("new")
        assert install(tree, prefix).returncode == 0
        assert (prefix / name).exists() is kept
    assert (prefix / "LICENSE").read_text() == "new"

    before = files(prefix)
    (tree / "LICENSE").write_text("newer")
    assert install(tree, prefix, PYTHON="/no/python").returncode != 0
    assert files(prefix) == before


@pytest.fixture
def wheels():
    """Two releases of a torch that takes no time; in a path without spaces, since TORCH is words."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield [make_wheel(Path(name), version) for version in ("1.0", "2.0")]


def make_wheel(folder: Path, version: str) -> Path:
    path = folder / f"torch-{version}-py3-none-any.whl"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("torch.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_install_with_a_python_environment(tree, place, wheels):
    """Built once for the same words, side by side for others: running jobs keep the one that they began with."""
    prefix = place / "my apps"
    found = []
    for wheel in (wheels[0], wheels[0], wheels[1]):
        done = install(tree, prefix, f"--no-index {wheel}")
        assert (done.returncode, done.stderr) == (0, "")
        python = run(prefix / "venv/bin/python3", "-c", "import sys, torch; print(sys.prefix, torch.__version__)")
        found.append((python.stdout, (prefix / "venv").resolve(), (prefix / "venv/bin").stat().st_mtime_ns))
        assert python.stdout.startswith(f"{prefix}/venv ")
    assert found[0] == found[1]
    assert [out.split()[-1] for out, _, _ in found] == ["1.0", "1.0", "2.0"]
    assert found[0][1].is_dir()
    assert found[0][1] != found[2][1]

    assert install(tree, prefix).returncode == 0  # without TORCH it stays as it is
    assert (prefix / "venv").resolve() == found[2][1]
    assert install(tree, prefix, "--no-index no-such-package").returncode != 0
    assert (prefix / "venv").resolve() == found[2][1]
    assert sorted(path.name for path in prefix.iterdir()) == sorted(
        [*PARTS, "venv", found[0][1].name, found[2][1].name]
    )


@pytest.mark.parametrize("prefix, existing, message", [
    ("", None, "no folder named; say make install PREFIX=DIR"),
    (".", None, "is the tree to install"),
    ("../local", "bin/other", "local is not empty, and no earlier install either"),
    ("../local", "README.md", "local is not empty, and no earlier install either"),
    ("../file", None, "File exists"),
])  # fmt: skip
def test_install_refuses_what_is_not_its_own(tree, place, prefix, existing, message):
    (place / "file").touch()
    if existing:
        path = place / "local" / existing
        path.parent.mkdir(parents=True)
        path.write_text("theirs")
    before = files(place)
    done = install(tree, prefix)
    assert done.returncode == 2
    assert message in done.stderr
    assert files(place) == before


def test_install_refuses_to_replace_a_foreign_environment(tree, place):
    assert install(tree, place / "apps").returncode == 0
    (place / "apps/venv/bin").mkdir(parents=True)
    done = install(tree, place / "apps", "torch")
    assert "venv was not made by this script; TORCH= leaves it alone" in done.stderr
    assert install(tree, place / "apps").returncode == 0
