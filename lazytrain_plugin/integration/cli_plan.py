"""`lazytrain plan | explain | profile`: does it fit, where does everything go, and why, before a GPU is rented."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group

from lazytrain_plugin.config.folders import check_output_file
from lazytrain_plugin.errors import ConfigError, LazyTrainError
from lazytrain_plugin.integration.cli_nodes import explain_cluster
from lazytrain_plugin.integration.cli_options import (
    AccumulationSteps,
    Asked,
    CpuMemory,
    Dtype,
    ErrorPrices,
    EvaluationTokens,
    GpuMemory,
    GradientBits,
    Hardware,
    InsideGbit,
    NetworkGbit,
    Nodes,
    NvmeMemory,
    NvmeWrites,
    PlannedNodes,
    PlannedRanks,
    PlannedShard,
    RanksPerNode,
    SequenceLength,
    ShardOption,
    ranks_of,
    shard_of,
)
from lazytrain_plugin.integration.console import make_console
from lazytrain_plugin.integration.meta_model import check_dtype, profile_from_config
from lazytrain_plugin.integration.profile_tables import hardware_table, model_table
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.check import check_plan, problem_of
from lazytrain_plugin.plan.explain import explain_plan, explain_unit, find_unit
from lazytrain_plugin.plan.explain_measured import explain_measured, planned_events
from lazytrain_plugin.plan.explain_unit import explain_choice
from lazytrain_plugin.plan.fidelity import advise, lossy_choices
from lazytrain_plugin.plan.greedy import fits
from lazytrain_plugin.plan.measured import MeasuredTrace, compare_kinds, compare_resources
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.timeline import build_timeline, timeline_page, with_measured
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.vocab import Fidelity, Shard

THIS_MACHINE = "this"
OTHER_STEP_FRAC = 0.05
"""Further from its plan than that, a replay is one of other options; measured rates of one machine differ by less."""

Measured = Annotated[
    Path | None, typer.Option(help='steps that a run measured ("trace": {"path": ...}), drawn or told beside the plan')
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
    nvme_gib: NvmeMemory = None,
    nvme_write_gib_per_day: NvmeWrites = None,
    evaluation_tokens: EvaluationTokens = None,
    nodes: Nodes = 1,
    ranks_per_node: RanksPerNode = 1,
    shard: ShardOption = Shard.NODE,
    network_gbit: NetworkGbit = None,
    inside_gbit: InsideGbit = None,
    gradient_bits: GradientBits = None,
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
        _check_outputs(out=out, timeline=timeline)
        trace = MeasuredTrace.load(measured) if measured is not None else None
        machine = load_hardware(hardware)
        profile = load_model(model, dtype, sequence_length=seq_len, fused_kernels=machine.has_gpu)
        asked = Asked(
            fidelity=fidelity,
            max_tokens=micro_batch * seq_len,
            accumulation_steps=accumulation_steps,
            gpu_memory_gib=gpu_memory_gib,
            cpu_memory_gib=cpu_memory_gib,
            nvme_gib=nvme_gib,
            nvme_write_gib_per_day=nvme_write_gib_per_day,
            evaluation_tokens=evaluation_tokens,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            network_gbit=network_gbit,
            inside_gbit=inside_gbit,
            gradient_bits=gradient_bits,
            error_prices=error_prices,
            shard=shard,
        )
        machine, request = asked.on(machine)
        plan = make_plan(profile, machine, request)
        check_plan(plan, profile, machine, request)
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
        console.print(_replayed(problem, plan))
        for choice in lossy_choices(plan, profile, machine, request):
            console.print(f"lossy: {choice}")
        if advice:
            lower = advise(plan, profile, machine, request)
            console.print(f"advice: {lower or 'no lower fidelity would win more than 5 %'}")
        if request.cluster is not None:
            console.print(explain_cluster(problem, plan, request.cluster))
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
    nvme_gib: NvmeMemory = None,
    nvme_write_gib_per_day: NvmeWrites = None,
    evaluation_tokens: EvaluationTokens = None,
    nodes: PlannedNodes = None,
    ranks_per_node: PlannedRanks = None,
    shard: PlannedShard = None,
    network_gbit: NetworkGbit = None,
    inside_gbit: InsideGbit = None,
    gradient_bits: GradientBits = None,
    error_prices: ErrorPrices = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan, say why one unit or tensor is where it is, or compare the plan with measured steps."""
    with _errors_to_exit():
        _check_outputs(timeline=timeline)
        plan, trace = _load_plan_or_trace(plan_file)
        if measured is not None:
            trace = MeasuredTrace.load(measured)
        profile = problem = machine = request = None
        if model is not None:
            nodes, ranks_per_node = ranks_of(
                plan, nodes=nodes, ranks_per_node=ranks_per_node, network_gbit=network_gbit, nvme_gib=nvme_gib
            )
            machine = load_hardware(hardware)
            profile = load_model(model, dtype, sequence_length=seq_len, fused_kernels=machine.has_gpu)
            asked = Asked(
                fidelity=plan.fidelity,
                max_tokens=None,
                accumulation_steps=accumulation_steps,
                gpu_memory_gib=gpu_memory_gib,
                cpu_memory_gib=cpu_memory_gib,
                nvme_gib=nvme_gib,
                nvme_write_gib_per_day=nvme_write_gib_per_day,
                evaluation_tokens=evaluation_tokens,
                nodes=nodes,
                ranks_per_node=ranks_per_node,
                network_gbit=network_gbit,
                inside_gbit=inside_gbit,
                gradient_bits=gradient_bits,
                error_prices=error_prices,
                shard=shard_of(plan, shard),
            )
            machine, request = asked.on(machine)
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
        if problem is not None:
            _warn_of_other_options(console, problem, plan)
        if unit is not None:
            console.print(explain_unit(plan, unit, profile))
            if problem is not None:
                name = find_unit(plan, unit, profile)[0].name
                unit_profile = next(u for u in (*profile.units, *profile.stem) if u.name == name)
                console.print(explain_choice(problem, plan, unit_profile))
        elif trace is None or measured is None:
            console.print(explain_plan(plan) if problem is None else _replayed(problem, plan))
            for choice in lossy_choices(plan, profile, machine, request) if problem is not None else ():
                console.print(f"lossy: {choice}")
            if request is not None and request.cluster is not None:
                console.print(explain_cluster(problem, plan, request.cluster))
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
        _check_outputs(out=out)
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
            profile = ModelProfile.from_json(text)
            for tensor in (tensor for unit in (*profile.units, *profile.stem) for tensor in unit.tensors):
                check_dtype(tensor.dtype, f"{model}: {tensor.name}")
            return profile
    return profile_from_config(model, dtype, sequence_length=sequence_length, fused_kernels=fused_kernels)


