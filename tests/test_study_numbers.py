"""How measured numbers are written: as many digits as the interval bears, one unit, a minus that is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtplab.study.numbers import percent, plus_minus

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.00456, 0.00028, "0.00456 ± 0.00028"),
        (0.0074, 0.0005, "0.00740 ± 0.00050"),  # no zero is lost
        (9.1e-6, 2.7e-6, "0.0000091 ± 0.0000027"),  # no exponent where one can be done without
        (250.4, 19.6, "250 ± 20"),
        (0.5, 0.00996, "0.500 ± 0.010"),  # two digits after rounding, too
        (-0.0011, 0.00058, "−0.00110 ± 0.00058"),
        (-1e-7, 0.001, "0.0000 ± 0.0010"),  # nothing has no sign
        (0.405465, None, "0.405"),
        (3.0, None, "3.00"),
        (0, None, "0"),
        (0.0, 0.0, "0"),
        (1.25e-12, None, "1.2e−12"),
        (float("nan"), None, "nan"),
    ],
)
def test_digits_follow_the_interval(value, error, text):
    assert plus_minus(value, error) == text
    if value > 0:
        assert plus_minus(value, error, sign=True) == f"+{text}"


def test_shares():
    assert [percent(0.4149), percent(-0.141, sign=True), percent(0.35, sign=True), percent(0.9961, 2)] == [
        "41 %", "−14 %", "+35 %", "99.61 %"]  # fmt: skip


def test_kl_has_one_unit_and_shares_one_spelling():
    """Nats, in tables and figures as in rows and options; a blank before the per cent sign wherever people read."""
    pages = [*REPO.glob("mtplab/**/*.py"), *REPO.glob("mtplab/**/*.js"), *REPO.glob("notebooks/*.ipynb")]
    texts = {path.relative_to(REPO): path.read_text(encoding="utf-8") for path in (*pages, REPO / "README.md")}
    assert len(texts) > 100
    other = re.compile(r"millinat|mnat|thousandths? of a nat", re.IGNORECASE)
    assert [str(path) for path, text in texts.items() if other.search(text)] == []
    glued = re.compile(r":[+]?\.?[0-9]*%\}")
    found = [str(path) for path, text in texts.items() if glued.search(text) and "bench" not in path.parts]
    assert found == [], "mtplab.study.numbers.percent"
