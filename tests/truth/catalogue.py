"""Names every world that can be built."""

from collections.abc import Callable

from tests.truth import training_library
from tests.truth.world import World

Builder = Callable[[str, int, float], World]
"""From the world's name, a seed and its length in seconds."""


def _recipe(name: str) -> Builder:
    return lambda _, seed, seconds: training_library.build_recipe(name, seed, seconds)


def _builders() -> dict[str, Builder]:
    result: dict[str, Builder] = {f"training_{name}": _recipe(name) for name in training_library.RECIPES}
    result["training_reinforcement"] = lambda _, seed, seconds: training_library.build_reinforcement(
        "reinforcement", seed, seconds
    )
    result["random_training_job"] = lambda _, seed, seconds: training_library.random_training_job(seed, seconds)
    return result


BUILDERS = _builders()


def build(name: str, *, seed: int = 0, seconds: float = 3600.0) -> World:
    """Build a world; the same name, seed and length always give the same one. KeyError for an unknown name."""
    return BUILDERS[name](name, seed, seconds)
