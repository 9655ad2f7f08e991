"""Attention: the product, and the multi-head module with its cache (Vaswani et al. 2017, section 3.2)."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.errors import ConfigError
from transformer_jax.nn.axes import constrain
from transformer_jax.nn.positions import rotary


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """softmax(Q K^T / sqrt(K) + bias) V, with the softmax in float32.

    Args:
      query: [B, T, H, K].
      key: [B, S, G, K], where G divides H: head h reads key head h // (H / G).
      value: [B, S, G, K].
      mask: bool [B or 1, H or 1, T, S], True = may attend. A query that may attend to nothing gets the mean of
        the values: finite, to be ignored.
      bias: float32 [B or 1, H or 1, T, S], added to the scaled scores.
      dropout: Applied to the attention weights.

    Returns:
      [B, T, H, K], in the dtype of value.

    Raises:
      ConfigError: For ranks, head counts or mask dtypes that do not fit.
    """
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ConfigError(f"query, key and value must have rank 4, got {query.shape}, {key.shape}, {value.shape}")
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads are no multiple of {num_kv_heads} key heads")
    if mask is not None and mask.dtype != jnp.bool_:
        raise ConfigError(f"a mask must be bool, True = may attend, got {mask.dtype}")
    groups = num_heads // num_kv_heads

    def grouped(x: jax.Array) -> jax.Array:
        """[B, H or 1, T, S] -> [B, G or 1, H/G or 1, T, S]."""
        return x[:, :, None] if x.shape[1] == 1 else x.reshape(x.shape[0], num_kv_heads, groups, *x.shape[2:])

    query = query.reshape(batch, length, num_kv_heads, groups, head_dim)
    scores = jnp.einsum("BTGRK,BSGK->BGRTS", query, key, preferred_element_type=jnp.float32) * head_dim**-0.5
    if bias is not None:
        scores = scores + grouped(bias)
    if mask is not None:
        scores = jnp.where(grouped(mask), scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if dropout is not None:
        weights = dropout(weights)
    out = jnp.einsum("BGRTS,BSGK->BTGRK", weights.astype(value.dtype), value)
    return out.reshape(batch, length, num_heads, head_dim)


@flax.struct.dataclass
class KVCache:
    """Keys and values of the tokens seen so far. Row b holds positions 0 to length[b] - 1.

    Attributes:
      keys: [L, B, S, G, K], after rotary positions.
      values: [L, B, S, G, K].
      length: int32 [B], real tokens in each row, so that rows may differ.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Tokens a row can hold (S)."""
        return self.keys.shape[2]

    def write(
        self, layer: jax.Array | int, slots: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple["KVCache", jax.Array, jax.Array]:
        """Stores one layer's new keys and values.

        Args:
          layer: Index into L.
          slots: int32 [B, T], where each token goes; a slot past the end is dropped, never clamped.
          keys: [B, T, G, K].
          values: [B, T, G, K].

        Returns:
          The cache (length unchanged), and all keys and values of this layer, each [B, S, G, K].
        """
        rows = jnp.arange(slots.shape[0])[:, None]
        new = self.replace(
            keys=self.keys.at[layer, rows, slots].set(keys.astype(self.keys.dtype), mode="drop"),
            values=self.values.at[layer, rows, slots].set(values.astype(self.values.dtype), mode="drop"),
        )
        return new, new.keys[layer], new.values[layer]


class MultiHeadAttention(nn.Module):
    """Multi-head, grouped-query or multi-query self-attention (Ainslie et al. 2023 for the groups).

    Attributes:
      num_heads: Query heads (H).
      num_kv_heads: Key and value heads (G); None means H, 1 is multi-query.
      rotary_base: Rotary positions with this base; None means none.
      qk_norm: Makes the norm of queries and keys over head_dim; None means none.
      use_bias: Biases of the four linear maps.
      dropout: Rate on the attention weights.
      dtype: Type of the matrix products.
      kernel_init: Of queries, keys and values.
      output_init: Of the output projection.
    """

    num_heads: int
    num_kv_heads: int | None = None
    rotary_base: float | None = None
    qk_norm: Callable[..., nn.Module] | None = None
    use_bias: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    output_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: KVCache | None = None,
        layer: jax.Array | int = 0,
        slots: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Attends from x to x, or with a cache to all that the cache then holds.

        Args:
          x: [B, T, D].
          mask: bool [B or 1, H or 1, T, S], True = may attend.
          bias: float32 [B or 1, H or 1, T, S].
          positions: int32 [B or 1, T], for rotary positions; None means 0 to T - 1.
          cache: Holds S slots; without one S = T.
          layer: Which of the cache's layers this is.
          slots: int32 [B, T], where the new keys go in the cache.
          deterministic: Turns dropout off.

        Returns:
          [B, T, D], and the cache with the new keys and values where one was given.

        Raises:
          ConfigError: If the heads do not divide D.
        """
        d_model = x.shape[-1]
        num_kv_heads = self.num_kv_heads or self.num_heads
        if d_model % self.num_heads:
            raise ConfigError(f"num_heads {self.num_heads} does not divide d_model {d_model}")
        head_dim = d_model // self.num_heads

        def project(name: str, heads: int) -> jax.Array:
            return nn.DenseGeneral(
                (heads, head_dim), use_bias=self.use_bias, dtype=self.dtype, kernel_init=self.kernel_init, name=name
            )(x)

        query = constrain(project("query", self.num_heads), "batch", "length", "heads", "head_dim")
        key = constrain(project("key", num_kv_heads), "batch", "length", "kv_heads", "head_dim")
        value = constrain(project("value", num_kv_heads), "batch", "length", "kv_heads", "head_dim")
        if self.qk_norm is not None:
            query, key = self.qk_norm(name="query_norm")(query), self.qk_norm(name="key_norm")(key)
        if self.rotary_base is not None:
            if positions is None:
                positions = jnp.arange(x.shape[1])[None, :]
            query = rotary(query, positions, self.rotary_base)
            key = rotary(key, positions, self.rotary_base)
        if cache is not None:
            if slots is None:
                raise ConfigError("attention with a cache needs slots: int32 [B, T], where the new keys go")
            cache, key, value = cache.write(layer, slots, key, value)
        dropout = nn.Dropout(self.dropout, deterministic=deterministic) if self.dropout else None
        out = dot_product_attention(query, key, value, mask, bias, dropout=dropout)
        out = nn.DenseGeneral(
            d_model,
            axis=(-2, -1),
            use_bias=self.use_bias,
            dtype=self.dtype,
            kernel_init=self.output_init,
            name="output",
        )(out)
        return out if cache is None else (out, cache)
