"""Faults that are known, put into healthy runs: what of them is found, when, and whether it is named right."""
