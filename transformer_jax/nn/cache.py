"""What a decoder remembers of earlier tokens: keys and values, as an argument and a result."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class KVCache:
    """Keys and values of the tokens seen so far. Row b holds positions 0 to length[b] - 1.

    Each head's places follow each other in memory, as the products read them: a step that had to bring them into that
    order would take twice as long.

    Attributes:
      keys: [L, B, G, S, K], after rotary positions.
      values: [L, B, G, S, K].
      length: int32 [B], real tokens in each row, so that rows may differ.
      memory: For cross-attention, the keys and values of the source in each layer, each [L, B, G, S', K].
      memory_valid: bool [B, S'], which of the source's places are real; None means all.

    Example:
      >>> from transformer_jax import ModelConfig, create_model
      >>> cache = create_model(ModelConfig(vocab_size=65)).init_cache(batch_size=2, max_length=16)
      >>> cache.capacity, cache.length.tolist(), cache.keys.shape
      (16, [0, 0], (4, 2, 4, 16, 32))
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array
    memory: tuple[jax.Array, jax.Array] | None = None
    memory_valid: jax.Array | None = None

    @property
    def capacity(self) -> int:
        """Tokens a row can hold (S)."""
        return self.keys.shape[3]

    def cleared(self) -> "KVCache":
        """Without its tokens; a source stays."""
        return self.replace(length=jnp.zeros_like(self.length))

    def rows(self, index: jax.Array) -> "KVCache":
        """The rows at an index, int32 [B']. With a source B' is B, and each must come from one of the same source."""
        return self.replace(keys=self.keys[:, index], values=self.values[:, index], length=self.length[index])


@flax.struct.dataclass
class LayerCache:
    """One layer's view of a cache, and where its new keys go.

    Attributes:
      cache: All layers.
      layer: Index into L.
      slots: int32 [B, T], where each new token goes; a slot past the end is dropped, never clamped.
    """

    cache: KVCache
    layer: jax.Array | int
    slots: jax.Array

    def write(self, keys: jax.Array, values: jax.Array) -> tuple["LayerCache", jax.Array, jax.Array]:
        """Stores new keys and values, each [B, T, G, K].

        Returns:
          The view of the new cache (its length unchanged), and all keys and values of this layer, each [B, S, G, K].
        """
        cache, rows = self.cache, jnp.arange(self.slots.shape[0])[:, None]
        place = self.layer, rows, slice(None), self.slots
        new = cache.replace(
            keys=cache.keys.at[place].set(keys.astype(cache.keys.dtype), mode="drop"),
            values=cache.values.at[place].set(values.astype(cache.values.dtype), mode="drop"),
        )
        return self.replace(cache=new), *self._read((new.keys, new.values))

    @property
    def memory(self) -> tuple[jax.Array, jax.Array] | None:
        """The layer's keys and values of the source, each [B, S', G, K]."""
        return None if self.cache.memory is None else self._read(self.cache.memory)

    def _read(self, both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Of keys and values this layer, as attention takes them: [L, B, G, S, K] -> [B, S, G, K]."""
        return jax.tree.map(lambda x: x[self.layer].swapaxes(1, 2), both)
