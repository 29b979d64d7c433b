"""The metrics, against the definitions and examples of their papers and pages."""

import json

import pytest

from kestrel_client.commands.evaluation.answers import relaxed_correct
from kestrel_client.commands.evaluation.place_metrics import iou, matched


@pytest.mark.parametrize(
    ("expected", "said", "right"),
    [
        ("100", "95", True),  # within 5 % of the gold answer
        ("100", "105.1", False),
        ("-20", "-19.5", True),
        ("0", "0", True),
        ("0", "0.01", False),
        ("12%", "0.12", True),
        ("12%", "12", False),
        ("Blue", "blue ", True),  # any other answer must be equal
        ("Blue", "light blue", False),
        ("nan", "nan", True),
        ("5", "five", False),
        ("5", "", False),
        ("20", "21", True),  # 1 / 20 is 5 %
        ("20", "21.01", False),
        ("0.8", "0.77", True),
        ("50%", "0.52", True),
        ("50%", "52%", True),
        ("1,000", "1000", False),  # not a number in ChartQA's own program either
        ("1e3", "1000", True),
        ("-5", "5", False),
    ],
)
def test_relaxed_accuracy(expected, said, right):
    assert relaxed_correct(expected, said) is right


def test_boxes():
    assert iou((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert iou((0, 0, 1, 1), (1, 1, 2, 2)) == 0
    assert matched([(0, 0, 2, 2), (5, 5, 6, 6)], [(0, 0, 2, 2), (0, 0, 2, 1.9)]) == [1.0]
    # Half of a box is found, so the overlap is 8 of 16: IoU 0.5, which counts as a match.
    assert matched([(0, 0, 4, 4)], [(0, 0, 4, 2)]) == [0.5]
    # One truth takes one box, the better one; the other is a false positive: F1 is 2 * 1 / (1 + 2).
    assert matched([(0, 0, 4, 4)], [(0, 0, 4, 3), (0, 0, 4, 4)]) == [1.0]
    assert json.dumps(iou((0, 0, 0, 0), (0, 0, 0, 0))) == "0.0"
