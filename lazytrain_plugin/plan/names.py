"""Names of rows and columns of the program, so that its LP text reads and differs well.

Parentheses, not brackets: HiGHS drops all names of a model when one holds a bracket.
"""

from __future__ import annotations


def name(kind: str, *where: str | int) -> str:
    """`name("keep", 3)` -> `keep(L03)`; units are numbered in forward order, stem units carry their name."""
    parts = [f"L{part:02d}" if isinstance(part, int) else _clean(part) for part in where]
    return f"{kind}({','.join(parts)})" if parts else kind


def _clean(text: str) -> str:
    return "".join(character if character.isalnum() or character in "._" else "_" for character in text)
