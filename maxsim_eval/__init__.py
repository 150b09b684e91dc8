"""Exact MaxSim paths compared end to end: data in, report out."""
