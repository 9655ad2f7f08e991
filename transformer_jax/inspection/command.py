"""What `transformer-jax inspect` prints."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformer_jax.config import Config, ModelConfig, differences
from transformer_jax.errors import ConfigError
from transformer_jax.inspection import svg, terminal
from transformer_jax.inspection.diagram import diagram
from transformer_jax.inspection.figures import Figures, changed, different_parameters, figures, idle_fields
from transformer_jax.nn import kernels
from transformer_jax.output import Output
from transformer_jax.presets import PRESETS, TINY_SHAKESPEARE


def inspect(
    what: str,
    other: str | None,
    load: Callable[[str], Config],
    *,
    vocab_size: int | None = None,
    picture: Path | None = None,
    as_json: bool = False,
) -> None:
    """Prints the figures and the diagram of a model, or what tells two apart.

    Args:
      what: Names a model.
      other: Names another, to compare with the first.
      load: Finds the config of a name.
      vocab_size: In place of the configs' own.
      picture: Also draw the model into this file, as SVG.
      as_json: Print one JSON object instead.

    Raises:
      ConfigError: If two models are to be drawn in one picture, or a config cannot work.
    """
    if picture is not None and other is not None:
        raise ConfigError(f"--svg {picture} draws one model, and there are two: leave out {other}")
    names = [what] if other is None else [what, other]
    configs = _with_vocab(names, [load(name) for name in names], vocab_size)
    found = [figures(config.model) for config in configs]
    if picture is not None:
        model = configs[0].model
        picture.write_text(svg.render(diagram(model), f"{what}: {model.architecture}"), encoding="utf-8")
        _note(f"wrote {picture}")
    if as_json:
        print(json.dumps(_to_dict(names, configs, found)))
    elif other is None:
        _show_one(what, configs[0].model, found[0])
    else:
        _show_two(names, configs, found)


def _with_vocab(names: list[str], configs: list[Config], vocab_size: int | None) -> list[Config]:
    """Fills in a vocabulary that is left open; of two models, one that has none gets the other's."""
    own = [config.model.vocab_size for config in configs]
    assumed = next((size for size in own if size is not None), TINY_SHAKESPEARE)
    if vocab_size is None and None in own:
        lacking = " and ".join(dict.fromkeys(name for name, size in zip(names, own, strict=True) if size is None))
        whose = "tiny Shakespeare's" if own.count(None) == len(own) else "the other's"
        _note(f"vocab_size is not set in {lacking}: assuming {assumed}, {whose}; --vocab-size N for another")
    sizes = [size or assumed if vocab_size is None else vocab_size for size in own]
    return [replace(c, model=replace(c.model, vocab_size=size)) for c, size in zip(configs, sizes, strict=True)]


def _totals(found: Iterable[Figures]) -> dict[str, list[float]]:
    """The figures that are one number, for each model."""
    rows = [
        {
            "parameters": each.count,
            "of them embeddings": each.embeddings,
            "bytes as float32": each.bytes,
            "FLOPs per token, forward": each.flops.forward_per_token,
            "FLOPs per token, training": each.flops.training_per_token,
        }
        for each in found
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _to_dict(names: list[str], configs: list[Config], found: list[Figures]) -> dict[str, Any]:
    models = [
        {"name": name, "model": asdict(config.model), **each.to_dict()}
        for name, config, each in zip(names, configs, found, strict=True)
    ]
    if len(models) == 1:
        return models[0]
    return {
        "models": models,
        "differences": differences(*configs),
        "ratios": {name: second / first for name, (first, second) in _totals(found).items()},
        "parameter_differences": different_parameters(*found),
    }


def _show_one(name: str, model: ModelConfig, found: Figures) -> None:
    out = Output()
    out.say(f"{name}: {PRESETS[name].text if name in PRESETS else model.architecture}")
    out.drawing(terminal.render(diagram(model), out.width), terminal.to_ascii)
    rows = [(p.path, f"{p.dtype}{_shape(p.shape)}", p.count) for p in found.parameters]
    out.table(["parameter", "type and shape", "count"], rows)
    out.table(["in all", ""], [(figure, *values) for figure, values in _totals([found]).items()])
    out.say(_how_counted([model]))
    if found.attention is not None:
        out.say(f"attention: {found.attention}")
    rows = [(field, str(here), str(default)) for field, (here, default) in changed(model).items()]
    if rows:
        out.table(["field", "here", "default"], rows)


def _show_two(names: list[str], configs: list[Config], found: list[Figures]) -> None:
    out = Output()
    rows = [(field, *_effective(field, values, configs)) for field, values in differences(*configs).items()]
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    out.table(["field", *names], rows) if rows else out.say("the configs do not differ")
    rows = [(figure, *values, f"{values[1] / values[0]:#.4g}") for figure, values in _totals(found).items()]
    out.table(["in all", *names, "ratio"], rows)
    out.say(_how_counted([config.model for config in configs]))
    kinds = zip(names, [each.attention or "none" for each in found], strict=True)
    out.say("\n".join(f"attention of {name}: {kind}" for name, kind in kinds))
    rows = [(path, *map(_shape, shapes)) for path, shapes in different_parameters(*found).items()]
    out.table(["parameter", *names], rows) if rows else out.say("the parameters have the same names and shapes")


def _effective(field: str, values: tuple[Any, Any], configs: list[Config]) -> list[str]:
    """The values of a field, such as "model.window", with a dash where it changes nothing."""
    section, name = field.split(".")
    return [
        "-" if section == "model" and name in idle_fields(config.model) else str(value)
        for value, config in zip(values, configs, strict=True)
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "-" if shape is None else f"[{','.join(map(str, shape))}]"


def _how_counted(models: Sequence[ModelConfig]) -> str:
    lengths = " and ".join(dict.fromkeys(f"{model.context:,}" for model in models))
    text = f"FLOPs are those of matrix products, on average over a row of {lengths} tokens"
    if any(kernels.attends(model) for model in models):
        text += "; attention counts as if each token saw all of them"
    if any(model.architecture == "encoder_decoder" for model in models):
        text += "; an encoder-decoder's are per target token, with a source as long"
    return text


def _note(text: str) -> None:
    print(text, file=sys.stderr)
