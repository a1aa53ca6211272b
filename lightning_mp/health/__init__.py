"""What a run measures of itself, and when it warns."""
