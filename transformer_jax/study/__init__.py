"""Studies: what an ablation over several seeds shows, and what it does not."""
