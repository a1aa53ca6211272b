"""A small language model and its training text, for the shipped configs and the demo. They need no network."""
