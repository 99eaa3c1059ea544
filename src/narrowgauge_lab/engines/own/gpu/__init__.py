"""Our engine on CUDA devices: fused steps in our own Triton kernels and cuDNN's, as one graph."""
