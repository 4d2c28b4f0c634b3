"""`lazytrain plan | explain | profile`: does it fit, where does everything go, and why, before a GPU is rented."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from lazytrain_plugin.errors import ConfigError, LazyTrainError
from lazytrain_plugin.integration.cli_nodes import cluster_of, explain_cluster
from lazytrain_plugin.integration.console import make_console
from lazytrain_plugin.integration.meta_model import profile_from_config
from lazytrain_plugin.integration.plan_cache import parse_errors
from lazytrain_plugin.integration.profile_tables import hardware_table, model_table
from lazytrain_plugin.plan.check import check_plan, problem_of
from lazytrain_plugin.plan.explain import explain_plan, explain_unit, find_unit
from lazytrain_plugin.plan.explain_measured import explain_measured, planned_events
from lazytrain_plugin.plan.explain_unit import explain_choice
from lazytrain_plugin.plan.fidelity import advise, lossy_choices
from lazytrain_plugin.plan.measured import MeasuredTrace, compare_kinds, compare_resources
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.timeline import build_timeline, timeline_page, with_measured
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Fidelity

THIS_MACHINE = "this"

Hardware = Annotated[str, typer.Option(help="a file as in configs/hardware/, or 'this' machine")]
SequenceLength = Annotated[int, typer.Option(min=1, help="tokens of one sequence")]
Dtype = Annotated[str, typer.Option(help="dtype of the weights")]
AccumulationSteps = Annotated[int, typer.Option(min=1, help="micro-batches per optimizer step")]
GpuMemory = Annotated[float | None, typer.Option(help="GPU budget; default: all there is")]
CpuMemory = Annotated[float | None, typer.Option(help="host budget; default: all there is")]
Measured = Annotated[
    Path | None, typer.Option(help='steps that a run measured ("trace": {"path": ...}), drawn or told beside the plan')
]
ErrorPrices = Annotated[
    Path | None,
    typer.Option(help="what fewer bits did to a model's gradients, as a run measured (its log names the file)"),
]
Timeline = Annotated[Path | None, typer.Option(help="draw the step as one HTML page")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON only")]


def register(app: typer.Typer) -> None:
    """Adds the planning commands to the `lazytrain` command line."""
    app.command("plan")(plan_command)
    app.command("explain")(explain_command)
    app.command("profile")(profile_command)


def plan_command(
    model: Annotated[str, typer.Argument(help="a config.json, a model folder, a hub id, or a profile of a model")],
    hardware: Hardware = THIS_MACHINE,
    micro_batch: Annotated[int, typer.Option(min=1, help="sequences of one micro-batch")] = 1,
    seq_len: SequenceLength = 1024,
    fidelity: Annotated[Fidelity, typer.Option(help="how lossy the plan may be")] = Fidelity.EXACT,
    accumulation_steps: AccumulationSteps = 1,
    dtype: Dtype = "bfloat16",
    gpu_memory_gib: GpuMemory = None,
    cpu_memory_gib: CpuMemory = None,
    nvme_gib: Annotated[float | None, typer.Option(help="NVMe budget; default: none is used")] = None,
    nvme_write_gib_per_day: Annotated[
        float | None, typer.Option(help="what may be written to the disk in 24 hours; default: no limit")
    ] = None,
    evaluation_tokens: Annotated[
        int | None, typer.Option(min=1, help="an evaluation batch whose whole logits the GPU must hold")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="machines like this one")] = 1,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each, like the one described")] = 1,
    network_gbit: Annotated[float | None, typer.Option(help="a node's link to the others, Gbit/s each way")] = None,
    inside_gbit: Annotated[
        float | None, typer.Option(help="a GPU's link to those of its node, Gbit/s each way; default: PCIe")
    ] = None,
    gradient_bits: Annotated[
        int | None, typer.Option(help="of gradients between nodes, 8 or 16; default: 8 unless exact")
    ] = None,
    error_prices: ErrorPrices = None,
    out: Annotated[Path | None, typer.Option(help="write the plan here")] = None,
    timeline: Timeline = None,
    measured: Measured = None,
    advice: Annotated[
        bool, typer.Option(help="plan with the lower fidelities too, and say if one would win more than 5 %")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan MODEL for a machine: does it fit, where does everything go, how long is a step. Exits with 1 if not."""
    with _errors_to_exit():
        trace = MeasuredTrace.load(measured) if measured is not None else None
        machine = load_hardware(hardware)
        profile = load_model(model, dtype, sequence_length=seq_len, fused_kernels=machine.has_gpu)
        request = PlanRequest(
            max_tokens=micro_batch * seq_len,
            gpu_budget_bytes=_gib_to_bytes("gpu-memory-gib", gpu_memory_gib),
            cpu_budget_bytes=_gib_to_bytes("cpu-memory-gib", cpu_memory_gib),
            fidelity=fidelity,
            accumulation_steps=accumulation_steps,
            nvme_write_bytes_per_day=_gib_to_bytes("nvme-write-gib-per-day", nvme_write_gib_per_day),
            evaluation_tokens=evaluation_tokens,
            gradient_errors=_error_prices(error_prices),
            local_ranks=ranks_per_node,
            nodes=nodes,
        )
        if nvme_gib is not None:
            machine, request = _with_nvme(machine, request, nvme_gib)
        elif nvme_write_gib_per_day is not None:
            raise ConfigError("--nvme-write-gib-per-day limits what --nvme-gib allows to use; give both")
        cluster = cluster_of(machine, fidelity, nodes, ranks_per_node, network_gbit, inside_gbit, gradient_bits)
        request = replace(request, cluster=cluster)
        plan = make_plan(profile, machine, request)
        ledger = check_plan(plan, profile, machine, request)
        problem = build_problem(profile, machine, request)
        if out is not None:
            plan.save(out)
        if timeline is not None:
            data = build_timeline(problem, plan, title=_title(profile, machine, micro_batch, seq_len))
            _write_page(timeline, data, trace)
        if as_json:
            sys.stdout.write(plan.to_json())
            return
        console = make_console()
        size = f"{profile.num_parameters / 1e9:.2f} G parameters"
        console.print(f"{profile.name}: {size} on {machine.name} ({machine.source})")
        if profile.estimate:
            console.print(f"activation bytes are an upper estimate ({profile.estimate})", style="yellow")
        have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
        console.print(explain_plan(plan, ledger=ledger, have_bytes=have, times=simulate(problem, plan)))
        for choice in lossy_choices(plan, profile, machine, request):
            console.print(f"lossy: {choice}")
        if advice:
            lower = advise(plan, profile, machine, request)
            console.print(f"advice: {lower or 'no lower fidelity would win more than 5 %'}")
        if cluster is not None:
            console.print(explain_cluster(problem, plan, cluster))
        if trace is not None:
            console.print(explain_measured(build_timeline(problem, plan, title=""), trace.typical))


