"""Block-wise low-bit storage of activations and gradients: the formats, and plain torch for every device.

A tensor is flattened and cut into blocks of 128 values that share one scale (the last block is filled with zeros).
A value is `level * scale`:

    fp4    levels 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign (e2m1)                                     4.125 bits per value
    nf4    16 quantiles of a normal distribution between -1 and 1 (QLoRA, Dettmers et al., 2023)  4.125
    int5, int6, int8   whole numbers from -15, -31, -127 to as many                               5.125, 6.125, 8.125
    bf16   no codes: the tensor itself in bf16                                                    16

How a value is rounded (everywhere in this order of fp32 operations, so with the same bits):

    scale  the largest magnitude / the largest level, rounded up to bf16: fp32's range in two bytes. Up, so that nothing
           is clipped; it costs under 0.8 % of a step. (At most so far that the largest level is finite in bf16, and a
           value decoded as fp16 is cut at fp16's end: there the last 0.8 % are lost.) NaN if the block holds NaN or
           infinity: all of the block then decodes to NaN, nothing is hidden.
    level  the nearest to value / scale (IEEE division; fp4 compares with products of scale and boundary, which are
           exact). Ties go to the even code; nf4's to the lower level, which are no ties but for rounding. With noise
           (int formats, for gradients) floor(value / scale + u), u uniform in [0, 1) and a function of (key, index)
           alone.

The codes of a block are `2 * bits` times 8 bytes in planes: byte j of the first 64 holds the low four bits of values j
and j + 64; then, for 5, 6 and 8 bits, the upper `bits - 4`: byte j of plane two holds those of values j, j + n,
j + 2n, ..., where n = 16 * (bits - 4).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import NormalDist

import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels import reference
from lazytrain_plugin.kernels.state8 import noise_seeds

BLOCK = 128
CHUNK_BLOCKS = 8192  # a million values at a time keep the temporaries small
LARGEST_BF16 = torch.finfo(torch.bfloat16).max
LARGEST_FP16 = torch.finfo(torch.float16).max
FP16_LIMIT = LARGEST_FP16 * (1 + 2.0**-7)  # as far as a scale's rounding may carry a value that fp16 holds
_FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`bits` of a code, and the largest level: a block's largest magnitude gets about that one."""

    name: str
    bits: int
    largest_level: float

    @property
    def is_integer(self) -> bool:
        return self.name.startswith("int")

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's codes."""
        return BLOCK * self.bits // 8

    @property
    def largest_scale(self) -> float:
        """The largest bf16 whose product with the largest level is finite in bf16."""
        quotient = torch.tensor(LARGEST_BF16 / self.largest_level, dtype=torch.float32)
        return (quotient.view(torch.int32) & -0x10000).view(torch.float32).item()

    def storage_bytes(self, numel: int) -> int:
        """Bytes of codes and scales of `numel` values."""
        if self.bits == 16:
            return 2 * numel
        return num_blocks(numel) * (self.block_bytes + 2)

    def levels(self) -> torch.Tensor:
        """Every level, ascending, fp64. Raises KernelError for bf16, which has none."""
        if self.name == "fp4":
            positive = torch.tensor(_FP4_LEVELS, dtype=torch.float64)
            return torch.cat((-positive[1:].flip(0), positive))
        if self.name == "nf4":
            return torch.tensor(nf4_levels(), dtype=torch.float64)
        if self.is_integer:
            return torch.arange(-self.largest_level, self.largest_level + 1, dtype=torch.float64)
        raise KernelError(f"The format {self.name} has no levels. Ask for those of {', '.join(LOW_BIT_FORMATS)}.")


FORMATS = {
    form.name: form
    for form in (
        BlockFormat("fp4", 4, 6.0),
        BlockFormat("nf4", 4, 1.0),
        BlockFormat("int5", 5, 15.0),
        BlockFormat("int6", 6, 31.0),
        BlockFormat("int8", 8, 127.0),
        BlockFormat("bf16", 16, 1.0),
    )
}
LOW_BIT_FORMATS = tuple(name for name in FORMATS if name != "bf16")


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor of `shape` and `dtype` in the format `format`.

    `codes`: uint8 [num_blocks, block_bytes], or with bf16 the values, bf16 [numel]; `scales`: bf16 [num_blocks], with
    bf16 [0].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    format: BlockFormat

    @property
    def storage_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


