"""The files of a run, and the report made from them."""
