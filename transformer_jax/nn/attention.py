"""Attention: the product, and the multi-head module (Vaswani et al. 2017, section 3.2)."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.errors import ConfigError
from transformer_jax.nn import kernels
from transformer_jax.nn.axes import constrain
from transformer_jax.nn.cache import LayerCache
from transformer_jax.nn.inputs import check_array, check_floats, check_valid
from transformer_jax.nn.masks import IndexMask
from transformer_jax.nn.positions import rotary


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | IndexMask | None = None,
    bias: jax.Array | None = None,
    *,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    implementation: str = "xla",
    return_weights: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(Q K^T / sqrt(K) + bias) V, with the softmax in float32.

    Args:
      query: [B, T, H, K].
      key: [B, S, G, K], where G divides H: head h reads key head h // (H / G).
      value: [B, S, G, K].
      mask: bool [B or 1, H or 1, T or 1, S], True = may attend; or an `IndexMask`, which fused kernels can use. A
        query that may attend to nothing gets a mean of values: finite, to be ignored.
      bias: float32 [B or 1, H or 1, T or 1, S], added to the scaled scores.
      dropout: Applied to the attention weights.
      implementation: "xla", "cudnn", "tpu" or "auto"; see `transformer_jax.nn.kernels`.
      return_weights: Also return the attention weights, before dropout.

    Returns:
      [B, T, H, K], in the dtype of value; with the weights, float32 [B, H, T, S], where asked for.

    Raises:
      ConfigError: For ranks, sizes or mask dtypes that do not fit, or an implementation that cannot do this.

    Example:
      >>> x = jnp.ones((1, 3, 2, 4))
      >>> dot_product_attention(x, x, x, IndexMask(causal=True)).shape
      (1, 3, 2, 4)
    """
    _check(query, key, value, mask, bias)
    batch, length, num_heads, head_dim = query.shape
    key_length, num_kv_heads = key.shape[1:3]
    index = mask if isinstance(mask, IndexMask) else IndexMask()
    if implementation != "xla":
        present = {
            "captured attention weights": return_weights,
            "dropout of attention weights": dropout is not None,
            "ALiBi or another bias": bias is not None,
            "a mask given as an array": mask is not None and mask is not index,
            "a window together with padding": index.window is not None and index.valid is not None,
            "a window": index.window is not None,
            "padding": index.valid is not None,
            "grouped heads": num_kv_heads != num_heads,
            "float32": any(x.dtype not in (jnp.bfloat16, jnp.float16) for x in (query, key, value)),
        }
        implementation, _ = kernels.choose(
            implementation,
            [need for need, needed in present.items() if needed],
            head_dim=head_dim,
            lengths=(length, key_length),
            causal=index.causal,
            sizes={"batch": batch, "heads": num_heads, "kv_heads": num_kv_heads},
        )
    if implementation == "cudnn":
        return kernels.cudnn(query, key, value, mask, bias)
    if implementation == "tpu":
        return kernels.splash(query, key, value, mask)

    groups = num_heads // num_kv_heads
    if isinstance(mask, IndexMask):
        mask = mask.dense(length, key_length)

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
    dropped = weights if dropout is None else dropout(weights)
    out = jnp.einsum("BGRTS,BSGK->BTGRK", dropped.astype(value.dtype), value)
    out = out.reshape(batch, length, num_heads, head_dim)
    return (out, weights.reshape(batch, num_heads, length, key_length)) if return_weights else out


def _check(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, bias: jax.Array | None) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_floats(name, array, "B T H K")
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or key.shape != value.shape:
        raise ConfigError(f"query [B, T, H, K], key and value [B, S, G, K] do not fit together: {shapes}")
    if not key.shape[2] or query.shape[2] % key.shape[2]:
        raise ConfigError(f"{query.shape[2]} query heads are no multiple of {key.shape[2]} key heads")
    full = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
    if isinstance(mask, IndexMask) and mask.valid is not None:
        check_array("valid", mask.valid)
        check_valid("valid", mask.valid, (1 if mask.valid.shape[:1] == (1,) else full[0], full[3]))
    for name, array, kind in (("mask", mask, jnp.bool_), ("bias", bias, jnp.floating)):
        if array is None or isinstance(array, IndexMask):
            continue
        check_array(name, array)
        if not jnp.issubdtype(array.dtype, kind):
            said = "bool, True = may attend" if name == "mask" else "a float, added to the scores"
            raise ConfigError(f"a {name} must be {said}, got {array.dtype}{list(array.shape)}")
        if array.ndim != 4 or any(size not in (1, whole) for size, whole in zip(array.shape, full, strict=True)):
            raise ConfigError(f"a {name} must broadcast to [B, H, T, S] = {list(full)}, got {list(array.shape)}")


class MultiHeadAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, to itself or to a source (Ainslie et al. 2023, the groups).

    Attributes:
      num_heads: Query heads (H).
      num_kv_heads: Key and value heads (G); None means H, 1 is multi-query.
      rotary_base: Rotary positions with this base; None means none. For self-attention only.
      qk_norm: Makes the norm of queries and keys over head_dim; None means none.
      use_bias: Biases of the four linear maps.
      dropout: Rate on the attention weights.
      implementation: As in `dot_product_attention`; with a cache, and to make parameters, always "xla".
      dtype: Type of the matrix products.
      kernel_init: Of queries, keys and values.
      output_init: Of the output projection.

    Example:
      >>> attention, x = MultiHeadAttention(num_heads=4, num_kv_heads=2), jnp.ones((2, 5, 16))
      >>> params = attention.init(jax.random.key(0), x)["params"]
      >>> attention.apply({"params": params}, x, mask=IndexMask(causal=True)).shape
      (2, 5, 16)
      >>> params["key"]["kernel"].shape
      (16, 2, 4)
    """

    num_heads: int
    num_kv_heads: int | None = None
    rotary_base: float | None = None
    qk_norm: Callable[..., nn.Module] | None = None
    use_bias: bool = True
    dropout: float = 0.0
    implementation: str = "auto"
    dtype: Any = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    output_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        *,
        mask: jax.Array | IndexMask | None = None,
        bias: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: LayerCache | None = None,
        return_weights: bool = False,
        deterministic: bool = True,
    ) -> Any:
        """Attends from x to x, to all that a cache then holds, or to a source.

        Args:
          x: [B, T, D].
          memory: Cross-attention: the source [B, S, D], or its keys and values from `project_memory`.
          mask: bool [B or 1, H or 1, T or 1, S], True = may attend; or an `IndexMask`.
          bias: float32 [B or 1, H or 1, T or 1, S].
          positions: int32 [B or 1, T], for rotary positions; None means 0 to T - 1.
          cache: Where the new keys and values go, and those before them are.
          return_weights: Also return the attention weights.
          deterministic: Turns dropout off.

        Returns:
          [B, T, D]; then the cache with the new keys and values where one was given; then the weights, float32
          [B, H, T, S], where asked for.

        Raises:
          ConfigError: If the heads do not divide D, or x or memory are not floats [B, T, D].
        """
        num_kv_heads, head_dim = self._sizes(x)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if memory is not None and not isinstance(memory, tuple):
            check_floats("memory", memory, "B S D")
        query = constrain(self._project("query", self.num_heads, head_dim)(x), "batch", "length", "heads", "head_dim")
        norm = (lambda name: lambda y: y) if self.qk_norm is None else (lambda name: self.qk_norm(name=name))
        query = norm("query_norm")(query)
        if isinstance(memory, tuple):
            key, value = memory
        else:
            source = x if memory is None else memory
            key, value = (self._project(name, num_kv_heads, head_dim)(source) for name in ("key", "value"))
            key, value = (constrain(y, "batch", "length", "kv_heads", "head_dim") for y in (key, value))
            key = norm("key_norm")(key)
        if memory is None and self.rotary_base is not None:
            if positions is None:
                positions = jnp.arange(x.shape[1])[None, :]
            query = rotary(query, positions, self.rotary_base)
            key = rotary(key, positions, self.rotary_base)
        if cache is not None:
            cache, key, value = cache.write(key, value)
        # Parameters are made from inputs of any length, on any machine.
        plain = cache is not None or isinstance(memory, tuple) or self.is_initializing()
        dropping = self.dropout > 0 and not deterministic
        result = dot_product_attention(
            query,
            key,
            value,
            mask,
            bias,
            dropout=nn.Dropout(self.dropout, deterministic=False) if dropping else None,
            implementation="xla" if plain else self.implementation,
            return_weights=return_weights,
        )
        out, weights = result if return_weights else (result, None)
        out = nn.DenseGeneral(
            x.shape[-1],
            axis=(-2, -1),
            use_bias=self.use_bias,
            dtype=self.dtype,
            kernel_init=self.output_init,
            name="output",
        )(out)
        return given(out, cache, weights)

    @nn.nowrap
    def project_memory(self, params: Any, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A source's keys and values, to compute once for many steps.

        Args:
          params: This module's parameters.
          memory: [B, S, D].

        Returns:
          Keys and values, each [B, S, G, K].
        """
        num_kv_heads, head_dim = self._sizes(memory)
        key, value = (
            self._project(None, num_kv_heads, head_dim).apply({"params": params[name]}, memory)
            for name in ("key", "value")
        )
        if self.qk_norm is not None:
            key = self.qk_norm(name=None).apply({"params": params.get("key_norm", {})}, key)
        return key, value

    @nn.nowrap
    def _sizes(self, x: jax.Array) -> tuple[int, int]:
        """G and K for inputs of that width."""
        check_floats("x", x, "B T D")
        if self.num_heads < 1 or x.shape[-1] % self.num_heads:
            raise ConfigError(f"num_heads {self.num_heads} does not divide d_model {x.shape[-1]}")
        return self.num_kv_heads or self.num_heads, x.shape[-1] // self.num_heads

    @nn.nowrap
    def _project(self, name: str | None, heads: int, head_dim: int) -> nn.DenseGeneral:
        return nn.DenseGeneral(
            (heads, head_dim), use_bias=self.use_bias, dtype=self.dtype, kernel_init=self.kernel_init, name=name
        )


def given(*values: Any) -> Any:
    """The values that are there: one alone, several as a tuple. What a module returns when asked for more."""
    kept = tuple(value for value in values if value is not None)
    return kept[0] if len(kept) == 1 else kept


def taken(result: Any, *asked: bool) -> tuple[Any, ...]:
    """The inverse of `given`: the first value and, for each further one, whether it was asked for."""
    values = iter(result if any(asked) else (result,))
    return (next(values), *(next(values) if wanted else None for wanted in asked))
