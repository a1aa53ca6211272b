"""One optimizer step on one kind of strategy, behind the small protocol of ``base``."""
