"""Batches of text as a pure function of (seed, first example, size): resuming needs no iterator state."""

import dataclasses
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import DataError

Batch = dict[str, np.ndarray]
"""inputs int32 [B, T], targets int32 [B, T], weights float32 [B, T] (0 where a target does not count); where inputs
may be padding valid bool [B, T]; for pairs source int32 [B, S] and source_valid bool [B, S]."""

TRAINING, EVALUATION, SHOWN = range(1, 4)
"""What characters are hidden for: each has random draws of its own."""

SPLITS = ("train", "validation", "tune", "test")


def split_bounds(size: int, name: str) -> tuple[int, int]:
    """Where a part of `size` things begins and ends.

    Args:
      size: How many there are.
      name: "train" is the first 90 %, "validation" the last 10 %; its first half is "tune", its second half is "test"
        (the parts that TFDS calls validation and test).

    Raises:
      DataError: For another name.
    """
    start = int(size * 0.9)
    middle = start + (size - start) // 2
    bounds = {"train": (0, start), "validation": (start, size), "tune": (start, middle), "test": (middle, size)}
    if name not in bounds:
        raise DataError(f"unknown split {name!r}; it is one of {', '.join(SPLITS)}")
    return bounds[name]


@dataclasses.dataclass(frozen=True)
class TextCorpus:
    """A text as ids, and what a model learns from it: each next character, or hidden ones.

    Attributes:
      name: What to call it.
      ids: [N] ids of the whole text.
      vocab: Its characters, with a gap among them where some are hidden.
      sha256: Of the text's UTF-8 bytes.
      context: Characters of a window (T).
      mask_rate: Share of the characters that is hidden; None where the next one is predicted.
    """

    name: str
    ids: np.ndarray
    vocab: Vocab
    sha256: str
    context: int
    mask_rate: float | None = None

    source_vocab = None
    unit = "character"

    @property
    def size(self) -> str:
        """How much it is, in words."""
        return f"{len(self.ids):,} characters, {len(self.vocab.symbols)} symbols"

    @property
    def symbols_per_example(self) -> float:
        """Characters that a training example has."""
        return self.context

    @property
    def shortest(self) -> int:
        """Length of the shortest training batches."""
        return self.context

    @property
    def counts(self) -> str:
        """What the targets of an evaluation are, in words."""
        return "characters" if self.mask_rate is None else "hidden characters"

    def split(self, name: str) -> np.ndarray:
        """A view of the ids of one part; see `split_bounds`."""
        return self.ids[slice(*split_bounds(len(self.ids), name))]

    def training(self, seed: int) -> "Windows | MaskedWindows":
        """The training examples."""
        windows = Windows(self.split("train"), self.context, seed)
        return windows if self.mask_rate is None else MaskedWindows(windows, self.vocab, self.mask_rate, seed)

    def evaluation(self, split: str, rows: int, limit: int | None = None) -> Iterator[Batch]:
        """A part as batches of equal shapes, or what its first `limit` characters give; see `evaluation_batches`."""
        ids = self.split(split)
        if self.mask_rate is None:
            return evaluation_batches(ids[: None if limit is None else limit + 1], self.context, rows)
        return masked_evaluation_batches(ids[:limit], self.context, rows, self.vocab, self.mask_rate)


class Windows:
    """Training windows of a text, in an order that depends on the seed alone.

    Example i of N - T starts is one of a permutation that is new in each epoch: each window comes once per epoch.
    """

    def __init__(self, ids: np.ndarray, context: int, seed: int) -> None:
        self._ids = ids
        self._context = context
        # Grain adds the epoch to the seed: seeds 0 and 1 would read nearly the same order. Spread them first.
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._order = grain.MapDataset.range(len(ids) - context).shuffle(seed=spread).repeat()

    @property
    def per_epoch(self) -> int:
        """Windows in an epoch."""
        return len(self._ids) - self._context

    def batch(self, first: int, size: int, rows: range | None = None) -> Batch:
        """Examples first to first + size - 1, or some rows of these.

        Returns:
          inputs and targets int32 [B, T], weights float32 [B, T] of ones.
        """
        if rows is not None:
            return self.batch(first + rows.start, len(rows))
        starts = np.array([self._order[i] for i in range(first, first + size)]).reshape(-1, 1)
        window = self._ids[starts + np.arange(self._context + 1)].astype(np.int32)
        weights = np.ones((size, self._context), np.float32)
        return {"inputs": window[:, :-1], "targets": window[:, 1:], "weights": weights}


