"""Attacks on one daemon, one class a file; each is a function of an episode."""
