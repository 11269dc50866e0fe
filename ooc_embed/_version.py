"""The version of the package. Knows nothing else."""

__version__ = "0.1.0"
