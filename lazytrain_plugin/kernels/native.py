"""The C++ kernels of csrc/ through ctypes (calls release the GIL), or plain torch where the library is missing.

Arguments are checked by the callers (adamw.py, split.py, state8.py, norm.py); here are pointers, threads and the
instruction set.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels import reference, state8
from lazytrain_plugin.kernels.batch import Batch, run_or_add
from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.scalars import AdamWScalars
from lazytrain_plugin.kernels.state8 import Moment8

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("liblazytrain_kernels.so")
ISAS = ("avx512vbmi", "avx512", "avx2", "generic")
PLAIN_TORCH = "torch"
_ABI_VERSION = 3

_lock = threading.Lock()
_forced_plain_torch = False


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """`isa`: one of ISAS, or "torch" when the library is not used; `library`: its path, or None."""

    isa: str
    threads: int
    library: str | None


class _Scalars(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_float) for name in AdamWScalars.__slots__[:9]),
        *((name, ctypes.c_int32) for name in AdamWScalars.__slots__[9:]),
    ]


class _CodeBook(ctypes.Structure):
    _fields_ = [
        ("values", ctypes.POINTER(ctypes.c_float)),
        *((name, ctypes.c_float * 8) for name in ("scale", "offset", "below", "tail", "first")),
        ("top", ctypes.c_float),
        ("extreme", ctypes.c_float),
        ("zero_code", ctypes.c_int32),
    ]


class _Gradient(ctypes.Structure):
    _fields_ = [
        ("values", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
    ]


class _AdamW(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("gradient", _Gradient),
        ("scalars", _Scalars),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("exp_avg_codes", ctypes.c_void_p),
        ("exp_avg_scales", ctypes.c_void_p),
        ("exp_avg_sq_codes", ctypes.c_void_p),
        ("exp_avg_sq_scales", ctypes.c_void_p),
        ("signed_book", ctypes.POINTER(_CodeBook)),
        ("unsigned_book", ctypes.POINTER(_CodeBook)),
        ("seed0", ctypes.c_uint32),
        ("seed1", ctypes.c_uint32),
        ("first_index", ctypes.c_int64),
        ("numel", ctypes.c_int64),
    ]


@functools.cache
def _code_book(signed: bool) -> _CodeBook:
    book = state8.code_book(signed)
    tables = ((ctypes.c_float * 8)(*table) for table in book.decade_tables())
    values = (ctypes.c_float * 256)(*book.values)
    return _CodeBook(values, *tables, book.top, book.extreme, book.zero_code)  # the structure keeps `values` alive


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    reason = f"{LIBRARY} does not exist"
    if LIBRARY.exists():
        try:
            library = ctypes.CDLL(str(LIBRARY))
            if library.lazytrain_abi_version() == _ABI_VERSION:
                pointer, integer, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
                library.lazytrain_isa.restype = ctypes.c_char_p
                for name, arguments in {
                    "force_isa": (ctypes.c_char_p,),
                    "set_num_threads": (integer,),
                    "adamw_many": (ctypes.POINTER(_AdamW), ctypes.c_int64),
                    "quantize": (pointer, pointer, pointer, ctypes.POINTER(_CodeBook), count),
                    "dequantize": (pointer, pointer, pointer, ctypes.POINTER(_CodeBook), count),
                    "split": (pointer, pointer, pointer, count),
                    "join": (pointer, pointer, pointer, count),
                    "accumulate": (pointer, pointer, integer, integer, count),
                    "sum_squares": (ctypes.POINTER(_Gradient), count, pointer),
                    "encode_gradient": (pointer, integer, ctypes.POINTER(_Gradient), count),
                    "decode_gradient": (ctypes.POINTER(_Gradient), pointer, count),
                    "add_codes": (ctypes.POINTER(_Gradient), ctypes.POINTER(_Gradient), integer, count),
                }.items():
                    getattr(library, f"lazytrain_{name}").argtypes = arguments
                library.lazytrain_set_num_threads(default_num_threads(1))
                return library
            reason = f"{LIBRARY} is of another version"
        except (OSError, AttributeError) as error:
            reason = f"{LIBRARY} can't be loaded ({error})"
    logger.warning(
        "The CPU kernels run in plain torch, some 30 (fp32 states) to 40 times (8-bit states) slower: %s. "
        "Install g++ and run: python -m lazytrain_plugin._build",
        reason,
    )
    return None


def _library() -> ctypes.CDLL | None:
    if _forced_plain_torch:
        return None
    with _lock:  # functools.cache alone would let two threads load, and warn, at once
        return _loaded()


def kernel_info() -> KernelInfo:
    library = _library()
    if library is None:
        return KernelInfo(PLAIN_TORCH, torch.get_num_threads(), None)
    return KernelInfo(library.lazytrain_isa().decode(), library.lazytrain_num_threads(), str(LIBRARY))


def available_isas() -> list[str]:
    """The instruction sets that this processor runs, best first, then "torch", which always works."""
    library = _library()
    if library is None:
        return [PLAIN_TORCH]
    current = library.lazytrain_isa()
    found = [isa for isa in ISAS if library.lazytrain_force_isa(isa.encode()) == 0]
    library.lazytrain_force_isa(current)
    return [*found, PLAIN_TORCH]


def force_isa(isa: str | None) -> None:
    """Makes all CPU kernels use one of `available_isas()`; None: the best again.

    For tests and benchmarks, not while kernels run. Raises KernelError when this processor or build does not have it.
    """
    global _forced_plain_torch
    _forced_plain_torch = False
    library = _library()
    if isa == PLAIN_TORCH:
        _forced_plain_torch = True
    elif library is None:
        if isa is not None:
            raise KernelError(
                f"There is no {isa} kernel without the C++ library. Run: python -m lazytrain_plugin._build"
            )
    elif library.lazytrain_force_isa(None if isa is None else isa.encode()) != 0:
        raise KernelError(f"This processor has no {isa} kernel. Choose one of {', '.join(available_isas())}.")


def set_num_threads(n: int) -> None:
    """Threads of the CPU kernels in this process, the caller's included. They are started at the next call."""
    library = _library()
    if library is not None:
        library.lazytrain_set_num_threads(max(1, n))


