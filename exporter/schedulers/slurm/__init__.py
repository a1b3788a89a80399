"""Slurm on a node: which job holds which GPU."""
