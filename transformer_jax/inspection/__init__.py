"""What a config describes, without running it: parameters, operations, and a diagram of the architecture."""
