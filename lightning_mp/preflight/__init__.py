"""Checks that find problems of a run before its first step."""
