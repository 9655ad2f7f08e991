"""The decoder stack and the language model around it."""

import dataclasses
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax import config
from transformer_jax.config import ModelConfig, unknown
from transformer_jax.errors import ConfigError
from transformer_jax.nn.attention import KVCache, MultiHeadAttention
from transformer_jax.nn.axes import constrain
from transformer_jax.nn.layers import INITS, Embedding, FeedForward, Head, Inits, make_norm
from transformer_jax.nn.masks import causal_mask, combine_masks, padding_mask, window_mask
from transformer_jax.nn.positions import alibi_bias, sinusoidal, token_positions

_CHOICES = {
    "positions": config.Positions,
    "norm_position": config.NormPosition,
    "attention": config.Attention,
    "residual": config.Residual,
}
"""Fields whose values are names that stand only here; the others are looked up in a table of implementations."""


class _Blocks(nn.Module):
    """The fields that layers, stacks and models share; each stands in `ModelConfig` under the same name.

    Attributes:
      d_model: Width (D).
      num_heads, num_kv_heads: Query heads (H), and key and value heads (G; None means H).
      num_layers: Depth (L); the initialisation "gpt2" depends on it.
      weight_init: `ModelConfig.init`, whose name a Flax module needs for itself.
      d_ff: Hidden width (F); None means 4 * D, or 8/3 D for "swiglu".
      positions: "rotary" and "alibi" act inside attention, the others before the first layer.
      rotary_base, norm, norm_position, norm_eps, norm_affine, attention, qk_norm, window, feed_forward,
      residual, use_bias, dropout, attention_dropout, compute_dtype: See `ModelConfig`.
    """

    d_model: int
    num_heads: int = 4
    num_kv_heads: int | None = None
    num_layers: int = 1
    d_ff: int | None = None
    positions: str = "none"
    rotary_base: float = 10_000.0
    norm: str = "layer"
    norm_position: str = "pre"
    norm_eps: float = 1e-5
    norm_affine: bool = True
    attention: str = "full"
    qk_norm: bool = False
    window: int | None = None
    feed_forward: str = "relu"
    residual: str = "add"
    use_bias: bool = True
    weight_init: str = "xavier"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    compute_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(unknown(f"value for {name}:", getattr(self, name), get_args(choices)))
        super().__post_init__()

    def _shared(self, kind: type["_Blocks"]) -> dict[str, Any]:
        """The fields that a part of that kind has in common with this one."""
        return {name: getattr(self, name) for name in _fields(kind)}

    @property
    def _inits(self) -> Inits:
        if self.weight_init not in INITS:
            raise ConfigError(unknown("init", self.weight_init, INITS))
        return INITS[self.weight_init](self.num_layers)

    def _norm(self, name: str) -> Any:
        return make_norm(self.norm, eps=self.norm_eps, affine=self.norm_affine, use_bias=self.use_bias, name=name)


def _fields(kind: type[nn.Module]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in ("parent", "name")]


