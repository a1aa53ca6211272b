"""DeepSpeed's JSON: its keys, what a strategy makes of one, and the way of a plan from and to one."""
