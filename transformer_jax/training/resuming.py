"""What a run may change when it goes on, and what it must keep."""

import dataclasses

from transformer_jax.config import Config, differences, resolve
from transformer_jax.data.batches import TextCorpus
from transformer_jax.data.pairs import PairCorpus
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import ConfigError
from transformer_jax.training.checkpoint import Metadata

MAY_CHANGE = (
    "data.path",
    "model.attention_dropout",
    "model.attention_impl",
    "model.dropout",
    "model.feed_forward_dropout",
    "model.remat",
    "model.unroll",
    "optim.clip_norm",
    "optim.learning_rate",
    "optim.muon_learning_rate",
    "optim.weight_decay",
    *(
        f"train.{name}"
        for name in (
            "accumulate",
            "batch_size",
            "deterministic",
            "eval_every",
            "keep",
            "keep_best",
            "keep_every",
            "label_smoothing",
            "log_every",
            "max_skipped",
            "sample_chars",
            "save_every",
            "steps",
            "z_loss",
        )
    ),
)
"""Fields that a resumed run may set anew. All others decide what the stored state means."""


def check_resumable(config: Config, metadata: Metadata, corpus: TextCorpus | PairCorpus) -> tuple[Config, list[str]]:
    """The config with which a run goes on, and the fields that differ from before, with both values.

    Raises:
      ConfigError: If the text, a vocabulary or a field that may not change differs, with both values.
    """
    if corpus.sha256 != metadata.corpus["sha256"]:
        raise ConfigError(
            f"the run was trained on other data: {metadata.corpus['name']} with SHA-256 "
            f"{metadata.corpus['sha256'][:12]}, and these are {corpus.name} with {corpus.sha256[:12]}"
        )
    # The schedule does not move: what was resolved at the start stays.
    optim = dataclasses.replace(config.optim, decay_steps=config.optim.decay_steps or metadata.config.optim.decay_steps)
    # Sizes are those of the data, which are the same: another one can only have been asked for.
    sizes = {
        name: getattr(config.model, name) or getattr(metadata.config.model, name)
        for name in ("vocab_size", "source_vocab_size")
    }
    config = resolve(dataclasses.replace(config, optim=optim), **sizes)
    changed = {name: f"{name} {old!r} -> {new!r}" for name, (old, new) in differences(metadata.config, config).items()}
    fixed = [text for name, text in changed.items() if name not in MAY_CHANGE]
    if fixed:
        raise ConfigError(f"a resumed run must keep {', '.join(fixed)}; start a new run with another --out")
    for name in ("vocab", "source_vocab"):
        old, new = getattr(metadata, name), getattr(corpus, name)
        if old != new:
            raise ConfigError(
                f"the run's {name} is {_brief(old)} and that of the same data is {_brief(new)}; "
                "read them with the version of this program that began the run"
            )
    if config.train.steps < metadata.step:
        raise ConfigError(f"the run has made {metadata.step} steps already, and train.steps is {config.train.steps}")
    return config, list(changed.values())


def _brief(vocab: Vocab | None) -> str:
    return "none" if vocab is None else f"{len(vocab)} symbols, {str(vocab.symbols)[:40]!r}..."
