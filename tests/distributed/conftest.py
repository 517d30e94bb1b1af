"""One pool of gloo ranks for each world size, for the whole session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_longca.parallel.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    made: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        if size not in made:
            made[size] = Pool(size, path=[str(Path(__file__).parent)])
        return made[size]

    yield pool
    for each in made.values():
        each.close()
