"""A row of a step's report, as the host reads it."""

import numpy as np
from specstep.report import LEAST_LOGPROB, RUNNING, TOP_LOGPROBS, RowReport


def test_log_probabilities_of_what_is_no_number_are_the_least():
    """A step makes any integer of it, as the lowest that there is. No token is likely there."""
    lowest = np.iinfo(np.int64).min
    scalars, token, path = [1, RUNNING, 0, 0], [7], [0, 0]
    top = [*range(TOP_LOGPROBS), *[lowest] * TOP_LOGPROBS]
    (found,) = RowReport.read(np.array([*scalars, *token, *path, lowest, *top]), 2).logprobs
    assert found == (7, LEAST_LOGPROB, ())
