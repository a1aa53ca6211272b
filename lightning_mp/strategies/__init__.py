"""Lightning strategies that run a plan, one class in each file.

``lightning_mp.make_strategy`` builds them by name.
"""
