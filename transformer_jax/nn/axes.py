"""Names of the axes of activations and parameters, for sharding: `training.sharding` maps them to a mesh."""

from math import prod

import flax.linen as nn
import jax

from transformer_jax.errors import ConfigError

ACTIVATIONS = (
    ("batch", "sequence", "embed"),
    ("batch", "length", "embed"),
    ("batch", "length", "heads", "head_dim"),
    ("batch", "length", "kv_heads", "head_dim"),
    ("batch", "length", "d_ff"),
    ("batch", "length", "vocab"),
    ("vocab", "embed"),
)
"""What models tell the partitioner about: the residual stream, that of recurrent models, queries, keys and values,
hidden layers, logits, and tables while rows of them are read."""

PARAMETERS = {
    **dict.fromkeys(("token_embedding/embedding", "source_embedding/embedding"), ("vocab", "width")),
    **dict.fromkeys(("position_embedding/embedding", "source_position_embedding/embedding"), ("positions", "width")),
    "query/kernel": ("width", "heads", "head_dim"),
    "query/bias": ("heads", "head_dim"),
    **dict.fromkeys(("key/kernel", "value/kernel"), ("width", "kv_heads", "head_dim")),
    **dict.fromkeys(("key/bias", "value/bias"), ("kv_heads", "head_dim")),
    **dict.fromkeys(("query_norm/scale", "key_norm/scale"), ("head_dim",)),
    "output/kernel": ("heads", "head_dim", "width"),
    **dict.fromkeys(("up/kernel", "gate/kernel"), ("width", "d_ff")),
    **dict.fromkeys(("up/bias", "gate/bias"), ("d_ff",)),
    "down/kernel": ("d_ff", "width"),
    "input/kernel": ("width", "gates", "embed"),
    "input/bias": ("gates", "embed"),
    "recurrent_kernel": ("width", "gates", "embed"),
    "recurrent_bias": ("embed",),
    "dense/kernel": ("width", "embed"),
    "head/kernel": ("width", "vocab"),
    "head/bias": ("vocab",),
    # What is added to the residual stream or scales it: the norms, and the other biases.
    "scale": ("embed",),
    "bias": ("embed",),
}
"""The axes of each parameter, by the end of its path. "width" is the D of matrices, and "embed" that of all else."""

NAMES = ("layers", *dict.fromkeys(name for array in (*ACTIVATIONS, *PARAMETERS.values()) for name in array))
"""All names. "layers" is the first axis of a stack's parameters."""


def parameter_axes(path: str, rank: int) -> tuple[str, ...]:
    """The names of a parameter's axes.

    Args:
      path: Such as "decoder/layers/self_attention/query/kernel"; what stands before its last two parts is not read.
      rank: Of the array.

    Raises:
      ConfigError: For a parameter that is not in `PARAMETERS`.

    Example:
      >>> parameter_axes("decoder/layers/ffn/up/kernel", 3)
      ('layers', 'width', 'd_ff')
    """
    end = "/".join(path.split("/")[-2:])
    names = PARAMETERS.get(end) or PARAMETERS.get(path.split("/")[-1])
    if names is not None and rank == len(names) + 1:
        names = ("layers", *names)
    if names is None or rank != len(names):
        raise ConfigError(f"the parameter {path} of rank {rank} has no axis names; add it to nn.axes.PARAMETERS")
    return names


def parts(name: str) -> int:
    """Into how many parts the current rules split a named axis on the current mesh."""
    (by,) = nn.logical_to_mesh_axes((name,)) or (None,)
    sizes = jax.sharding.get_abstract_mesh().shape
    return prod(sizes.get(axis, 1) for axis in ((by,) if isinstance(by, str) else by or ()))


def constrain(x: jax.Array, *names: str) -> jax.Array:
    """Tells the partitioner how x lies on the mesh; does nothing where no rules are set.

    An axis that does not divide stays whole: a single row, an odd number of symbols. It would be filled up otherwise.

    Raises:
      ConfigError: For names that are not one of `ACTIVATIONS`. Flax treats what it does not know as "replicated", in
        silence.
    """
    if names not in ACTIVATIONS or x.ndim != len(names):
        raise ConfigError(f"axis names {names} for an array of rank {x.ndim}; they are one of {ACTIVATIONS}")
    split = (name if size % parts(name) == 0 else None for name, size in zip(names, x.shape, strict=True))
    return nn.with_logical_constraint(x, tuple(split))
