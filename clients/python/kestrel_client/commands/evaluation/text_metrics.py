"""Scores of texts, from the definitions of the metrics: relaxed accuracy, ANLS, VQA accuracy, yes or no, counts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def relaxed_correct(expected: str, said: str, tolerance: float = 0.05) -> bool:
    """ChartQA's relaxed accuracy: numbers may be off by 5 %, other answers must be equal but for case.

    https://arxiv.org/abs/2203.10244, section 5.1. A percentage is its value over 100.
    """
    truth, answer = expected.strip().lower(), said.strip().lower()
    wanted, given = _number(truth), _number(answer)
    if wanted and given is not None:  # Nothing is within 5 % of 0 but 0, which is equal as a text.
        return abs(given - wanted) / abs(wanted) <= tolerance
    return truth == answer


def anls(answers: Sequence[str], said: str, threshold: float = 0.5) -> float:
    """DocVQA's average normalised Levenshtein similarity of one answer: the best of all true ``answers``, 0 where the
    normalised distance reaches ``threshold``.

    https://arxiv.org/abs/1907.00490, equation 1; without regard to case, as in https://arxiv.org/abs/2007.00398, and to
    how words are spaced, as in the challenge's own program.
    """
    return max((_similarity(each, said, threshold) for each in answers), default=0.0)


def vqa_accuracy(answers: Sequence[str], said: str) -> float:
    """VQA accuracy: an answer is right as far as three of the other people gave it, averaged over the people.

    https://visualqa.org/evaluation.html, also TextVQA's.
    """
    given = vqa_normal(said)
    equal = [vqa_normal(each) == given for each in answers]
    if len(equal) < 2:
        return float(any(equal))
    total = sum(equal)
    return sum(min(1.0, (total - each) / 3) for each in equal) / len(equal)


def vqa_normal(text: str) -> str:
    """The form in which VQA accuracy compares texts: lower case, digits for number words, no articles, apostrophes in
    contractions, and no punctuation but apostrophes, colons and decimal points."""
    text = re.sub(r"(?<=\d),(?=\d)", "", text.lower())
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text)
    text = re.sub(r"[^\w\s':.]", " ", text).replace("_", " ")
    words = (_CONTRACTIONS.get(word, _DIGITS.get(word, word)) for word in text.split())
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def yes_or_no(said: str) -> str:
    """POPE's reading of an answer: "no" if its first sentence has the word no or not, otherwise "yes"; "" for none.

    https://arxiv.org/abs/2305.10355, section 4.
    """
    words = re.findall(r"\w+", said.lower().partition(".")[0])
    if not words:
        return ""
    return "no" if "no" in words or "not" in words else "yes"


def stated_count(said: str) -> int | None:
    """The first whole number of a text, in digits or as a word up to ten; None without one."""
    for word in re.findall(r"\d[\d,]*(?:\.\d+)?|[a-z]+", said.lower()):
        digits = _DIGITS.get(word, word.replace(",", ""))
        if digits.isdecimal() and len(digits) <= 18:
            return int(digits)
        if digits[0].isdecimal():
            return None
    return None


def _number(text: str) -> float | None:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _similarity(answer: str, said: str, threshold: float) -> float:
    first, second = (" ".join(text.lower().split()) for text in (answer, said))
    longest = max(len(first), len(second))
    if longest == 0:
        return 1.0
    if abs(len(first) - len(second)) >= threshold * longest:
        return 0.0
    distance = _distance(first, second) / longest
    return 1 - distance if distance < threshold else 0.0


def _distance(first: str, second: str) -> int:
    """Levenshtein's distance."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


_DIGITS = {"none": "0"} | {
    word: str(number)
    for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
_CONTRACTIONS = {
    word.replace("'", ""): word
    for word in (
        "ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's "
        "i've isn't it'd it'll ma'am might've must've mustn't needn't o'clock shan't she's should've shouldn't "
        "somebody's someone's something's that's there's they'd they'll they're they've wasn't we've weren't what'll "
        "what're what's what've when's where's who'd who'll who's who've why's won't would've wouldn't y'all you'd "
        "you'll you're you've"
    ).split()
}
