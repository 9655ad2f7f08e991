"""Norms, feed-forward, embeddings and how weights start."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.checks import unknown
from transformer_jax.errors import ConfigError
from transformer_jax.nn.axes import constrain
from transformer_jax.nn.inputs import check_floats


def _over_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Shapes a [D] vector so that it broadcasts over [..., D] without rank promotion."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps), over the last axis and in float32 (Ba et al. 2016, section 3).

    The variance is the mean of squared differences: E[x^2] - E[x]^2 loses all digits on a large mean.

    Attributes:
      eps: Added to the variance.
      use_scale: A learned gain [D], starting at 1.
      use_bias: A learned bias [D], starting at 0.

    Example:
      >>> out = LayerNorm(use_scale=False, use_bias=False).apply({}, jnp.array([1.0, 2.0, 3.0]))
      >>> [round(float(x), 3) for x in out]
      [-1.225, 0.0, 1.225]
    """

    eps: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D], in the dtype of x."""
        check_floats("x", x, "... D")
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.use_scale:
            y = y * _over_last(self.param("scale", nn.initializers.ones, x.shape[-1:]), y)
        if self.use_bias:
            y = y + _over_last(self.param("bias", nn.initializers.zeros, x.shape[-1:]), y)
        return y.astype(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), over the last axis and in float32 (Zhang & Sennrich 2019, section 4).

    Attributes:
      eps: Added to the mean of squares.
      use_scale: A learned gain [D], starting at 1.

    Example:
      >>> RMSNorm(use_scale=False).apply({}, jnp.array([-2.0, 2.0])).round().tolist()
      [-1.0, 1.0]
    """

    eps: float = 1e-6
    use_scale: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D], in the dtype of x."""
        check_floats("x", x, "... D")
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.use_scale:
            y = y * _over_last(self.param("scale", nn.initializers.ones, x.shape[-1:]), y)
        return y.astype(x.dtype)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _gelu(x: jax.Array) -> jax.Array:
    # By erf: jax.nn.gelu goes by erfc, which on a CPU made a whole training step 1.4 times as long.
    return 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "swiglu": jax.nn.silu,
}
"""relu: Vaswani et al. 2017; gelu, and gelu_tanh, which comes near it: Hendrycks & Gimpel 2016; relu2: So et al. 2021;
swiglu: Shazeer 2020."""

NORMS = ("layer", "rms", "none")


def make_norm(kind: str, *, eps: float, affine: bool, use_bias: bool, name: str | None = None) -> Callable:
    """A norm by its name; "none" gives the identity, so that call sites need no branch.

    Raises:
      ConfigError: For an unknown kind.
    """
    if kind == "layer":
        return LayerNorm(eps=eps, use_scale=affine, use_bias=affine and use_bias, name=name)
    if kind == "rms":
        return RMSNorm(eps=eps, use_scale=affine, name=name)
    if kind == "none":
        return lambda x: x
    raise ConfigError(unknown("norm", kind, NORMS))


def feed_forward_width(kind: str, d_model: int, d_ff: int | None) -> int:
    """The hidden width (F): as given, or 4 D, or 8/3 D for the three maps of "swiglu" (Shazeer 2020, section 3.2)."""
    return d_ff or (8 * d_model // 3 if kind == "swiglu" else 4 * d_model)


class FeedForward(nn.Module):
    """Two linear maps with an activation between them, at each position alone (Vaswani et al. 2017, section 3.3).

    Attributes:
      d_ff: Hidden width (F).
      activation: A name of `ACTIVATIONS`; "swiglu" has a third map that gates the hidden layer.
      use_bias: Biases of the linear maps.
      dropout: Rate on the hidden layer.
      dtype: Type of the matrix products.
      kernel_init: Of the maps into the hidden layer.
      output_init: Of the map out of it.

    Example:
      >>> ffn, x = FeedForward(d_ff=32, activation="swiglu"), jnp.ones((2, 5, 8))
      >>> params = ffn.init(jax.random.key(0), x)["params"]
      >>> ffn.apply({"params": params}, x).shape, sorted(params)
      ((2, 5, 8), ['down', 'gate', 'up'])
    """

    d_ff: int
    activation: str = "relu"
    use_bias: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    output_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """[..., T, D] -> [..., T, D].

        Args:
          x: Any batch of positions.
          deterministic: Turns dropout off.

        Raises:
          ConfigError: For an unknown activation, no hidden width, or an x that is not floats.
        """
        check_floats("x", x, "... D")
        if self.d_ff < 1:
            raise ConfigError(f"d_ff must be at least 1, got {self.d_ff}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(unknown("feed-forward", self.activation, ACTIVATIONS))

        def linear(name: str, features: int, init: nn.initializers.Initializer) -> nn.Dense:
            return nn.Dense(features, use_bias=self.use_bias, dtype=self.dtype, kernel_init=init, name=name)

        hidden = ACTIVATIONS[self.activation](linear("up", self.d_ff, self.kernel_init)(x))
        if self.activation == "swiglu":
            hidden = hidden * linear("gate", self.d_ff, self.kernel_init)(x)
        hidden = nn.Dropout(self.dropout, deterministic=deterministic)(hidden)
        if hidden.ndim == 3:
            hidden = constrain(hidden, "batch", "length", "d_ff")
        return linear("down", x.shape[-1], self.output_init)(hidden)


class Embedding(nn.Module):
    """A table of vectors, one for each id.

    Attributes:
      num_embeddings: Rows of the table (V).
      features: Width (D).
      embedding_init: How the table starts.
    """

    num_embeddings: int
    features: int
    embedding_init: nn.initializers.Initializer = nn.initializers.normal(0.02)

    def setup(self) -> None:
        """Declares the table."""
        self.embedding = self.param("embedding", self.embedding_init, (self.num_embeddings, self.features))

    def __call__(self, ids: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """Reads rows: ids int [...] -> [..., D]. Ids out of range, which a traced call cannot refuse, read the nearest.

        The rows are cast after they are read, so that their gradients add up in float32.
        """
        table = constrain(self.embedding, "vocab", "embed")
        return jnp.take(table, ids, axis=0, mode="clip").astype(dtype)


class Head(nn.Module):
    """The map from the residual stream to logits.

    Attributes:
      vocab_size: Symbols (V).
      use_bias: A bias [V].
      transform: Makes the norm after a linear map with bias and GELU that come first (Devlin et al. 2019); None means
        none.
      kernel_init: Of the map.
      transform_init: Of the linear map that comes first.
    """

    vocab_size: int
    use_bias: bool = False
    transform: Callable[..., nn.Module] | None = None
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    transform_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(self, x: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """[B, T, D] -> float32 [B, T, V]: the product adds up in float32 and is not rounded afterwards.

        Args:
          x: The residual stream.
          table: [V, D], the token embedding, to tie the head to it (Press & Wolf 2017); None makes a kernel.
        """
        width = x.shape[-1]
        if self.transform is not None:
            x = _gelu(nn.Dense(width, dtype=x.dtype, kernel_init=self.transform_init, name="dense")(x))
            x = self.transform(name="norm")(x)
        kernel = self.param("kernel", self.kernel_init, (width, self.vocab_size)) if table is None else table.T
        logits = jnp.einsum("BTD,DV->BTV", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        if self.use_bias:
            logits = logits + _over_last(self.param("bias", nn.initializers.zeros, (self.vocab_size,)), logits)
        return logits


@dataclasses.dataclass(frozen=True)
class Inits:
    """How the four kinds of weights start.

    Attributes:
      kernel: Maps that read the residual stream.
      output: Maps that write to it.
      embedding: Tables.
      head: The output head.
    """

    kernel: nn.initializers.Initializer
    output: nn.initializers.Initializer
    embedding: nn.initializers.Initializer
    head: nn.initializers.Initializer


_FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

INITS: dict[str, Callable[[int], Inits]] = {
    # LeCun et al. 1998, section 4.6: outputs of unit variance from inputs of unit variance.
    "fan_in": lambda maps: Inits(_FAN_IN, _FAN_IN, nn.initializers.normal(1.0), _FAN_IN),
    # Glorot & Bengio 2010, as in the Transformer's reference code.
    "xavier": lambda maps: Inits(
        nn.initializers.xavier_uniform(),
        nn.initializers.xavier_uniform(),
        nn.initializers.variance_scaling(1.0, "fan_out", "normal"),
        nn.initializers.xavier_uniform(),
    ),
    # Devlin et al. 2019, as in BERT's code.
    "bert": lambda maps: Inits(*[nn.initializers.truncated_normal(0.02)] * 4),
    # Radford et al. 2019, section 2.3: the maps into the residual stream shrink with their number.
    "gpt2": lambda maps: Inits(
        nn.initializers.normal(0.02),
        nn.initializers.normal(0.02 / maps**0.5),
        nn.initializers.normal(0.02),
        nn.initializers.normal(0.02),
    ),
    # Each layer starts as the identity and the first prediction is uniform (Zhang et al. 2019, section 3).
    "zero_output": lambda maps: Inits(
        _FAN_IN, nn.initializers.zeros, nn.initializers.normal(1.0), nn.initializers.zeros
    ),
}
"""Initialisations by name, given the number of maps that write to the residual stream: two or three in a layer."""