@functools.cache
def nf4_levels() -> tuple[float, ...]:
    """The 16 levels of NF4, ascending: quantiles of N(0, 1), eight of them above zero, divided by the largest."""
    tail = 0.9677083
    quantile = NormalDist().inv_cdf
    above = [quantile(0.5 + (tail - 0.5) * i / 8) for i in range(1, 9)]
    below = [-quantile(0.5 + (tail - 0.5) * i / 7) for i in range(7, 0, -1)]
    return tuple(level / above[-1] for level in (*below, 0.0, *above))


def block_format(name: str) -> BlockFormat:
    """Raises KernelError if there is none of that name."""
    try:
        return FORMATS[name]
    except KeyError:
        raise KernelError(f"There is no block format {name!r}. Use one of {', '.join(FORMATS)}.") from None


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, format: str, device) -> QuantizedTensor:
    """Memory for a tensor; its contents are undefined."""
    form, shape = block_format(format), torch.Size(shape)
    if form.bits == 16:
        codes = torch.empty(shape.numel(), dtype=torch.bfloat16, device=device)
        return QuantizedTensor(codes, codes.new_empty(0), shape, dtype, form)
    blocks = num_blocks(shape.numel())
    codes = torch.empty(blocks, form.block_bytes, dtype=torch.uint8, device=device)
    return QuantizedTensor(codes, torch.empty(blocks, dtype=torch.bfloat16, device=device), shape, dtype, form)


def zeros(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, format: str, device) -> QuantizedTensor:
    """A tensor of zeros, to accumulate into."""
    quantized = empty(shape, dtype, format, device)
    quantized.codes.zero_()
    quantized.scales.zero_()
    return quantized


def over_memory(
    memory: torch.Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, format: str
) -> QuantizedTensor:
    """A tensor in a low-bit `format` whose codes, then scales, lie in `memory` (uint8 [storage_bytes], contiguous).

    Raises KernelError for bf16, and when the memory has another size.
    """
    form, shape = block_format(format), torch.Size(shape)
    if form.bits == 16 or memory.dtype != torch.uint8 or memory.numel() != form.storage_bytes(shape.numel()):
        raise KernelError(
            f"{memory.numel()} elements of {memory.dtype} can't hold {tuple(shape)} in {format}. "
            "Use a low-bit format and uint8 memory of its storage_bytes."
        )
    blocks = num_blocks(shape.numel())
    codes, scales = memory.split([blocks * form.block_bytes, 2 * blocks])
    return QuantizedTensor(codes.view(blocks, form.block_bytes), scales.view(torch.bfloat16), shape, dtype, form)


