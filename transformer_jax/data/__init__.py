"""Text in, batches of windows out."""
