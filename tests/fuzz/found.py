"""What the fuzzing has found since it began; each is a test in tests/fuzz/test_faults.py."""

from benchmarks.group import Table

FOUND = Table(
    about="Found by it so far, all mended; each has a test of its own",
    head=("parser", "input", "what happened", "what happens now"),
    rows=(
        ("hostlists of Slurm", "n[1-65536][1-65536][1-65536]", "memory without bound", "refused: too many names"),
        ("hostlists of Slurm", "2,000 brackets; a name of 60,000 letters", "RecursionError; 4 GB of names", "refused"),
        (
            "watch of the API server",
            "a byte that is not UTF-8, or 100,000 brackets, in an event",
            "the watch ended for good",
            "told, and asked anew",
        ),
        (
            "inventory file, pause file",
            "nested a thousand deep",
            "RecursionError",
            "told, and gone on without; counts as a pause",
        ),
        (
            "engines' pages",
            "a value of 400 digits",
            "OverflowError: its page was told as our fault",
            "a bad line, counted",
        ),
        (
            "configuration",
            "a number of 5,000 digits; a port of 5,000",
            "ValueError with a traceback",
            "refused, with file and reason",
        ),
        ("recordings", "nested a thousand deep", "RecursionError", "refused, with its line"),
        ("recordings", "a line without end, packed or not", "memory without bound", "refused beyond 64 MiB a line"),
        (
            "history",
            "a row with text that is not UTF-8",
            "the store could not be begun on: told as our fault",
            "a checkpoint of no use: begun anew",
        ),
        ("history", "a row without its body", "TypeError", "told as damage"),
    ),
)
