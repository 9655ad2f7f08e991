"""One layer: attention and feed-forward, each with norm and residual (Vaswani et al. 2017, section 3.1)."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax import config
from transformer_jax.checks import check_positive, check_rates, unknown
from transformer_jax.errors import ConfigError
from transformer_jax.nn.attention import MultiHeadAttention, given, taken
from transformer_jax.nn.axes import constrain
from transformer_jax.nn.cache import LayerCache
from transformer_jax.nn.inputs import check_capture, check_floats
from transformer_jax.nn.layers import INITS, FeedForward, Inits, feed_forward_width, make_norm
from transformer_jax.nn.masks import IndexMask

_CHOICES = {
    "positions": config.Positions,
    "norm_position": config.NormPosition,
    "attention": config.Attention,
    "residual": config.Residual,
    "attention_impl": config.AttentionImpl,
}
"""Fields whose values are names that stand only here; the others are looked up in a table of implementations."""

CAPTURES = ("attention", "hidden")
"""What `capture` can ask for: attention weights, and the output of each layer."""


class Blocks(nn.Module):
    """The fields that layers, stacks and models share; each stands in `ModelConfig` under the same name.

    The defaults are those of a plain block, and not `ModelConfig`'s. Where a field acts: "sinusoidal" and "learned"
    positions in the models, before the stack; `window` and "alibi" in stacks and models, while a layer alone takes them
    from its caller as mask and bias.

    Attributes:
      d_model: Width (D).
      num_heads, num_kv_heads: Query heads (H), and key and value heads (G; None means H).
      num_layers: Depth (L); the initialisation "gpt2" depends on it.
      weight_init: `ModelConfig.init`, whose name a Flax module needs for itself.
      d_ff: Hidden width (F); None means 4 * D, or 8/3 D for "swiglu".
      positions: "rotary" and "alibi" act inside attention, the others before the first layer.
      rotary_base, norm, norm_position, norm_eps, norm_affine, attention, qk_norm, window, feed_forward,
      residual, use_bias, dropout, attention_dropout, feed_forward_dropout, attention_impl, compute_dtype: See
        `ModelConfig`.
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
    feed_forward_dropout: float = 0.0
    attention_impl: str = "auto"
    compute_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(unknown(f"value for {name}:", getattr(self, name), get_args(choices)))
        kind = type(self).__name__
        check_positive(self, kind, ("d_model", "num_heads", "num_kv_heads", "num_layers", "d_ff", "window", "norm_eps"))
        check_rates(self, kind, ("dropout", "attention_dropout", "feed_forward_dropout"))
        super().__post_init__()

    def _shared(self, kind: type["Blocks"]) -> dict[str, Any]:
        """The fields that a part of that kind has in common with this one."""
        return {name: getattr(self, name) for name in field_names(kind) if hasattr(self, name)}

    @property
    def _residual_maps(self) -> int:
        """How many maps write to the residual stream, in all layers."""
        return 2 * self.num_layers

    @property
    def _inits(self) -> Inits:
        if self.weight_init not in INITS:
            raise ConfigError(unknown("init", self.weight_init, INITS))
        return INITS[self.weight_init](self._residual_maps)

    @nn.nowrap
    def _norm(self, name: str | None) -> Any:
        return make_norm(self.norm, eps=self.norm_eps, affine=self.norm_affine, use_bias=self.use_bias, name=name)


def field_names(kind: type[nn.Module]) -> list[str]:
    """The fields of a module that are its own."""
    return [field.name for field in dataclasses.fields(kind) if field.name not in ("parent", "name")]


