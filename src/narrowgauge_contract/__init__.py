"""What the launcher and the lab agree on: jobs, events, outcomes, records, data sets, claims.

Standard library only (and tomli below Python 3.11). Import from the submodules.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
