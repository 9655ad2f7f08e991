"""Batches as a pure function of (seed, first example, size): resuming needs no iterator state."""

import dataclasses
from collections.abc import Iterator

import grain
import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.corpora import load_text
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import DataError

Batch = dict[str, np.ndarray]
"""inputs int32 [B, T], targets int32 [B, T], weights float32 [B, T] (0 where a target does not count)."""

SPLITS = ("train", "validation", "tune", "test")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as ids, with its vocabulary and its place of origin.

    Attributes:
      name: What to call it.
      ids: [N] ids of the whole text.
      vocab: Its characters.
      sha256: Of the text's UTF-8 bytes.
    """

    name: str
    ids: np.ndarray
    vocab: Vocab
    sha256: str

    def split(self, name: str) -> np.ndarray:
        """A view of the ids of one part.

        Args:
          name: "train" is the first 90 % of the characters, "validation" the last 10 %; its first half is "tune",
            its second half is "test" (the parts that TFDS calls validation and test).
        """
        start = int(len(self.ids) * 0.9)
        middle = start + (len(self.ids) - start) // 2
        bounds = {"train": (0, start), "validation": (start, None), "tune": (start, middle), "test": (middle, None)}
        if name not in bounds:
            raise DataError(f"unknown split {name!r}; it is one of {', '.join(SPLITS)}")
        return self.ids[slice(*bounds[name])]


def load_corpus(config: DataConfig, context: int) -> Corpus:
    """Reads the text that a config names, as ids.

    Raises:
      DataError: For a text that cannot be read, or that is too short for one window of the context in either part.
    """
    text = load_text(config)
    vocab = Vocab.from_text(text.text)
    corpus = Corpus(text.name, vocab.encode(text.text), vocab, text.sha256)
    # Each half of the validation part needs a target too.
    for split, least in (("train", context + 1), ("validation", max(context + 1, 4))):
        size = len(corpus.split(split))
        if size < least:
            raise DataError(
                f"the {split} part of {text.name} has {size:,} of its {len(corpus.ids):,} characters, and one window "
                f"needs context + 1 = {least}; lower --model.context or give a longer text"
            )
    return corpus


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

    def batch(self, first: int, size: int) -> Batch:
        """Examples first to first + size - 1.

        Returns:
          inputs and targets int32 [B, T], weights float32 [B, T] of ones.
        """
        starts = np.array([self._order[i] for i in range(first, first + size)]).reshape(-1, 1)
        window = self._ids[starts + np.arange(self._context + 1)].astype(np.int32)
        weights = np.ones((size, self._context), np.float32)
        return {"inputs": window[:, :-1], "targets": window[:, 1:], "weights": weights}


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
