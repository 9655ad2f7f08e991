"""The architecture as data: columns of blocks in the order of computation, which the renderers draw."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from transformer_jax.config import ModelConfig
from transformer_jax.nn.layers import feed_forward_width
from transformer_jax.nn.rnn import CELLS

Kind = Literal[
    "text", "embedding", "positions", "norm", "dropout", "attention", "cross_attention", "feed_forward", "cell", "head"
]

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclasses.dataclass(frozen=True)
class Block:
    """One box, or for the kind "text" what goes in or comes out.

    Attributes:
      kind: What it is; "cross_attention" also reads the column before.
      title: Its name.
      details: Short phrases: sizes, and what is special.
      carries: What a recurrent cell hands to the next token; "" for all else.
    """

    kind: Kind
    title: str
    details: tuple[str, ...] = ()
    carries: str = ""


@dataclasses.dataclass(frozen=True)
class Plus:
    """Something that is added to the stream.

    Attributes:
      block: Where it comes from.
    """

    block: Block


@dataclasses.dataclass(frozen=True)
class Residual:
    """A sub-layer whose input is added to its output.

    Attributes:
      blocks: The sub-layer.
    """

    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Layers:
    """A layer that is repeated, each time with parameters of its own.

    Attributes:
      times: How often (L).
      parts: One layer.
    """

    times: int
    parts: tuple[Block | Residual, ...]


Part = Block | Plus | Residual | Layers


@dataclasses.dataclass(frozen=True)
class Column:
    """A stack with what stands before and after it.

    Attributes:
      parts: In the order of computation.
    """

    parts: tuple[Part, ...]

    def blocks(self) -> Iterator[Block]:
        """All blocks, those of a layer once."""
        yield from _blocks(self.parts)


def _blocks(parts: tuple[Part, ...]) -> Iterator[Block]:
    for part in parts:
        match part:
            case Block():
                yield part
            case Plus():
                yield part.block
            case Residual():
                yield from part.blocks
            case Layers():
                yield from _blocks(part.parts)


def diagram(model: ModelConfig) -> tuple[Column, ...]:
    """The columns of a model: one stack, or an encoder and the decoder that reads it.

    Example:
      >>> (column,) = diagram(ModelConfig(architecture="gru", vocab_size=65, num_layers=2))
      >>> [block.title for block in column.blocks()]
      ['token ids', 'token embedding', 'GRU cell', 'output head', 'logits']
    """
    if model.architecture != "encoder_decoder":
        causal = model.architecture == "decoder"
        layers = _cells(model) if model.recurrent else _stack(model, model.num_layers, causal=causal, source=False)
        return (Column((*_embedding(model, "token ids", model.vocab_size), *layers, *_head(model))),)
    shared = model.source_vocab_size is None
    source_size = model.vocab_size if shared else model.source_vocab_size
    depth = model.num_encoder_layers or model.num_layers
    encoder = _embedding(model, "source ids", source_size), _stack(model, depth, causal=False, source=False)
    decoder = (
        _embedding(model, "target ids", model.vocab_size, *(["shared with the source"] if shared else [])),
        _stack(model, model.num_layers, causal=True, source=True),
        _head(model),
    )
    return tuple(Column(tuple(part for parts in column for part in parts)) for column in (encoder, decoder))


def _embedding(model: ModelConfig, ids: str, vocab_size: int | None, *more: str) -> tuple[Part, ...]:
    width = f"{model.d_model:,}"
    scale = [f"times sqrt({width})"] if model.scale_embeddings else []
    parts: list[Part] = [
        Block("text", ids, (f"context {model.context:,}",)),
        Block("embedding", "token embedding", (f"{_size(vocab_size)} {TIMES} {width}", *scale, *more)),
    ]
    if not model.recurrent:
        if model.positions == "learned":
            parts.append(Plus(Block("positions", "learned positions", (f"{model.context:,} {TIMES} {width}",))))
        elif model.positions == "sinusoidal":
            parts.append(Plus(Block("positions", "sinusoidal positions")))
        parts += [*(_norm(model) if model.norm_embeddings else ()), *_dropout(model)]
    return tuple(parts)


def _stack(model: ModelConfig, depth: int, *, causal: bool, source: bool) -> tuple[Part, ...]:
    parts: list[Block | Residual] = []
    if model.attention != "none":
        parts += _sublayer(model, _self_attention(model, causal))
    if source:
        parts += _sublayer(model, _cross_attention(model))
    if model.feed_forward != "none":
        parts += _sublayer(model, _feed_forward(model))
    final = _norm(model, "final") if model.final_norm and model.norm_position == "pre" else ()
    return Layers(depth, tuple(parts)), *final


def _sublayer(model: ModelConfig, block: Block) -> tuple[Block | Residual, ...]:
    norm, pre = _norm(model), model.norm_position == "pre"
    inside = (*(norm if pre else ()), block, *_dropout(model))
    return (*((Residual(inside),) if model.residual == "add" else inside), *(() if pre else norm))


def _self_attention(model: ModelConfig, causal: bool) -> Block:
    details = [*_heads(model), "causal" if causal else "sees both sides"]
    if model.positions == "rotary":
        base = "" if model.rotary_base == ModelConfig().rotary_base else f" with base {model.rotary_base:,g}"
        details.append(f"rotary{base}")
    elif model.positions == "alibi":
        details.append("ALiBi")
    if model.window is not None:
        details.append(f"window {model.window:,}")
    return Block("attention", "self-attention", (*details, *_attention_details(model)))


def _cross_attention(model: ModelConfig) -> Block:
    return Block("cross_attention", "cross-attention", (*_heads(model), "to the source", *_attention_details(model)))


def _heads(model: ModelConfig) -> tuple[str, ...]:
    heads = f"{_plural(model.num_heads, 'head')} {TIMES} {model.head_dim:,}"
    groups = model.num_kv_heads or model.num_heads
    return (heads, *([_plural(groups, "key-value head")] if groups < model.num_heads else []))


def _attention_details(model: ModelConfig) -> tuple[str, ...]:
    said = {
        "query-key norm": model.qk_norm,
        "biases": model.use_bias,
        f"dropout {model.attention_dropout:g} on weights": model.attention_dropout > 0,
    }
    return tuple(text for text, true in said.items() if true)


def _feed_forward(model: ModelConfig) -> Block:
    width = model.d_model
    hidden = feed_forward_width(model.feed_forward, width, model.d_ff)
    details = [f"{model.feed_forward} {width:,} → {hidden:,} → {width:,}"]
    details += ["biases"] if model.use_bias else []
    details += [f"dropout {model.feed_forward_dropout:g} inside"] if model.feed_forward_dropout else []
    return Block("feed_forward", "feed-forward", tuple(details))


def _cells(model: ModelConfig) -> tuple[Part, ...]:
    gates, width = CELLS[model.architecture], f"{model.d_model:,}"
    name = "tanh cell" if model.architecture == "rnn" else f"{model.architecture.upper()} cell"
    details = (
        f"{width} → {width}",
        *([f"{gates} gates"] if gates > 1 else []),
        *(["biases"] if model.use_bias else []),
    )
    cell = Block("cell", name, details, carries="h and c" if model.architecture == "lstm" else "h")
    return Layers(model.num_layers, (*_dropout(model), cell)), *_dropout(model)


def _head(model: ModelConfig) -> tuple[Part, ...]:
    width = f"{model.d_model:,}"
    parts: list[Part] = []
    if model.head_transform and not model.recurrent:
        parts += [Block("head", "head transform", (f"gelu {width} → {width}", "bias")), *_norm(model)]
    details = [f"{width} → {_size(model.vocab_size)}"]
    details += ["tied to the embedding"] if model.tie_embeddings else []
    details += ["bias"] if model.head_bias else []
    return (*parts, Block("head", "output head", tuple(details)), Block("text", "logits"))


def _norm(model: ModelConfig, *details: str) -> tuple[Block, ...]:
    if model.norm == "none":
        return ()
    name = "RMS norm" if model.norm == "rms" else "layer norm"
    return (Block("norm", name, (*details, *([] if model.norm_affine else ["no gain"]))),)


def _dropout(model: ModelConfig) -> tuple[Block, ...]:
    return (Block("dropout", f"dropout {model.dropout:g}"),) if model.dropout else ()


def _size(vocab_size: int | None) -> str:
    return "?" if vocab_size is None else f"{vocab_size:,}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
