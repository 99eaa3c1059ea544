"""The planner: from what the parts of a training step cost to the fastest placement plan.

whatif    what another machine would have: a faster bus, one memory, a faster accelerator
rates     copies and conversions of any size, from some measured sizes
pipeline  a pass over the bus in pieces, as the layers do it
options   what each pass of each layer costs at each place
instance  a problem to solve, and what a step takes by a given choice
milp      the fastest choice
search    all variants of a plan: where everything else lives, wire, policy
report    the result as tables
"""
