"""The conformance matrix: every policy under every strategy, in real processes, against what the policy declares."""

import os
from importlib import import_module

#: the environment variable that says which of Lightning's two copies a process of the pool runs under
HOST = "CONFORMANCE_HOST"

import_module(os.environ.get(HOST, "lightning.pytorch"))  # the copy that is imported first is the one that is used