def quantize(
    x: torch.Tensor, format: str, *, noise_key: int | None = None, out: QuantizedTensor | None = None
) -> QuantizedTensor:
    """`x` (bf16, fp16 or fp32, any shape) in `format`; nearest, or with `noise_key` stochastic (int formats only).

    `out`: a tensor of that shape, dtype, format and device to write to. Raises KernelError for other dtypes, for noise
    where there is none, and when `out` doesn't fit.
    """
    form = block_format(format)
    _check_source(x, form, noise_key)
    quantized = out or empty(x.shape, x.dtype, format, x.device)
    if (quantized.shape, quantized.dtype, quantized.format) != (x.shape, x.dtype, form):
        raise KernelError(
            f"Can't quantize {tuple(x.shape)} of {x.dtype} to {format} into memory for {tuple(quantized.shape)} of "
            f"{quantized.dtype} in {quantized.format.name}."
        )
    flat = x.reshape(-1)
    if form.bits == 16:
        quantized.codes.copy_(flat)
    elif x.is_cuda:
        from lazytrain_plugin.kernels.triton import blockwise as kernels

        kernels.quantize(flat.contiguous(), quantized, seeds=_seeds(noise_key), accumulate=False)
    else:
        quantize_reference(flat, quantized, seeds=_seeds(noise_key))
    return quantized


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values, in `dtype` (else that of the tensor that was quantized), contiguous."""
    dtype = dtype or quantized.dtype
    if quantized.format.bits == 16:
        return quantized.codes.to(dtype, copy=True).view(quantized.shape)
    out = torch.empty(quantized.shape, dtype=dtype, device=quantized.codes.device)
    if out.is_cuda:
        from lazytrain_plugin.kernels.triton import blockwise as kernels

        kernels.dequantize(quantized, out.view(-1))
    else:
        dequantize_reference(quantized, out.view(-1))
    return out


def accumulate(total: QuantizedTensor, x: torch.Tensor, *, noise_key: int | None = None) -> None:
    """Adds `x` (shape of `total`) in place: decodes, adds in fp32, encodes anew; NaN and infinity make a block NaN.

    Raises KernelError when shapes, devices or dtypes don't fit.
    """
    _check_source(x, total.format, noise_key)
    if x.shape != total.shape or x.device != total.codes.device:
        raise KernelError(
            f"Can't add a tensor {tuple(x.shape)} on {x.device} to {tuple(total.shape)} on {total.codes.device}. "
            "Shapes and devices must be the same."
        )
    flat = x.reshape(-1)
    if total.format.bits == 16:
        total.codes.copy_(total.codes.float() + flat.float())
    elif x.is_cuda:
        from lazytrain_plugin.kernels.triton import blockwise as kernels

        kernels.quantize(flat.contiguous(), total, seeds=_seeds(noise_key), accumulate=True)
    else:
        quantize_reference(flat, total, seeds=_seeds(noise_key), accumulate=True)


def _check_source(x: torch.Tensor, form: BlockFormat, noise_key: int | None) -> None:
    if x.dtype not in _SOURCE_DTYPES:
        raise KernelError(f"Can't quantize a tensor of {x.dtype}. Use bfloat16, float16 or float32.")
    if noise_key is not None and not form.is_integer:
        raise KernelError(f"The format {form.name} rounds to nearest only. Use int8, or no noise_key.")


def _seeds(noise_key: int | None) -> tuple[int, int] | None:
    return None if noise_key is None else noise_seeds(noise_key, 0)


def quantize_reference(
    flat: torch.Tensor, out: QuantizedTensor, *, seeds: tuple[int, int] | None = None, accumulate: bool = False
) -> None:
    """Encodes `flat` [numel] into `out`; with `accumulate`, the sum of both. Plain torch, on every device."""
    form = out.format
    for first in range(0, out.scales.numel(), CHUNK_BLOCKS):
        part = slice(first, min(first + CHUNK_BLOCKS, out.scales.numel()))
        values = flat[part.start * BLOCK : part.stop * BLOCK].float()
        values = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        if accumulate:
            values = _decoded(out.codes[part], out.scales[part], form) + values
        noise = None
        if seeds is not None:
            noise16, _ = reference.noise(part.start * BLOCK, values.numel(), seeds, values.device)
            noise = noise16.float().view_as(values) * 2.0**-16
        codes, scales = _encoded(values, form, noise)
        out.codes[part] = _packed(codes, form.bits)
        out.scales[part] = scales


def dequantize_reference(quantized: QuantizedTensor, out: torch.Tensor) -> None:
    """Decodes into `out` [numel], any floating dtype. Plain torch, on every device."""
    for first in range(0, quantized.scales.numel(), CHUNK_BLOCKS):
        part = slice(first, first + CHUNK_BLOCKS)
        values = _decoded(quantized.codes[part], quantized.scales[part], quantized.format)
        target = out[first * BLOCK : (first + CHUNK_BLOCKS) * BLOCK]
        if out.dtype == torch.float16:
            values = torch.where(values.abs() <= FP16_LIMIT, values.clamp(-LARGEST_FP16, LARGEST_FP16), values)
        target.copy_(values.view(-1)[: target.numel()])


def scales_of(largest: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """Scales (fp32 that bf16 holds) of blocks whose largest magnitudes are `largest`; NaN and infinity become NaN."""
    scale = largest / torch.full_like(largest, form.largest_level)  # by a tensor: CUDA multiplies by a scalar's inverse
    up = ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).clamp(max=form.largest_scale)
    return torch.where(largest <= torch.finfo(torch.float32).max, up, torch.nan)


def _encoded(values: torch.Tensor, form: BlockFormat, noise: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int32 [blocks, 128] and scales fp32 [blocks] of `values` fp32 [blocks, 128]."""
    scales = scales_of(values.abs().amax(1), form)  # amax hands NaN on
    finite = scales > 0
    if form.name == "fp4":
        magnitude = values.abs()
        codes = torch.zeros_like(values, dtype=torch.int32)
        for index, boundary in enumerate(_FP4_BOUNDARIES):  # a tie goes to the even one of codes index, index + 1
            least = torch.where(finite, scales * boundary, torch.inf)[:, None]
            codes += (magnitude >= least if index % 2 else magnitude > least).to(torch.int32)
        codes = torch.where(finite[:, None], codes, 0)
        return codes + 8 * (torch.signbit(values) & (codes > 0)).to(torch.int32), scales
    x = torch.where(finite[:, None], values / torch.where(finite, scales, 1.0)[:, None], 0.0)
    if form.name == "nf4":
        levels = nf4_table(x.device)
        codes = torch.bucketize(x, levels[16:31], out_int32=True)
    else:
        rounded = torch.round(x) if noise is None else torch.floor(x + noise)
        codes = rounded.clamp(-form.largest_level, form.largest_level).to(torch.int32) & (2**form.bits - 1)
    return codes, scales


