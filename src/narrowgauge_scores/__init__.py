"""How networks that answer more than once are scored: numpy only, the same on host and in images.

side_file    `logits.npz`, what a run leaves for its scoring
answers      what exits said: predictions, confidences, and costs per image
areas        accuracy over the logarithm of a cost, as one number
calibration  whether a network knows when it is right
quality      monotonicity, overthinking, performance profiles: what makes it an anytime network
points       operating points: all stop at an exit, thresholds, the oracle's staircase
fronts       Pareto front and hypervolume over families
resampling   intervals over test samples and over seeds
scalars      all of a run's figures, by the names that records have
"""