def restart_threads(n: int) -> None:
    """As `set_num_threads`, and starts them now: they inherit the processors that the caller may run on."""
    library = _library()
    if library is None:
        return
    for count in (1, max(1, n)):  # an unchanged number would keep the old threads
        library.lazytrain_set_num_threads(count)
    library.lazytrain_split(None, None, None, 0)  # the first call, of whatever, starts them


def default_num_threads(local_world_size: int) -> int:
    """This rank's share of the processors that the affinity mask and the cgroup quota allow, at least 1.

    OMP_NUM_THREADS is not asked: launchers set it to 1.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cgroup_cpu_quota()
    if quota is not None:
        allowed = min(allowed, max(1, int(quota)))
    return max(1, allowed // max(1, local_world_size))


def cgroup_cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), process_cgroups: Path = Path("/proc/self/cgroup")
) -> float | None:
    """How many processors' time the control groups of this process allow (the tightest, v1 and v2); None: unlimited."""
    quotas = []
    try:
        lines = process_cgroups.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if controllers == "" else root / "cpu"
        if controllers != "" and "cpu" not in controllers.split(","):
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            quotas.append(_quota_v2(folder) if controllers == "" else _quota_v1(folder))
            if folder == base:
                break
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if quota <= 0 else quota / period


def _gradient(gradient: torch.Tensor | CodedGradient) -> _Gradient:
    if isinstance(gradient, CodedGradient):
        return _Gradient(gradient.codes.data_ptr(), gradient.steps.data_ptr(), 2 if gradient.bits == 8 else 3)
    return _Gradient(gradient.data_ptr(), None, int(gradient.dtype == torch.bfloat16))


def _structure(
    weight: torch.Tensor, remainder: torch.Tensor | None, gradient: torch.Tensor | CodedGradient, scalars: AdamWScalars
) -> _AdamW:
    return _AdamW(
        weight=weight.data_ptr(),
        remainder=None if remainder is None else remainder.data_ptr(),
        gradient=_gradient(gradient),
        scalars=_Scalars(*(getattr(scalars, name) for name in AdamWScalars.__slots__)),
        numel=weight.numel(),
    )


