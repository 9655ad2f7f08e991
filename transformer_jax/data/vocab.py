"""Symbols to ids and back."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from transformer_jax.errors import DataError

_CHUNK = 1 << 20
"""Characters looked at in one go: large texts never exist as one array of code points."""

SPECIAL = ("", "gap", "end")
_GAPS = "_□▁"


@dataclasses.dataclass(frozen=True)
class Vocab:
    """A vocabulary: characters, or words with blanks between them.

    Attributes:
      symbols: A string of characters, or a tuple of words; the id of each is its place. Those built from a text are in
        code point order.
      special: What the one id after all symbols stands for: "gap", a hidden symbol, as a masked language model sees
        it; "end", before and after a sequence; "" where there is none.
    """

    symbols: str | tuple[str, ...]
    special: str = ""

    def __post_init__(self) -> None:
        if not self.symbols:
            raise DataError("a vocabulary needs at least one symbol, and the text has none")
        if len(set(self.symbols)) != len(self.symbols):
            raise DataError("a vocabulary must not hold a symbol twice")
        odd = next((word for word in self.symbols if isinstance(self.symbols, tuple) and word.split() != [word]), None)
        if odd is not None:
            raise DataError(f"a vocabulary's words stand between blanks, and {odd[:60]!r} is empty or holds one")
        if self.special not in SPECIAL:
            raise DataError(f"a vocabulary's special symbol must be one of {SPECIAL}, got {self.special!r}")
        if self.special == "gap" and not self.gap:
            raise DataError(f"the text uses all of {' '.join(_GAPS)}, and a gap needs a sign of its own; take one out")

    @classmethod
    def from_text(cls, text: Iterable[str], special: str = "") -> "Vocab":
        """The distinct characters of a text, or the distinct words of a list."""
        symbols = sorted(set(text))
        return cls("".join(symbols) if isinstance(text, str) else tuple(symbols), special)

    def __len__(self) -> int:
        return len(self.symbols) + bool(self.special)

    @property
    def special_id(self) -> int:
        """The id of the special symbol."""
        return len(self.symbols)

    @property
    def gap(self) -> str:
        """How a gap is written: an underscore, or another sign where the text has underscores itself."""
        return next((sign for sign in _GAPS if sign not in self.symbols), "")

    @property
    def start(self) -> str:
        """Where a text begins when nobody says: a line end, or the first symbol."""
        return "\n" if "\n" in self.symbols else self.symbols[0]

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id."""
        return np.min_scalar_type(len(self) - 1)

    def encode(self, text: str) -> np.ndarray:
        """[N] ids of `dtype`. A gap may stand in the text where it is the special symbol.

        Raises:
          DataError: For a symbol that is not in the vocabulary, with its place in the text.
        """
        if isinstance(self.symbols, tuple):
            return self._encode_words(text.split())
        known = self.symbols + (self.gap if self.special == "gap" else "")
        points = np.array([ord(symbol) for symbol in known])
        table = np.full(points.max() + 2, -1, np.int32)
        table[points] = np.arange(len(known))
        ids = np.empty(len(text), self.dtype)
        for start in range(0, len(text), _CHUNK):
            chunk = np.frombuffer(text[start : start + _CHUNK].encode("utf-32-le", "surrogatepass"), np.uint32)
            found = table[np.minimum(chunk, len(table) - 1)]
            if found.min() < 0:
                place = start + int(np.argmin(found >= 0))
                raise DataError(self._unknown("character", text[place], place))
            ids[start : start + _CHUNK] = found
        return ids

    def _encode_words(self, words: Sequence[str]) -> np.ndarray:
        known = [*self.symbols, *([self.gap] if self.special == "gap" else [])]
        table = {word: number for number, word in enumerate(known)}
        for place, word in enumerate(words):
            if word not in table:
                raise DataError(self._unknown("symbol", word, place))
        return np.array([table[word] for word in words], self.dtype)

    def _unknown(self, kind: str, symbol: str, place: int) -> str:
        shown = self.symbols if isinstance(self.symbols, str) else " ".join(self.symbols)
        return (
            f"{kind} {symbol!r} (position {place}) is not among the {len(self.symbols)} symbols "
            f"of the vocabulary: {shown[:100]!r}{'...' if len(shown) > 100 else ''}"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any iterable of ids; an end is left out, and negative ids, which stand after one.

        Raises:
          DataError: For an id that is not in the vocabulary.
        """
        special = [self.gap] if self.special == "gap" else [None]
        texts = [*self.symbols, *(special if self.special else [])]
        kept = [int(i) for i in ids if i >= 0]
        if kept and max(kept) >= len(self):
            raise DataError(f"id {max(kept)} is not in [0, {len(self)}), the ids of the vocabulary")
        separator = "" if isinstance(self.symbols, str) else " "
        return separator.join(texts[i] for i in kept if texts[i] is not None)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        symbols = self.symbols if isinstance(self.symbols, str) else list(self.symbols)
        return {"symbols": symbols, **({"special": self.special} if self.special else {})}

    @classmethod
    def from_dict(cls, values: Any) -> "Vocab":
        """Reads what `to_dict` made.

        Raises:
          DataError: For anything else.
        """
        if isinstance(values, dict) and {"symbols"} <= set(values) <= {"symbols", "special"}:
            symbols, special = values["symbols"], values.get("special", "")
            if isinstance(symbols, list) and all(isinstance(symbol, str) for symbol in symbols):
                symbols = tuple(symbols)
            if isinstance(symbols, str | tuple) and isinstance(special, str):
                return cls(symbols, special)
        raise DataError('a vocabulary must be a JSON object {"symbols": "..."}, with "special" where it has one')
