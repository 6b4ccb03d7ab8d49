"""The version of rlflow."""

__version__ = "0.1.0"
