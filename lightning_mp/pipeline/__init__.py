"""Pipeline parallelism under a plan."""
