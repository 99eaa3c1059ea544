"""`narrowgauge doctor`: what of this host is in the way of a run, or of its numbers.

`probe` gathers one frozen Situation; every check is a pure function of it.
"""
