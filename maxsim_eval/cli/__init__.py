"""TODO."""

from maxsim_eval.cli.app import main

__all__ = ["main"]
