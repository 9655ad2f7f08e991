"""The commands: a file for each, with its options and what it does; they load what is slow only when they run."""
