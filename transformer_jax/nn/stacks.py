"""Stacks of layers: an encoder that sees both sides, and a causal decoder with a cache and, if wanted, a source.

The layers' parameters are stacked: each has a leading axis L, whatever `unroll` says.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.errors import ConfigError
from transformer_jax.nn.attention import given, taken
from transformer_jax.nn.blocks import Blocks, DecoderLayer, EncoderLayer
from transformer_jax.nn.cache import KVCache, LayerCache
from transformer_jax.nn.inputs import check_cache, check_floats, check_valid, concrete
from transformer_jax.nn.masks import IndexMask, causal_mask, combine_masks, window_mask
from transformer_jax.nn.positions import alibi_bias, token_positions


class Stack(Blocks):
    """The fields of a whole stack.

    Attributes:
      final_norm: One more norm after the last layer of a pre-norm stack.
      unroll: Layers compiled as straight code; never changes the parameters.
      remat: Recompute each layer in the backward pass.
    """

    final_norm: bool = True
    unroll: int = 1
    remat: bool = False

    def _run(self, body: Any, layer: nn.Module, carry: tuple) -> tuple[tuple, Any]:
        """Applies the layers in turn: body(layer, carry, index) -> carry, captured."""
        # The cache is carried: as a scanned input and output it would be copied at each token.
        scan = nn.scan(
            nn.remat(body, prevent_cse=False) if self.remat else body,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.num_layers,
            unroll=min(self.unroll, self.num_layers),
        )
        return scan(layer, carry, jnp.arange(self.num_layers))

    def _finish(self, x: jax.Array) -> jax.Array:
        return self._norm("output_norm")(x) if self.final_norm and self.norm_position == "pre" else x

    def _bias(self, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        return alibi_bias(self.num_heads, queries, keys) if self.positions == "alibi" else None

    def _mask(self, valid: jax.Array | None, causal: bool, positions: jax.Array) -> jax.Array | IndexMask:
        """Who sees whom in whole sequences: by places in the array, unless a window must not count padding."""
        if self.window is None or valid is None:
            return IndexMask(valid, causal, self.window)
        near = window_mask(positions, window=self.window)
        return combine_masks(IndexMask(valid, causal).dense(*(positions.shape[1:] * 2)), near)

    def _checked(self, x: jax.Array, valid: jax.Array | None) -> jax.Array:
        """The input in the type of the matrix products, which the layers hand on."""
        check_floats("x", x, "B T D", self.d_model)
        check_valid("valid", valid, x.shape[:2])
        return x.astype(self.compute_dtype)


class Encoder(Stack):
    """A stack in which every token sees every other (Vaswani et al. 2017, section 3.1).

    Fields as in `ModelConfig`, with the defaults of a plain block. Of `positions`, "rotary" and "alibi" act here; the
    others are added before a stack, as the models do.

    Example:
      >>> encoder, x = Encoder(d_model=16, num_heads=4, num_layers=2), jnp.ones((2, 5, 16))
      >>> variables = jax.jit(encoder.init)(jax.random.key(0), x)
      >>> x, captured = jax.jit(lambda v, x: encoder.apply(v, x, capture=("attention",)))(variables, x)
      >>> x.shape, captured["attention"].shape
      ((2, 5, 16), (2, 2, 4, 5, 5))
    """

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        valid: jax.Array | None = None,
        capture: tuple[str, ...] = (),
        deterministic: bool = True,
    ) -> Any:
        """Runs the layers.

        Args:
          x: [B, T, D].
          valid: bool [B, T], True where a token is real; None means all. Padding is seen by nobody, and not counted
            by positions.
          capture: "attention", "hidden" or both.
          deterministic: Turns dropout off.

        Returns:
          [B, T, D]; with a capture also a dict: "attention" float32 [L, B, H, T, T], "hidden" [L, B, T, D], each
          layer's output before the final norm.

        Raises:
          ConfigError: For an x or a valid of another kind.
        """
        x = self._checked(x, valid)
        positions = token_positions(x.shape[1], valid)
        mask, bias = self._mask(valid, False, positions), self._bias(positions, positions)

        def body(layer: EncoderLayer, carry: tuple, index: jax.Array) -> tuple[tuple, Any]:
            out = layer(
                carry[0], mask=mask, bias=bias, positions=positions, capture=capture, deterministic=deterministic
            )
            x, captured = taken(out, bool(capture))
            return (x,), captured

        (x,), captured = self._run(body, EncoderLayer(**self._shared(EncoderLayer), name="layers"), (x,))
        return given(self._finish(x), captured)


class Decoder(Stack):
    """A causal stack (Vaswani et al. 2017, section 3.1; without a source as in Radford et al. 2018).

    Fields as in `ModelConfig`, with the defaults of a plain block. Of `positions`, "rotary" and "alibi" act here; the
    others are added before a stack, as the models do.

    Attributes:
      cross_attention: Each layer also reads a source.

    Example:
      >>> decoder, x = Decoder(d_model=16, num_heads=4, num_layers=2, cross_attention=True), jnp.ones((2, 5, 16))
      >>> memory = jnp.ones((2, 7, 16))
      >>> variables = jax.jit(decoder.init)(jax.random.key(0), x, memory)
      >>> jax.jit(decoder.apply)(variables, x, memory).shape
      (2, 5, 16)
    """

    cross_attention: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        valid: jax.Array | None = None,
        memory_valid: jax.Array | None = None,
        cache: KVCache | None = None,
        capture: tuple[str, ...] = (),
        deterministic: bool = True,
    ) -> Any:
        """Runs the layers.

        Args:
          x: [B, T, D].
          memory: [B, S', D], the encoder's output; not needed where the cache holds its keys and values.
          valid: bool [B, T], True where a token is real; None means all. With a cache, padding stands on the
            right and is not stored.
          memory_valid: bool [B, S'], True where a place of the source is real; None means all.
          cache: Keys and values of earlier tokens. Tokens that find no room are dropped, and their outputs and
            those after them are finite but meaningless; a call outside jit refuses.
          capture: "attention", "hidden" or both.
          deterministic: Turns dropout off.

        Returns:
          [B, T, D]; the cache with the new tokens where one was given; with a capture a dict: "attention" float32
          [L, B, H, T, S], "cross_attention" float32 [L, B, H, T, S'], "hidden" [L, B, T, D], each layer's output
          before the final norm.

        Raises:
          ConfigError: For inputs of another kind, cross-attention without a source, or outside jit a full cache.
        """
        x = self._checked(x, valid)
        if memory is not None:
            if cache is not None and cache.memory is not None:
                raise ConfigError("the cache holds a source already: give memory or the cache, not both")
            memory = real_memory(memory, memory_valid, x.shape[0])
        elif memory_valid is not None:
            raise ConfigError("memory_valid without memory: a cache has its own")
        batch, length, _ = x.shape
        positions = token_positions(length, valid, None if cache is None else cache.length)
        if cache is None:
            slots, mask, bias = None, self._mask(valid, True, positions), self._bias(positions, positions)
        else:
            self._check_cache(cache, batch)
            new_length = cache.length + (length if valid is None else jnp.sum(valid, axis=1, dtype=jnp.int32))
            needed = concrete(new_length.max())
            if needed is not None and needed > cache.capacity:
                raise ConfigError(f"the cache holds {cache.capacity} tokens and would need {needed}; make it longer")
            slots = jnp.broadcast_to(positions, (batch, length))
            slots = slots if valid is None else jnp.where(valid, slots, cache.capacity)
            places = jnp.arange(cache.capacity, dtype=jnp.int32)[None, :]
            # No mask for padding: slots up to a query's own position are always filled.
            near = None if self.window is None else window_mask(positions, places, window=self.window)
            mask, bias = combine_masks(causal_mask(positions, places), near), self._bias(positions, places)
            memory_valid = cache.memory_valid if cache.memory is not None else memory_valid
        memory_mask = None if memory_valid is None else IndexMask(memory_valid)

        def body(layer: DecoderLayer, carry: tuple, index: jax.Array) -> tuple[tuple, Any]:
            x, cache = carry
            out = layer(
                x,
                memory,
                mask=mask,
                bias=bias,
                memory_mask=memory_mask,
                positions=positions,
                cache=None if cache is None else LayerCache(cache, index, slots),
                capture=capture,
                deterministic=deterministic,
            )
            x, view, captured = taken(out, cache is not None, bool(capture))
            return (x, None if view is None else view.cache), captured

        layers = DecoderLayer(**self._shared(DecoderLayer), name="layers")
        (x, cache), captured = self._run(body, layers, (x, cache))
        if cache is not None:
            cache = cache.replace(length=jnp.minimum(new_length, cache.capacity))
        return given(self._finish(x), cache, captured)

    @nn.nowrap
    def _check_cache(self, cache: KVCache, batch: int) -> None:
        check_cache(cache, KVCache, batch)
        ours = self.num_layers, self.num_kv_heads or self.num_heads, self.d_model // self.num_heads
        layers, _, heads, _, head_dim = cache.keys.shape
        theirs = layers, heads, head_dim
        if ours != theirs:
            raise ConfigError(f"the cache is another model's: layers, key heads, head_dim {theirs}, and here {ours}")

    @nn.nowrap
    def empty_cache(self, batch_size: int, max_length: int) -> KVCache:
        """A cache without tokens and without a source, for rows of at most `max_length` tokens.

        Raises:
          ConfigError: For less than one row or token.
        """
        if batch_size < 1 or max_length < 1:
            raise ConfigError(f"a cache needs at least one row and one token, got {batch_size} and {max_length}")
        shape = self.num_layers, batch_size, self.num_kv_heads or self.num_heads, max_length
        keys = jnp.zeros((*shape, self.d_model // self.num_heads), jnp.dtype(self.compute_dtype))
        return KVCache(keys, keys, jnp.zeros((batch_size,), jnp.int32))

    @nn.nowrap
    def project_memory(self, params: Any, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A source's keys and values for each layer, [L, B, G, S, K], from the stack's parameters.

        Args:
          params: The stack's own.
          memory: From `real_memory`.
        """
        layer = DecoderLayer(**self._shared(DecoderLayer), parent=None)
        attention = layer.attention_module(None)
        projected = jax.vmap(attention.project_memory, (0, None))(params["layers"]["cross_attention"], memory)
        return jax.tree.map(lambda x: x.swapaxes(2, 3), projected)


def real_memory(memory: jax.Array, valid: jax.Array | None, batch: int) -> jax.Array:
    """A source with zeros where it is padding: a row that is nothing else is attended to all the same.

    Args:
      memory: [B, S, D].
      valid: bool [B, S], True where a place is real; None means all.
      batch: Rows of the target.

    Raises:
      ConfigError: For other shapes and types.
    """
    check_floats("memory", memory, "B S D")
    if memory.shape[0] != batch:
        raise ConfigError(f"memory must be [B, S, D] with B = {batch}, got {list(memory.shape)}")
    check_valid("memory_valid", valid, memory.shape[:2])
    return memory if valid is None else jnp.where(valid[..., None], memory, jnp.zeros((), memory.dtype))
