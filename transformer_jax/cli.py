"""The command line: `transformer-jax train | sample | evaluate | inspect`."""

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from transformer_jax.checks import unknown
from transformer_jax.config import Config, from_dict
from transformer_jax.config_files import find_config, load_config, stored_config
from transformer_jax.data.batches import SPLITS
from transformer_jax.errors import ConfigError, TransformerJaxError
from transformer_jax.training.mesh import parse_mesh

_USAGE_STATUS = 2


@dataclasses.dataclass
class _Where:
    """Train a model.

    Attributes:
      config: A Python file that sets CONFIG, the config.json of a run, or a preset such as nanogpt_char; other flags
        change single fields of it.
      out: Folder of the run; a new one under runs/ where it is left out.
      resume: Go on from the newest good checkpoint of --out.
      overwrite: Replace the run in --out.
      mesh: How all devices share the work, such as data=4,fsdp=2,tensor=1; a size of -1 is the rest. Where it is left
        out each of as many devices as divide the batch has a whole model. A run goes on with any other mesh.
    """

    config: Path | None = None
    out: Path | None = None
    resume: bool = False
    overwrite: bool = False
    mesh: str | None = None


@dataclasses.dataclass
class _Sample:
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


@dataclasses.dataclass
class _Evaluate:
    """Evaluate a trained model on a whole part of its data, with the figures of its task.

    Attributes:
      run: Folder of a run, or of its checkpoints.
      split: train (first 90 %), validation (last 10 %), or its halves tune and test.
      step: Checkpoint: best (lowest validation loss), last, or a number.
      batch_size: Windows at once; changes the speed only.
      beams: For an encoder_decoder, the error rates of a search too.
      mesh: As for train.
      json: Print one JSON object.
    """

    run: tyro.conf.Positional[Path]
    split: str = "validation"
    step: str = "best"
    batch_size: int = 64
    beams: int | None = None
    mesh: str | None = None
    json: bool = False


@dataclasses.dataclass
class _Inspect:
    """Show a model's diagram, parameters and FLOPs before it runs, or what tells two apart.

    Attributes:
      what: A preset's name, the folder of a run, or a config file.
      other: Another one, to compare with the first.
      vocab_size: Symbols, in place of the config's; where neither says it, the other's or 65.
      svg: Also draw the model into this file.
      json: Print one JSON object.
    """

    what: tyro.conf.Positional[str]
    other: tyro.conf.Positional[str | None] = None
    vocab_size: int | None = None
    svg: Path | None = None
    json: bool = False


