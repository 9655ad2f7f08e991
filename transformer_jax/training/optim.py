"""Learning-rate schedules and the optax chain."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from transformer_jax.config import OptimConfig


def schedule_shape(config: OptimConfig) -> optax.Schedule:
    """The rate of an update as a fraction of the peak.

    Update n (counted from 1, given as n - 1) has (n / warmup_steps) in the warmup, so that the first update already
    moves the weights, and 1 at n = warmup_steps. The decay ends at n = decay_steps and stays there.

    Raises:
      ValueError: If decay_steps is not resolved yet.
    """
    warmup = config.warmup_steps
    if config.schedule == "noam":
        return lambda count: jnp.minimum((count + 1) / warmup, jnp.sqrt(warmup / (count + 1)))
    if config.decay_steps is None:
        raise ValueError("decay_steps is resolved when a run is created")
    rest = config.decay_steps - warmup
    if config.schedule == "constant" or rest == 0:
        after = optax.constant_schedule(1.0)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(1.0, rest, alpha=config.final_fraction)
    else:
        decay = min(round(config.decay_steps * config.decay_fraction), rest)
        after = optax.linear_schedule(1.0, config.final_fraction, decay, transition_begin=rest - decay)
    if warmup == 0:
        return lambda count: after(count + 1)
    rise = optax.linear_schedule(0.0, 1.0, warmup)
    return lambda count: optax.join_schedules([rise, after], [warmup])(count + 1)


def leaf_name(path: tuple[Any, ...]) -> str:
    """A parameter's path in words, such as "decoder/layers/self_attention/query/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def decay_mask(params: Any) -> Any:
    """True for matrices and embeddings; norms and biases are never decayed, stacked or not."""
    decayed = ("kernel", "recurrent_kernel", "embedding")
    return jax.tree.map_with_path(lambda path, _: leaf_name(path).split("/")[-1] in decayed, params)


_MUON_AXES = {
    # Layers are stacked: axis 0 is the layer, and each layer's map is orthogonalised as one matrix.
    "query": MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),
    "key": MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),
    "value": MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),
    "output": MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=3),
    "up": MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    "gate": MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    "down": MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    # [L, D, gates, D]: each gate's map is a matrix of its own.
    "input": MuonDimensionNumbers(reduction_axis=1, output_axis=3),
    "recurrent_kernel": MuonDimensionNumbers(reduction_axis=1, output_axis=3),
}


def muon_dimension_numbers(params: Any) -> Any:
    """Which axes of each kernel form its matrix; None for what AdamW updates: embeddings, head, norms, biases.

    Given by path, because optax's own rule goes by rank: it would send stacked kernels to Adam, and embeddings to
    Muon.
    """

    def one(path: tuple[Any, ...], _: Any) -> MuonDimensionNumbers | None:
        *_, module, leaf = ["", *leaf_name(path).split("/")]
        return _MUON_AXES.get(module if leaf == "kernel" else leaf)

    return jax.tree.map_with_path(one, params)


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Clipping, the optimiser at its peak rate, and the schedule.

    The peak rates are arrays in the optimiser's state, so that replicas with different rates share one program.
    """

    def at_peak(learning_rate: Any, muon_learning_rate: Any) -> optax.GradientTransformation:
        if config.optimizer == "muon":
            return optax.contrib.muon(
                muon_learning_rate,
                beta=config.muon_beta,
                weight_decay=config.weight_decay,
                adam_learning_rate=learning_rate,
                adam_b1=config.b1,
                adam_b2=config.b2,
                eps=config.eps,
                muon_weight_dimension_numbers=muon_dimension_numbers,
            )
        return optax.adamw(
            learning_rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )

    return optax.chain(
        optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm),
        optax.inject_hyperparams(at_peak)(
            learning_rate=config.learning_rate, muon_learning_rate=config.muon_learning_rate
        ),
        optax.scale_by_schedule(schedule_shape(config)),
    )


def with_rates(config: OptimConfig, opt_state: Any) -> Any:
    """Puts the config's peak rates into an optimiser's state: on resuming they may have changed."""
    for name in ("learning_rate", "muon_learning_rate"):
        sharding = optax.tree.get(opt_state, name).sharding
        rate = jax.device_put(np.float32(getattr(config, name)), sharding)
        opt_state = optax.tree.set(opt_state, **{name: rate})
    return opt_state


def learning_rate(config: OptimConfig, opt_state: Any, step: jax.Array) -> jax.Array:
    """The rate that AdamW applies in the update after `step` updates; Muon's is in the same proportion."""
    peak = optax.tree.get(opt_state, "learning_rate")
    return peak * schedule_shape(config)(step)


def with_schedule_of(opt_state: Any, other: Any) -> Any:
    """An optimiser's state with the place in the schedule of another one."""
    return (*opt_state[:-1], other[-1])
