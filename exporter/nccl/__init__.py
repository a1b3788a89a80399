"""Reads what NCCL, its profiler plugins and PyTorch know of a job's communication, without any change to the job."""