def main(args: list[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 2 for an error, 128 + the signal for an interrupted run."""
    args = list(sys.argv[1:] if args is None else args)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "sample": _sample,
        "evaluate": _evaluate,
        "inspect": _inspect,
    }
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        if not args or args[0] in ("-h", "--help"):
            print(_help(commands))
            return 0 if args else _USAGE_STATUS
        if args[0] == "--version":
            from transformer_jax import __version__

            print(__version__)
            return 0
        if args[0] not in commands:
            raise ConfigError(unknown("command", args[0], commands))
        return commands[args[0]](args[1:])
    except TransformerJaxError as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return _USAGE_STATUS
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if debug:
            raise
        print(f"error: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return _USAGE_STATUS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _help(commands: dict[str, Any]) -> str:
    lines = [
        f"  {name:<10}{_first_line(kind)}"
        for name, kind in zip(commands, (_Where, _Sample, _Evaluate, _Inspect), strict=True)
    ]
    return "\n".join(
        [
            "usage: transformer-jax COMMAND [options]",
            "",
            *lines,
            "",
            "COMMAND --help lists the options of each; --debug shows where an error comes from.",
        ]
    )


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def _train(args: list[str]) -> int:
    started = time.monotonic()
    where, _ = tyro.cli(
        _Where, args=[a for a in args if a not in ("-h", "--help")], return_unknown_args=True, prog=_prog("train")
    )
    if where.resume and where.out is None:
        raise ConfigError("--resume needs --out RUN: the folder of the run to go on with")
    if where.resume and where.overwrite:
        raise ConfigError("--resume goes on with a run and --overwrite replaces it; give one of them")
    mesh = None if where.mesh is None else parse_mesh(where.mesh)
    default = Config() if where.config is None else load_config(where.config)
    if where.resume and where.config is None:
        default = stored_config(where.out, _note)
    config = _parse_config(args, default)
    out = where.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.data.corpus}"

    # Imported only now: a mistyped option is found before the second that this takes.
    from transformer_jax import compile_cache
    from transformer_jax.training import loop

    counts = compile_cache.enable()
    try:
        loop.train(config, out, resume=where.resume, overwrite=where.overwrite, mesh=mesh)
    except loop.Interrupted as interrupted:
        again = ["transformer-jax", "train", "--out", str(out), "--resume"] + (["--mesh", where.mesh] if mesh else [])
        print(f"\n{interrupted}: saved; go on with: {shlex.join(again)}", flush=True)
        return 128 + interrupted.signum
    cache = "off" if counts is None else ", ".join(f"{counts[name]} {name}" for name in ("hits", "misses"))
    print(f"took       {time.monotonic() - started:.1f} s in all; compile cache: {cache}")
    return 0


def _sample(args: list[str]) -> int:
    options = tyro.cli(_Sample, args=args, prog=_prog("sample"))
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
    run = load_run(options.run, options.step, _note)
    model = run.config.model
    causal = model.architecture not in ("encoder", "encoder_decoder")
    if options.prompt is None and not causal:
        needs = {"encoder_decoder": "the source", "encoder": f"a text with {run.vocab.gap} for each hidden character"}
        raise ConfigError(f"this run is an {model.architecture} and needs --prompt: {needs[model.architecture]}")
    prompt = run.vocab.start if options.prompt is None else normalise_line_ends(options.prompt)
    if options.prompt is None:
        _note(f"no --prompt: going on from {prompt!r}")
    if causal and len(prompt) > model.context:
        _note(
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


def _evaluate(args: list[str]) -> int:
    options = tyro.cli(_Evaluate, args=args, prog=_prog("evaluate"))
    for name in ("batch_size", "beams"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.split not in SPLITS:
        raise ConfigError(unknown("split", options.split, SPLITS))
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    from transformer_jax import compile_cache
    from transformer_jax.training.evaluate import evaluate_run
    from transformer_jax.training.runs import load_run

    compile_cache.enable()
    run = load_run(options.run, options.step, _note)
    figures = evaluate_run(run, options.split, options.batch_size, options.beams, mesh)
    print(json.dumps(figures) if options.json else _table(figures))
    return 0


def _table(figures: dict[str, Any]) -> str:
    """The figures of `evaluate_run` in lines."""
    unit = figures["unit"]
    lines = [f"{figures['split']} ({figures['targets']:,} {figures['counted']}), step {figures['step']}"]
    for name, key in ((f"nats per {unit}", "loss"), (f"bits per {unit}", "bits"), ("perplexity", "perplexity")):
        lines.append(f"{name:<24}{figures[key]:>8.4f}")
    beam = figures.get("beam", {})
    for found, how in ((figures, ", greedy" if beam else ""), (beam, f", {beam.get('beams')} beams")):
        for name, value in found.items():
            if name.endswith(("_rate", "_accuracy")):
                lines.append(f"{name.replace('_', ' ') + how:<28}{value:>8.2%}")
    if "loss_by_position" in figures:
        lines.append("nats by the characters seen in the window")
        by_position = figures["loss_by_position"]
        for first, last in _doubling(len(by_position)):
            known = [loss for loss in by_position[first - 1 : last] if loss is not None]
            if known:
                seen = str(first) if first == last else f"{first} to {last}"
                lines.append(f"  {seen:<22}{sum(known) / len(known):>8.4f}")
    return "\n".join(lines)


def _doubling(length: int) -> Iterator[tuple[int, int]]:
    """1, 2, 3 to 4, 5 to 8 and so on up to a length, both ends included."""
    first, last = 1, 1
    while first <= length:
        yield first, min(last, length)
        first, last = last + 1, 2 * last


def _inspect(args: list[str]) -> int:
    options = tyro.cli(_Inspect, args=args, prog=_prog("inspect"))
    from transformer_jax.inspection.command import inspect
    from transformer_jax.training.metrics import escape_unprintable

    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg {options.svg} lies in a folder that does not exist; make it first")
    escape_unprintable()
    inspect(
        options.what,
        options.other,
        partial(find_config, report=_note),
        vocab_size=options.vocab_size,
        picture=options.svg,
        as_json=options.json,
    )
    return 0


def _parse_config(args: list[str], default: Config) -> Config:
    """Applies the flags of `train` to a config.

    The parser fills dataclasses without checks, and the config is made of them afterwards: inside the parser each of
    our one-line errors would become a box about something else.
    """

    def mirror(value: Any) -> Any:
        """A value's own dataclass, without its checks."""
        if not dataclasses.is_dataclass(value):
            return value
        values = {f.name: mirror(getattr(value, f.name)) for f in dataclasses.fields(value)}
        fields = [
            (f.name, type(values[f.name]) if dataclasses.is_dataclass(f.type) else f.type)
            for f in dataclasses.fields(value)
        ]
        kind = dataclasses.make_dataclass(type(value).__name__, fields, namespace={"__doc__": type(value).__doc__})
        return kind(**values)

    plain = mirror(default)
    settings = Annotated[type(plain), tyro.conf.arg(name="")]
    options = dataclasses.make_dataclass("Train", [("settings", settings)], bases=(_Where,), kw_only=True)
    options.__doc__ = _Where.__doc__
    parsed = tyro.cli(options, args=args, default=options(settings=plain), prog=_prog("train")).settings
    return from_dict(dataclasses.asdict(parsed))


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _prog(command: str) -> str:
    return "train.py" if Path(sys.argv[0]).name == "train.py" else f"transformer-jax {command}"


if __name__ == "__main__":
    sys.exit(main())
