"""``lightning-mp train``: from a YAML file to a run; and small modules for it to train."""
