"""Fixtures of the tests of users' scorers."""

from scorer_cases import here, write  # noqa: F401