def explain_command(
    plan_file: Annotated[Path, typer.Argument(help="a plan that `lazytrain plan --out` wrote, or a trace")],
    unit: Annotated[str | None, typer.Argument(help="a unit or a tensor; default: the whole plan")] = None,
    measured: Measured = None,
    timeline: Timeline = None,
    model: Annotated[str | None, typer.Option(help="what the plan is for: adds sizes, costs and alternatives")] = None,
    hardware: Hardware = THIS_MACHINE,
    seq_len: SequenceLength = 1024,
    dtype: Dtype = "bfloat16",
    accumulation_steps: AccumulationSteps = 1,
    gpu_memory_gib: GpuMemory = None,
    cpu_memory_gib: CpuMemory = None,
    error_prices: ErrorPrices = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan, say why one unit or tensor is where it is, or compare the plan with measured steps."""
    with _errors_to_exit():
        plan, trace = _load_plan_or_trace(plan_file)
        if measured is not None:
            trace = MeasuredTrace.load(measured)
        profile = problem = machine = request = None
        if model is not None:
            machine = load_hardware(hardware)
            profile = load_model(model, dtype, sequence_length=seq_len, fused_kernels=machine.has_gpu)
            request = PlanRequest(
                accumulation_steps=accumulation_steps,
                gpu_budget_bytes=_gib_to_bytes("gpu-memory-gib", gpu_memory_gib),
                cpu_budget_bytes=_gib_to_bytes("cpu-memory-gib", cpu_memory_gib),
                gradient_errors=_error_prices(error_prices),
            )
            problem = problem_of(plan, profile, machine, request)
        data = _timeline_data(problem, plan, trace, profile)
        if timeline is not None:
            if data is None:
                raise ConfigError("a picture of the plan needs the model: add --model, and --hardware if not this one")
            _write_page(timeline, data, trace)
        if as_json:
            sys.stdout.write(_explained_as_json(plan, unit, profile, trace, data))
            return
        console = make_console()
        if unit is not None:
            console.print(explain_unit(plan, unit, profile))
            if problem is not None:
                name = find_unit(plan, unit, profile)[0].name
                unit_profile = next(u for u in (*profile.units, *profile.stem) if u.name == name)
                console.print(explain_choice(problem, plan, unit_profile))
        elif trace is None or measured is None:
            console.print(explain_plan(plan))
            for choice in lossy_choices(plan, profile, machine, request) if problem is not None else ():
                console.print(f"lossy: {choice}")
        if trace is not None and unit is None:
            console.print(explain_measured(data, trace.typical))


def profile_command(
    model: Annotated[str | None, typer.Argument(help="profile this model instead of the machine")] = None,
    dtype: Dtype = "bfloat16",
    seq_len: SequenceLength = 1024,
    micro_batch: Annotated[int, typer.Option(min=1, help="sequences that --measure runs")] = 1,
    measure: Annotated[bool, typer.Option(help="time the model's layers on this machine, with random weights")] = False,
    nvme_path: Annotated[Path | None, typer.Option(help="measure the disk of this folder too")] = None,
    out: Annotated[Path | None, typer.Option(help="write the profile here")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine (or describe MODEL) as the JSON that the planner reads, and show it as a table."""
    with _errors_to_exit():
        if model is not None:
            if nvme_path is not None:
                raise ConfigError("--nvme-path measures this machine; leave out the model")
            batch = micro_batch if measure else None
            profile = profile_from_config(model, dtype, sequence_length=seq_len, measured_batch=batch)
        else:
            profile = load_hardware(THIS_MACHINE)
            if nvme_path is not None:
                from lazytrain_plugin.integration.measure_nvme import nvme_fields

                profile = replace(profile, **nvme_fields([nvme_path], cached=False))
        if out is not None:
            profile.save(out)
        if as_json:
            sys.stdout.write(profile.to_json())
        else:
            make_console().print(model_table(profile) if isinstance(profile, ModelProfile) else hardware_table(profile))


def load_hardware(name: str) -> HardwareProfile:
    """A hardware file, or this machine measured."""
    if name != THIS_MACHINE:
        return HardwareProfile.load(name)
    import torch

    from lazytrain_plugin.integration.training_request import measure_coding_rates, measure_update_rate
    from lazytrain_plugin.profile.measure import measure_hardware

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return measure_hardware(
        device, update_parameters_per_s=measure_update_rate, coding_bytes_per_s=measure_coding_rates
    )


def load_model(model: str, dtype: str, *, sequence_length: int, fused_kernels: bool) -> ModelProfile:
    """A profile that `lazytrain profile MODEL --out` wrote, or one made from a config."""
    if model.endswith(".json") and Path(model).is_file():
        text = Path(model).read_text()
        if '"kept_bytes_per_token"' in text:
            return ModelProfile.from_json(text)
    return profile_from_config(model, dtype, sequence_length=sequence_length, fused_kernels=fused_kernels)


def _error_prices(path: Path | None) -> dict[str, dict[int, float]] | None:
    """Errors that a run has measured; None: those of a small model."""
    if path is None:
        return None
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--error-prices {str(path)!r} can't be read: {error}; give a file that a run kept"
        ) from error
    errors = parse_errors(text)
    if errors is None:
        raise ConfigError(
            f"--error-prices {str(path)!r} holds no error prices (norm, gemm and swiglu in 4, 5, 6 and 8 bits); give "
            "the file that the log of a compact run names"
        )
    return errors


