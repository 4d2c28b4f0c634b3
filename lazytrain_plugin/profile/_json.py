"""JSON of profiles and plans: canonical text, digests, and objects whose keys and types are checked."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any

_TYPES = {"int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false"}


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest_of(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def check_keys(raw: Any, record: type, *, more_keys: Collection[str] = ()) -> None:
    """Raises ValueError unless `raw` is an object with the fields of a dataclass: no other key, none missing, and
    numbers, strings and booleans where the dataclass has them. NaN and infinity are no numbers.

    Args:
        more_keys: other keys that a file may have.
    """
    if not isinstance(raw, dict):
        raise ValueError("it is no JSON object")
    known = {field.name: field for field in fields(record)}
    for key in raw:
        if key not in known and key not in more_keys:
            near = difflib.get_close_matches(key, [*known, *more_keys], n=1, cutoff=0.6)
            raise ValueError(f'unknown key "{key}"' + (f'; did you mean "{near[0]}"?' if near else ""))
    required = (key for key, field in known.items() if field.default is field.default_factory is MISSING)
    if missing := [key for key in required if key not in raw]:
        raise ValueError(f"it has no {', '.join(missing)}")
    for key, value in raw.items():
        if key in known:
            check_value(key, value, known[key].type)


def check_value(key: str, value: Any, type_name: str) -> None:
    """Raises ValueError unless `value` is of a plain type as annotations name it ("int", "float | None"); other types
    are not looked at."""
    name, _, optional = type_name.partition(" | ")
    if name not in _TYPES or optional not in ("", "None") or (optional and value is None):
        return
    if name in ("int", "float"):
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        right = right and (name == "float" or value == int(value))
    else:
        right = isinstance(value, str if name == "str" else bool)
    if not right:
        quoted = ", without quotes" if isinstance(value, str) else ""
        raise ValueError(f"{key} is {json.dumps(value)}; give {_TYPES[name]}{quoted}")
