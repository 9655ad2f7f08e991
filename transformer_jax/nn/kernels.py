"""Ways to compute attention over whole sequences that give the same answer, and what each of them can do.

The plain way, "xla", does everything and stores the T x S scores. The fused kernels do not store them: "cudnn" is flash
attention on NVIDIA GPUs, by `jax.nn.dot_product_attention`; "tpu" is the splash attention that comes with JAX.
"""

from collections.abc import Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.checks import unknown
from transformer_jax.config import ModelConfig
from transformer_jax.errors import ConfigError
from transformer_jax.nn.axes import parts
from transformer_jax.nn.masks import IndexMask

SUPPORT: dict[str, dict[str, bool]] = {
    "xla": {
        "grouped heads": True,
        "padding": True,
        "a window": True,
        "a window together with padding": True,
        "ALiBi or another bias": True,
        "a mask given as an array": True,
        "float32": True,
        "dropout of attention weights": True,
        "captured attention weights": True,
    },
    "cudnn": {
        "grouped heads": True,
        "padding": True,
        "a window": True,  # causal only, checked apart
        "a window together with padding": False,
        "ALiBi or another bias": True,
        "a mask given as an array": True,
        "float32": False,
        "dropout of attention weights": False,
        "captured attention weights": False,
    },
    "tpu": {
        "grouped heads": True,
        "padding": True,
        "a window": True,
        "a window together with padding": False,
        "ALiBi or another bias": False,
        "a mask given as an array": False,
        "float32": True,
        "dropout of attention weights": False,
        "captured attention weights": False,
    },
}
"""What each implementation can do. Steps with a cache always go by "xla"."""

_PLATFORM = {"cudnn": "gpu", "tpu": "tpu"}
_BLOCK = 128
"""Lanes of a TPU: lengths come in multiples of this, and head widths are filled up to it."""


