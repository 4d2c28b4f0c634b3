"""`lazytrain plan | explain | profile`: does it fit, where does everything go, and why, before a GPU is rented."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lazytrain_plugin.errors import ConfigError, LazyTrainError
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.explain import explain_plan, explain_unit
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Fidelity

THIS_MACHINE = "this"


def register(app: typer.Typer) -> None:
    """Adds the planning commands to the `lazytrain` command line."""
    app.command("plan")(plan_command)
    app.command("explain")(explain_command)
    app.command("profile")(profile_command)


def plan_command(
    model: Annotated[str, typer.Argument(help="a config.json, a model folder or a hub id")],
    hardware: Annotated[str, typer.Option(help="a file as in configs/hardware/, or 'this' machine")] = THIS_MACHINE,
    micro_batch: Annotated[int, typer.Option(min=1, help="sequences of one micro-batch")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="tokens of one sequence")] = 1024,
    fidelity: Annotated[Fidelity, typer.Option(help="how lossy the plan may be")] = Fidelity.EXACT,
    accumulation_steps: Annotated[int, typer.Option(min=1, help="micro-batches per optimizer step")] = 1,
    dtype: Annotated[str, typer.Option(help="dtype of the weights")] = "bfloat16",
    gpu_memory_gib: Annotated[float | None, typer.Option(help="GPU budget; default: all there is")] = None,
    cpu_memory_gib: Annotated[float | None, typer.Option(help="host budget; default: all there is")] = None,
    out: Annotated[Path | None, typer.Option(help="write the plan here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Plan MODEL for a machine: does it fit, where does everything go, how long is a step. Exits with 1 if not."""
    with _errors_to_exit():
        machine = load_hardware(hardware)
        profile = profile_from_config(model, dtype, sequence_length=seq_len, fused_kernels=machine.has_gpu)
        request = PlanRequest(
            max_tokens=micro_batch * seq_len,
            gpu_budget_bytes=_gib_to_bytes("gpu-memory-gib", gpu_memory_gib),
            cpu_budget_bytes=_gib_to_bytes("cpu-memory-gib", cpu_memory_gib),
            fidelity=fidelity,
            accumulation_steps=accumulation_steps,
        )
        plan = make_plan(profile, machine, request)
        ledger = check_plan(plan, profile, machine, request)
        if out is not None:
            plan.save(out)
        if as_json:
            sys.stdout.write(plan.to_json())
            return
        problem = build_problem(profile, machine, request)
        console = Console()
        size = f"{profile.num_parameters / 1e9:.2f} G parameters"
        console.print(f"{profile.name}: {size} on {machine.name} ({machine.source})")
        if profile.estimate:
            console.print(f"activation bytes are an upper estimate ({profile.estimate})", style="yellow")
        console.print(
            explain_plan(
                plan,
                ledger=ledger,
                have_bytes={"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes},
                times=simulate(problem, plan),
            )
        )


def explain_command(
    plan_file: Annotated[Path, typer.Argument(help="a plan that `lazytrain plan --out` wrote")],
    unit: Annotated[str | None, typer.Argument(help="a unit or a tensor; default: the whole plan")] = None,
) -> None:
    """Show a plan, or say why one unit is where it is."""
    with _errors_to_exit():
        if not plan_file.is_file():
            raise ConfigError(f"no plan at {str(plan_file)!r}; write one with `lazytrain plan MODEL --out plan.json`")
        plan = PlacementPlan.load(plan_file)
        Console().print(explain_unit(plan, unit) if unit else explain_plan(plan))


def profile_command(
    model: Annotated[str | None, typer.Argument(help="profile this model instead of the machine")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the weights")] = "bfloat16",
    seq_len: Annotated[int, typer.Option(min=1, help="tokens of one sequence")] = 1024,
    out: Annotated[Path | None, typer.Option(help="write the profile here")] = None,
) -> None:
    """Measure this machine (or describe MODEL) as the JSON that the planner reads."""
    with _errors_to_exit():
        profile = profile_from_config(model, dtype, sequence_length=seq_len) if model else load_hardware(THIS_MACHINE)
        if out is not None:
            profile.save(out)
        else:
            sys.stdout.write(profile.to_json())


def load_hardware(name: str) -> HardwareProfile:
    """A hardware file, or this machine measured."""
    if name != THIS_MACHINE:
        return HardwareProfile.load(name)
    import torch

    from lazytrain_plugin.profile.measure import measure_hardware

    return measure_hardware("cuda" if torch.cuda.is_available() else "cpu", cache_dir=_cache_dir())


def profile_from_config(
    model: str, dtype: str = "bfloat16", *, sequence_length: int = 1024, fused_kernels: bool = True
) -> ModelProfile:
    """Profile of a model that is never built: its config on the meta device.

    Args:
        model: a config.json, a folder that holds one, or a hub id.
        dtype: torch's name of the weights' dtype.

    Raises:
        ConfigError: no such file and no network, or a dtype that torch doesn't know.
    """
    import torch

    from lazytrain_plugin.profile.extract import extract_model_profile
    from lazytrain_plugin.runtime.discovery import discover

    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is not one of torch's; use bfloat16 or float32")
    config = _load_config(model)
    built = _build_on_meta(config, torch_dtype, model)
    found = discover(built)
    return extract_model_profile(
        built,
        [(unit.name, unit.module) for unit in found.units],
        [(unit.name, [parameter for _, parameter in unit.parameters]) for unit in found.stem],
        sequence_length=sequence_length,
        fused_kernels=fused_kernels,
        name=Path(model).name if not model.endswith(".json") else type(built).__name__,
    )


def _load_config(model: str) -> Any:
    from transformers import AutoConfig

    path = Path(model)
    if model.endswith(".json") and not path.is_file():
        raise ConfigError(f"no config at {model!r}; give a config.json, a model folder or a hub id")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"{model!r} holds no config.json; give a model folder as save_pretrained writes it")
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        if path.exists():
            raise ConfigError(f"{model!r} is no model config: {str(error).splitlines()[0]}") from error
        raise ConfigError(
            f"the config of {model!r} can't be had from the hub (no such model, or no network): "
            "download its config.json and give the file"
        ) from error


def _build_on_meta(config: Any, dtype: Any, model: str) -> Any:
    import torch
    import transformers

    class_names = getattr(config, "architectures", None) or []
    model_class = getattr(transformers, class_names[0], None) if class_names else None
    try:
        with torch.device("meta"):
            if model_class is not None and hasattr(model_class, "_from_config"):
                return model_class._from_config(config, dtype=dtype)
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ConfigError(f"{model!r} describes no model that can be built: {str(error).splitlines()[0]}") from error


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lazytrain"


def _gib_to_bytes(option: str, gib: float | None) -> int | None:
    if gib is None:
        return None
    if gib <= 0:
        raise ConfigError(f"--{option} is {gib:g}; give a size above 0")
    return int(gib * GIB)


class _errors_to_exit:
    """LazyTrain's own errors become one line on stderr and exit code 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, LazyTrainError):
            typer.echo(f"lazytrain: {error}", err=True)
            raise typer.Exit(code=1)
