"""What all commands share."""

import sys
from pathlib import Path


def note(text: str) -> None:
    """Tells people something that is no part of the output."""
    print(text, file=sys.stderr)


def prog(command: str) -> str:
    """How a command was called."""
    return "train.py" if Path(sys.argv[0]).name == "train.py" else f"transformer-jax {command}"
