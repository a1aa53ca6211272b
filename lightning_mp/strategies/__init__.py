"""Lightning strategies that carry a plan out, one class a file; ``lightning_mp.make_strategy`` builds them by name."""
