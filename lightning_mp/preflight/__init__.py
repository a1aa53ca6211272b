"""What will go wrong in a run, found before its first step."""
