"""What a run tells: a live line or plain lines on the terminal, and JSON records in its folder."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from transformer_jax.errors import TransformerJaxError

_QUIET_SECONDS = 5.0
"""Plain lines come no closer than this, so that a log stays readable."""


class MetricLog:
    """The records of a run, one JSON object a line.

    Args:
      path: Of the file.
      after: Records of later steps are cut off: a resumed run writes them again.
    """

    def __init__(self, path: Path, after: int) -> None:
        kept = [line for line in _lines(path) if _step(line) <= after]
        write_whole(path, "".join(line + "\n" for line in kept))
        self._path = path

    def write(self, record: dict[str, Any]) -> None:
        """Adds one record; it is in the file when this returns.

        Raises:
          TransformerJaxError: If it cannot be written. Where a disk is full, Python's own error names no file.
        """
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            why = error.strerror or str(error)
            raise TransformerJaxError(
                f"{self._path} cannot be written: {why}; make room, or the folder writable, and go on with --resume"
            ) from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or a crash of the machine leaves an empty file under the new name
    part.replace(path)


def escape_unprintable() -> None:
    """Lets text that the terminal's encoding lacks be escaped: nothing must die of its own sample."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a run; a line that was cut off is left out."""
    return [json.loads(line) for line in _lines(path) if _step(line) < float("inf")]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _step(line: str) -> float:
    """The step of a record; infinity for what is no record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class Terminal:
    """Lines of text for people, and a line of progress: live where the output is a terminal, else plain.

    Args:
      console: To write to; None is standard output.
      silent: Write nothing: of several processes one speaks.
    """

    def __init__(self, console: Console | None = None, *, silent: bool = False) -> None:
        escape_unprintable()
        self._silent = silent
        self._console = console or Console(highlight=False, emoji=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._said = 0.0

    def say(self, text: str) -> None:
        """Prints text as it is, above the live line where there is one."""
        if self._silent:
            return
        if self._progress is None:
            print(text, file=self._console.file, flush=True)
        else:
            self._console.out(text, highlight=False)

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[None]:
        """Shows the steps of the block that follows."""
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        if self._silent or not self._console.is_terminal:
            yield
            return
        with Progress(*columns, console=self._console) as self._progress:
            self._progress.add_task("train", total=total, completed=done, figures="")
            try:
                yield
            finally:
                self._progress = None

    def step(self, record: dict[str, Any], total: int, seconds_left: float) -> None:
        """Shows the figures of a step."""
        figures = (
            f"loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  {record['tokens_per_second']:,.0f} tokens/s"
        )
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=record["step"], figures=figures)
        evaluated = f"  val {record['val_loss']:.4f}" if "val_loss" in record else ""
        now = time.monotonic()
        quiet = self._progress is not None or (now - self._said < _QUIET_SECONDS and record["step"] < total)
        if evaluated or not quiet:
            self.say(f"step {record['step']:>6}/{total}  {figures}{evaluated}  {_clock(seconds_left)} left")
            self._said = now


class Clock:
    """Seconds spent training: runs, but for what is done inside `paused`.

    Args:
      seconds: Spent by earlier parts of the run.
    """

    def __init__(self, seconds: float) -> None:
        self._spent = seconds
        self._since: float | None = time.monotonic()

    def read(self) -> float:
        """The seconds so far."""
        return self._spent + (0.0 if self._since is None else time.monotonic() - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock for a block."""
        self._spent, self._since = self.read(), None
        try:
            yield
        finally:
            self._since = time.monotonic()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
