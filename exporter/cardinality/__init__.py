"""How many series a fleet is: scraped, recorded by rules, and left by a profile of relabelling.

Owns the counting, from the tables of metrics and of rules. Refuses to say what a series costs: the command does.
"""