def _load_plan_or_trace(path: Path) -> tuple[PlacementPlan, MeasuredTrace | None]:
    if not path.is_file():
        raise ConfigError(f"no plan at {str(path)!r}; write one with `lazytrain plan MODEL --out plan.json`")
    text = path.read_text()
    if '"waits_s"' not in text:
        return PlacementPlan.from_json(text), None
    trace = MeasuredTrace.from_json(text)
    if trace.plan is None:
        raise ConfigError(f"the trace {str(path)!r} holds no plan; give the plan, and the trace with --measured")
    return PlacementPlan.from_json(json.dumps(trace.plan)), trace


def _with_nvme(machine: HardwareProfile, request: PlanRequest, gib: float) -> tuple[HardwareProfile, PlanRequest]:
    """Machine and request with so much of the disk."""
    budget_bytes = _gib_to_bytes("nvme-gib", gib)
    if not machine.nvme_read_bytes_per_s or not machine.nvme_write_bytes_per_s:
        raise ConfigError(
            f"--nvme-gib is {gib:g}, but the profile of {machine.name!r} has no rates of a disk; measure one with "
            "`lazytrain profile --nvme-path FOLDER --out machine.json`"
        )
    if machine.nvme_bytes and budget_bytes > machine.nvme_bytes:
        raise ConfigError(
            f"--nvme-gib is {gib:g}, {machine.name!r} has {machine.nvme_bytes / GIB:g} GiB of disk free; give less"
        )
    capabilities = replace(request.capabilities, nvme=True)
    return replace(machine, nvme_bytes=budget_bytes), replace(
        request, nvme_budget_bytes=budget_bytes, capabilities=capabilities
    )


