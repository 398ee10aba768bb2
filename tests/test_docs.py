"""The documents and the code say the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from conftest import COMMAND, ROOT, job_environment
from torchrun_nccl import __version__
from torchrun_nccl.errors import EXIT_CODES
from torchrun_nccl.options import OPTIONS, REFUSED, VARIABLES

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "pytorch" / "README.md",
    ROOT / "tests" / "README.md",
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_and_options_exist(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (document.parent / link).exists(), link
    known = {name for option in OPTIONS for name in option.names} | set(REFUSED) | {"--help", "--version"}
    for line in text.splitlines():
        if "torchrun_nccl.sh" in line and "--nnodes" not in line:
            # The script's own options stand behind it.
            before = re.split(r"\S+\.py|package\.module", line.partition("torchrun_nccl.sh")[2])[0]
            assert set(re.findall(r"(?<!\S)--[a-z-]+", before)) <= known, line


def test_the_readme_has_the_codes_and_variables_of_the_code() -> None:
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `?([^|`]+)`? \| (.+) \|$", text, re.M)
    table = {name.strip(): meaning for name, meaning in rows}
    for name, meaning in (*EXIT_CODES, *VARIABLES):
        assert table[name] == meaning


def test_the_changelog_knows_this_version() -> None:
    assert __version__ in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_the_readmes_first_commands_do_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = [str(COMMAND), "--dry-run", "train.py"]
    run = subprocess.run(words, cwd=tmp_path, env=job_environment(), capture_output=True, text=True, check=True)
    for word in ("launch:", "node 0:", "by hand:", "torch.distributed.run"):
        assert word in run.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]