class _Layer(Blocks):
    """The sub-layers that encoder and decoder layers are made of."""

    @nn.nowrap
    def attention_module(self, name: str | None) -> MultiHeadAttention:
        """The attention of a sub-layer; its inputs say whether it is to itself or to a source."""
        inits = self._inits
        # For self-attention the norms stand beside the attention in the tree, where the first runs have them.
        norm = self._norm_beside if name == "self_attention" else self._query_key_norm
        return MultiHeadAttention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            rotary_base=self.rotary_base if self.positions == "rotary" else None,
            qk_norm=norm if self.qk_norm else None,
            use_bias=self.use_bias,
            dropout=self.attention_dropout,
            implementation=self.attention_impl,
            dtype=self.compute_dtype,
            kernel_init=inits.kernel,
            output_init=inits.output,
            name=name,
        )

    @nn.nowrap
    def _query_key_norm(self, name: str | None) -> Any:
        """Query-key norm (Henry et al. 2020; Dehghani et al. 2023, section 2), always by root mean square."""
        return make_norm("rms", eps=self.norm_eps, affine=self.norm_affine, use_bias=False, name=name)

    def _norm_beside(self, name: str) -> Any:
        """The same as a part of the layer, whoever calls: a wrapped method makes modules in its own scope."""
        return self._query_key_norm(name)

    def _sublayer(self, x: jax.Array, name: str, deterministic: bool, function: Callable, *asked: bool) -> tuple:
        """Norm, function, dropout and residual, in the order of `norm_position`; then what else the function gave."""
        norm = self._norm(f"{name}_norm")
        y, *more = taken(function(norm(x) if self.norm_position == "pre" else x), *asked)
        y = nn.Dropout(self.dropout, deterministic=deterministic)(y)
        y = x + y if self.residual == "add" else y
        return (norm(y) if self.norm_position == "post" else y, *more)

    def _self_attention(
        self,
        x: jax.Array,
        mask: jax.Array | IndexMask | None,
        bias: jax.Array | None,
        positions: jax.Array | None,
        cache: LayerCache | None,
        weights: bool,
        deterministic: bool,
    ) -> tuple[jax.Array, LayerCache | None, jax.Array | None]:
        if self.attention == "none":
            return x, cache, None
        attend = partial(
            self.attention_module("self_attention"),
            mask=mask,
            bias=bias,
            positions=positions,
            cache=cache,
            return_weights=weights,
            deterministic=deterministic,
        )
        return self._sublayer(x, "self_attention", deterministic, attend, cache is not None, weights)

    def _feed_forward(self, x: jax.Array, deterministic: bool) -> jax.Array:
        if self.feed_forward == "none":
            return x
        inits = self._inits
        ffn = FeedForward(
            d_ff=feed_forward_width(self.feed_forward, self.d_model, self.d_ff),
            activation=self.feed_forward,
            use_bias=self.use_bias,
            dropout=self.feed_forward_dropout,
            dtype=self.compute_dtype,
            kernel_init=inits.kernel,
            output_init=inits.output,
            name="ffn",
        )
        return self._sublayer(x, "ffn", deterministic, partial(ffn, deterministic=deterministic))[0]


class EncoderLayer(_Layer):
    """Self-attention and a feed-forward (Vaswani et al. 2017, section 3.1).

    Fields as in `ModelConfig`, with the defaults of a plain block. Windows and ALiBi come as mask and bias: see
    `IndexMask` and `alibi_bias`.

    Example:
      >>> layer, x = EncoderLayer(d_model=16, num_heads=4, norm_position="post"), jnp.ones((2, 5, 16))
      >>> params = layer.init(jax.random.key(0), x)["params"]
      >>> layer.apply({"params": params}, x).shape
      (2, 5, 16)
    """

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | IndexMask | None = None,
        bias: jax.Array | None = None,
        positions: jax.Array | None = None,
        capture: tuple[str, ...] = (),
        deterministic: bool = True,
    ) -> Any:
        """Runs the layer.

        Args:
          x: [B, T, D].
          mask: bool [B or 1, H or 1, T or 1, T], True = may attend, or an `IndexMask`; None sees everything.
          bias: float32 [B or 1, H or 1, T or 1, T], such as `alibi_bias`.
          positions: int32 [B or 1, T], for rotary positions; None means 0 to T - 1.
          capture: Names of `CAPTURES`.
          deterministic: Turns dropout off.

        Returns:
          [B, T, D]; with a capture also a dict: "attention" float32 [B, H, T, T], "hidden" [B, T, D].
        """
        check_floats("x", x, "B T D", self.d_model)
        weights = "attention" in capture and self.attention != "none"
        x, _, attention = self._self_attention(x, mask, bias, positions, None, weights, deterministic)
        x = constrain(self._feed_forward(x, deterministic), "batch", "sequence", "embed")
        return given(x, _captured(capture, attention=attention, hidden=x))


