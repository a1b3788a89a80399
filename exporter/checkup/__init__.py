"""Checks whether an installation works."""
