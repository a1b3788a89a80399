"""The whole cluster, seen by one instance of its own: queue, expected GPUs, reservations, interruptions, placement.

Owns what a single node cannot know. Refuses to run on a node's hot path and to know any one GPU's seconds: those are
the ledger's. What a scheduler says is turned into the values of `model`; everything after that is the same for all.
"""
