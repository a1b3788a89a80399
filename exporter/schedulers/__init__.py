"""Schedulers: which job holds which GPU of this node. See `base` for the protocol and the registry."""
