"""`transformer-jax sample`."""

import dataclasses
from pathlib import Path

import tyro

from transformer_jax.commands.terminal import note, prog
from transformer_jax.errors import ConfigError


@dataclasses.dataclass
class Options:
    """Write text with a trained model: go on from a prompt, fill its gaps, or answer it.

    Attributes:
      run: Folder of a run, or of its checkpoints.
      prompt: Text to go on from, a line end where it is left out; for an encoder a text with gaps, "RO_EO:"; for an
        encoder_decoder the source.
      tokens: Most symbols to write; 500 where it is left out, and for an encoder_decoder its context.
      temperature: Divides the logits; 0 always takes the most likely symbol. 0.8 where it is left out, and 0 for gaps
        and sources.
      top_k: Draw from this many most likely symbols.
      top_p: Draw from the fewest symbols with this much probability.
      min_p: Draw from symbols with this fraction of the most likely one's probability.
      repetition_penalty: Above 1 makes symbols of the text so far less likely.
      stop: End a text after the first of these strings that it writes.
      beams: Search with this many texts at a time instead of drawing; --num-samples of them are written, with scores.
      length_penalty: A score is the log-probability over the length to this power.
      seed: Of the random draws; the same seed gives the same text.
      num_samples: Texts to write; with beams the best ones, each with its score.
      step: Checkpoint: best (lowest validation loss), last, or a number.
      out: Also write the texts to this file, as UTF-8.
    """

    run: tyro.conf.Positional[Path]
    prompt: str | None = None
    tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    beams: int | None = None
    length_penalty: float = 1.0
    seed: int = 0
    num_samples: int = 1
    step: str = "best"
    out: Path | None = None


def run(args: list[str]) -> int:
    """Writes text with a trained model. Returns the exit status."""
    options = tyro.cli(Options, args=args, prog=prog("sample"))
    from transformer_jax import compile_cache
    from transformer_jax.data.corpora import normalise_line_ends
    from transformer_jax.generation import check_settings
    from transformer_jax.training.metrics import escape_unprintable
    from transformer_jax.training.runs import load_run
    from transformer_jax.training.samples import write

    names = ("top_k", "top_p", "min_p", "repetition_penalty", "num_samples", "seed", "beams", "length_penalty")
    settings = {name: getattr(options, name) for name in names}
    check_settings(
        num_tokens=1 if options.tokens is None else options.tokens,
        temperature=0.0 if options.temperature is None else options.temperature,
        stop=() if options.beams is not None else options.stop,  # a word can be one symbol: only the vocabulary knows
        **settings,
    )
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {options.out} lies in a folder that does not exist; make it first")
    compile_cache.enable()
    run = load_run(options.run, options.step, note)
    model = run.config.model
    causal = model.architecture not in ("encoder", "encoder_decoder")
    if options.prompt is None and not causal:
        needs = {"encoder_decoder": "the source", "encoder": f"a text with {run.vocab.gap} for each hidden character"}
        raise ConfigError(f"this run is an {model.architecture} and needs --prompt: {needs[model.architecture]}")
    prompt = run.vocab.start if options.prompt is None else normalise_line_ends(options.prompt)
    if options.prompt is None:
        note(f"no --prompt: going on from {prompt!r}")
    if causal and len(prompt) > model.context:
        note(
            f"the prompt has {len(prompt)} characters and the model's context is {model.context}: "
            f"it reads the last {model.context}"
        )
    escape_unprintable()
    streams = causal and options.num_samples == 1 and options.beams is None
    shown = []

    def show(piece: str) -> None:
        print(piece if shown else prompt + piece, end="", flush=True)
        shown.append(piece)

    texts = write(
        run,
        prompt,
        options.tokens,
        temperature=options.temperature,
        stop=tuple(map(normalise_line_ends, options.stop)),
        stream=show if streams else None,
        **settings,
    )
    if streams:
        print()
    elif len(texts) == 1:
        print(*[text for text, _ in texts])
    else:
        heads = [f"sample {i + 1}" if score is None else f"{score:.4f}" for i, (_, score) in enumerate(texts)]
        lines = [
            f"--- {head}\n{text}" if causal else f"{head}  {text}" for head, (text, _) in zip(heads, texts, strict=True)
        ]
        print(("\n\n" if causal else "\n").join(lines))
    if options.out is not None:
        options.out.write_text("\n\n".join(text for text, _ in texts) + "\n", encoding="utf-8")
    return 0
