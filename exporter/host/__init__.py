"""Reads what the host shows of jobs and their network: CPU time, pressure, RDMA ports."""
