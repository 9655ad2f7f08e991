"""Paragraphs, drawings and tables for people."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 100
"""Of drawings that go to a file or to another program."""


class Output:
    """The terminal; or a file or another program, for which nothing is wrapped or cut off."""

    def __init__(self) -> None:
        console = Console(highlight=False, emoji=False, markup=False)
        self.width = console.width if console.is_terminal else _PIPED_WIDTH
        self._console = console if console.is_terminal else Console(file=console.file, markup=False, width=10_000)

    def say(self, text: str) -> None:
        """Prints a paragraph."""
        self._console.print(f"{text}\n")

    def drawing(self, text: str, plainer: Callable[[str], str]) -> None:
        """Prints lines as they are, or in plainer characters where the output has no others."""
        try:
            text.encode(self._console.encoding)
        except UnicodeEncodeError:
            text = plainer(text)
        self._console.out(f"{text}\n", highlight=False)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        """Prints a table; numbers stand at the right of their columns."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for header, cell in zip(headers, rows[0], strict=True):
            table.add_column(header, justify="left" if isinstance(cell, str) else "right", overflow="fold")
        for row in rows:
            table.add_row(*(cell if isinstance(cell, str) else f"{cell:,.0f}" for cell in row))
        self._console.print(table)
        self._console.print()
