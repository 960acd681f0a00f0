"""Whether what processing made anew could be left away for what is in use."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_sparse_refit.apply.slots import Equivalence


def one(*_: Any, **__: Any) -> None:
    """A function to be told from ``other``."""


def other(*_: Any, **__: Any) -> None:
    """Another one."""


WEIGHT = torch.arange(4.0)


@pytest.mark.parametrize(
    ("live", "fresh", "equal"),
    [
        (
            functools.partial(one, 1, mat=WEIGHT),
            functools.partial(one, 1, mat=WEIGHT.clone()),
            True,
        ),
        (functools.partial(one, 1), functools.partial(one, 2), False),
        (functools.partial(one, mat=WEIGHT), functools.partial(one, mat=WEIGHT + 1), False),
        (functools.partial(one), functools.partial(other), False),
        # Keywords may have any name, also that of another part.
        (functools.partial(one, func=1), functools.partial(other, func=1), False),
        (functools.partial(one, function=1), functools.partial(other, function=1), False),
        (functools.partial(one, 1), functools.partial(one, **{"0": 1}), False),
        ([WEIGHT, 1], [WEIGHT.clone(), 1], True),
        ([WEIGHT], (WEIGHT,), False),
        ({"a": WEIGHT}, {"b": WEIGHT}, False),
        (SimpleNamespace(a=WEIGHT, b=2), SimpleNamespace(a=WEIGHT.clone(), b=2), True),
        (SimpleNamespace(a=WEIGHT, b=2), SimpleNamespace(a=WEIGHT.clone(), b=3), False),
        (lambda: WEIGHT, lambda: WEIGHT, False),
        (WEIGHT, WEIGHT.double(), False),
        (WEIGHT, WEIGHT.reshape(2, 2).clone(), False),
    ],
)
def test_objects_are_equivalent_if_all_their_parts_are(live: Any, fresh: Any, equal: bool) -> None:
    assert Equivalence([]).holds(live, fresh) is equal


def test_a_tensor_in_use_stands_for_the_fresh_one_that_it_gets_the_bits_of() -> None:
    live, fresh = WEIGHT.clone(), WEIGHT + 1
    assert not Equivalence([]).holds([live], [fresh])
    assert Equivalence([(live, fresh)]).holds([live], [fresh])
    assert not Equivalence([(live, fresh)]).holds([WEIGHT], [fresh])
