"""Figures of models, and what tells two of them apart; from shapes alone, so that no size is too large."""

import dataclasses
from typing import Any

import jax

from transformer_jax.config import ModelConfig, field_names
from transformer_jax.errors import ConfigError
from transformer_jax.flops import Flops, abstract_model, model_flops
from transformer_jax.nn import kernels
from transformer_jax.nn.blocks import field_names as module_fields
from transformer_jax.nn.transformer import MODELS


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of parameters.

    Attributes:
      path: Its names, such as "decoder/layers/ffn/up/kernel".
      shape: Those of all L layers are in one array, with a leading axis L.
      dtype: Its type.
      count: Its numbers.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    count: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is known of a model before it runs.

    Attributes:
      parameters: All of them.
      flops: Of one row of full length.
      attention: How it is computed here, and why; None for a model without attention.
    """

    parameters: tuple[Parameter, ...]
    flops: Flops
    attention: str | None

    @property
    def count(self) -> int:
        """Numbers in all parameters."""
        return sum(parameter.count for parameter in self.parameters)

    @property
    def embeddings(self) -> int:
        """Those in tables of tokens and positions, a tied head's among them."""
        return sum(parameter.count for parameter in self.parameters if parameter.path.endswith("embedding"))

    @property
    def bytes(self) -> int:
        """Of the parameters in float32, in which they are kept whatever `compute_dtype` is."""
        return 4 * self.count

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "parameters": [dataclasses.asdict(parameter) for parameter in self.parameters],
            "totals": {"parameters": self.count, "embeddings": self.embeddings, "bytes": self.bytes},
            "flops": {
                **dataclasses.asdict(self.flops),
                "forward_per_token": self.flops.forward_per_token,
                "training_per_token": self.flops.training_per_token,
            },
            "attention": self.attention,
        }


def figures(model: ModelConfig) -> Figures:
    """The figures of a model; nothing is run.

    Raises:
      ConfigError: If vocab_size is not set.

    Example:
      >>> found = figures(ModelConfig(architecture="lstm", vocab_size=9, d_model=8, num_layers=2))
      >>> found.count, found.embeddings, found.attention
      (1168, 72, None)
    """
    _, variables, _ = abstract_model(model)
    arrays = jax.tree_util.tree_flatten_with_path(variables["params"])[0]
    parameters = tuple(
        Parameter(jax.tree_util.keystr(path, simple=True, separator="/"), array.shape, array.dtype.name, array.size)
        for path, array in arrays
    )
    return Figures(parameters, model_flops(model), _attention(model) if kernels.attends(model) else None)


def _attention(model: ModelConfig) -> str:
    try:
        return kernels.explain(model)
    except ConfigError as error:  # a config for another machine can be looked at on this one
        return str(error)


def changed(model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """The fields that have an effect and are not the default's, with both values.

    Example:
      >>> changed(ModelConfig(architecture="gru", num_heads=2, d_model=64))
      {'architecture': ('gru', 'decoder'), 'd_model': (64, 128)}
    """
    default, idle = ModelConfig(), idle_fields(model)
    return {
        name: (getattr(model, name), getattr(default, name))
        for name in field_names(ModelConfig)
        if name not in idle and getattr(model, name) != getattr(default, name)
    }


def idle_fields(model: ModelConfig) -> set[str]:
    """Fields that change nothing beside the values of the others."""
    if model.recurrent:
        used = {"init" if name == "weight_init" else name for name in module_fields(MODELS[model.architecture])}
        return set(field_names(ModelConfig)) - used
    no_norm, no_self_attention = model.norm == "none", model.attention == "none"
    without = {
        "rotary_base": no_self_attention or model.positions != "rotary",
        "window": no_self_attention,
        **dict.fromkeys(("num_heads", "num_kv_heads", "qk_norm", "attention_dropout"), not kernels.attends(model)),
        "attention_impl": not kernels.attends(model),
        **dict.fromkeys(("d_ff", "feed_forward_dropout"), model.feed_forward == "none"),
        **dict.fromkeys(("norm_position", "norm_embeddings"), no_norm),
        **dict.fromkeys(("norm_eps", "norm_affine"), no_norm and not (model.qk_norm and kernels.attends(model))),
        "final_norm": no_norm or model.norm_position == "post",
    }
    return {name for name, nothing in without.items() if nothing}


def different_parameters(first: Figures, second: Figures) -> dict[str, tuple[Any, Any]]:
    """The parameters that one of two models lacks or has in another shape: path to both shapes, None where it lacks."""
    shapes = [{parameter.path: parameter.shape for parameter in each.parameters} for each in (first, second)]
    return {
        path: (shapes[0].get(path), shapes[1].get(path))
        for path in shapes[0] | shapes[1]
        if shapes[0].get(path) != shapes[1].get(path)
    }
