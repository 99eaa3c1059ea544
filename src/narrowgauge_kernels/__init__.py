"""Compiled operators with their references: C++ and CUDA, loaded through torch.

`python -m narrowgauge_kernels.build` builds them, `load` loads them. Importing this does neither,
and imports no torch.
"""

from narrowgauge_kernels.library import build_hash, is_built, library_directory, load

__all__ = ["build_hash", "is_built", "library_directory", "load"]
