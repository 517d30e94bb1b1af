"""pytest-longca: tells the truth about attention kernels."""

__version__ = "0.1.0"
