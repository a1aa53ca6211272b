"""A plan, and what carries it out in a run."""
