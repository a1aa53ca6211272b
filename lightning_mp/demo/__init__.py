"""A small language model and text to train it on, without a network: what the shipped configs and the demo name."""
