"""`HardwareProfile`: capacities and rates of one machine, as one process sees them. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.profile._json import check_keys, check_value, digest_of
from lazytrain_plugin.units import GIB

CODING_MEMORY_FRACS = (0.5, 0.75)
"""Of a GPU's memory rate, what making codes and values reaches where it is not measured: codes are bound by
instructions."""
CPU_CODING_MEMORY_FRACS = (0.005, 0.03)
"""The same of a CPU and host memory: there codes are plain tensor operations, and most layers compute again sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """What the planner knows of a machine with one GPU (or none).

    "Shared" rates are those seen while the other users of the same path are busy (both PCIe directions, the update
    worker on host DRAM): the planner uses these, since in a step everything runs at once.
    """

    name: str
    source: str
    """Where the figures come from: "measured ..." or "estimate ..."."""
    gpu_bytes: int
    """GPU memory; 0 means that the CPU computes."""
    gpu_free_bytes: int
    """What this process may hold in all, memory that it holds already included."""
    cpu_bytes: int
    """Host memory: the smaller of RAM and the cgroup limit."""
    cpu_free_bytes: int
    """What this process may hold in all, its own resident memory included."""
    pin_limit_bytes: int | None = None
    """RLIMIT_MEMLOCK; None: no limit. CUDA's own pinning is not bound by it on most drivers."""
    cpu_threads: int
    """Threads that the CPU update may use."""

    matmul_flop_per_s: float
    """Dense bf16 matrix product at large sizes, on the device that computes."""
    layer_flop_frac: float
    """Share of `matmul_flop_per_s` that a whole decoder layer reaches (attention, norms, launches included)."""
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_shared_bytes_per_s: float
    d2h_shared_bytes_per_s: float
    host_memory_bytes_per_s: float
    """Host DRAM, reads and writes together."""
    gpu_memory_bytes_per_s: float
    """GPU DRAM, reads and writes together; 0 without a GPU."""
    cpu_update_32bit_parameters_per_s: float
    """Fused AdamW with fp32 moments on `cpu_threads` threads, links idle."""
    cpu_update_8bit_parameters_per_s: float
    cpu_update_32bit_shared_parameters_per_s: float
    cpu_update_8bit_shared_parameters_per_s: float
    gpu_update_32bit_parameters_per_s: float
    """AdamW on resident states; 0 without a GPU."""
    gpu_update_8bit_parameters_per_s: float
    quantize_bytes_per_s: float = 0.0
    """Block-wise 4-bit codes made of 16-bit values where layers compute: bytes read and written together; 0: derived
    from the rate of that device's memory."""
    dequantize_bytes_per_s: float = 0.0
    """The same of values made of codes."""
    launch_s: float = 0.0
    """Host time to launch one operator from Python, autograd's part included; 0: launches take no time."""
    nvme_bytes: int = 0
    """Space that may be used on disk; 0: no NVMe tier."""
    nvme_read_bytes_per_s: float = 0.0
    nvme_write_bytes_per_s: float = 0.0
    nvme_read_shared_bytes_per_s: float = 0.0
    """While as much waits to be written; 0: not known, half of the rate alone is taken, as of a disk that takes turns.
    """
    nvme_write_shared_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value < 0:
                raise ConfigError(f"hardware profile {self.name!r}: {field.name} is {value}; it can't be negative")
        required = [
            "cpu_bytes",
            "cpu_free_bytes",
            "cpu_threads",
            "matmul_flop_per_s",
            "layer_flop_frac",
            "host_memory_bytes_per_s",
            "cpu_update_32bit_parameters_per_s",
            "cpu_update_8bit_parameters_per_s",
            "cpu_update_32bit_shared_parameters_per_s",
            "cpu_update_8bit_shared_parameters_per_s",
        ]
        if self.has_gpu:
            required += [
                "h2d_bytes_per_s",
                "d2h_bytes_per_s",
                "h2d_shared_bytes_per_s",
                "d2h_shared_bytes_per_s",
                "gpu_memory_bytes_per_s",
                "gpu_update_32bit_parameters_per_s",
                "gpu_update_8bit_parameters_per_s",
            ]
        zero = [name for name in required if not getattr(self, name)]
        if zero:
            raise ConfigError(
                f"hardware profile {self.name!r}: {', '.join(zero)} must be above 0; measure with `lazytrain profile`"
            )
        if self.layer_flop_frac > 1:
            raise ConfigError(
                f"hardware profile {self.name!r}: layer_flop_frac is {self.layer_flop_frac}; give a share in (0, 1]"
            )

    @property
    def has_gpu(self) -> bool:
        return self.gpu_bytes > 0

    @property
    def layer_flop_per_s(self) -> float:
        return self.matmul_flop_per_s * self.layer_flop_frac

    def cpu_update_parameters_per_s(self, state_bits: int, *, shared: bool = True) -> float:
        """Parameters that the CPU updates in a second, with 32- or 8-bit moments."""
        suffix = "shared_parameters_per_s" if shared else "parameters_per_s"
        return getattr(self, f"cpu_update_{state_bits}bit_{suffix}")

    def gpu_update_parameters_per_s(self, state_bits: int) -> float:
        """Parameters that the GPU updates in a second, with 32- or 8-bit moments in its memory."""
        return getattr(self, f"gpu_update_{state_bits}bit_parameters_per_s")

    @property
    def coding_bytes_per_s(self) -> tuple[float, float]:
        """(quantize, dequantize), derived where they are not given."""
        memory_bytes_per_s = self.gpu_memory_bytes_per_s if self.has_gpu else self.host_memory_bytes_per_s
        fracs = CODING_MEMORY_FRACS if self.has_gpu else CPU_CODING_MEMORY_FRACS
        given = self.quantize_bytes_per_s, self.dequantize_bytes_per_s
        return tuple(rate or frac * memory_bytes_per_s for rate, frac in zip(given, fracs, strict=True))

    @property
    def digest(self) -> str:
        return digest_of(asdict(self))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Parses a profile. Memory may be given as `*_gib` instead of `*_bytes`; free memory defaults to all of it.

        Raises:
            ConfigError: not JSON, an unknown or a missing key, a value of another type, or a figure out of range.
        """
        try:
            raw = json.loads(text)
            return cls(**_in_bytes(raw))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"not a hardware profile: {error}; compare with a file in configs/hardware/") from error

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Reads a hardware file; raises ConfigError, with the file's name, as `from_json` does."""
        try:
            return cls.from_json(Path(path).read_text())
        except OSError as error:
            raise ConfigError(
                f"hardware profile {str(path)!r} can't be read: {error.strerror}; give a file as in configs/hardware/, "
                "or leave --hardware out to measure this machine"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error


def _in_bytes(raw: Any) -> dict[str, Any]:
    """The fields as a file means them: sizes in bytes, free memory all there is where none is given.

    Raises:
        ValueError: an unknown or missing key, another type, one size given twice, or more free memory than there is.
    """
    names = [field.name for field in fields(HardwareProfile) if field.name.endswith("_bytes")]
    sizes = {name.removesuffix("_bytes") + "_gib": name for name in names}
    if isinstance(raw, dict):
        raw = dict(raw)
        for key, name in sizes.items():
            if key in raw:
                check_value(key, raw[key], "float")
                if name in raw:
                    raise ValueError(f"it has both {key} and {name}; give one of them")
                raw[name] = int(raw.pop(key) * GIB)
        for tier in ("gpu", "cpu"):
            if f"{tier}_bytes" in raw:
                raw.setdefault(f"{tier}_free_bytes", raw[f"{tier}_bytes"])
    check_keys(raw, HardwareProfile, more_keys=sizes)
    for tier in ("gpu", "cpu"):
        free, total = raw[f"{tier}_free_bytes"], raw[f"{tier}_bytes"]
        if free > total >= 0:
            raise ValueError(
                f"{tier}_free_bytes is {free}, and {tier}_bytes {total}; no more can be free than there is"
            )
    # 24e9 is a whole number too.
    whole = {field.name for field in fields(HardwareProfile) if field.type.startswith("int")}
    return {name: int(value) if name in whole and value is not None else value for name, value in raw.items()}
