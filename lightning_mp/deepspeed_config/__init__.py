"""DeepSpeed's JSON: its keys, what a strategy makes of one, and a plan read from one and written to one."""
