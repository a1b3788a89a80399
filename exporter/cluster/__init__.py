"""One instance for a whole cluster: queue, expected GPUs, reservations, interruptions and placement of jobs."""
