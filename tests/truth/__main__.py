"""Command line of the generator: list the worlds, or write one's trace and its truth."""

import argparse
import json
import sys
from pathlib import Path

from tests.truth import BUILDERS, World, build, doubts_between, layer, truth, write_trace


def answer(world: World) -> dict[str, object]:
    """Return the truth about a world, as written to a file. Seconds."""
    seconds = truth(world)
    layers = {
        uuid: {
            name: sum(value for cause, value in causes.items() if layer(cause) == name)
            for name in ("useful", "allocation", "compute_time", "model_flops")
        }
        for uuid, causes in seconds.items()
    }
    doubts = {
        uuid: [{"cause": a, "or": b, "seconds": value} for (a, b), value in rows.items()]
        for uuid, rows in doubts_between(world, 0.0, world.seconds).items()
    }
    hang = world.hang
    return {
        "name": world.name,
        "seed": world.seed,
        "seconds": world.seconds,
        "causes": seconds,
        "layers": layers,
        "doubts": doubts,
        "hang": None
        if hang is None
        else {
            "job_id": hang.job_id, "onset": hang.onset, "end": hang.end, "culprit": hang.culprit, "what": hang.what,
        },
        "zombies": [{"uuid": z.uuid, "start": z.start, "end": z.end} for z in world.zombies],
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.truth", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the worlds")
    write = commands.add_parser("write", help="write a world's trace and truth")
    write.add_argument("name", choices=sorted(BUILDERS))
    write.add_argument("--seed", type=int, default=0)
    write.add_argument("--seconds", type=float, default=3600.0)
    write.add_argument("--reading", type=float, default=1.0, help="seconds between readings")
    write.add_argument("--fields", choices=("full", "stock"), default="full")
    write.add_argument("--reports", choices=("none", "usual", "timed"), default="none")
    write.add_argument("--missing", type=float, default=0.0, help="probability that a profiling field is blank")
    write.add_argument("-o", "--output", type=Path, required=True)
    write.add_argument("--truth", type=Path, help="file for the truth")
    return parser


def main() -> int:
    """Run the command line."""
    arguments = _parser().parse_args()
    if arguments.command == "list":
        sys.stdout.write("".join(f"{name}\n" for name in sorted(BUILDERS)))
        return 0
    world = build(arguments.name, seed=arguments.seed, seconds=arguments.seconds)
    write_trace(
        world, arguments.output, reading_seconds=arguments.reading, fields=arguments.fields,
        reports=arguments.reports, missing=arguments.missing,
    )  # fmt: skip
    if arguments.truth is not None:
        arguments.truth.write_text(json.dumps(answer(world), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
