"""Time to go, predicted from what was measured."""

from __future__ import annotations

from mtplab.study.progress import Estimator, duration


def test_estimator_by_hand():
    estimate = Estimator()
    assert estimate.remaining([1, 2]) is None
    estimate.row_took(1, 2.0)
    estimate.row_took(1, 4.0)
    estimate.row_took(5, 10.0)
    estimate.load_took(1.5)
    # depth 2 is nearest to 1, depth 7 to 5; half of the first row is done
    assert estimate.remaining([2, 7], loads=2, spent=1.5) == 3.0 - 1.5 + 10.0 + 3.0
    assert estimate.remaining([], 0) == 0.0
    assert [duration(s) for s in (7.6, 200, 7500)] == ["8 s", "3 min 20 s", "2 h 05 min"]
