"""Declared against observed dtypes."""
