"""Fixtures of the tests of users' scorers."""

from scorer_cases import here, home, task, write  # noqa: F401
