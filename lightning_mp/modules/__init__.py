"""What is changed in a module: which modules a pattern means, pins and activation checkpointing, by class swap."""
