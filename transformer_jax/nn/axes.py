"""Names of the axes that activations have, for sharding: `training.sharding` maps them to a mesh."""

import flax.linen as nn
import jax

from transformer_jax.errors import ConfigError

ACTIVATION_AXES = ("batch", "length", "embed", "heads", "kv_heads", "head_dim", "d_ff", "vocab")


def constrain(x: jax.Array, *names: str) -> jax.Array:
    """Tells the partitioner how x lies on the mesh; does nothing where no rules are set.

    Raises:
      ConfigError: For an unknown or repeated name. Flax treats both as "replicated", in silence.
    """
    if len(names) != x.ndim or len(set(names)) != len(names) or not set(names) <= set(ACTIVATION_AXES):
        raise ConfigError(f"axis names {names} for an array of rank {x.ndim}; distinct names of {ACTIVATION_AXES}")
    return nn.with_logical_constraint(x, names)
