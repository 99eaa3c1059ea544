"""`narrowgauge`, our own engine, on CPUs and on CUDA devices."""
