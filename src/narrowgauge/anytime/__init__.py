"""`narrowgauge anytime-score`: runs of networks that answer more than once, on one scale.

gather    the answers that runs kept, and that they are of one test
families  runs that are one network with several seeds
scoring   figures, intervals and pairs of families
showing   the table, JSON and CSV
picture   all families against MACs, and against measured latency
"""
