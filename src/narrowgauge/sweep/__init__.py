"""Many runs of one experiment: which points, which of them are done, and what came out."""
