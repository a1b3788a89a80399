"""Names every world that can be built."""

from collections.abc import Callable, Iterable
from functools import partial

from tests.truth import hangs, inference, lookalikes, other_work, shared_node, training_library, zombies
from tests.truth.world import World

Builder = Callable[[str, int, float], World]
"""From the world's name, a seed and its length in seconds."""


def _kind(prefix: str, names: Iterable[str], builder: Builder) -> dict[str, Builder]:
    """Return builders that get their name without the prefix."""
    return {f"{prefix}_{name}": partial(_named, name, builder) for name in names}


def _named(name: str, builder: Builder, _: str, seed: int, seconds: float) -> World:
    return builder(name, seed, seconds)


def _builders() -> dict[str, Builder]:
    result = _kind("training", training_library.RECIPES, training_library.build_recipe)
    result |= _kind("training", ("reinforcement",), training_library.build_reinforcement)
    result["random_training_job"] = lambda _, seed, seconds: training_library.random_training_job(seed, seconds)
    result |= _kind("hang", hangs.FREEZES, hangs.build_hang)
    result["hang_crash_loop"] = hangs.build_crash_loop
    result |= _kind("lookalike", lookalikes.EPISODES, lookalikes.build_lookalike)
    result["lookalike_index"] = lookalikes.build_index
    result["lookalike_compile"] = lookalikes.build_compile
    result["lookalike_integer"] = lookalikes.build_integer
    result["lookalike_debugging"] = lookalikes.build_debugging
    result["shared_node"] = shared_node.build
    result |= inference.BUILDERS
    result |= _kind("other", other_work.STORIES, other_work.build_simple)
    result["other_solver"] = other_work.build_solver
    result |= _kind("zombie", zombies.STORIES, zombies.build_zombies)
    return result


BUILDERS = _builders()


def build(name: str, *, seed: int = 0, seconds: float = 3600.0) -> World:
    """Build a world; the same name, seed and length always give the same one. KeyError for an unknown name."""
    return BUILDERS[name](name, seed, seconds)
