"""Whole models: a decoder or an encoder alone, and both together; `create_model` makes one of a config."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.checks import unknown
from transformer_jax.config import ModelConfig
from transformer_jax.errors import ConfigError
from transformer_jax.nn.attention import given, taken
from transformer_jax.nn.axes import constrain
from transformer_jax.nn.blocks import field_names
from transformer_jax.nn.cache import KVCache
from transformer_jax.nn.inputs import check_cache, check_floats, check_ids, check_valid
from transformer_jax.nn.layers import Embedding, Head
from transformer_jax.nn.positions import sinusoidal, token_positions
from transformer_jax.nn.rnn import CELLS, RecurrentLM
from transformer_jax.nn.stacks import Decoder, Encoder, Stack, real_memory


class _Model(Stack):
    """Embedding and head, around a stack.

    Attributes:
      vocab_size: Symbols (V).
      context: Rows of a learned position table; other kinds of positions have no limit.
      tie_embeddings: The head reuses the token embedding (Press & Wolf 2017).
      scale_embeddings, norm_embeddings, head_bias, head_transform: See `ModelConfig`.
    """

    vocab_size: int = 0
    context: int = 0
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    norm_embeddings: bool = False
    head_bias: bool = False
    head_transform: bool = False

    def setup(self) -> None:
        """Declares the embedding and the head."""
        if self.positions == "learned" and self.context < 1:
            raise ConfigError("learned positions need a context: the longest sequence")
        inits = self._inits
        self.token_embedding = Embedding(self.vocab_size, self.d_model, inits.embedding)
        if self.positions == "learned":
            self.position_embedding = Embedding(self.context, self.d_model, inits.embedding)
        if self.norm_embeddings:
            self.embedding_norm = self._norm(None)
        # Random keys depend on names, and the first runs have this one.
        self.Dropout_0 = nn.Dropout(self.dropout)
        self.head = Head(
            self.vocab_size,
            self.head_bias,
            transform=self._norm if self.head_transform else None,
            kernel_init=inits.head,
            transform_init=inits.kernel,
        )

    def _embed(self, x: jax.Array, positions: jax.Array, table: Any, norm: Any, deterministic: bool) -> jax.Array:
        """From rows of the token embedding to what enters the first layer."""
        if self.scale_embeddings:
            x = x * jnp.asarray(self.d_model**0.5, x.dtype)
        if self.positions == "learned":
            x = x + table(positions, self.compute_dtype)
        elif self.positions == "sinusoidal":
            x = x + sinusoidal(positions, self.d_model).astype(x.dtype)
        if self.norm_embeddings:
            x = norm(x)
        return constrain(self.Dropout_0(x, deterministic=deterministic), "batch", "sequence", "embed")

    def _embed_tokens(
        self, name: str, ids: jax.Array, valid: jax.Array | None, cache: KVCache | None, deterministic: bool
    ) -> jax.Array:
        self._check(name, ids, self.vocab_size, valid, cache)
        return self._embed(
            self.token_embedding(ids, self.compute_dtype),
            token_positions(ids.shape[1], valid, None if cache is None else cache.length),
            self.position_embedding if self.positions == "learned" else None,
            self.embedding_norm if self.norm_embeddings else None,
            deterministic,
        )

    def _logits(self, x: jax.Array) -> jax.Array:
        logits = self.head(x, self.token_embedding.embedding if self.tie_embeddings else None)
        return constrain(logits, "batch", "length", "vocab")

    def _check(
        self, name: str, ids: jax.Array, vocab_size: int, valid: jax.Array | None, cache: KVCache | None
    ) -> None:
        check_ids(name, ids, vocab_size)
        check_valid("valid" if name == "ids" else f"{name}_valid", valid, ids.shape)
        if cache is not None:
            check_cache(cache, KVCache, ids.shape[0])
        if self.positions == "learned" and cache is None and ids.shape[1] > self.context:
            raise ConfigError(f"{ids.shape[1]} tokens are more than the {self.context} learned positions")

    @nn.nowrap
    def _empty_cache(self, batch_size: int, max_length: int, **fields: Any) -> KVCache:
        if self.positions == "learned" and max_length > self.context:
            raise ConfigError(f"a cache of {max_length} tokens is longer than the {self.context} learned positions")
        return Decoder(**self._shared(Decoder), **fields, parent=None).empty_cache(batch_size, max_length)


class Transformer(_Model):
    """One stack with embedding and head: a causal language model, or an encoder that predicts symbols in place.

    Attributes:
      architecture: "decoder" (Radford et al. 2018) or "encoder" (Devlin et al. 2019).

    Example:
      >>> model = Transformer(vocab_size=9, d_model=16, num_layers=2, positions="alibi")
      >>> ids = jnp.zeros((2, 5), jnp.int32)
      >>> variables = jax.jit(model.init)(jax.random.key(0), ids)
      >>> jax.jit(model.apply)(variables, ids).shape
      (2, 5, 9)
    """

    architecture: str = "decoder"

    def setup(self) -> None:
        """Declares the parts."""
        super().setup()
        if self.architecture == "decoder":
            self.decoder = Decoder(**self._shared(Decoder))
        elif self.architecture == "encoder":
            self.encoder = Encoder(**self._shared(Encoder))
        else:
            raise ConfigError(unknown("architecture of one stack:", self.architecture, ("decoder", "encoder")))

    def __call__(
        self,
        ids: jax.Array,
        *,
        valid: jax.Array | None = None,
        cache: KVCache | None = None,
        capture: tuple[str, ...] = (),
        deterministic: bool = True,
    ) -> Any:
        """Predicts each next symbol ("decoder"), or each symbol from all the others and itself ("encoder").

        Args:
          ids: int [B, T].
          valid: bool [B, T], True where a token is real; None means all. What padding holds never matters.
          cache: From `init_cache`; then ids are the tokens that follow those in the cache. For a decoder only.
          capture: "attention", "hidden" or both.
          deterministic: Turns dropout off; otherwise pass rngs={"dropout": key}.

        Returns:
          logits float32 [B, T, V]; the new cache where one was given; with a capture a dict, as `Decoder` gives it.

        Raises:
          ConfigError: For ids that are not int [B, T] or, outside jit, not in [0, V); a valid that is not
            bool [B, T]; more tokens than a learned table or, outside jit, the cache can hold; a cache for an encoder.
        """
        if cache is not None and self.architecture == "encoder":
            raise ConfigError("an encoder sees both sides of each token and has no cache; call it without one")
        x = self._embed_tokens("ids", ids, valid, cache, deterministic)
        if self.architecture == "encoder":
            out = self.encoder(x, valid=valid, capture=capture, deterministic=deterministic)
        else:
            out = self.decoder(x, valid=valid, cache=cache, capture=capture, deterministic=deterministic)
        x, cache, captured = taken(out, cache is not None, bool(capture))
        return given(self._logits(x), cache, captured)

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for `batch_size` rows of at most `max_length` tokens; needs no parameters.

        Raises:
          ConfigError: For a length beyond a learned position table, or an encoder.
        """
        if self.architecture == "encoder":
            raise ConfigError("an encoder sees both sides of each token and has no cache")
        return self._empty_cache(batch_size, max_length)