def _decoded(codes: torch.Tensor, scales: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """Values fp32 [blocks, 128] of packed codes [blocks, block_bytes] and scales [blocks]."""
    unpacked = _unpacked(codes, form.bits)
    if form.is_integer:
        sign = 2 ** (form.bits - 1)
        levels = ((unpacked ^ sign) - sign).float()
    else:
        levels = _table(form.name, codes.device)[unpacked]
    return levels * scales.float()[:, None]


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [blocks, 16 * bits] of codes int32 [blocks, 128]."""
    planes = [_plane(codes & 15, 4)]
    if bits > 4:
        planes.append(_plane(codes >> 4, bits - 4))
    return torch.cat(planes, 1).to(torch.uint8)


def _plane(codes: torch.Tensor, width: int) -> torch.Tensor:
    parts = codes.view(codes.shape[0], 8 // width, BLOCK * width // 8)
    shifts = torch.arange(0, 8, width, dtype=torch.int32, device=codes.device)
    return (parts << shifts[:, None]).sum(1)


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [blocks, 128] of uint8 [blocks, 16 * bits]."""
    codes = codes.to(torch.int32)
    low = _values_of_plane(codes[:, : BLOCK // 2], 4)
    return low if bits == 4 else low + (_values_of_plane(codes[:, BLOCK // 2 :], bits - 4) << 4)


def _values_of_plane(plane: torch.Tensor, width: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, width, dtype=torch.int32, device=plane.device)
    return ((plane[:, None, :] >> shifts[:, None]) & (2**width - 1)).reshape(plane.shape[0], BLOCK)


@functools.cache
def nf4_table(device: torch.device) -> torch.Tensor:
    """fp32 [32]: the levels, then the 15 boundaries between them, then infinity."""
    levels = torch.tensor(nf4_levels(), dtype=torch.float64)
    boundaries = (levels[1:] + levels[:-1]) / 2
    return torch.cat((levels, boundaries, levels.new_full((1,), torch.inf))).float().to(device)


@functools.cache
def _table(name: str, device: torch.device) -> torch.Tensor:
    """fp32 [16 or 32]: levels by code."""
    if name == "nf4":
        return nf4_table(device)
    return torch.tensor([*_FP4_LEVELS, *(-level for level in _FP4_LEVELS)], device=device)
