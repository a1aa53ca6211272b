"""Hydra configs, found by ``hydra.searchpath: [pkg://lightning_mp.configs]``; ``docs/how-to/hydra.md`` says what each is."""
