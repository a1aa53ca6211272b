"""What is done to numbers, with torch alone: no Lightning, no strategy, no trainer."""
