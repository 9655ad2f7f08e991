"""Texts of trained models: what the `sample` command writes, and what a run shows at its end."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transformer_jax.config import Config
from transformer_jax.data.batches import TextCorpus, hide
from transformer_jax.data.pairs import PairCorpus
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.generation import fill_gaps, generate
from transformer_jax.nn import create_model
from transformer_jax.training.error_rates import answer
from transformer_jax.training.runs import Run


def write(
    run: Run,
    prompt: str,
    num_tokens: int | None = None,
    *,
    temperature: float | None = None,
    stop: Sequence[str] = (),
    stream: Callable[[str], None] | None = None,
    **settings: Any,
) -> list[tuple[str, float | None]]:
    """Texts of a trained model for one prompt.

    Args:
      run: From `load_run`.
      prompt: What a causal model goes on from, an encoder fills the gaps of, and an encoder-decoder answers.
      num_tokens: Most new symbols; None means 500, and for an encoder-decoder its context.
      temperature: As for `generate`; None means 0.8 for going on, and the most likely symbol for gaps and answers.
      stop: Strings; a text ends after the first of these that it makes.
      stream: Called with each new piece of a single text that goes on.
      **settings: Of `generate`; for gaps seed and num_samples alone.

    Returns:
      Each text, with its score where beams were asked for. A text that goes on begins with its prompt.

    Raises:
      ConfigError, DataError: For what the model cannot read or do.
    """
    model, architecture = create_model(run.config.model), run.config.model.architecture
    if architecture == "encoder":
        return [(text, None) for text in _fill(run, prompt, temperature or 0.0, stop=stop, **settings)]
    pairs = architecture == "encoder_decoder"
    ids = (run.source_vocab if pairs else run.vocab).encode(prompt)
    beams = settings.get("beams")
    if temperature is None:
        temperature = 0.0 if pairs or beams is not None else 0.8
    stops = [_encode_stop(run.vocab, text) for text in stop]
    if pairs:
        settings["start"] = run.vocab.special_id
        stops.append([run.vocab.special_id])
    made = generate(
        model,
        run.params,
        [ids],
        num_tokens or (model.context if pairs else 500),
        temperature=temperature,
        stop=stops,
        stream=None if stream is None else lambda piece: stream(_text(run.vocab, piece[0])),
        return_scores=beams is not None,
        **settings,
    )
    rows, scores = (made, [None] * len(made)) if beams is None else made
    given = "" if pairs else prompt
    return [(given + _text(run.vocab, row), score) for row, score in zip(rows, scores, strict=True)]


def _text(vocab: Vocab, row: np.ndarray) -> str:
    return vocab.decode(row[row >= 0])


def _encode_stop(vocab: Vocab, text: str) -> Sequence[int]:
    try:
        return vocab.encode(text)
    except DataError as error:
        raise ConfigError(f"stop {text!r}: {error}") from error


def _fill(
    run: Run, prompt: str, temperature: float, *, seed: int = 0, num_samples: int = 1, **others: Any
) -> list[str]:
    """A prompt with its gaps filled, once for each sample."""
    vocab, context = run.vocab, run.config.model.context
    plain = {"stop": (), "top_k": None, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "beams": None}
    for name, value in others.items():
        if name in plain and value != plain[name]:
            raise ConfigError(f"{name} {value!r} is for models that go on; one that fills gaps takes temperature alone")
    if vocab.gap not in prompt:
        raise ConfigError(f"the prompt {prompt[:60]!r} has no gap to fill; write {vocab.gap} for each hidden character")
    ids = vocab.encode(prompt)
    if len(ids) > context:
        raise ConfigError(f"the prompt has {len(ids)} characters, and the model reads at most {context}; shorten it")
    model = create_model(run.config.model)
    rows = [
        fill_gaps(model, run.params, [ids], vocab.special_id, temperature=temperature, seed=(seed + i) % 2**32)[0]
        for i in range(num_samples)
    ]
    return [vocab.decode(row) for row in rows]


def sample_text(config: Config, params: Any, corpus: TextCorpus | PairCorpus) -> str:
    """About `train.sample_chars` characters from a model, by train.seed."""
    if isinstance(corpus, PairCorpus):
        return _answers(config, params, corpus)
    if corpus.mask_rate is not None:
        return _filled(config, params, corpus)
    prompt = corpus.vocab.start
    ids = generate(
        create_model(config.model),
        params,
        [corpus.vocab.encode(prompt)],
        config.train.sample_chars,
        temperature=0.8,
        seed=config.train.seed,
    )
    return prompt + corpus.vocab.decode(ids[0])


def _filled(config: Config, params: Any, corpus: TextCorpus) -> str:
    """The beginning of the validation part with hidden characters, and what the model makes of it."""
    vocab = corpus.vocab
    ids = corpus.split("tune")[: min(corpus.context, config.train.sample_chars)].astype(np.int32)
    hidden = hide(ids[None], np.ones((1, len(ids)), bool), vocab, corpus.mask_rate, [(config.train.seed, 0)])
    gaps = np.where(hidden["weights"][0] > 0, vocab.special_id, ids)
    (filled,) = fill_gaps(create_model(config.model), params, [gaps], vocab.special_id)
    shown = {"given": gaps, "filled": filled, "original": ids}
    return "\n\n".join(f"--- {name}\n{vocab.decode(row)}" for name, row in shown.items())


def _answers(config: Config, params: Any, corpus: PairCorpus) -> str:
    """The first sources of the validation part, each with the model's answer and, where that is wrong, a right one."""
    lines, left = [], config.train.sample_chars
    references = corpus.references("tune")[:64]
    model = create_model(config.model)
    answers = answer(model, params, [source for source, _ in references], corpus.vocab.special_id)
    for (source, right), made in zip(references, answers, strict=True):
        line = f"{corpus.source_vocab.decode(source)} -> {corpus.vocab.decode(made)}"
        if not any(np.array_equal(made, one) for one in right):
            line += f" (right: {corpus.vocab.decode(right[0])})"
        if lines and left < len(line):
            break
        lines.append(line)
        left -= len(line)
    return "\n".join(lines)
