"""The trainer: pure step functions, and a loop that does the input and output around them."""
