"""The recurrent baselines behind the interface of the Transformer: vanilla tanh, GRU and LSTM language models.

Equations and order of gates are those of PyTorch's `RNN`, `GRU` and `LSTM`; where PyTorch adds two biases to one sum,
there is one here. What a layer reads is multiplied for all time steps at once; only the recurrent product runs in turn.
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.checks import unknown
from transformer_jax.errors import ConfigError
from transformer_jax.nn.attention import given
from transformer_jax.nn.axes import constrain
from transformer_jax.nn.inputs import check_cache, check_capture, check_floats, check_ids, check_valid
from transformer_jax.nn.layers import INITS, Embedding, Head

CELLS = {"rnn": 1, "gru": 3, "lstm": 4}
"""Gates of each cell: Elman 1990; Cho et al. 2014; Hochreiter & Schmidhuber 1997 with the forget gate of Gers 1999."""


@flax.struct.dataclass
class RecurrentState:
    """What a recurrent model remembers of earlier tokens.

    Attributes:
      hidden: float32 [L, B, D].
      cell: float32 [L, B, D]; only an LSTM changes it.
      length: int32 [B], tokens read so far.

    Example:
      >>> state = RecurrentLM(vocab_size=9, d_model=8).init_cache(batch_size=2)
      >>> state.hidden.shape, state.length.tolist()
      ((1, 2, 8), [0, 0])
    """

    hidden: jax.Array
    cell: jax.Array
    length: jax.Array

    def rows(self, index: jax.Array) -> "RecurrentState":
        """The rows at an index, int32 [B']."""
        return RecurrentState(self.hidden[:, index], self.cell[:, index], self.length[index])


def _step(kind: str, read: jax.Array, recurrent: jax.Array, hidden: jax.Array, cell: jax.Array) -> tuple:
    """One time step: read and recurrent are [B, gates, D], what the input and the hidden state contribute."""
    if kind == "rnn":
        return jnp.tanh(read[:, 0] + recurrent[:, 0]), cell
    if kind == "gru":
        reset, update = jnp.split(jax.nn.sigmoid(read[:, :2] + recurrent[:, :2]), 2, axis=1)
        new = jnp.tanh(read[:, 2] + reset[:, 0] * recurrent[:, 2])
        return (1 - update[:, 0]) * new + update[:, 0] * hidden, cell
    gates = read + recurrent
    keep_in, keep, new, out = (gates[:, i] for i in range(4))
    cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(keep_in) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


class RecurrentLayer(nn.Module):
    """One recurrent layer.

    Attributes:
      kind: A name of `CELLS`.
      use_bias: A bias for each gate, and for a GRU the one inside its reset gate.
      dropout: Rate on what the layer reads; the recurrence is never cut (Zaremba et al. 2014, section 3.1).
      dtype: Type of the matrix products; the state is float32.
      kernel_init: Of the map that reads the input; the recurrent map starts orthogonal (Saxe et al. 2014).

    Example:
      >>> layer, x, zeros = RecurrentLayer("gru"), jnp.ones((2, 5, 8)), jnp.zeros((2, 8))
      >>> (out, hidden, cell), variables = layer.init_with_output(jax.random.key(0), x, zeros, zeros)
      >>> out.shape, hidden.shape
      ((2, 5, 8), (2, 8))
    """

    kind: str
    use_bias: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        hidden: jax.Array,
        cell: jax.Array,
        *,
        valid: jax.Array | None = None,
        deterministic: bool = True,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Reads a sequence.

        Args:
          x: [B, T, D].
          hidden: float32 [B, D], before the first token.
          cell: float32 [B, D], likewise.
          valid: bool [B, T]; a token that is not real leaves the state as it is.
          deterministic: Turns dropout off.

        Returns:
          The hidden state after each token [B, T, D], and hidden and cell after the last.

        Raises:
          ConfigError: For an unknown kind, or inputs of other shapes.
        """
        check_floats("x", x, "B T D")
        for name, state in (("hidden", hidden), ("cell", cell)):
            check_floats(name, state, "B D", x.shape[-1])
        check_valid("valid", valid, x.shape[:2])
        if self.kind not in CELLS:
            raise ConfigError(unknown("recurrent cell", self.kind, CELLS))
        gates, width = CELLS[self.kind], x.shape[-1]
        x = nn.Dropout(self.dropout, deterministic=deterministic)(x)
        read = nn.DenseGeneral(
            (gates, width), use_bias=self.use_bias, dtype=self.dtype, kernel_init=self.kernel_init, name="input"
        )(x).astype(jnp.float32)
        kernel = self.param("recurrent_kernel", _orthogonal, (width, gates, width)).astype(self.dtype)
        bias = None
        if self.kind == "gru" and self.use_bias:
            bias = self.param("recurrent_bias", nn.initializers.zeros, (width,))

        def step(state: tuple, now: tuple) -> tuple[tuple, jax.Array]:
            hidden, cell = state
            read, valid = now
            recurrent = jnp.einsum("BD,DGE->BGE", hidden.astype(self.dtype), kernel, preferred_element_type=jnp.float32)
            if bias is not None:
                recurrent = recurrent.at[:, 2].add(bias[None, :])
            new = _step(self.kind, read, recurrent, hidden, cell)
            if valid is not None:
                new = jax.tree.map(lambda a, b: jnp.where(valid[:, None], a, b), new, (hidden, cell))
            return new, new[0]

        by_time = (read.swapaxes(0, 1), None if valid is None else valid.T)
        (hidden, cell), out = jax.lax.scan(step, (hidden, cell), by_time)
        return out.swapaxes(0, 1).astype(self.dtype), hidden, cell


def _orthogonal(key: jax.Array, shape: tuple[int, int, int], dtype: Any = jnp.float32) -> jax.Array:
    """One orthogonal matrix for each gate: [D, gates, D]."""
    keys = jax.random.split(key, shape[1])
    one = nn.initializers.orthogonal()
    return jax.vmap(lambda key: one(key, (shape[0], shape[2]), dtype), out_axes=1)(keys)


class RecurrentLM(nn.Module):
    """A recurrent language model: embedding, layers, head. Dropout acts on what each layer and the head read.

    Attributes:
      architecture: "rnn", "gru" or "lstm".
      vocab_size: Symbols (V).
      context: Longest prompt that is read; the state itself has no limit.
      d_model: Width of embeddings and states (D).
      num_layers: Depth (L).
      tie_embeddings, scale_embeddings, head_bias, use_bias, dropout, compute_dtype, unroll: See `ModelConfig`.
      weight_init: `ModelConfig.init`.

    Example:
      >>> model = RecurrentLM(architecture="lstm", vocab_size=9, d_model=8, num_layers=2)
      >>> ids = jnp.zeros((2, 5), jnp.int32)
      >>> variables = jax.jit(model.init)(jax.random.key(0), ids)
      >>> step = jax.jit(lambda variables, ids, cache: model.apply(variables, ids, cache=cache))
      >>> logits, state = step(variables, ids, model.init_cache(2))
      >>> logits.shape, state.length.tolist()
      ((2, 5, 9), [5, 5])
    """

    architecture: str = "rnn"
    vocab_size: int = 0
    context: int = 64
    d_model: int = 128
    num_layers: int = 1
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    head_bias: bool = False
    use_bias: bool = True
    weight_init: str = "xavier"
    dropout: float = 0.0
    compute_dtype: Any = jnp.float32
    unroll: int = 1

    @nn.compact
    def __call__(
        self,
        ids: jax.Array,
        *,
        valid: jax.Array | None = None,
        cache: RecurrentState | None = None,
        capture: tuple[str, ...] = (),
        deterministic: bool = True,
    ) -> Any:
        """Predicts each next symbol.

        Args:
          ids: int [B, T].
          valid: bool [B, T], True where a token is real; padding leaves the state as it is.
          cache: From `init_cache`; then ids are the tokens that follow those read before. None starts from zeros.
          capture: "hidden", each layer's output.
          deterministic: Turns dropout off; otherwise pass rngs={"dropout": key}.

        Returns:
          logits float32 [B, T, V]; the new state where one was given; with a capture a dict: "hidden" [L, B, T, D].

        Raises:
          ConfigError: For an unknown architecture; ids that are not int [B, T] or, outside jit, not in [0, V); a
            valid that is not bool [B, T]; a capture of attention, which there is none of.
        """
        check_ids("ids", ids, self.vocab_size)
        check_valid("valid", valid, ids.shape)
        if cache is not None:
            check_cache(cache, RecurrentState, ids.shape[0])
        check_capture(capture, ("hidden",))
        if self.weight_init not in INITS:
            raise ConfigError(unknown("init", self.weight_init, INITS))
        inits = INITS[self.weight_init](self.num_layers)
        embedding = Embedding(self.vocab_size, self.d_model, inits.embedding, name="token_embedding")
        x = embedding(ids, self.compute_dtype)
        if self.scale_embeddings:
            x = x * jnp.asarray(self.d_model**0.5, x.dtype)
        state = self.init_cache(ids.shape[0]) if cache is None else cache

        def body(layer: RecurrentLayer, x: jax.Array, state: tuple) -> tuple[jax.Array, tuple]:
            x, hidden, cell = layer(x, *state, valid=valid, deterministic=deterministic)
            x = constrain(x, "batch", "length", "embed")
            return x, (hidden, cell, x if capture else None)

        layers = RecurrentLayer(
            self.architecture, self.use_bias, self.dropout, self.compute_dtype, inits.kernel, name="layers"
        )
        scan = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.num_layers,
            unroll=min(self.unroll, self.num_layers),
        )
        x, (hidden, cell, outputs) = scan(layers, x, (state.hidden, state.cell))
        x = nn.Dropout(self.dropout, deterministic=deterministic)(x)
        table = embedding.embedding if self.tie_embeddings else None
        logits = Head(self.vocab_size, self.head_bias, kernel_init=inits.head, name="head")(x, table)
        if cache is not None:
            read = ids.shape[1] if valid is None else jnp.sum(valid, axis=1, dtype=jnp.int32)
            cache = RecurrentState(hidden, cell, state.length + read)
        return given(constrain(logits, "batch", "length", "vocab"), cache, {"hidden": outputs} if capture else None)

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int | None = None) -> RecurrentState:
        """The state before the first token; it has no length limit, whatever max_length says."""
        zeros = jnp.zeros((self.num_layers, batch_size, self.d_model))
        return RecurrentState(zeros, zeros, jnp.zeros((batch_size,), jnp.int32))