def adamw_fp32(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: AdamWScalars,
    batch: Batch | None = None,
) -> None:
    if _library() is None:
        return reference.adamw_fp32(weight, remainder, gradient, exp_avg, exp_avg_sq, scalars)
    item = _structure(weight, remainder, gradient, scalars)
    item.exp_avg, item.exp_avg_sq = exp_avg.data_ptr(), exp_avg_sq.data_ptr()
    run_or_add(_update_together, item, batch)


def adamw_8bit(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    exp_avg: Moment8,
    exp_avg_sq: Moment8,
    scalars: AdamWScalars,
    seeds: tuple[int, int],
    first_index: int,
    batch: Batch | None = None,
) -> None:
    if _library() is None:
        return reference.adamw_8bit(weight, remainder, gradient, exp_avg, exp_avg_sq, scalars, seeds, first_index)
    item = _structure(weight, remainder, gradient, scalars)
    item.exp_avg_codes, item.exp_avg_scales = exp_avg.codes.data_ptr(), exp_avg.scales.data_ptr()
    item.exp_avg_sq_codes, item.exp_avg_sq_scales = exp_avg_sq.codes.data_ptr(), exp_avg_sq.scales.data_ptr()
    item.signed_book, item.unsigned_book = ctypes.pointer(_code_book(True)), ctypes.pointer(_code_book(False))
    item.seed0, item.seed1 = seeds
    item.first_index = first_index
    run_or_add(_update_together, item, batch)


def _update_together(items: list[_AdamW]) -> None:
    _library().lazytrain_adamw_many((_AdamW * len(items))(*items), len(items))


def quantize(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:
    library = _library()
    if library is None:
        return reference.quantize(values, codes, scales, signed)
    library.lazytrain_quantize(
        values.data_ptr(), codes.data_ptr(), scales.data_ptr(), _code_book(signed), values.numel()
    )


def dequantize(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, signed: bool) -> None:
    library = _library()
    if library is None:
        return reference.dequantize(codes, scales, values, signed)
    library.lazytrain_dequantize(
        codes.data_ptr(), scales.data_ptr(), values.data_ptr(), _code_book(signed), values.numel()
    )


def split(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    library = _library()
    if library is None:
        return reference.split(master, weight, remainder)
    library.lazytrain_split(master.data_ptr(), weight.data_ptr(), remainder.data_ptr(), master.numel())


def join(weight: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    library = _library()
    if library is None:
        return reference.join(weight, remainder, master)
    library.lazytrain_join(weight.data_ptr(), remainder.data_ptr(), master.data_ptr(), master.numel())


def accumulate(accumulator: torch.Tensor, gradient: torch.Tensor, first: bool) -> None:
    library = _library()
    if library is None:
        return reference.accumulate(accumulator, gradient, first)
    library.lazytrain_accumulate(
        accumulator.data_ptr(), gradient.data_ptr(), gradient.dtype == torch.bfloat16, first, accumulator.numel()
    )


def sum_squares(values: torch.Tensor | CodedGradient, lanes: torch.Tensor) -> None:
    library = _library()
    if library is None:
        return reference.sum_squares(values, lanes)
    library.lazytrain_sum_squares(_gradient(values), values.numel(), lanes.data_ptr())


def encode_gradient(values: torch.Tensor, coded: CodedGradient) -> None:
    library = _library()
    if library is None:
        return reference.encode_gradient(values, coded)
    library.lazytrain_encode_gradient(
        values.data_ptr(), values.dtype == torch.bfloat16, _gradient(coded), values.numel()
    )


def decode_gradient(coded: CodedGradient, values: torch.Tensor) -> None:
    library = _library()
    if library is None:
        return reference.decode_gradient(coded, values)
    library.lazytrain_decode_gradient(_gradient(coded), values.data_ptr(), values.numel())


def add_codes(total: CodedGradient, arrived: CodedGradient, first: bool) -> None:
    library = _library()
    if library is None:
        return reference.add_codes(total, arrived, first)
    library.lazytrain_add_codes(_gradient(total), _gradient(arrived), first, total.numel())