def _check_outputs(**paths: Path | None) -> None:
    """Raises ConfigError for a file that can't be written, before anything is measured or planned for it."""
    for option, path in paths.items():
        if path is not None:
            check_output_file(f"--{option}", str(path))


def _load_plan_or_trace(path: Path) -> tuple[PlacementPlan, MeasuredTrace | None]:
    if not path.is_file():
        raise ConfigError(f"no plan at {str(path)!r}; write one with `lazytrain plan MODEL --out plan.json`")
    text = path.read_text()
    if '"waits_s"' not in text:
        return PlacementPlan.load(path), None
    trace = MeasuredTrace.from_json(text)
    if trace.plan is None:
        raise ConfigError(f"the trace {str(path)!r} holds no plan; give the plan, and the trace with --measured")
    return PlacementPlan.from_json(json.dumps(trace.plan)), trace


def _replayed(problem: PlacementProblem, plan: PlacementPlan) -> Group:
    """The plan's tables for a machine and its budgets."""
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
    return explain_plan(plan, ledger=account(problem, plan), have_bytes=have, times=simulate(problem, plan))


def _warn_of_other_options(console: Console, problem: PlacementProblem, plan: PlacementPlan) -> None:
    """Says where the model, the machine or the options can't be those of the plan: what follows is for them."""
    step_s = simulate(problem, plan).step_s
    if plan.predicted_step_s and abs(step_s / plan.predicted_step_s - 1) > OTHER_STEP_FRAC:
        console.print(
            f"the plan says {plan.predicted_step_s:.3f} s for a step, and with these options it is {step_s:.3f} s: "
            "give --hardware, --accumulation-steps and the others as it was planned",
            style="yellow",
        )
    if not fits(problem, plan):
        console.print("the plan doesn't fit these budgets; give those that it was made with", style="yellow")


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


class _errors_to_exit:
    """LazyTrain's own errors become one line on stderr and exit code 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, OSError):
            what = f"{error.filename or 'a file'}: {error.strerror or error}"
            error = ConfigError(f"{what}; correct the path, or make room there")
        if isinstance(error, LazyTrainError):
            typer.echo(f"lazytrain: {error}", err=True)
            raise typer.Exit(code=1)
