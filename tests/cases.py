"""The job environments in tests/cases: `NAME.env`, and beside it the files that its variables name.

`NAME.env` begins with comments (site and product, what it shows, captured or reconstructed), then has lines NAME=value.
`NAME.nodefile` is what PBS_NODEFILE names, and so on with FILES; `HOST x48` there is 48 lines of HOST.
`NAME.answers` holds what the scheduler's commands answered: a line `$ COMMAND`, then the output.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

from torchrun_nccl.allocation import Env, ReadText, Run

FOLDER = Path(__file__).with_name("cases")
FILES = {
    "PBS_NODEFILE": ".nodefile",
    "PBS_GPUFILE": ".gpufile",
    "LSB_DJOB_HOSTFILE": ".hostfile",
    "LSB_DJOB_RANKFILE": ".hostfile",
    "PE_HOSTFILE": ".pe_hostfile",
}
#: Variables that name a folder, the file in it and what it is called here.
IN_FOLDERS = {"SGE_JOB_SPOOL_DIR": ("pe_hostfile", ".spooled")}
_REPEATED = re.compile(r"(\S+) x([0-9]+)")


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.env")))


def load(name: str) -> tuple[Env, ReadText]:
    """The case's environment, and a reader of the files that it names; all other files are missing."""
    env = dict(_variables(name))
    siblings = {env[variable]: FOLDER / f"{name}{suffix}" for variable, suffix in FILES.items() if env.get(variable)}
    for variable, (file, suffix) in IN_FOLDERS.items():
        siblings.setdefault(f"{env.get(variable)}/{file}", FOLDER / f"{name}{suffix}")
    texts = {path: _unpacked(file.read_text()) for path, file in siblings.items() if file.exists()}

    return env, reader(texts)


def reader(files: Mapping[str, str]) -> ReadText:
    """A reader of these files; all others are missing."""

    def read_text(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return files[path]

    return read_text


def answers(name: str) -> Run:
    """The scheduler's commands as this case recorded them; all others fail."""
    file = FOLDER / f"{name}.answers"
    recorded = re.split(r"^\$ (.*)\n", file.read_text() if file.exists() else "", flags=re.MULTILINE)
    outputs = dict(zip(recorded[1::2], recorded[2::2]))

    def run(words: tuple[str, ...]) -> str:
        command = " ".join(words)
        if command not in outputs:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), words[0])
        return outputs[command]

    return run


def head(name: str) -> list[str]:
    lines = (FOLDER / f"{name}.env").read_text().splitlines()
    return [line[2:] for line in lines if line.startswith("# ")]


def _variables(name: str) -> list[tuple[str, str]]:
    lines = (FOLDER / f"{name}.env").read_text().splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return [(variable, value) for variable, _, value in pairs]


def _unpacked(text: str) -> str:
    return "".join(_repeated(line) for line in text.splitlines())


def _repeated(line: str) -> str:
    match = _REPEATED.fullmatch(line)
    return f"{match[1]}\n" * int(match[2]) if match else f"{line}\n"
