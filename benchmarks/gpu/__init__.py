"""Everything that has to be seen on a GPU, by one command: ``python -m benchmarks.gpu --out DIR``.

From a plain checkout, without a network and without installing this package; it takes torch, lightning, transformers
and pytest. Each part is a process of its own with a time limit, so that each survives the failure of the others.
"""
