"""The live view: what nodes say of their GPUs and jobs now, drawn for a terminal.

Owns how answers of the JSON API become lines of words (pure, any width and height), how nodes are asked, and the one
module that knows Textual (`app`). Refuses to judge: every figure is the daemon's. Refuses to show an old figure as
live, and to let a name that somebody chose reach the terminal as anything but text.
"""