class MaskedWindows:
    """Training windows with hidden characters, which depend on the seed and the example's number alone."""

    def __init__(self, windows: Windows, vocab: Vocab, rate: float, seed: int) -> None:
        self._windows, self._vocab, self._rate, self._seed = windows, vocab, rate, seed

    def batch(self, first: int, size: int, rows: range | None = None) -> Batch:
        """Examples first to first + size - 1, or some rows of these; see `hide`."""
        if rows is not None:
            return self.batch(first + rows.start, len(rows))
        ids = self._windows.batch(first, size)["inputs"]
        streams = [(TRAINING, self._seed, example) for example in range(first, first + size)]
        batch = hide(ids, np.ones(ids.shape, bool), self._vocab, self._rate, streams)
        del batch["valid"]  # all of it is
        return batch


def hide(ids: np.ndarray, valid: np.ndarray, vocab: Vocab, rate: float, streams: Sequence[tuple[int, ...]]) -> Batch:
    """Hides characters for a masked language model (Devlin et al. 2019, section 3.1).

    In each row that share of its characters is chosen, at least one. Of these 80 % become a gap, 10 % any character,
    and 10 % stay; all of them are targets.

    Args:
      ids: int32 [B, T].
      valid: bool [B, T], the real ones, on the left.
      vocab: With a gap.
      rate: Share to choose.
      streams: B tuples of numbers, the seed of each row; the first says what for.

    Returns:
      inputs, targets int32 [B, T], weights float32 [B, T], 1 where chosen, and valid.
    """
    inputs, weights = ids.copy(), np.zeros(ids.shape, np.float32)
    for row, stream in enumerate(streams):
        random = np.random.default_rng(stream)
        length = int(valid[row].sum())
        if length == 0:
            continue
        chosen = random.choice(length, max(1, round(rate * length)), replace=False)
        lot, others = random.random(len(chosen)), random.integers(len(vocab.symbols), size=len(chosen))
        inputs[row, chosen] = np.where(lot < 0.8, vocab.special_id, np.where(lot < 0.9, others, ids[row, chosen]))
        weights[row, chosen] = 1
    return {"inputs": inputs, "targets": ids, "weights": weights, "valid": valid}


def masked_evaluation_batches(
    ids: np.ndarray, context: int, batch_size: int, vocab: Vocab, rate: float
) -> Iterator[Batch]:
    """Cuts a text into windows that do not overlap, with hidden characters that are the same for each model."""
    # One more, because `evaluation_batches` has no input without its next character.
    for number, batch in enumerate(evaluation_batches(np.append(ids, ids[:1]), context, batch_size)):
        valid = batch["weights"] > 0
        streams = [(EVALUATION, number * batch_size + row) for row in range(batch_size)]
        yield hide(batch["inputs"], valid, vocab, rate, streams)


def evaluation_batches(ids: np.ndarray, context: int, batch_size: int) -> Iterator[Batch]:
    """Cuts a text into windows that do not overlap, so that every target is counted once.

    The last window and the last batch are filled up with targets of weight 0, so that all shapes are equal.

    Args:
      ids: [N].
      context: Window and stride (T).
      batch_size: B.

    Yields:
      Batches whose weights add up to N - 1.
    """
    size = batch_size * context
    for first in range(0, len(ids) - 1, size):
        part = ids[first : first + size + 1]
        count = len(part) - 1
        batch = {
            "inputs": np.zeros(size, np.int32),
            "targets": np.zeros(size, np.int32),
            "weights": np.zeros(size, np.float32),
        }
        batch["inputs"][:count], batch["targets"][:count], batch["weights"][:count] = part[:-1], part[1:], 1
        yield {name: array.reshape(batch_size, context) for name, array in batch.items()}
