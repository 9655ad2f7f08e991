"""Floating-point operations of a model, counted from its program; nothing is run and nothing is allocated.

Counted are the matrix products, 2 operations for each multiplication and addition. Norms, activations, softmax and
lookups are not: they are small beside the products, and how many operations they take depends on the machine.
"""

import dataclasses
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.errors import ConfigError
from transformer_jax.nn import create_model

_OPAQUE = ("pallas_call", "conv_general_dilated", "ragged_dot_general")
"""Products that are written otherwise."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """The products of one row of full length.

    Attributes:
      forward: Of the logits.
      training: Of the logits and the gradients of all parameters, and what `remat` computes again.
      tokens: Length of the row: `context`. An encoder-decoder has as many target tokens, and a source of that length.
    """

    forward: int
    training: int
    tokens: int

    @property
    def forward_per_token(self) -> float:
        """Per token, of the target for an encoder-decoder."""
        return self.forward / self.tokens

    @property
    def training_per_token(self) -> float:
        """Likewise, forward and backward."""
        return self.training / self.tokens


def model_flops(model_config: ModelConfig) -> Flops:
    """Counts a model's products at the full context.

    Attention counts as the plain product does it, over all T x S scores: a causal mask or a window saves nothing.

    Example:
      >>> flops = model_flops(ModelConfig(architecture="gru", vocab_size=65))
      >>> flops.forward_per_token, flops.training / flops.forward
      (803072.0, 3.0)
    """
    model, variables, inputs = abstract_model(model_config)

    def total(variables: Any, *inputs: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(variables, *inputs))

    return Flops(
        count(total, variables, *inputs),
        count(jax.value_and_grad(total), variables, *inputs),
        model_config.context,
    )


def abstract_model(model_config: ModelConfig) -> tuple[nn.Module, Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """A model with the shapes of its parameters, and of what it takes: one row of `context` tokens.

    Raises:
      ConfigError: If vocab_size is not set.
    """
    model = create_model(dataclasses.replace(model_config, attention_impl="xla", unroll=1))
    row = jax.ShapeDtypeStruct((1, model_config.context), jnp.int32)
    inputs = (row, row) if model_config.architecture == "encoder_decoder" else (row,)
    variables = jax.eval_shape(lambda *inputs: model.init(jax.random.key(0), *inputs), *inputs)
    return model, variables, inputs


def count(function: Callable[..., Any], *args: Any) -> int:
    """The operations of all matrix products in a function's program.

    The program is taken as it is traced: a loop counts each of its turns, a branch as the most expensive one, and what
    the compiler would leave out or move out of a loop still counts.

    Args:
      function: Anything that `jax.make_jaxpr` takes.
      *args: Arrays, or their shapes as `jax.ShapeDtypeStruct`.

    Raises:
      ConfigError: For a product in a kernel or in a loop whose number of turns is not known.

    Example:
      >>> count(jnp.dot, jax.ShapeDtypeStruct((2, 3), float), jax.ShapeDtypeStruct((3, 4), float))
      48
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lengths = [equation.invars[0].aval.shape[axis] for axis in contracted]
        return 2 * prod(equation.outvars[0].aval.shape) * prod(lengths)
    if name in _OPAQUE:
        raise ConfigError(f"the products inside {name} cannot be counted; count a program that uses plain ones")
    inner = [_count(jaxpr) for value in params.values() for jaxpr in _programs(value)]
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "cond":
        return max(inner)
    if name == "while" and any(inner):
        raise ConfigError("a while loop has products, and how often it turns is not known; write it as a scan")
    return sum(inner)


def _programs(value: Any) -> Iterator[Any]:
    """The programs in a parameter of an equation, told by their looks: JAX does not export their types."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield from _programs(value.jaxpr)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _programs(each)