def current_platform() -> str:
    """Where the program being traced will run: the current mesh's platform, or else that of the default device.

    The mesh may be of devices that are only described, as when a program is compiled for a machine one does not have.
    GPUs without the kernels of "cudnn" have a name of their own.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) or jax.config.jax_default_device
    platform = device if isinstance(device, str) else getattr(device, "platform", None) or jax.default_backend()
    if platform in ("gpu", "cuda"):
        first = jax.devices("gpu")[0]
        if "cuda" not in first.client.platform_version:
            return "rocm"
        return "gpu" if float(first.compute_capability) >= 8.0 else "a GPU older than Ampere"
    return platform


def choose(
    wanted: str,
    needs: Collection[str],
    *,
    head_dim: int,
    lengths: tuple[int, int],
    causal: bool,
    sizes: Mapping[str, int] | None = None,
    platform: str | None = None,
) -> tuple[str, str]:
    """Picks an implementation.

    Args:
      wanted: "auto", or a name of `SUPPORT`.
      needs: Names of features, as in `SUPPORT`.
      head_dim: K.
      lengths: T and S.
      causal: Whether the mask is causal.
      sizes: Of the axes "batch", "heads" and "kv_heads", as far as known: on a mesh they have to divide.
      platform: "cpu", "gpu" or "tpu"; None means `current_platform()`.

    Returns:
      The name, and why it was chosen.

    Raises:
      ConfigError: For an unknown name, or one that cannot be used here; with the reason.

    Example:
      >>> choose("auto", ["ALiBi or another bias"], head_dim=64, lengths=(256, 256), causal=True, platform="tpu")
      ('xla', 'tpu has no ALiBi or another bias')
    """
    if wanted not in ("auto", *SUPPORT):
        raise ConfigError(unknown("attention_impl", wanted, ("auto", *SUPPORT)))
    platform = platform or current_platform()
    if wanted == "xla":
        return "xla", "as asked"
    fused = wanted if wanted != "auto" else next((name for name, on in _PLATFORM.items() if on == platform), None)
    if fused is None:
        return "xla", f"no fused kernel for {platform}"
    obstacle = _obstacle(fused, needs, head_dim, lengths, causal, platform) or _mesh_obstacle(sizes or {})
    if obstacle is None:
        return fused, "as asked" if wanted != "auto" else f"fused, on {platform}"
    if wanted == "auto":
        return "xla", obstacle
    raise ConfigError(f"attention_impl {wanted!r} cannot be used here: {obstacle}; choose 'auto' or 'xla'")


def _obstacle(
    name: str, needs: Collection[str], head_dim: int, lengths: tuple[int, int], causal: bool, platform: str
) -> str | None:
    """Why a fused kernel cannot do this, or None."""
    if platform != _PLATFORM[name]:
        return f"{name} runs on {_PLATFORM[name]}, and this is for {platform}"
    for need in needs:
        if not SUPPORT[name][need]:
            return f"{name} has no {need}"
    if name == "cudnn":
        if head_dim % 8 or head_dim > 128:
            return f"cudnn needs a head_dim that is a multiple of 8 and at most 128, and it is {head_dim}"
        if any(length % 2 for length in lengths):
            return f"cudnn needs even lengths, and they are {lengths[0]} and {lengths[1]}"
        if "a window" in needs and not causal:
            return "cudnn has windows for causal attention only"
    if name == "tpu" and any(length % _BLOCK for length in lengths):
        return f"tpu needs lengths that are multiples of {_BLOCK}, and they are {lengths[0]} and {lengths[1]}"
    return None


def _mesh_obstacle(sizes: Mapping[str, int]) -> str | None:
    """Why each device cannot compute rows and heads of its own on the current mesh, or None."""
    for name, size in sizes.items():
        if size % parts(name):
            return f"{size} {name} do not divide into {parts(name)} parts of the mesh"
    if parts("length") > 1:
        return f"the rules cut sequences into {parts('length')} parts, and fused kernels need them whole"
    return None


def attends(model: ModelConfig) -> bool:
    """Whether a model has attention of any kind."""
    return not model.recurrent and (model.attention != "none" or model.architecture == "encoder_decoder")


def explain(model: ModelConfig, platform: str | None = None, *, length: int | None = None) -> str:
    """How a model's attention over whole windows will be computed, and why, such as "xla (no fused kernel for cpu)".

    Args:
      model: The architecture.
      platform: As for `choose`.
      length: Of the shortest windows; None means the context. An encoder-decoder's are taken to be padded.

    Raises:
      ConfigError: If attention_impl asks for what cannot be.
    """
    padded = model.architecture == "encoder_decoder"
    length = model.context if length is None else length
    present = {
        "padding": padded,
        "a window together with padding": padded and model.window is not None,
        "grouped heads": model.num_kv_heads not in (None, model.num_heads),
        "a window": model.window is not None,
        "ALiBi or another bias": model.positions == "alibi",
        "float32": model.compute_dtype == "float32",
        "dropout of attention weights": model.attention_dropout > 0,
    }
    name, reason = choose(
        model.attention_impl,
        [need for need, needed in present.items() if needed],
        head_dim=model.head_dim,
        lengths=(length, length),
        causal=model.architecture == "decoder",
        sizes={"heads": model.num_heads, "kv_heads": model.num_kv_heads or model.num_heads},
        platform=platform,
    )
    return f"{name} ({reason})"


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, bias: jax.Array | None) -> jax.Array:
    """Attention by cuDNN; arguments as in `dot_product_attention`.

    Masks and biases are stored as one bias in the type of the query, padding too; causal masks and windows are not.
    """
    causal, window = False, None
    if isinstance(mask, IndexMask):
        causal, window, valid = mask.causal, mask.window, mask.valid
        mask = None if valid is None else valid[:, None, None, :]

    def whole(x: jax.Array | None) -> jax.Array | None:
        """[B or 1, H or 1, T or 1, S or 1] -> [B or 1, H or 1, T, S]: cuDNN spreads rows and heads alone."""
        return None if x is None else jnp.broadcast_to(x, (*x.shape[:2], query.shape[1], key.shape[1]))

    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=None if bias is None else whole(bias.astype(query.dtype)),
        mask=whole(mask),
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def splash(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: IndexMask | None, *, interpret: bool = False
) -> jax.Array:
    """Attention by the TPU kernel; arguments as in `dot_product_attention`.

    On a mesh each device computes its own rows and heads, as the current axis rules place them.

    Args:
      query: [B, T, H, K].
      key: [B, S, G, K].
      value: [B, S, G, K].
      mask: What may be attended to.
      interpret: Run the kernel's own steps on any device: slow, for tests.
    """
    valid = None if mask is None else mask.valid
    valid = jnp.ones(key.shape[:2], bool) if valid is None else jnp.broadcast_to(valid, key.shape[:2])

    def local(query: jax.Array, key: jax.Array, value: jax.Array, valid: jax.Array) -> jax.Array:
        return _splash_on_one_device(query, key, value, valid, mask or IndexMask(), interpret)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(query, key, value, valid)
    heads = nn.logical_to_mesh_axes(("batch", "length", "heads", "head_dim"))
    kv_heads = nn.logical_to_mesh_axes(("batch", "length", "kv_heads", "head_dim"))
    rows = nn.logical_to_mesh_axes(("batch", "length"))
    shared = jax.shard_map(local, in_specs=(heads, kv_heads, kv_heads, rows), out_specs=heads, check_vma=False)
    return shared(query, key, value, valid)


def _splash_on_one_device(
    query: jax.Array, key: jax.Array, value: jax.Array, valid: jax.Array, mask: IndexMask, interpret: bool
) -> jax.Array:
    # Imported here: it takes half a second, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention

    length, num_heads, head_dim = query.shape[1:]
    shape = length, key.shape[1]
    if mask.window is None:
        one = splash_attention.CausalMask(shape) if mask.causal else splash_attention.FullMask(shape)
    else:
        reach = mask.window - 1
        one = splash_attention.LocalMask(shape, window_size=(reach, 0 if mask.causal else reach), offset=0)
    queries, keys = (next(size for size in (512, 256, _BLOCK) if length % size == 0) for length in shape)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([one] * num_heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash_attention.BlockSizes(
            block_q=queries,
            block_kv=keys,
            block_kv_compute=keys,
            block_q_dkv=queries,
            block_kv_dkv=keys,
            block_kv_dkv_compute=keys,
            block_q_dq=queries,
            block_kv_dq=keys,
        ),
        interpret=interpret,
    )

    def heads_first(x: jax.Array) -> jax.Array:
        """[B, T, H, K] -> [B, H, T, K'], with K filled up by zeros, which add nothing to a product."""
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -head_dim % _BLOCK)))
        return x.transpose(0, 2, 1, 3)

    def one_row(query: jax.Array, key: jax.Array, value: jax.Array, valid: jax.Array) -> jax.Array:
        segments = splash_attention.SegmentIds(q=jnp.ones((length,), jnp.int32), kv=valid.astype(jnp.int32))
        return kernel(query, key, value, segment_ids=segments)

    scaled = query * jnp.asarray(head_dim**-0.5, query.dtype)
    out = jax.vmap(one_row)(heads_first(scaled), heads_first(key), heads_first(value), valid)
    return out.transpose(0, 2, 1, 3)[..., :head_dim].astype(value.dtype)