def _timeline_data(
    problem: PlacementProblem | None, plan: PlacementPlan, trace: MeasuredTrace | None, profile: ModelProfile | None
) -> dict | None:
    """The planned step: replayed for the given model, else as the run that was measured had it."""
    if problem is not None:
        return build_timeline(problem, plan, title=f"{profile.name}, {problem.max_tokens} tokens")
    return trace.planned if trace is not None else None


def _write_page(path: Path, data: dict, trace: MeasuredTrace | None) -> None:
    path.write_text(timeline_page(with_measured(data, trace.typical) if trace is not None else data))


def _title(profile: ModelProfile, machine: HardwareProfile, micro_batch: int, seq_len: int) -> str:
    return f"{profile.name}, {micro_batch} x {seq_len} tokens on {machine.name}"


def _explained_as_json(
    plan: PlacementPlan, unit: str | None, profile: ModelProfile | None, trace: MeasuredTrace | None, data: dict | None
) -> str:
    if trace is not None:
        planned = planned_events(data) if data is not None else ()
        step = trace.typical
        resources = [asdict(row) for row in compare_resources(planned, step.events)]
        kinds = [asdict(row) for row in compare_kinds(planned, step.events)]
        return (
            json.dumps(
                {
                    "step": step.step,
                    "planned_step_s": data["step_s"] if data is not None else None,
                    "measured_step_s": step.step_s,
                    "resources": resources,
                    "operations": kinds,
                    "waits_s": step.waits_s,
                    "peak_bytes": step.peak_bytes,
                },
                indent=1,
            )
            + "\n"
        )
    if unit is None:
        return plan.to_json()
    return json.dumps(asdict(find_unit(plan, unit, profile)[0]), indent=1) + "\n"


def _gib_to_bytes(option: str, gib: float | None) -> int | None:
    if gib is None:
        return None
    if not 0 < gib < math.inf:
        raise ConfigError(f"--{option} is {gib:g}; give a number of GiB above 0")
    return int(gib * GIB)


class _errors_to_exit:
    """LazyTrain's own errors become one line on stderr and exit code 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, OSError):
            error = ConfigError(f"{error.filename or 'a file'}: {error.strerror}")
        if isinstance(error, LazyTrainError):
            typer.echo(f"lazytrain: {error}", err=True)
            raise typer.Exit(code=1)
