"""One parser under fuzz in a process of its own: `-m tests.fuzz.fuzzed NAME SECONDS SEED [FOLDER MODULE...]`.

Owns that process: its memory limit, its dice, and its answer on standard output, a `Tried` in JSON. With FOLDER,
where atheris lies, inputs are led by what they reach in those modules; without, they are `changing`'s.
"""

import faulthandler
import logging
import os
import re
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import msgspec

from tests.fuzz.changing import MOST_BYTES, Changer
from tests.fuzz.trying import Target, Trial, Tried, limit_memory, tried

_PULSE = re.compile(r"cov: (\d+)")
_WORD = re.compile(rb"[A-Za-z_][\w.:-]{2,40}")
_MOST_WORDS = 400


def plain(target: Target, seconds: float, seed: int) -> Tried:
    """The samples, and changed samples for so long."""
    samples = target.samples()
    found = tried(target, samples)
    changed = tried(target, iter(Changer(samples, seed).one, None), seconds=seconds)
    changed.inputs += found.inputs
    changed.findings = found.findings + changed.findings
    return changed


def guided(name: str, seconds: float, seed: int, library: Path, modules: list[str]) -> None:
    """Led by coverage; answers on standard output and ends the process, for libFuzzer never comes back."""
    sys.path.append(f"{library}")  # after the project's own packages: its requirements are these already
    atheris = import_module("atheris")

    with atheris.instrument_imports(include=modules, enable_loader_override=False):
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415  so that its imports are instrumented

    target = TARGETS[name]
    answer, log = os.dup(1), tempfile.TemporaryFile()  # noqa: SIM115  libFuzzer writes there until the end
    os.dup2(log.fileno(), 2)
    trial, until = Trial(target), time.monotonic() + seconds

    def one(data: bytes) -> None:
        trial.one(data)
        if time.monotonic() > until:
            found = trial.done()
            seen = [int(cov) for cov in _PULSE.findall(os.pread(log.fileno(), 1 << 24, 0).decode(errors="replace"))]
            found.coverage = (seen[0], seen[-1]) if seen else (0, 0)
            os.write(answer, msgspec.json.encode(found))
            os._exit(0)

    with tempfile.TemporaryDirectory() as folder:
        words = _corpus(Path(folder), target.samples())
        flags = [
            f"-seed={seed}",
            f"-max_len={MOST_BYTES}",
            f"-dict={words}",
            "-timeout=0",
            "-rss_limit_mb=0",
            "-reload=0",
        ]
        atheris.Setup([sys.argv[0], f"{Path(folder) / 'corpus'}", *flags, "-len_control=0"], one)
        atheris.Fuzz()


def _corpus(folder: Path, samples: list[bytes]) -> Path:
    """The samples as files, and their words as a dictionary; gives its path."""
    (folder / "corpus").mkdir()
    for number, sample in enumerate(samples):
        (folder / "corpus" / f"{number}").write_bytes(sample)
    words = sorted({word for sample in samples for word in _WORD.findall(sample)})[:_MOST_WORDS]
    (folder / "words").write_text("".join(f'"{word.decode()}"\n' for word in words))
    return folder / "words"


def main(words: list[str]) -> None:
    name, seconds, seed, *where = words
    logging.disable()
    faulthandler.enable()
    if where:
        guided(name, float(seconds), int(seed), Path(where[0]), where[1:])
    from tests.fuzz.targets import TARGETS  # noqa: PLC0415  not before they may be instrumented

    limit_memory()
    sys.stdout.buffer.write(msgspec.json.encode(plain(TARGETS[name], float(seconds), int(seed))))


if __name__ == "__main__":
    main(sys.argv[1:])
