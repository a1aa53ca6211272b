"""Measurements of a run's health, and the alerts about it."""
