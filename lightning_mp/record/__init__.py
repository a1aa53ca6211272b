"""What a run writes down, and the page made of it."""
