"""What fails is raised, and said in one line; Orbax and TensorStore also write pages of text about it."""

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any


def quieten() -> None:
    """Holds back what the two write about errors that they raise as well."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_others)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _not_of_others(record: logging.LogRecord) -> bool:
    """Of several reads or writes that fail, one is raised."""
    return "exception was never retrieved" not in record.getMessage()


@dataclasses.dataclass
class _Hook:
    """Where one read or write fails, TensorStore tells of the others when the loop that waited for them is closed."""

    other: Callable[[Any], None]

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.other(unraisable)
