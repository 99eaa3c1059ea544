"""Other machines of the lab: which there are, how they are reached, whose turn it is on them."""
