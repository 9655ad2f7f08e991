"""One update and one evaluation, as pure functions."""

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import Config
from transformer_jax.nn import EncoderDecoder, create_model
from transformer_jax.training.losses import cross_entropy, mean
from transformer_jax.training.optim import learning_rate, make_optimizer, with_schedule_of
from transformer_jax.training.sharding import Placement

Metrics = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
    """All that training changes.

    Attributes:
      step: int32, updates made so far.
      params: The parameters, float32.
      opt_state: The optimiser's state.
      average: An exponential average of the parameters, or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    average: Any

    @property
    def num_parameters(self) -> int:
        """Numbers in the parameters."""
        return sum(x.size for x in jax.tree.leaves(self.params))

    @property
    def eval_params(self) -> Any:
        """The parameters to evaluate and to sample with."""
        return self.params if self.average is None else self.average


def init_state(config: Config) -> TrainState:
    """A state before the first update; depends on train.seed alone, and not on any mesh."""
    model = create_model(config.model)
    key = jax.random.fold_in(jax.random.key(config.train.seed), 0)
    ids = jnp.zeros((1, 1), jnp.int32)
    params = (
        model.init(key, ids, ids)["params"] if isinstance(model, EncoderDecoder) else model.init(key, ids)["params"]
    )
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=make_optimizer(config.optim).init(params),
        # A copy: donated states must not hold one buffer twice.
        average=None if config.train.average_decay is None else jax.tree.map(jnp.copy, params),
    )


def create_state(config: Config, placement: Placement) -> TrainState:
    """`init_state`, made where it is to lie: no device ever holds more than its part."""
    make = partial(init_state, config)
    return jax.jit(make, out_shardings=placement.shardings(jax.eval_shape(make)))()


def predict(config: Config, params: Any, batch: dict[str, jax.Array], **kwargs: Any) -> jax.Array:
    """The logits of a batch's targets, float32 [B, T, V]; further arguments go to the model."""
    model, variables = create_model(config.model), {"params": params}
    if isinstance(model, EncoderDecoder):
        source, valid = batch["source"], batch["source_valid"]
        return model.apply(variables, source, batch["inputs"], source_valid=valid, **kwargs)
    return model.apply(variables, batch["inputs"], valid=batch.get("valid"), **kwargs)


def pieces(config: Config, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A batch [B, ...] as [A, B / A, ...], for `accumulate` pieces."""
    # Piece i takes rows i, i + A, ...: rows that lie on one device stay there.
    return jax.tree.map(lambda x: x.reshape(-1, config.train.accumulate, *x.shape[1:]).swapaxes(0, 1), batch)


def dropout_keys(config: Config, step: jax.Array) -> jax.Array:
    """A key for each piece of the batch that follows `step` updates."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.train.seed), 1), step)
    return key[None] if config.train.accumulate == 1 else jax.random.split(key, config.train.accumulate)


def training_loss(
    config: Config, params: Any, piece: dict[str, jax.Array], key: jax.Array, **kwargs: Any
) -> tuple[jax.Array, Any]:
    """What is minimised, summed over a piece; further arguments go to the model.

    Returns:
      The sum, and the number of targets; where something is captured a pair of this number and logits and capture.
    """
    out = predict(config, params, piece, deterministic=False, rngs={"dropout": key}, **kwargs)
    total, count = cross_entropy(
        out[0] if "capture" in kwargs else out,
        piece["targets"],
        piece["weights"],
        label_smoothing=config.train.label_smoothing,
        z_loss=config.train.z_loss,
    )
    return total, (count, out) if "capture" in kwargs else count


def train_step(config: Config, state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
    """One update.

    The batch may be cut into `accumulate` pieces. Their losses and gradients are sums, divided once by the number of
    targets that count: how a batch is cut never changes what it teaches.

    Args:
      config: Resolved.
      state: Before the update.
      batch: As in `data.batches.Batch`.

    Returns:
      The state after the update, and float32 scalars: loss (nats per target, of this batch before the update),
      grad_norm (before clipping), learning_rate (the one applied here). Where loss or gradients are not finite the
      state is the one before, but for its step and its place in the schedule.
    """
    keys = dropout_keys(config, state.step)
    gradient = jax.value_and_grad(partial(training_loss, config), has_aux=True)
    if config.train.accumulate == 1:
        (total, count), grads = gradient(state.params, batch, keys[0])
    else:

        def add(sums: Any, piece: tuple) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, gradient(state.params, *piece)), None

        zeros = jnp.zeros(()), jnp.zeros(())
        start = zeros, jax.tree.map(jnp.zeros_like, state.params)
        ((total, count), grads), _ = jax.lax.scan(add, start, (pieces(config, batch), keys))

    grads = jax.tree.map(lambda g: mean(g, count), grads)
    updates, opt_state = make_optimizer(config.optim).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
        # As in TensorFlow's ExponentialMovingAverage with num_updates: a short run is not mostly its first weights.
        decay = jnp.minimum(config.train.average_decay, (state.step + 1) / (state.step + 10))
        average = optax.incremental_update(params, average, 1 - decay)
    metrics = {
        "loss": mean(total, count),
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": learning_rate(config.optim, state.opt_state, state.step),
    }
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    new = TrainState(state.step + 1, params, opt_state, average)
    kept = jax.tree.map(partial(jnp.where, finite), new, state)
    return kept.replace(step=new.step, opt_state=with_schedule_of(kept.opt_state, new.opt_state)), metrics


def eval_step(config: Config, params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums over a batch's rows, for each place of its windows, each float32 [T].

    Dropout is off and nothing is smoothed.

    Returns:
      The loss in nats, the number of targets, and how many of them were the most likely symbol.
    """
    logits = predict(config, params, batch)
    totals, counts = cross_entropy(logits, batch["targets"], batch["weights"], axis=0)
    right = jnp.sum(batch["weights"] * (jnp.argmax(logits, axis=-1) == batch["targets"]), axis=0)
    return totals, counts, right


def all_finite(state: TrainState) -> jax.Array:
    """Whether every number of a state is finite: what is not must never replace a good checkpoint."""
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]).all()


def compile_train_step(config: Config, state: TrainState, placement: Placement) -> Any:
    """`train_step` under jit, from state and global batch as they lie to a state that lies the same.

    The state is donated.
    """
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(
        partial(train_step, config),
        in_shardings=(shardings, placement.rows),
        out_shardings=(shardings, placement.replicated),
        donate_argnums=0,
        compiler_options=compiler_options(config),
    )


def compiler_options(config: Config) -> dict[str, bool]:
    """For XLA. Its one flag for GPUs makes sums and fused attention repeat, and does not choose programs by trial."""
    return {"xla_gpu_deterministic_ops": True} if config.train.deterministic else {}