class EncoderDecoder(_Model):
    """An encoder for the source and a decoder for the target that reads it (Vaswani et al. 2017).

    Attributes:
      source_vocab_size: Symbols of the source; None means that both sides share one vocabulary and its embedding.
      num_encoder_layers: Depth of the encoder; None means num_layers.

    Example:
      >>> model = EncoderDecoder(vocab_size=9, source_vocab_size=7, d_model=16, num_layers=2)
      >>> source, target = jnp.zeros((2, 6), jnp.int32), jnp.zeros((2, 5), jnp.int32)
      >>> params = jax.jit(model.init)(jax.random.key(0), source, target)["params"]
      >>> memory = jax.jit(lambda p, s: model.apply({"params": p}, s, method="encode"))(params, source)
      >>> cache = model.init_cache(2, 5, params=params, memory=memory)
      >>> step = jax.jit(lambda p, ids, cache: model.apply({"params": p}, ids, cache=cache))
      >>> logits, cache = step(params, target[:, :1], cache)
      >>> logits.shape, cache.length.tolist()
      ((2, 1, 9), [1, 1])
    """

    source_vocab_size: int | None = None
    num_encoder_layers: int | None = None

    def setup(self) -> None:
        """Declares the parts."""
        super().setup()
        inits = self._inits
        depth = self.num_encoder_layers or self.num_layers
        self.encoder = Encoder(**{**self._shared(Encoder), "num_layers": depth})
        self.decoder = Decoder(**self._shared(Decoder), cross_attention=True)
        if self.source_vocab_size is not None:
            self.source_embedding = Embedding(self.source_vocab_size, self.d_model, inits.embedding)
        if self.positions == "learned":
            self.source_position_embedding = Embedding(self.context, self.d_model, inits.embedding)
        if self.norm_embeddings:
            self.source_embedding_norm = self._norm(None)

    def __call__(
        self,
        source: jax.Array,
        target: jax.Array | None = None,
        *,
        source_valid: jax.Array | None = None,
        target_valid: jax.Array | None = None,
        valid: jax.Array | None = None,
        cache: KVCache | None = None,
        capture: tuple[str, ...] = (),
        deterministic: bool = True,
    ) -> Any:
        """Predicts each next symbol of the target: from source and target, or from tokens and a cache.

        Args:
          source: int [B, S]; with a cache instead the target's next tokens, int [B, T].
          target: int [B, T], shifted for teacher forcing: logits at t predict what follows target[:, t].
          source_valid: bool [B, S], True where a token is real; None means all.
          target_valid: bool [B, T], likewise.
          valid: With a cache, bool [B, T] for the tokens.
          cache: From `init_cache`, which holds the source.
          capture: "attention", "hidden" or both.
          deterministic: Turns dropout off; otherwise pass rngs={"dropout": key}.

        Returns:
          logits float32 [B, T, V]; the new cache where one was given; with a capture a dict, as `Decoder` gives it,
          and without a cache the encoder's under "encoder_attention" and "encoder_hidden".

        Raises:
          ConfigError: As for `Transformer`, and where source and target, or source and cache, do not go together.
        """
        if cache is not None:
            if target is not None or source_valid is not None or target_valid is not None:
                raise ConfigError("a cache holds the source: give the next tokens and the cache, and `valid` for them")
            return self.decode(source, valid=valid, cache=cache, capture=capture, deterministic=deterministic)
        if target is None or valid is not None:
            raise ConfigError("an encoder-decoder takes source and target, with source_valid and target_valid")
        if source.shape[:1] != target.shape[:1]:
            raise ConfigError(f"source has {source.shape[0]} rows and target {target.shape[0]}")
        encoded = self.encode(source, source_valid=source_valid, capture=capture, deterministic=deterministic)
        memory, inside = taken(encoded, bool(capture))
        out = self.decode(
            target,
            memory,
            valid=target_valid,
            source_valid=source_valid,
            capture=capture,
            deterministic=deterministic,
        )
        logits, captured = taken(out, bool(capture))
        return given(logits, {f"encoder_{k}": v for k, v in inside.items()} | captured if capture else None)

    def encode(
        self,
        source: jax.Array,
        *,
        source_valid: jax.Array | None = None,
        capture: tuple[str, ...] = (),
        deterministic: bool = True,
    ) -> Any:
        """What the encoder makes of a source: int [B, S] -> [B, S, D]; with a capture also a dict."""
        size = self.vocab_size if self.source_vocab_size is None else self.source_vocab_size
        self._check("source", source, size, source_valid, None)
        tokens = self.token_embedding if self.source_vocab_size is None else self.source_embedding
        x = self._embed(
            tokens(source, self.compute_dtype),
            token_positions(source.shape[1], source_valid),
            self.source_position_embedding if self.positions == "learned" else None,
            self.source_embedding_norm if self.norm_embeddings else None,
            deterministic,
        )
        return self.encoder(x, valid=source_valid, capture=capture, deterministic=deterministic)

    def decode(
        self,
        ids: jax.Array,
        memory: jax.Array | None = None,
        *,
        valid: jax.Array | None = None,
        source_valid: jax.Array | None = None,
        cache: KVCache | None = None,
        capture: tuple[str, ...] = (),
        deterministic: bool = True,
    ) -> Any:
        """Logits of the target's next symbols, from what `encode` gave or from a cache."""
        x = self._embed_tokens("target" if cache is None else "ids", ids, valid, cache, deterministic)
        out = self.decoder(
            x,
            memory,
            valid=valid,
            memory_valid=source_valid,
            cache=cache,
            capture=capture,
            deterministic=deterministic,
        )
        x, cache, captured = taken(out, cache is not None, bool(capture))
        return given(self._logits(x), cache, captured)

    @nn.nowrap
    def init_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        params: Any = None,
        memory: jax.Array | None = None,
        source_valid: jax.Array | None = None,
    ) -> KVCache:
        """A cache without target tokens, with the source's keys and values for every layer, computed once.

        Args:
          batch_size: Rows (B).
          max_length: Most target tokens.
          params: The model's parameters.
          memory: [B, S, D], from `encode`.
          source_valid: bool [B, S], True where the source is real; None means all.

        Raises:
          ConfigError: Without a source, for one of other rows or width, or for what are not the model's parameters.
        """
        if params is None or memory is None:
            raise ConfigError("cross-attention needs a source: init_cache(..., params=params, memory=memory)")
        if "decoder" not in params:
            raise ConfigError(f"params must be the model's, init(...)['params'], got the keys {list(params)}")
        check_floats("memory", memory, "B S D", self.d_model)
        memory = real_memory(memory, source_valid, batch_size)
        decoder = Decoder(**self._shared(Decoder), cross_attention=True, parent=None)
        cache = self._empty_cache(batch_size, max_length, cross_attention=True)
        return cache.replace(memory=decoder.project_memory(params["decoder"], memory), memory_valid=source_valid)


