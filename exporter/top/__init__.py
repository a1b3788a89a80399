"""Shows the GPUs and jobs of nodes live in a terminal, from the JSON API of their daemons.

Only `app` imports Textual. Refuses to classify, because every value comes from the daemon, and to show an old value as
live.
"""
