"""Small profiles with round figures, for problems that can be solved by hand."""

from lazytrain_plugin.plan.problem import GPU_RESERVE_BYTES
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile, TensorProfile, UnitProfile, UnitRole
from lazytrain_plugin.units import GIB, MIB

MATRIX = 512  # rows and columns: 2**18 parameters, aligned in every flat


def tensor(name: str, rows: int = MATRIX, columns: int = MATRIX, dtype: str = "bfloat16", trainable: bool = True):
    return TensorProfile(name=name, shape=(rows, columns), dtype=dtype, trainable=trainable)


def layer(index: int, *, matrices: int = 4, dtype: str = "bfloat16", trainable: bool = True, **changes) -> UnitProfile:
    values = {
        "name": f"layers.{index}",
        "tensors": tuple(tensor(f"layers.{index}.w{i}", dtype=dtype, trainable=trainable) for i in range(matrices)),
        "boundary_bytes_per_token": 2 * MATRIX,
        "kept_bytes_per_token": 20 * MATRIX,
        "workspace_bytes_per_token": 26 * MATRIX,
        "flop_per_token": 2.0 * matrices * MATRIX**2,
    }
    return UnitProfile(**{**values, **changes})


def model(num_units: int = 4, *, dtype: str = "bfloat16", tied: bool = False, vocab: int = 4096, **layer_changes):
    embedding = UnitProfile(
        name="stem.embed", tensors=(tensor("embed", vocab, MATRIX, dtype),), role=UnitRole.EMBEDDING
    )
    head = UnitProfile(
        name="stem.head",
        tensors=(tensor("head", vocab, MATRIX, dtype),),
        role=UnitRole.HEAD,
        flop_per_token=2.0 * vocab * MATRIX,
    )
    return ModelProfile(
        name="small",
        units=tuple(layer(index, dtype=dtype, **layer_changes) for index in range(num_units)),
        stem=(embedding,) if tied else (embedding, head),
        hidden_size=MATRIX,
        vocab_size=vocab,
        sequence_length=128,
        activation_bytes=2,
        tied=tied,
    )


def hardware(*, gpu_gib: float = 8, cpu_gib: float = 16, **changes) -> HardwareProfile:
    gpu = gpu_gib > 0
    values = {
        "name": "small machine",
        "source": "test",
        "gpu_bytes": int(gpu_gib * GIB),
        "gpu_free_bytes": int(gpu_gib * GIB),
        "cpu_bytes": int(cpu_gib * GIB),
        "cpu_free_bytes": int(cpu_gib * GIB),
        "cpu_threads": 4,
        "matmul_flop_per_s": 1e12,
        "layer_flop_frac": 1.0,
        "h2d_bytes_per_s": 2e9 * gpu,
        "d2h_bytes_per_s": 2e9 * gpu,
        "h2d_shared_bytes_per_s": 1e9 * gpu,
        "d2h_shared_bytes_per_s": 1e9 * gpu,
        "host_memory_bytes_per_s": 20e9,
        "gpu_memory_bytes_per_s": 500e9 * gpu,
        "cpu_update_32bit_parameters_per_s": 2e8,
        "cpu_update_8bit_parameters_per_s": 4e8,
        "cpu_update_32bit_shared_parameters_per_s": 1e8,
        "cpu_update_8bit_shared_parameters_per_s": 2e8,
        "gpu_update_32bit_parameters_per_s": 2e10 * gpu,
        "gpu_update_8bit_parameters_per_s": 2e10 * gpu,
    }
    return HardwareProfile(**{**values, **changes})


def solve_whole(problem, *, time_limit_s: float, gap_frac: float):
    """The whole program by HiGHS alone, with nothing to start from."""
    from lazytrain_plugin.plan.program import build_program, configure, run_program

    program, variables = build_program(problem)
    configure(program)
    return run_program(problem, program, variables, start=None, time_limit_s=time_limit_s, gap_frac=gap_frac)


GPU_RESERVE_GIB = GPU_RESERVE_BYTES / GIB
"""What every plan on a GPU starts from."""

__all__ = [
    "GIB",
    "GPU_RESERVE_BYTES",
    "GPU_RESERVE_GIB",
    "MATRIX",
    "MIB",
    "hardware",
    "layer",
    "model",
    "solve_whole",
    "tensor",
]
