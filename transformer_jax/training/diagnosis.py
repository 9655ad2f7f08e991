"""Where numbers were lost: the first part of a model that is not finite."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import Config
from transformer_jax.fetch import fetch
from transformer_jax.training.losses import mean
from transformer_jax.training.optim import leaf_name
from transformer_jax.training.step import dropout_keys, pieces, training_loss


def first_nonfinite(config: Config, params: Any, batch: dict[str, jax.Array], step: int) -> str | None:
    """The first part that is not finite, in the order in which an update computes them.

    These are the parameters, the output of each layer, the logits, the loss, the gradients from the top down, and their
    norm.

    Args:
      config: Resolved.
      params: Before the update.
      batch: Of the update.
      step: Updates made before it, for dropout.

    Returns:
      Such as "the output of layer 3 of 4"; None where all are finite.
    """
    found = fetch(jax.jit(partial(_examine, config))(params, batch, jnp.int32(step)))
    for path, finite in jax.tree_util.tree_leaves_with_path(found["params"]):
        if not finite.all():
            return f"the parameter {_place(leaf_name(path), finite.argmin())}"
    for name, finite in found["outputs"].items():
        if not finite.all():
            stack = name.removesuffix("hidden").rstrip("_")
            return f"the output of {stack and stack + ' '}layer {finite.argmin() + 1} of {len(finite)}"
    for name in ("logits", "loss"):
        if not found[name]:
            return f"the {name}"
    grads = [
        (_height(leaf_name(path), layer), f"the gradient of {_place(leaf_name(path), layer)}")
        for path, finite in jax.tree_util.tree_leaves_with_path(found["grads"])
        for layer, good in enumerate(finite)
        if not good
    ]
    if grads:
        return max(grads)[1]
    return None if found["norm"] else "the sum of squares of gradients that are finite"


def _examine(config: Config, params: Any, batch: dict[str, jax.Array], step: jax.Array) -> dict[str, Any]:
    """What is finite: bool [L] for each array of stacked layers and for each stack's outputs, else bool [1] or []."""

    def one(piece: tuple[dict[str, jax.Array], jax.Array]) -> dict[str, Any]:
        loss = partial(training_loss, config, piece=piece[0], key=piece[1], capture=("hidden",))
        (total, (count, (logits, captured))), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return {
            "outputs": {name: _finite(x, stacked=True) for name, x in captured.items()},
            "logits": jnp.isfinite(logits).all(),
            "loss": jnp.isfinite(total),
            "grads": _finite_leaves(grads),
            "norm": jnp.isfinite(mean(optax.tree.norm(grads), count)),
        }

    found = jax.lax.map(one, (pieces(config, batch), dropout_keys(config, step)))
    return {"params": _finite_leaves(params)} | jax.tree.map(lambda x: x.all(axis=0), found)


def _finite_leaves(tree: Any) -> Any:
    return jax.tree.map_with_path(lambda path, x: _finite(x, stacked=_stacked(leaf_name(path))), tree)


def _finite(x: jax.Array, *, stacked: bool) -> jax.Array:
    return jnp.isfinite(x).reshape(x.shape[0] if stacked else 1, -1).all(axis=1)


def _stacked(name: str) -> bool:
    return "layers" in name.split("/")


def _place(name: str, layer: int) -> str:
    return f"{name} of layer {layer + 1}" if _stacked(name) else name


def _height(name: str, layer: int) -> tuple[int, int]:
    """Gradients come down from the head, through the layers of a decoder and of an encoder, to the embeddings."""
    if _stacked(name):
        return (1 if name.startswith("encoder/") else 2), layer
    return (0 if "embedding" in name else 3), 0
