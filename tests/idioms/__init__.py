"""A table of idioms: ways in which public projects write Lightning code, each run under plans and compared with stock.

An idiom is a small module, callback, optimizer or sequence of calls, written in our own words. Its ``source`` names the
projects and files that write so. ``sources.md`` counts for each hook and attribute which projects use it.
"""
