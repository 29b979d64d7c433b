"""Changes a JSON value at one place, so that inputs stay JSON."""

import copy
import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, 5.0, 1e308, -1e-320, 2**31, 2**63, 2**64, 10**400),
    *("", " ", "\x00", "\ud83d", "é" * 300, "-1", "NaN", "data:image/png;base64,", "[", "a" * 5000),
    *([], {}, [[]], [None], {"": None}, [0] * 300, {"type": "object"}, {"$ref": "#"}),
)


def mutated(text: bytes, most: int, seed: int) -> bytes:
    """``text`` with some changes, of ``most`` bytes: within the value or, if it is not JSON or by chance, of bytes."""
    changed = None if seed % 8 == 0 else changed_value(text, seed)
    if changed is None or len(changed) > most:
        import atheris

        changed = bytes(atheris.Mutate(text, most))
    return changed


def changed_value(text: bytes, seed: int) -> bytes | None:
    """``text`` with some changes within the value; None if it is not JSON."""
    chance = random.Random(seed)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    box = [value]
    places = list(_places(box))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        holder, key = chance.choice(places)
        _change(holder, key, chance, places)
    try:
        return json.dumps(box[0]).encode()
    except (ValueError, RecursionError):
        return None


def _change(holder: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    if key not in (holder if isinstance(holder, dict) else range(len(holder))):
        return  # An earlier change has taken it away.
    kind = chance.randrange(6)
    if kind == 0:
        holder[key] = chance.choice(ODD)
    elif kind == 1:
        other, at = chance.choice(places)
        if at in other if isinstance(other, dict) else at < len(other):
            holder[key] = copy.deepcopy(other[at])
    elif kind == 2 and len(holder) > 1:
        del holder[key]
    elif kind == 3 and isinstance(holder, list):
        holder.extend(copy.deepcopy(holder[key]) for _ in range(chance.choice((1, 3, 20))))
    elif kind == 4 and isinstance(holder, dict):
        holder[f"{key}{chance.choice(('', '_', 's', '2'))}"] = holder.pop(key)
    else:
        holder[key] = _near(holder[key], chance)


def _near(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return chance.choice(
            (-value, value + 1, value - 1, value * 1000, str(value), 1.0 * (value % 99))
        )
    if isinstance(value, str) and value:
        at = chance.randrange(len(value))
        return chance.choice(
            (
                value[:at],
                value[at:],
                value * 2,
                value[:at] + chr(chance.randrange(1, 0x3000)) + value[at:],
            )
        )
    return [value]


def _places(value: Any) -> Any:
    """All places in ``value``, as a list or mapping and an index or key."""
    found = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(found):
        yield value, key
        if isinstance(part, (dict, list)):
            yield from _places(part)
