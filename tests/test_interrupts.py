"""A sample of `tests/benchmarks/interrupts.py`: the model comes back after Ctrl-C at any line."""

from __future__ import annotations

import pytest
from interrupt_cases import CASES
from interrupts import CAN_ARRIVE, count_lines, spread, try_case

#: Registration, call and removal of both adapters, with and without canonizers or rules.
SAMPLE = (
    "Zennit Gradient, LRP, merged norms, alone",
    "Zennit Gradient, GuidedBackprop, caught",
    "Zennit DisentangledComposite, LRP, merged norms",
    "Zennit collect, LRP, merged norms",
    "Zennit doctor, LRP",
    "Captum LRP",
    "Captum LRP, rules on modules",
    "Captum DeepLift",
)
# At the end are the lines in which the model is given back: more of them are tried.
N_EVENLY, N_LAST = 10, 10


needs_arrival = pytest.mark.skipif(not CAN_ARRIVE, reason="signals arrive at lines in CPython 3.11 alone")


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize(
    ("second", "at_once"),
    [
        pytest.param(None, True, id="at_once"),
        pytest.param(None, False, id="arriving", marks=needs_arrival),
        pytest.param(5, False, id="twice", marks=needs_arrival),
    ],
)
def test_the_model_comes_back(name, second, at_once):
    case = CASES[name]()
    case.prepare()
    case.run()
    n_lines = count_lines(case)
    lines = [*spread(n_lines, None, N_EVENLY), *range(n_lines - 10 * N_LAST, n_lines, 10)]
    if at_once:
        lines = lines[::2]
    count = try_case(case, lines, second, at_once)
    assert count.trials >= len(lines) - 1
    assert count.problems == {}