MODELS = {
    "decoder": Transformer,
    "encoder": Transformer,
    "encoder_decoder": EncoderDecoder,
    **dict.fromkeys(CELLS, RecurrentLM),
}
"""The class of each `ModelConfig.architecture`."""


def create_model(model_config: ModelConfig) -> Transformer | EncoderDecoder | RecurrentLM:
    """The model that a config describes: `init(key, ids)` gives its parameters, `apply` its logits.

    An encoder-decoder takes source and target where the others take ids.

    Raises:
      ConfigError: If vocab_size is not set, or for anything but a ModelConfig.

    Example:
      >>> model = create_model(ModelConfig(architecture="gru", vocab_size=65))
      >>> type(model).__name__, model.d_model
      ('RecurrentLM', 128)
    """
    if not isinstance(model_config, ModelConfig):
        kind = type(model_config).__name__
        raise ConfigError(f"create_model takes a ModelConfig, got {kind}; a Config and a preset have one in .model")
    if model_config.vocab_size is None:
        raise ConfigError("model.vocab_size is not set: give the number of symbols, or resolve it from the data")
    kind = MODELS[model_config.architecture]
    ours = {"weight_init": "init", "unroll": "unrolled"}
    return kind(**{name: getattr(model_config, ours.get(name, name)) for name in field_names(kind)})
