"""The library: the Transformer's parts as pure functions and stateless modules. Needs jax and flax only."""

from transformer_jax.nn.attention import KVCache, MultiHeadAttention, dot_product_attention
from transformer_jax.nn.layers import FeedForward, LayerNorm, RMSNorm
from transformer_jax.nn.masks import causal_mask, combine_masks, padding_mask, window_mask
from transformer_jax.nn.positions import alibi_bias, alibi_slopes, rotary, sinusoidal_positions
from transformer_jax.nn.transformer import Decoder, DecoderLayer, Transformer, create_model

__all__ = [
    "Decoder",
    "DecoderLayer",
    "FeedForward",
    "KVCache",
    "LayerNorm",
    "MultiHeadAttention",
    "RMSNorm",
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