class DecoderLayer(_Blocks):
    """Self-attention and a feed-forward, each with norm and residual (Vaswani et al. 2017, section 3.1).

    What may attend to what comes from outside: `Decoder` gives its layers the causal mask.
    """

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
        """[B, T, D] -> [B, T, D], and the cache where one was given; arguments as in `MultiHeadAttention`."""
        inits = self._inits

        def sublayer(x: jax.Array, y: jax.Array, name: str) -> jax.Array:
            """Dropout, residual and, post-norm, the norm."""
            y = nn.Dropout(self.dropout, deterministic=deterministic)(y)
            y = x + y if self.residual == "add" else y
            return self._norm(name)(y) if self.norm_position == "post" else y

        def before(x: jax.Array, name: str) -> jax.Array:
            return self._norm(name)(x) if self.norm_position == "pre" else x

        if self.attention != "none":
            attended = MultiHeadAttention(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                rotary_base=self.rotary_base if self.positions == "rotary" else None,
                qk_norm=self._head_norm if self.qk_norm else None,
                use_bias=self.use_bias,
                dropout=self.attention_dropout,
                dtype=self.compute_dtype,
                kernel_init=inits.kernel,
                output_init=inits.output,
                name="self_attention",
            )(
                before(x, "self_attention_norm"),
                mask=mask,
                bias=bias,
                positions=positions,
                cache=cache,
                layer=layer,
                slots=slots,
                deterministic=deterministic,
            )
            if cache is not None:
                attended, cache = attended
            x = sublayer(x, attended, "self_attention_norm")
        if self.feed_forward != "none":
            y = FeedForward(
                d_ff=self.d_ff or (8 * self.d_model // 3 if self.feed_forward == "swiglu" else 4 * self.d_model),
                activation=self.feed_forward,
                use_bias=self.use_bias,
                dtype=self.compute_dtype,
                kernel_init=inits.kernel,
                output_init=inits.output,
                name="ffn",
            )(before(x, "ffn_norm"))
            x = sublayer(x, y, "ffn_norm")
        x = constrain(x, "batch", "length", "embed")
        return x if cache is None else (x, cache)

    def _head_norm(self, name: str) -> Any:
        """Query-key norm (Henry et al. 2020; Dehghani et al. 2023, section 2), always by root mean square."""
        return make_norm("rms", eps=self.norm_eps, affine=self.norm_affine, use_bias=False, name=name)


class _Stack(_Blocks):
    """The fields of a whole stack.

    Attributes:
      final_norm: One more norm after the last layer of a pre-norm stack.
      unroll: Layers compiled as straight code; never changes the parameters.
      remat: Recompute each layer in the backward pass.
    """

    final_norm: bool = True
    unroll: int = 1
    remat: bool = False


class Decoder(_Stack):
    """A causal stack. The layers' parameters are stacked: each has a leading axis L."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        valid: jax.Array | None = None,
        cache: KVCache | None = None,
        deterministic: bool = True,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Runs the layers.

        Args:
          x: [B, T, D].
          positions: int32 [B or 1, T]; None counts the valid tokens of each row, after those in the cache.
          valid: bool [B, T], True where a token is real; None means all. With a cache, padding stands on the
            right and is not stored.
          cache: Keys and values of earlier tokens. Tokens that find no room are dropped, and their logits and
            those after them are finite but meaningless; a call outside jit refuses.
          deterministic: Turns dropout off.

        Returns:
          [B, T, D], and the cache with the new tokens where one was given.
        """
        batch, length, _ = x.shape
        if positions is None:
            positions = token_positions(length, valid, None if cache is None else cache.length)
        if cache is None:
            key_positions, slots, keys_valid = positions, None, valid
        else:
            new_length = cache.length + (length if valid is None else jnp.sum(valid, axis=1, dtype=jnp.int32))
            needed = _concrete(new_length.max())
            if needed is not None and needed > cache.capacity:
                raise ConfigError(f"the cache holds {cache.capacity} tokens and would need {needed}; make it longer")
            key_positions = jnp.arange(cache.capacity, dtype=jnp.int32)[None, :]
            slots = jnp.broadcast_to(positions, (batch, length))
            slots = slots if valid is None else jnp.where(valid, slots, cache.capacity)
            keys_valid = None  # Slots up to a query's own position are always filled.

        mask = combine_masks(
            causal_mask(positions, key_positions),
            None if self.window is None else window_mask(positions, key_positions, self.window),
            None if keys_valid is None else padding_mask(keys_valid),
        )
        bias = alibi_bias(self.num_heads, positions, key_positions) if self.positions == "alibi" else None

        def body(layer: DecoderLayer, carry: tuple, index: jax.Array) -> tuple[tuple, None]:
            x, cache = carry
            out = layer(
                x,
                mask=mask,
                bias=bias,
                positions=positions,
                cache=cache,
                layer=index,
                slots=slots,
                deterministic=deterministic,
            )
            return ((out, None) if cache is None else out), None

        # The cache is carried: as a scanned input and output it would be copied at each token.
        scan = nn.scan(
            nn.remat(body, prevent_cse=False) if self.remat else body,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.num_layers,
            unroll=min(self.unroll, self.num_layers),
        )
        layers = DecoderLayer(**self._shared(DecoderLayer), name="layers")
        (x, cache), _ = scan(layers, (x, cache), jnp.arange(self.num_layers))
        if self.final_norm and self.norm_position == "pre":
            x = self._norm("output_norm")(x)
        return x if cache is None else (x, cache.replace(length=jnp.minimum(new_length, cache.capacity)))


class Transformer(_Stack):
    """A decoder-only language model: token embedding, positions, stack, head.

    Attributes:
      vocab_size: Symbols (V).
      context: Rows of a learned position table; other kinds of positions have no limit.
      tie_embeddings: The head reuses the token embedding (Press & Wolf 2017).
      scale_embeddings: Multiply embeddings by sqrt(D).
      head_bias: Bias of the head.
    """

    vocab_size: int = 0
    context: int = 0
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    head_bias: bool = False

    @nn.compact
    def __call__(
        self,
        ids: jax.Array,
        *,
        valid: jax.Array | None = None,
        cache: KVCache | None = None,
        deterministic: bool = True,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Predicts each next symbol.

        Args:
          ids: int [B, T].
          valid: bool [B, T], True where a token is real; None means all. What padding holds never matters.
          cache: From `init_cache`; then ids are the tokens that follow those in the cache.
          deterministic: Turns dropout off; otherwise pass rngs={"dropout": key}.

        Returns:
          logits float32 [B, T, V], and the new cache where one was given.

        Raises:
          ConfigError: For ids that are not int [B, T] or, outside jit, not in [0, V); a valid that is not
            bool [B, T]; more tokens than a learned table or, outside jit, the cache can hold.
        """
        self._check(ids, valid, cache)
        inits = self._inits
        positions = token_positions(ids.shape[1], valid, None if cache is None else cache.length)
        embedding = Embedding(self.vocab_size, self.d_model, inits.embedding, name="token_embedding")
        x = embedding(ids, self.compute_dtype)
        if self.scale_embeddings:
            x = x * jnp.asarray(self.d_model**0.5, x.dtype)
        if self.positions == "learned":
            table = Embedding(self.context, self.d_model, inits.embedding, name="position_embedding")
            x = x + table(positions, self.compute_dtype)
        elif self.positions == "sinusoidal":
            x = x + sinusoidal(positions, self.d_model).astype(x.dtype)
        x = nn.Dropout(self.dropout, deterministic=deterministic)(x)
        x = constrain(x, "batch", "length", "embed")

        decoder = Decoder(**self._shared(Decoder), name="decoder")
        x = decoder(x, positions=positions, valid=valid, cache=cache, deterministic=deterministic)
        if cache is not None:
            x, cache = x

        if self.tie_embeddings:
            logits = embedding.attend(x)
        else:
            logits = Head(self.vocab_size, self.head_bias, inits.head, name="head")(x)
        logits = constrain(logits, "batch", "length", "vocab")
        return logits if cache is None else (logits, cache)

    def init_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for `batch_size` rows of at most `max_length` tokens; needs no parameters.

        Raises:
          ConfigError: For a length beyond a learned position table.
        """
        if self.positions == "learned" and max_length > self.context:
            raise ConfigError(f"a cache of {max_length} tokens is longer than the {self.context} learned positions")
        num_kv_heads = self.num_kv_heads or self.num_heads
        shape = (self.num_layers, batch_size, max_length, num_kv_heads, self.d_model // self.num_heads)
        dtype = jnp.dtype(self.compute_dtype)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch_size,), jnp.int32))

    def _check(self, ids: jax.Array, valid: jax.Array | None, cache: KVCache | None) -> None:
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ConfigError(f"ids must be whole numbers [B, T], got {ids.dtype}{list(ids.shape)}")
        if valid is not None and (valid.shape != ids.shape or valid.dtype != jnp.bool_):
            raise ConfigError(f"valid must be bool{list(ids.shape)}, got {valid.dtype}{list(valid.shape)}")
        if self.positions == "learned" and cache is None and ids.shape[1] > self.context:
            raise ConfigError(f"{ids.shape[1]} tokens are more than the {self.context} learned positions")
        if ids.size:
            lowest, highest = _concrete(ids.min()), _concrete(ids.max())
            if lowest is not None and highest is not None and not 0 <= lowest <= highest < self.vocab_size:
                raise ConfigError(f"ids must be in [0, {self.vocab_size}), got {lowest} to {highest}")


def create_model(model_config: ModelConfig) -> Transformer:
    """The model that a config describes: `init(key, ids)` gives its parameters, `apply` its logits.

    Raises:
      ConfigError: If vocab_size is not set.
    """
    if model_config.vocab_size is None:
        raise ConfigError("model.vocab_size is not set: give the number of symbols, or resolve it from the data")
    fields = {name: getattr(model_config, name) for name in _fields(Transformer) if name != "weight_init"}
    return Transformer(**fields, weight_init=model_config.init)


def _concrete(x: jax.Array) -> int | None:
    """The value of a scalar, or None inside jit, where values cannot be seen."""
    try:
        return int(x)
    except jax.errors.ConcretizationTypeError:
        return None
