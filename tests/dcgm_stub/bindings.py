"""NVIDIA's own Python bindings of DCGM, as its packages lay them out: a folder of plain modules.

They are on no package index by themselves, but NVIDIA's Apache-licensed triton-model-analyzer carries them all, with
their imports turned into its own namespace. `make` fetches that wheel, named and hashed in
`requirements.bindings.lock`, beside the virtual environment; here the imports are turned back and nothing else is
changed. Owns that; refuses to fetch anything.
"""

import re
import sysconfig
from pathlib import Path

_FETCHED = Path(sysconfig.get_path("purelib"), "../../../dcgm-bindings/dist").resolve()
_INSIDE = Path("model_analyzer/monitor/dcgm")
_PLAIN_IMPORT = re.compile(r"^(\s*)import model_analyzer\.monitor\.dcgm\.(\w+)(?: as (\w+))?", re.MULTILINE)
_FROM_IMPORT = re.compile(r"^(\s*)from model_analyzer\.monitor\.dcgm\.", re.MULTILINE)


def missing() -> str:
    """Say why there are no bindings here, as the reason of a skip; empty when there are."""
    there = (_FETCHED / _INSIDE / "dcgm_agent.py").is_file()
    return "" if there else "needs NVIDIA's DCGM bindings: `make .venv/dcgm-bindings/.fetched` fetches them"


def unpack(into: Path, *, library: Path | None = None) -> Path:
    """Fill `into` with the bindings and return it; with `library` they load libdcgm from that folder.

    They look for it in the system's library folders only, by absolute path, whatever LD_LIBRARY_PATH says.
    """
    into.mkdir(parents=True, exist_ok=True)
    for source in sorted((_FETCHED / _INSIDE).glob("*.py")):
        text = _restored(source.read_text(encoding="utf-8"))
        if library is not None and source.name == "dcgm_structs.py":
            text += f"\n_LoadDcgmLibrary({str(library)!r})\n"
        if "model_analyzer." not in text:  # the wheel's own monitor lies among them
            (into / source.name).write_text(text, encoding="utf-8")
    return into


def _restored(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        alias = "" if found[3] in (None, found[2]) else f" as {found[3]}"
        return f"{found[1]}import {found[2]}{alias}"

    return _FROM_IMPORT.sub(r"\1from ", _PLAIN_IMPORT.sub(plain, text))
