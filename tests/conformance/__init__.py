"""The conformance matrix: every policy under every strategy, in real processes, against what the policy declares."""
