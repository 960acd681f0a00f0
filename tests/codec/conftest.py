"""Runs tests of the codec once for each implementation of its loops."""

from collections.abc import Iterator

import pytest

from tests.codec import implementations


# Of module scope, so that hypothesis accepts it: nothing in it depends on the single test.
@pytest.fixture(scope="module", params=implementations.ALL)
def each_implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with implementations.running(request.param):
        yield request.param


@pytest.fixture(scope="module", params=implementations.NUMPY_AND_COMPILED)
def both_implementations(request: pytest.FixtureRequest) -> Iterator[str]:
    with implementations.running(request.param):
        yield request.param
