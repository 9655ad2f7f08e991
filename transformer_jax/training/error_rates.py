"""How often a sequence-to-sequence model is wrong: edit distances to the nearest of the right answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.data.pairs import PairCorpus
from transformer_jax.generation import generate
from transformer_jax.nn import EncoderDecoder

ROWS = 128
"""Sources answered at once; changes the speed only."""


@dataclasses.dataclass(frozen=True)
class ErrorCounts:
    """Counts that add up over parts.

    Attributes:
      edits: Symbols inserted, deleted and replaced on the way to the nearest right answer of each source.
      symbols: Of these right answers.
      wrong: Sources whose answer is none of the right ones.
      sources: All.
    """

    edits: int
    symbols: int
    wrong: int
    sources: int

    def __add__(self, other: "ErrorCounts") -> "ErrorCounts":
        return ErrorCounts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @property
    def symbol_error_rate(self) -> float:
        """Edits per symbol."""
        return self.edits / max(self.symbols, 1)

    @property
    def sequence_error_rate(self) -> float:
        """Share of the sources that are answered wrongly."""
        return self.wrong / max(self.sources, 1)


def count_errors(answers: Sequence[Sequence[int]], references: Sequence[Sequence[Sequence[int]]]) -> ErrorCounts:
    """Compares each answer with the nearest of its references; of equally near ones with the longest."""
    total = ErrorCounts(0, 0, 0, 0)
    for answer, right in zip(answers, references, strict=True):
        edits, length = min((edit_distance(answer, one), -len(one)) for one in right)
        total += ErrorCounts(edits, -length, int(edits > 0), 1)
    return total


def edit_distance(first: Sequence[int], second: Sequence[int]) -> int:
    """Fewest insertions, deletions and replacements that make one sequence the other (Levenshtein 1966)."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        corner, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (a != b))
    return row[-1]


def answer(
    model: EncoderDecoder, params: Any, sources: Sequence[np.ndarray], end: int, *, beams: int | None = None
) -> list[np.ndarray]:
    """A model's answer to each source, without its end: the most likely symbol each time, or by beam search.

    Args:
      model: The model.
      params: Its parameters.
      sources: Rows of ids.
      end: The id that begins and ends a target.
      beams: Of the search; None is greedy.
    """
    search = {"temperature": 0.0} if beams is None else {"beams": beams}
    answers: list[np.ndarray] = []
    for first in range(0, len(sources), ROWS):
        part = list(sources[first : first + ROWS])
        filled = part + part[:1] * (ROWS - len(part))  # one shape, one program
        made = generate(model, params, filled, model.context, start=end, stop=[[end]], **search)
        answers += [row[(row >= 0) & (row != end)] for row in made[: len(part)]]
    return answers


def measure_errors(
    model: EncoderDecoder, params: Any, corpus: PairCorpus, split: str, *, beams: int | None = None
) -> ErrorCounts:
    """The errors on a part of a corpus."""
    references = corpus.references(split)
    # The longest first: rows that are made together end at about the same time.
    order = sorted(range(len(references)), key=lambda i: -len(references[i][0]))
    answers = answer(model, params, [references[i][0] for i in order], corpus.vocab.special_id, beams=beams)
    return count_errors(answers, [references[i][1] for i in order])
