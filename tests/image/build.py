"""Runs a Dockerfile: every instruction of the stages that the last one needs, in folders, its commands in containers.

Owns what the instructions do and the image that comes out. A command has no network: what pip would fetch is given to
it as a folder of wheels, whose hashes it checks all the same. Refuses flags and forms that ours does not use.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from tests.image import dockerfile
from tests.image.contained import ENGINES_OWN, Process, ran
from tests.image.dockerfile import DockerfileError, Instruction, Stage

WHEELS = "/var/wheels"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": WHEELS}
"""What stands in for a package index."""
_OPTION = re.compile(r"--(interval|timeout|start-period)=(\d+s)\s+")


class Image(Struct):
    """A root file system and what an engine is told of it."""

    root: Path
    env: dict[str, str] = {}
    labels: dict[str, str] = {}
    entrypoint: list[str] = []
    command: list[str] = []
    healthcheck: list[str] = []
    user: str = "0:0"
    folder: str = "/"
    ports: list[str] = []
    stop_signal: str = "SIGTERM"


Base = Callable[[Path], Image]
"""Makes the root of an image that a registry would have given, in that folder."""


class Builder:
    """One build: its context, its arguments, the images at hand."""

    def __init__(self, work: Path, *, context: Path, wheels: Path, bases: Mapping[str, Base]) -> None:
        self._work, self._context, self._wheels, self._bases = work, context, wheels, bases
        self._stages: dict[str, Stage] = {}
        self._before: dict[str, str] = {}
        self._given: Mapping[str, str] = {}
        self._built: dict[str, Image] = {}

    def build(self, text: str, *, again: str = "", **given: str) -> Image:
        """The image of the last stage, with the stage `again` as it was built before; raises DockerfileError."""
        self._given = given
        for name in set(self._built) - {again}:
            shutil.rmtree(self._built.pop(name).root, ignore_errors=True)
        self._before, stages = dockerfile.stages(text, given)
        self._stages = {stage.name: stage for stage in stages}
        return self._stage(stages[-1])

    def _stage(self, stage: Stage) -> Image:
        if stage.name not in self._built:
            root = self._work / stage.name
            image, variables = self._based(stage.base, root), dict[str, str]()
            for each in stage.instructions:
                _DOES[each.name](self, image, variables, each)
            self._built[stage.name] = image
        return self._built[stage.name]

    def _based(self, base: str, root: Path) -> Image:
        if base == "scratch":
            root.mkdir()
            return Image(root)
        if base in self._bases:
            return self._bases[base](root)
        if base not in self._stages:
            raise DockerfileError(f"FROM {base}: neither a stage nor an image at hand: {', '.join(self._bases)}")
        below = self._stage(self._stages[base])
        shutil.copytree(below.root, root, symlinks=True)
        return Image(root, env=dict(below.env), labels=dict(below.labels), user=below.user, folder=below.folder)

    # -- what the instructions do --

    def _arg(self, image: Image, variables: dict[str, str], each: Instruction) -> None:
        name, equals, default = each.rest.partition("=")
        if name in self._given or name in self._before:
            variables[name] = self._given.get(name, self._before.get(name, ""))
        elif equals:
            variables[name] = dockerfile.expanded(each, variables | image.env, default)

    def _env(self, image: Image, variables: dict[str, str], each: Instruction) -> None:
        image.env |= dockerfile.pairs(each, variables | image.env)

    def _label(self, image: Image, variables: dict[str, str], each: Instruction) -> None:
        image.labels |= dockerfile.pairs(each, variables | image.env)

    def _copy(self, image: Image, variables: dict[str, str], each: Instruction) -> None:
        if set(each.flags) - {"from"}:
            raise each.error(f"these tests know no flag but --from, not {each.flags}")
        *sources, target = dockerfile.expanded(each, variables | image.env).split()
        where = self._stage(self._stages[each.flags["from"]]).root if each.flags else self._context
        place = _inside(image, target)
        for source in sources:
            _copied(each, where / source.strip("/"), place, into=target.endswith("/") or len(sources) > 1)

    def _run(self, image: Image, variables: dict[str, str], each: Instruction) -> None:
        process = Process(
            ["/bin/sh", "-c", each.rest],
            variables | image.env | OFFLINE,
            image.folder,
            _numbers(image.user, each),
            capabilities=ENGINES_OWN,
            writable=True,
            binds={WHEELS: self._wheels},
        )
        with TemporaryDirectory() as folder:
            status, said = ran(image.root, process, Path(folder) / "run")
        _unmounted(image.root / WHEELS[1:])
        if status:
            raise each.error(f"exit {status}:\n{said[-3000:]}")

    def _workdir(self, image: Image, variables: dict[str, str], each: Instruction) -> None:
        image.folder = f"{Path(image.folder) / dockerfile.expanded(each, variables | image.env)}"
        _inside(image, image.folder).mkdir(parents=True, exist_ok=True)

    def _user(self, image: Image, variables: dict[str, str], each: Instruction) -> None:
        image.user = dockerfile.expanded(each, variables | image.env)
        _numbers(image.user, each)

    def _entrypoint(self, image: Image, _: dict[str, str], each: Instruction) -> None:
        image.entrypoint, image.command = _words(each), []

    def _cmd(self, image: Image, _: dict[str, str], each: Instruction) -> None:
        image.command = _words(each)

    def _expose(self, image: Image, variables: dict[str, str], each: Instruction) -> None:
        image.ports += dockerfile.expanded(each, variables | image.env).split()

    def _healthcheck(self, image: Image, _: dict[str, str], each: Instruction) -> None:
        if set(each.flags) - {"interval", "timeout", "start-period"} or not each.rest.startswith("CMD "):
            raise each.error("is not HEALTHCHECK [--interval, --timeout, --start-period] CMD [...]")
        image.healthcheck = _words(each._replace(rest=each.rest.removeprefix("CMD ").strip()))

    def _stopsignal(self, image: Image, variables: dict[str, str], each: Instruction) -> None:
        image.stop_signal = dockerfile.expanded(each, variables | image.env)


def _words(each: Instruction) -> list[str]:
    """The exec form; the other needs a shell at run time."""
    try:
        found = json.loads(each.rest)
    except json.JSONDecodeError as err:
        raise each.error('is not ["word", ...]: it would need a shell') from err
    return [str(word) for word in found]


def _numbers(user: str, each: Instruction) -> tuple[int, int]:
    number, _, group = user.partition(":")
    if not (number.isdecimal() and group.isdecimal()):
        raise each.error(f"{user!r} is not number:number, which Kubernetes' runAsNonRoot can judge")
    return int(number), int(group)


def _copied(each: Instruction, source: Path, place: Path, *, into: bool) -> None:
    if source.is_dir():  # a folder's content, as Docker has it
        shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
    elif source.is_file():
        target = place / source.name if into else place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    else:
        raise each.error(f"{source.name} is not in the context (.dockerignore?) or the stage")


def _inside(image: Image, path: str) -> Path:
    """Where a path of the image is on this machine."""
    return image.root / (Path(image.folder) / path).relative_to("/")


def _unmounted(place: Path) -> None:
    """Take away what runc made to mount upon."""
    if place.is_dir():
        place.rmdir()


_DOES: dict[str, Callable[[Builder, Image, dict[str, str], Instruction], None]] = {
    "ARG": Builder._arg,
    "ENV": Builder._env,
    "LABEL": Builder._label,
    "COPY": Builder._copy,
    "RUN": Builder._run,
    "WORKDIR": Builder._workdir,
    "USER": Builder._user,
    "ENTRYPOINT": Builder._entrypoint,
    "CMD": Builder._cmd,
    "EXPOSE": Builder._expose,
    "HEALTHCHECK": Builder._healthcheck,
    "STOPSIGNAL": Builder._stopsignal,
}
