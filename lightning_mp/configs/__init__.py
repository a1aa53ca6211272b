"""Hydra configs, found by ``hydra.searchpath: [pkg://lightning_mp.configs]``; see ``docs/how-to/hydra.md``."""
