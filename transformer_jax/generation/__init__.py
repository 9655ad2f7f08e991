"""Symbols from a model, in one compiled loop whatever their number.

`generate` goes on from prompts with a decoder or a recurrent model, and writes the targets of sources with an
encoder-decoder: drawn, most likely first, or by beam search. `fill_gaps` puts symbols where an encoder's rows lack
them. `check_settings` refuses what `generate` cannot do before anything is loaded.
"""

from transformer_jax.generation.draw import Filters, draw
from transformer_jax.generation.gaps import fill_gaps
from transformer_jax.generation.settings import check_settings
from transformer_jax.generation.text import generate

__all__ = ["Filters", "check_settings", "draw", "fill_gaps", "generate"]
