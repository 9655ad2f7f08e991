"""Pairs of source and target, for sequence to sequence: read, split, and put into batches of few shapes."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial

import numpy as np

from transformer_jax.data.batches import Batch, split_bounds
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import DataError

_POOL = 8_192
_BLOCK = 256
"""Within each pool of shuffled examples, blocks of examples of similar length stand together: what a batch is padded
with costs time."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A pair as it was read.

    Attributes:
      source, target: Texts.
      where: File and line, or the like, for messages.
    """

    source: str
    target: str
    where: str


def parse_tsv(path: str, text: str) -> list[Pair]:
    """The pairs of a file: a source, a tab and a target on each line; empty lines do not count.

    Raises:
      DataError: For a line without a tab or with several, or with nothing on one side, with its number.
    """
    pairs = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        where = f"{path}, line {number}"
        sides = line.split("\t")
        if len(sides) != 2:
            raise DataError(f"{where}: {len(sides) - 1} tabs in {line[:60]!r}; a pair is a source, one tab, a target")
        for side, name in zip(sides, ("source", "target"), strict=True):
            if not side.strip():
                raise DataError(f"{where}: the {name} is empty in {line[:60]!r}; fill it in or take the line out")
        pairs.append(Pair(*sides, where))
    return pairs


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of ids of different lengths.

    Attributes:
      ids: All of them, one row after the other.
      starts: int64 [N + 1], where each row begins, and the end.
    """

    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Rows":
        """From a list of rows."""
        return cls(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [N]."""
        return np.diff(self.starts)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def padded(self, index: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Some rows, on the left of int32 [B, width], and which places are real, bool [B, width]."""
        places = np.arange(width)
        valid = places < self.lengths[index][:, None]
        taken = np.minimum(self.starts[index][:, None] + places, len(self.ids) - 1)
        return np.where(valid, self.ids[taken], 0).astype(np.int32), valid


@dataclasses.dataclass(frozen=True)
class PairCorpus:
    """Pairs as ids.

    They stand in the order of the SHA-256 of their sources, so that a part of them is a random one, the same for ever,
    and all targets of a source are in one part.

    Attributes:
      name: What to call them.
      sources: N rows of ids.
      targets: N rows of ids, without an end.
      groups: int64 [G + 1], where each distinct source begins, and the end.
      vocab: Of the targets, with an end.
      source_vocab: Of the sources.
      sha256: Of the pairs in this order.
      context: Most symbols of a source, and of a target with its end.
    """

    name: str
    sources: Rows
    targets: Rows
    groups: np.ndarray
    vocab: Vocab
    source_vocab: Vocab
    sha256: str
    context: int

    unit = "symbol"
    counts = "symbols, ends included"

    @property
    def size(self) -> str:
        """How much it is, in words."""
        symbols = f"{len(self.source_vocab.symbols)} and {len(self.vocab.symbols)} symbols"
        return f"{len(self.groups) - 1:,} sources, {len(self.targets.lengths):,} pairs, {symbols}"

    @cached_property
    def shortest(self) -> int:
        """Length of the shortest training batches."""
        return int(self.widths(self.split("train")).min())

    @cached_property
    def symbols_per_example(self) -> float:
        """Target symbols of a training example, with the end, on average."""
        return float(np.mean(self.targets.lengths[self.split("train")]) + 1)

    def split(self, name: str) -> np.ndarray:
        """int64 [n], the numbers of the pairs of one part: 90 % of the sources train; see `split_bounds`."""
        start, stop = split_bounds(len(self.groups) - 1, name)
        return np.arange(self.groups[start], self.groups[stop])

    def references(self, split: str) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """Each distinct source of a part, with all its targets, as ids."""
        start, stop = split_bounds(len(self.groups) - 1, split)
        bounds = zip(self.groups[start:stop], self.groups[start + 1 : stop + 1], strict=True)
        return [(self.sources[first], [self.targets[i] for i in range(first, last)]) for first, last in bounds]

    def training(self, seed: int) -> "PairExamples":
        """The training examples."""
        return PairExamples(self, seed)

    def evaluation(self, split: str, rows: int, limit: int | None = None) -> Iterator[Batch]:
        """A part as batches, or the first pairs of it with about `limit` target symbols; each pair counts once."""
        index = self.split(split)
        if limit is not None:
            index = index[: max(1, int(np.searchsorted(np.cumsum(self.targets.lengths[index] + 1), limit, "right")))]
        index = index[np.argsort(self.widths(index), kind="stable")]
        for first in range(0, len(index), rows):
            part = index[first : first + rows]
            batch = self.batch(np.pad(part, (0, rows - len(part)), mode="edge"))
            batch["weights"][len(part) :] = 0
            yield batch

    def widths(self, index: np.ndarray) -> np.ndarray:
        """int64 [n], the width to which each pair is padded: of 8, 12, 16, 24, 32, 48 and so on, or the context."""
        longest = np.maximum(self.sources.lengths[index], self.targets.lengths[index] + 1)
        ladder = np.array(sorted({min(base * 2**k, self.context) for base in (8, 12) for k in range(40)}))
        return ladder[np.searchsorted(ladder, longest)]

    def batch(self, index: np.ndarray, rows: range | None = None) -> Batch:
        """Pairs for teacher forcing: what the decoder reads begins with the end symbol, what it has to say ends so.

        Of some rows alone too, which are as wide as all of them need.
        """
        width = int(self.widths(index).max())
        if rows is not None:
            index = index[rows.start : rows.stop]
        source, source_valid = self.sources.padded(index, width)
        targets, _ = self.targets.padded(index, width)
        lengths = self.targets.lengths[index][:, None]
        places = np.arange(width)
        targets = np.where(places == lengths, self.vocab.special_id, targets).astype(np.int32)
        first = np.full((len(index), 1), self.vocab.special_id, np.int32)
        return {
            "source": source,
            "source_valid": source_valid,
            # Padding stands to the right of all real targets, which do not see it.
            "inputs": np.concatenate([first, targets[:, :-1]], axis=1),
            "targets": targets,
            "weights": (places <= lengths).astype(np.float32),
        }


class PairExamples:
    """Training pairs, in an order that depends on the seed alone: each comes once per epoch."""

    def __init__(self, corpus: PairCorpus, seed: int) -> None:
        self._corpus = corpus
        self._order = lru_cache(maxsize=2)(partial(self._epoch, seed))

    def batch(self, first: int, size: int, rows: range | None = None) -> Batch:
        """Examples first to first + size - 1, or some rows of these."""
        per_epoch = len(self._corpus.split("train"))
        places = np.arange(first, first + size)
        index = np.array([self._order(int(place // per_epoch))[place % per_epoch] for place in places])
        return self._corpus.batch(index, rows)

    def _epoch(self, seed: int, epoch: int) -> np.ndarray:
        """All training pairs: shuffled, and in each pool sorted into blocks by width, whose order is drawn too."""
        random = np.random.default_rng((seed, epoch))
        index = random.permutation(self._corpus.split("train"))
        pools = []
        for first in range(0, len(index), _POOL):
            pool = index[first : first + _POOL]
            pool = pool[np.argsort(self._corpus.widths(pool), kind="stable")]
            blocks = np.split(pool, range(_BLOCK, len(pool), _BLOCK))
            pools += [blocks[i] for i in random.permutation(len(blocks))]
        return np.concatenate(pools)


def make_corpus(name: str, pairs: Sequence[Pair], context: int, *, words: bool) -> PairCorpus:
    """Splits and encodes pairs.

    Args:
      name: What to call them.
      pairs: In any order; those that come twice count once.
      context: Most symbols of a source, and of a target with its end.
      words: Targets are made of words, not of characters.

    Raises:
      DataError: For too few sources; a source or a target that is too long; a symbol that occurs in no training pair.
    """
    first: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        first.setdefault((pair.source, pair.target), pair)
    pairs = list(first.values())
    digest = {source: hashlib.sha256(source.encode()).digest() for source in {pair.source for pair in pairs}}
    pairs.sort(key=lambda pair: digest[pair.source])
    names = [pair.source for pair in pairs]
    groups = np.array([i for i in range(len(pairs)) if i == 0 or names[i] != names[i - 1]] + [len(pairs)])
    count = len(groups) - 1
    if any(start == stop for start, stop in (split_bounds(count, part) for part in ("train", "tune", "test"))):
        raise DataError(f"{name} has {count} different sources, too few for parts of 90, 5 and 5 %; give at least 11")
    train = pairs[: groups[split_bounds(count, "train")[1]]]
    said = [word for pair in train for word in pair.target.split()] if words else "".join(p.target for p in train)
    vocab = Vocab.from_text(said, "end")
    source_vocab = Vocab.from_text("".join(pair.source for pair in train))
    _check_lengths(pairs, context, words)
    sources, targets = [], []
    for pair in pairs:
        try:
            sources.append(source_vocab.encode(pair.source))
            targets.append(vocab.encode(pair.target))
        except DataError as error:
            raise DataError(
                f"{pair.where}, not in the training part: {error}; take the pair out, or give more that have the symbol"
            ) from error
    text = "".join(f"{pair.source}\t{pair.target}\n" for pair in pairs)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return PairCorpus(name, Rows.of(sources), Rows.of(targets), groups, vocab, source_vocab, sha256, context)


def _check_lengths(pairs: Sequence[Pair], context: int, words: bool) -> None:
    """Refuses pairs that are too long, naming the longest: the context it asks for is enough for all."""
    sizes = (
        (length, side, pair.where)
        for pair in pairs
        for side, length in (
            ("source", len(pair.source)),
            ("target", 1 + len(pair.target.split() if words else pair.target)),
        )
    )
    length, side, where = max(sizes, key=lambda size: size[0])
    if length > context:
        end = ", its end included" if side == "target" else ""
        raise DataError(
            f"{where}: the {side} has {length} symbols{end}, and model.context is {context}; "
            f"give --model.context {length}, or take the pair out"
        )
