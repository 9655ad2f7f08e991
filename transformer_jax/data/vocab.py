"""Characters to ids and back."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from transformer_jax.errors import DataError

_CHUNK = 1 << 20
"""Characters looked at in one go: large texts never exist as one array of code points."""


@dataclasses.dataclass(frozen=True)
class Vocab:
    """A character vocabulary.

    Attributes:
      symbols: Its characters; the id of each is its place. Built from a text they are in code point order.
    """

    symbols: str

    def __post_init__(self) -> None:
        if not self.symbols:
            raise DataError("a vocabulary needs at least one symbol, and the text has none")
        if len(set(self.symbols)) != len(self.symbols):
            raise DataError("a vocabulary must not hold a symbol twice")

    @classmethod
    def from_text(cls, text: str) -> "Vocab":
        """The distinct characters of a text."""
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def start(self) -> str:
        """Where a text begins when nobody says: a line end, or the first symbol."""
        return "\n" if "\n" in self.symbols else self.symbols[0]

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id."""
        return np.min_scalar_type(len(self.symbols) - 1)

    def encode(self, text: str) -> np.ndarray:
        """[N] ids of `dtype`.

        Raises:
          DataError: For a character that is not in the vocabulary, with its place in the text.
        """
        points = np.array([ord(symbol) for symbol in self.symbols])
        table = np.full(points.max() + 2, -1, np.int32)
        table[points] = np.arange(len(self))
        ids = np.empty(len(text), self.dtype)
        for start in range(0, len(text), _CHUNK):
            chunk = np.frombuffer(text[start : start + _CHUNK].encode("utf-32-le", "surrogatepass"), np.uint32)
            found = table[np.minimum(chunk, len(table) - 1)]
            if found.min() < 0:
                place = start + int(np.argmin(found >= 0))
                raise DataError(
                    f"character {text[place]!r} (position {place}) is not among the {len(self)} symbols "
                    f"of the vocabulary: {self.symbols[:100]!r}{'...' if len(self) > 100 else ''}"
                )
            ids[start : start + _CHUNK] = found
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any iterable of ids."""
        return "".join(self.symbols[i] for i in ids)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"symbols": self.symbols}

    @classmethod
    def from_dict(cls, values: Any) -> "Vocab":
        """Reads what `to_dict` made.

        Raises:
          DataError: For anything else.
        """
        if not isinstance(values, dict) or set(values) != {"symbols"} or not isinstance(values["symbols"], str):
            raise DataError('a vocabulary must be a JSON object {"symbols": "..."}')
        return cls(values["symbols"])
