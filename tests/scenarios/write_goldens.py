"""Rewrites golden `/metrics` texts. Run by hand, from the repository's root, and read what changed before keeping it.

    .venv/bin/python -m tests.scenarios.write_goldens [SCENARIO ...]

Without a name it rewrites all. Refuses to judge: a golden text is right because a person has read its difference.
"""

import sys

from tests.scenarios.goldens import GOLDENS, path, text


def main(names: list[str]) -> int:
    """Write the named golden texts; return 2 if a name is not a scenario's."""
    unknown = sorted(set(names) - set(GOLDENS))
    if unknown:
        sys.stderr.write(f"No golden story is called {', '.join(unknown)}; there are {', '.join(GOLDENS)}\n")
        return 2
    for name in names or GOLDENS:
        path(name).parent.mkdir(parents=True, exist_ok=True)
        path(name).write_bytes(text(name))
        sys.stdout.write(f"{path(name)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
