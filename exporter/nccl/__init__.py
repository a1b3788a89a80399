"""Reads what NCCL and its plugins report of a job's communication, without any change to the job."""
