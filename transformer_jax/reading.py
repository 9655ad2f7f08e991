"""Files that a stranger may have written: read so that none can hang, fill the memory, or be taken for another."""

import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LARGEST_JSON = 1 << 26
"""Bytes. The metadata of a checkpoint with a vocabulary of a million symbols have a quarter of it."""


def check_file(path: str | Path) -> None:
    """Refuses what is no file: a pipe would be waited for without end, and a device can be read without end.

    Raises:
      OSError: If it is missing or no regular file.
      ValueError: If no file can have this name.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a folder")
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is no regular file, but a pipe, a socket or a device; copy what it gives into a file")


def check_folder(path: Path) -> None:
    """Holds a folder to what a checkpoint is made of, files and folders: nothing in it leads out, or is waited for.

    Raises:
      OSError: If there is anything else in it, or it cannot be listed.
    """
    for entry in sorted(path.rglob("*")):
        mode = entry.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise OSError(f"{entry} is a symbolic link, which no checkpoint has; put what it points to in its place")
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise OSError(f"{entry} is neither a file nor a folder, and no checkpoint has such; take it out")


def read_json(path: Path, *, largest: int = LARGEST_JSON) -> Any:
    """The values of a JSON file, which names nothing twice in one object: of two, one would be ignored in silence.

    Args:
      path: Of the file.
      largest: Bytes.

    Raises:
      OSError: If it is missing or no regular file.
      ValueError: If it is larger, or not such JSON in UTF-8.
    """
    check_file(path)
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"{path} has {size} bytes, and at most {largest} are read")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is named twice")
    return values
