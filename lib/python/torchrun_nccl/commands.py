"""A scheduler's own command, asked for its own text: bounded, and without a word on the user's terminal."""

from __future__ import annotations

import subprocess

SECONDS = 5.0


def answer(words: tuple[str, ...]) -> str:
    """What the command prints. Raises OSError where it is missing, fails, or takes longer than SECONDS."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=True
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"{words[0]}: {error}") from error
    return done.stdout
