"""Hydra configs, found by ``hydra.searchpath: [pkg://lightning_mp.configs]``; ``docs/configs.md`` says what each is."""