class DecoderLayer(_Layer):
    """Self-attention, cross-attention where there is a source, and a feed-forward (Vaswani et al. 2017, section 3.1).

    What may attend to what comes from outside: `Decoder` gives its layers the causal mask. Windows and ALiBi come as
    mask and bias. Fields as in `ModelConfig`, with the defaults of a plain block.

    Attributes:
      cross_attention: Has cross-attention to a source.

    Example:
      >>> layer, x = DecoderLayer(d_model=16, num_heads=4, cross_attention=True), jnp.ones((2, 5, 16))
      >>> memory, mask = jnp.ones((2, 7, 16)), IndexMask(causal=True)
      >>> params = layer.init(jax.random.key(0), x, memory, mask=mask)["params"]
      >>> layer.apply({"params": params}, x, memory, mask=mask).shape
      (2, 5, 16)
    """

    cross_attention: bool = False

    @property
    def _residual_maps(self) -> int:
        return (3 if self.cross_attention else 2) * self.num_layers

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        mask: jax.Array | IndexMask | None = None,
        bias: jax.Array | None = None,
        memory_mask: jax.Array | IndexMask | None = None,
        positions: jax.Array | None = None,
        cache: LayerCache | None = None,
        capture: tuple[str, ...] = (),
        deterministic: bool = True,
    ) -> Any:
        """Runs the layer.

        Args:
          x: [B, T, D].
          memory: [B, S', D], what an encoder made of the source; not needed where the cache holds its keys and values.
          mask: bool [B or 1, H or 1, T or 1, S], True = may attend, or an `IndexMask`; None sees everything.
          bias: float32 [B or 1, H or 1, T or 1, S].
          memory_mask: As mask, over the source's places.
          positions: int32 [B or 1, T], for rotary positions; None means 0 to T - 1.
          cache: Earlier tokens; without one S = T.
          capture: Names of `CAPTURES`.
          deterministic: Turns dropout off.

        Returns:
          [B, T, D]; the cache with the new tokens where one was given; with a capture a dict: "attention" float32
          [B, H, T, S], "cross_attention" float32 [B, H, T, S'], "hidden" [B, T, D].

        Raises:
          ConfigError: For cross-attention without a source, or a source without cross-attention.
        """
        check_floats("x", x, "B T D", self.d_model)
        source = memory if cache is None or cache.memory is None else cache.memory
        if (source is not None) != self.cross_attention:
            raise ConfigError(
                "cross-attention needs a source: give memory [B, S, D], or a cache made with one"
                if self.cross_attention
                else "there is a source and no cross-attention to read it; set cross_attention=True"
            )
        weights = "attention" in capture
        x, cache, attention = self._self_attention(
            x, mask, bias, positions, cache, weights and self.attention != "none", deterministic
        )
        crossed = None
        if self.cross_attention:
            attend = partial(
                self.attention_module("cross_attention"),
                memory=source,
                mask=memory_mask,
                return_weights=weights,
                deterministic=deterministic,
            )
            x, crossed = self._sublayer(x, "cross_attention", deterministic, attend, weights)
        x = constrain(self._feed_forward(x, deterministic), "batch", "sequence", "embed")
        return given(x, cache, _captured(capture, attention=attention, cross_attention=crossed, hidden=x))


def _captured(capture: tuple[str, ...], **values: jax.Array | None) -> dict[str, jax.Array] | None:
    """What was asked for and is there; "cross_attention" comes along with "attention"."""
    check_capture(capture, CAPTURES)
    if not capture:
        return None
    wanted = {*capture, *(["cross_attention"] if "attention" in capture else [])}
    return {name: value for name, value in values.items() if name in wanted and value is not None}
