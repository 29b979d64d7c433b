"""The formats of strings and numbers in a JSON Schema that are enforced, as regular expressions and ranges.

A text that matches is always valid. Rare valid texts are left out, such as a leap second, which is valid on a few days.
Sources: RFC 3339 (dates, times, durations), 5321 (email), 1123 (hostname), 2673 and 4291 (addresses), 4122, 3986.
"""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    "02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"


def _sequence(*units: str) -> str:
    """An amount of a unit, with amounts of the next units after it."""
    text = ""
    for unit in reversed(units):
        text = f"[0-9]{{1,9}}{unit}" + (f"(?:{text})?" if text else "")
    return text


_CLOCK = f"T(?:{_sequence('H', 'M', 'S')}|{_sequence('M', 'S')}|{_sequence('S')})"
_CALENDAR = f"(?:{_sequence('Y', 'M', 'D')}|{_sequence('M', 'D')}|{_sequence('D')})"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]{1,31}"
_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,31}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"


def _groups(most: int) -> str:
    return f"(?:{_GROUP}(?::{_GROUP}){{0,{most - 1}}})?" if most else ""


_IPV6 = "(?:" + "|".join(
    [
        f"{_GROUP}(?::{_GROUP}){{7}}",
        f"::{_groups(7)}",
        *(f"{_GROUP}(?::{_GROUP}){{{n - 1}}}::{_groups(7 - n)}" for n in range(1, 8)),
    ]
)
_IPV6 += ")"
_PORT = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3})"
_PCT = "%[0-9a-fA-F]{2}"
_PCHAR = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|{_PCT})"
_AUTHORITY = (
    rf"(?:(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|{_PCT})*@)?"
    rf"(?:\[{_IPV6}\]|(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|{_PCT})*)(?::{_PORT})?"
)
_URI = (
    rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|"
    rf"(?:{_PCHAR}+(?:/{_PCHAR}*)*)?)(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
)

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,9}}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})?@{_LABEL}(?:\.{_LABEL}){{1,2}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": _URI,
}
"""Regular expressions of whole texts."""

MAX_LENGTHS = {"hostname": 253}
"""Characters at most."""

RANGES: dict[str, tuple[int, int] | None] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**53), 2**53),
    "float": None,
    "double": None,
}
"""Formats of numbers (OpenAPI) with the least and the largest one; None: all."""
