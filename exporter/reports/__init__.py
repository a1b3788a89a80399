"""What training jobs say of themselves: taken on a local socket, on loopback HTTP, or read from their logs.

Owns the way from a process's words to `Report`s of a proven job. Refuses claims: a job is never told by its message.
"""
