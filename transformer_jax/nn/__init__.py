"""The library: the Transformer's parts as pure functions and stateless modules. Needs jax and flax only."""

from transformer_jax.nn.attention import MultiHeadAttention, dot_product_attention
from transformer_jax.nn.blocks import DecoderLayer, EncoderLayer
from transformer_jax.nn.cache import KVCache
from transformer_jax.nn.layers import FeedForward, LayerNorm, RMSNorm
from transformer_jax.nn.masks import IndexMask, causal_mask, combine_masks, padding_mask, window_mask
from transformer_jax.nn.positions import alibi_bias, alibi_slopes, rotary, sinusoidal_positions
from transformer_jax.nn.rnn import RecurrentLayer, RecurrentLM, RecurrentState
from transformer_jax.nn.stacks import Decoder, Encoder
from transformer_jax.nn.transformer import EncoderDecoder, Transformer, create_model

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderDecoder",
    "EncoderLayer",
    "FeedForward",
    "IndexMask",
    "KVCache",
    "LayerNorm",
    "MultiHeadAttention",
    "RMSNorm",
    "RecurrentLM",
    "RecurrentLayer",
    "RecurrentState",
    "Transformer",
    "alibi_bias",
    "alibi_slopes",
    "causal_mask",
    "combine_masks",
    "create_model",
    "dot_product_attention",
    "padding_mask",
    "rotary",
    "sinusoidal_positions",
    "window_mask",
]
