"""The demo: one small GPT-2 trained on real text in every precision mode, and what each mode cost and gave.

``lightning-mp demo`` runs it; :func:`lightning_mp.demo.ladder.run_demo` is the same from Python.
"""
