"""Byte sizes and how people read them."""

GIB = 2**30
MIB = 2**20


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'; always binary units, one decimal above KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def gib_to_bytes(gib: float | None) -> int | None:
    """Bytes of a size in GiB; None stays None."""
    return None if gib is None else int(gib * GIB)


def gbit_to_bytes_per_s(gbit: float) -> float:
    """Bytes per second of a bandwidth in Gbit/s."""
    return gbit * 1e9 / 8
