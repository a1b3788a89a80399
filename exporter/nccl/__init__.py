"""Evidence that NCCL and PyTorch keep about a job's collectives: who is in which, and who is missing."""
