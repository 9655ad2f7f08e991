"""What a training step takes on devices one does not have: memory, communication and time, before anything is run."""
