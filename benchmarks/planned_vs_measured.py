"""Plans a step within a budget, runs it, and compares: time and memory, planned and measured; one JSON line per plan.

    python benchmarks/planned_vs_measured.py 7b:24:8 7b:70:32 14b:130:8       # SHAPE:GPU_GIB:BATCH, a process for each
    python benchmarks/planned_vs_measured.py 7b:31,70,130:32                  # budgets one after the other in a process
    python benchmarks/planned_vs_measured.py 7b:70:8 --random-plans 10        # and ten other plans, and fixed policies
    python benchmarks/planned_vs_measured.py 3b:70:32 7b:70:32 --rounds 1 --all-resident    # what offloading costs
    python benchmarks/planned_vs_measured.py 32b:130:4 --cpu-gib 112 --nvme /mnt/nvme --nvme-gib 40 --rounds 1 \
        --warmup 2 --keep-on-device                                           # a model of three tiers
    python benchmarks/planned_vs_measured.py tiny:1:2 --seq 64 --device cpu --random-plans 3   # try it out

A cell goes the road of an ordinary script (`deepspeed.initialize` with a "lazytrain" block). Round 1 is the plan that
training starts with on a machine whose rates were measured and whose steps were not; each further round (`--rounds`)
plans again with the rates that the steps before it showed, as training does in the background. With `--random-plans`
the same model is then moved from plan to plan, the planner's own once more at the end.

`--all-resident` moves the same model to the plan that has everything on the GPU and treats activations alike: same
kernels, batch, state bits and recompute. The last line then says what the planned step takes over that one (`waste`),
and what both waited for.

Random weights are made on the device, then brought to where a loaded model is, host memory; `--keep-on-device` leaves
them on the device, from where they go home unit by unit, so that they are never in host memory beside their homes.

Policies of systems that wait for every update wait for it here too. What else their executors do (a second recompute, a
refill of pinned copies) is not done, which flatters them.

Memory: GPU is torch's peak of reserved memory since before the model was placed, with what CUDA itself takes;
host is the peak of resident memory while the plan ran (Linux's VmHWM, reset when the plan was in place).
`ratio` is measured / planned.
"""

import argparse
import gc
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from random_plans import random_plans
from step import set_launch_variables

import lazytrain_plugin.install  # noqa: F401
from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.units import GIB, gib_to_bytes

DIFFERENT_PLANS_STEPS = (1, 2)
"""Warm-up and timed steps of each plan of `--random-plans`."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cells",
        nargs="+",
        metavar="SHAPE:GPU_GIB:BATCH",
        help="GPU_GIB: budgets with commas; shapes are in benchmarks/shapes.py",
    )
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--state-bits", type=int, choices=(8, 32), default=8)
    parser.add_argument("--fidelity", choices=("exact", "balanced", "compact"), help="default: what --state-bits says")
    parser.add_argument("--cpu-gib", type=float, help="host budget; default: what is free")
    parser.add_argument("--layers", type=int, help="another depth than the shape's")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm limit; 0: none")
    parser.add_argument("--warmup", type=int, default=3, help="steps of a round before the timed ones")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=2, help="plans, each with the rates that the last one showed")
    parser.add_argument("--all-resident", action="store_true", help="then time the last plan with all of it on the GPU")
    parser.add_argument("--nvme", nargs="+", type=Path, help="folders on NVMe disks, one per disk")
    parser.add_argument("--nvme-gib", type=float, help="disk budget; default: what is free")
    parser.add_argument("--keep-on-device", action="store_true", help="the model starts there, not in host memory")
    parser.add_argument("--random-plans", type=int, default=0, metavar="N", help="time so many others, and policies")
    parser.add_argument("--seed", type=int, default=0, help="of the random plans")
    parser.add_argument("--save-plans", type=Path, help="write the plans of all rounds to this folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.fidelity is None:
        arguments.fidelity = "balanced" if arguments.state_bits == 8 else "exact"
    elif (arguments.fidelity == "exact") != (arguments.state_bits == 32):
        parser.error(f"--fidelity {arguments.fidelity} has states of other bits; give --state-bits too")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if len(arguments.cells) > 1:
        options = [text for text in sys.argv[1:] if text not in arguments.cells]
        # A process for each keeps what one model leaves behind out of the other's peaks.
        return max(subprocess.call([sys.executable, __file__, cell, *options]) for cell in arguments.cells)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    set_launch_variables(arguments.device)
    shape, budgets, batch = arguments.cells[0].split(":")
    arguments.shape, arguments.batch = shape, int(batch)
    cell = None
    for gpu_gib in map(float, budgets.split(",")):
        arguments.gpu_gib = gpu_gib
        try:
            if cell is None:
                cell = Cell(arguments)
            else:
                cell.plan_within(gpu_gib)
            cell.run()
        except InfeasiblePlanError as error:
            print_line(arguments, plan="planner", fits=False, message=str(error))
    torch.distributed.destroy_process_group()
    return 0


class Cell:
    """One shape, budget and batch: an engine, and plans for it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import deepspeed
        from shapes import build_model

        self.arguments, self.is_cuda = arguments, arguments.device == "cuda"
        deepspeed.init_distributed("nccl" if self.is_cuda else "gloo")
        torch.manual_seed(0)
        begin_s = time.perf_counter()
        model = build_model(arguments.shape, arguments.device, layers=arguments.layers)
        if not arguments.keep_on_device:
            model = model.to("cpu")
            self.forget_peaks()
        built_s = time.perf_counter()
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=deepspeed_config(arguments)
        )
        if arguments.keep_on_device:
            self.forget_peaks()
        self.start_s = {"build_s": built_s - begin_s, "initialize_s": time.perf_counter() - built_s}
        size = (arguments.accumulation, arguments.batch, arguments.seq)
        self.tokens = torch.randint(0, model.config.vocab_size, size, device=arguments.device)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())

    @property
    def executor(self):
        return self.engine.lazytrain.executor

    @property
    def planner(self):
        return self.engine._planner

    def run(self) -> None:
        from lazytrain_plugin.plan.check import check_plan
        from lazytrain_plugin.plan.policies import POLICIES

        arguments, planner = self.arguments, self.planner
        for round_number in range(1, arguments.rounds + 1):
            if round_number > 1:
                self.place(planner.plan_again())
            best = self.executor.plan
            self.measure(best, "planner", arguments.warmup, arguments.steps, round=round_number, **self.start_s)
            if arguments.save_plans is not None:
                arguments.save_plans.mkdir(parents=True, exist_ok=True)
                best.save(
                    arguments.save_plans
                    / f"{arguments.shape}_{arguments.gpu_gib:g}_{arguments.batch}_{round_number}.json"
                )
        if arguments.all_resident:
            self.compare_to_resident(best)
        if not arguments.random_plans:
            return
        problem = planner.problem()
        drawn = random_plans(problem, arguments.random_plans, arguments.seed)
        others = [(f"random {i}", plan, False) for i, plan in enumerate(drawn)]
        others += [(policy.name, policy.place(problem), policy.synchronous) for policy in POLICIES]
        others.append(("planner", best, False))
        for name, plan, synchronous in others:
            try:
                check_plan(plan, planner.model_profile, planner.hardware, planner.request)
            except InfeasiblePlanError as error:
                print_line(arguments, plan=name, fits=False, message=str(error))
                continue
            self.place(plan)
            self.measure(plan, name, *DIFFERENT_PLANS_STEPS, synchronous=synchronous)

    def plan_within(self, gpu_gib: float) -> None:
        """Another budget, planned as a run of its own would: without the rates that steps have shown."""
        planner = self.planner
        planner.request = replace(planner.request, gpu_budget_bytes=gib_to_bytes(gpu_gib))
        planner._take_rates({})
        self.place(planner.plan_again())

    def compare_to_resident(self, plan) -> None:
        """Prints what `plan`, measured last, takes over the same work with everything on the GPU."""
        ours, resident = self.measured, all_resident(plan)
        self.place(resident)
        theirs = self.measure(resident, "all resident", self.arguments.warmup, self.arguments.steps)
        parts = ("step_s", "forward_s", "backward_s")
        print_line(
            self.arguments,
            waste=round(ours["step_s"] / theirs["step_s"], 4),
            planned={part: ours[part] for part in parts} | {"waits_s": ours["waits_s"]},
            all_resident={part: theirs[part] for part in parts} | {"waits_s": theirs["waits_s"]},
        )

    def place(self, plan) -> None:
        self.engine._place(self.executor, plan)
        self.forget_peaks()

    def forget_peaks(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def measure(self, plan, name: str, warmup: int, steps: int, *, synchronous: bool = False, **more) -> dict:
        from lazytrain_plugin.integration.plan_watch import CUDA_CONTEXT_BYTES
        from lazytrain_plugin.plan.accounting import account

        planned = self.planner.predicted(plan)
        host_peak_bytes = reset_host_peak()
        marks, losses = self.run_steps(warmup + steps, synchronous=synchronous)
        marks = marks[warmup:]
        spans = {key: [mark[key] for mark in marks] for key in ("step_s", "forward_s", "backward_s")}
        measured = {key: round(statistics.median(values), 4) for key, values in spans.items()}
        needed = account(self.planner.problem(), plan).total_bytes()
        memory = {"host": (needed["cpu"], host_peak_bytes())}
        details = {}
        if self.is_cuda:
            reserved = torch.cuda.max_memory_reserved()
            free, total = torch.cuda.mem_get_info()
            details = {
                "gpu_peak_allocated_gib": gib(torch.cuda.max_memory_allocated()),
                "gpu_peak_reserved_gib": gib(reserved),
                "gpu_in_use_gib": gib(total - free),
                "gpu": torch.cuda.get_device_name(),
            }
            memory["gpu"] = (needed["gpu"], reserved + CUDA_CONTEXT_BYTES)
        waits = self.engine.lazytrain.trace.summary(last=steps)
        self.measured = measured | {"waits_s": {cause: round(seconds, 4) for cause, seconds in waits.items()}}
        times = {key: round(getattr(planned, key), 4) for key in ("step_s", "forward_s", "backward_s", "compute_s")}
        print_line(
            self.arguments,
            plan=name,
            fits=True,
            **more,
            planned=times | {f"{tier}_gib": gib(need) for tier, (need, _) in memory.items()},
            measured=measured | {f"{tier}_gib": gib(used) for tier, (_, used) in memory.items()},
            ratio={"step_s": round(measured["step_s"] / planned.step_s, 3)}
            | {tier: round(used / need, 3) for tier, (need, used) in memory.items()},
            **details,
            waits_s=self.measured["waits_s"],
            losses=losses,
            steps_s=[round(mark["step_s"], 4) for mark in marks],
            tflops=round(6 * self.num_parameters * self.tokens.numel() / measured["step_s"] / 1e12, 1),
            synchronous=synchronous,
            solver=plan.solver,
            **summary(plan),
        )
        return self.measured

    def run_steps(self, count: int, *, synchronous: bool) -> tuple[list[dict[str, float]], list[float]]:
        """Seconds of each step and its parts on the compute stream's own time line; its last micro-batch's loss."""
        marks, losses = [], []
        for _ in range(count):
            begin, parts = self.mark(), []
            for micro_batch in self.tokens:
                parts.append(self.mark())
                loss = self.engine(input_ids=micro_batch, labels=micro_batch).loss
                parts.append(self.mark())
                self.engine.backward(loss)
                parts.append(self.mark())
                self.engine.step()
            losses.append(loss.detach())
            if synchronous:
                self.engine.flush()
            marks.append((begin, parts))
        self.engine.flush()
        marks.append((self.mark(), []))
        if self.is_cuda:
            torch.cuda.synchronize()
        found = []
        for (begin, parts), (end, _) in zip(marks, marks[1:]):
            forward_s = sum(self.between(parts[i], parts[i + 1]) for i in range(0, len(parts), 3))
            backward_s = sum(self.between(parts[i + 1], parts[i + 2]) for i in range(0, len(parts), 3))
            found.append({"step_s": self.between(begin, end), "forward_s": forward_s, "backward_s": backward_s})
        return found, [round(loss.item(), 4) for loss in losses]

    def mark(self) -> object:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first, second) -> float:
        return first.elapsed_time(second) / 1e3 if self.is_cuda else second - first


def deepspeed_config(arguments: argparse.Namespace) -> dict:
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "gradient_clipping": arguments.clip,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "lazytrain": {
            "fidelity": arguments.fidelity,
            "gpu_memory_gib": arguments.gpu_gib if arguments.device == "cuda" else None,
            "cpu_memory_gib": arguments.cpu_gib,
            "nvme_path": [str(path) for path in arguments.nvme] if arguments.nvme else None,
            "nvme_gib": arguments.nvme_gib,
            "max_tokens": arguments.batch * arguments.seq,
            # Each plan stays while it is measured; what earlier runs measured is of no use to round 1.
            "plan": {"adapt": False, "cache": False},
        },
    }


def all_resident(plan):
    """The same plan with all it places on the GPU, updates included; what is recomputed stays so."""
    from lazytrain_plugin.vocab import Tier, Updater

    on_gpu = dict.fromkeys(("weights", "states", "gradients", "saved"), Tier.GPU) | {"updater": Updater.GPU}

    def at_home(unit):
        return replace(unit, **on_gpu, boundary=unit.boundary and Tier.GPU)  # None: dropped

    return replace(plan, units=tuple(map(at_home, plan.units)), stem=tuple(map(at_home, plan.stem)))


def reset_host_peak() -> Callable[[], int]:
    """Forgets the peak of resident memory; returns a function that reads the peak since."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # containers may forbid it: then what is resident at the end
        return lambda: psutil.Process().memory_info().rss
    fields = lambda: dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())  # noqa: E731
    return lambda: int(fields()["VmHWM"].split()[0]) * 1024


def summary(plan) -> dict:
    """How many units are treated how."""
    from lazytrain_plugin.vocab import Activations, Tier

    return {
        "units": len(plan.units),
        "resident_units": sum(unit.weights == Tier.GPU for unit in plan.units),
        "saving_units": sum(unit.activations != Activations.RECOMPUTE for unit in plan.units),
        "streamed_update_units": sum(unit.streams_states for unit in plan.units),
        "boundaries_cpu": sum(unit.boundary != Tier.GPU for unit in plan.units),
        "saved_cpu": sum(unit.saved != Tier.GPU for unit in plan.units),
        "nvme_units": {
            what: sum(getattr(unit, what) == Tier.NVME for unit in (*plan.units, *plan.stem))
            for what in ("weights", "states", "gradients", "boundary", "saved")
        },
        "stem_states_gpu": sum(unit.states == Tier.GPU for unit in plan.stem),
        "slots": [plan.weight_slots, plan.gradient_slots, plan.state_slots, plan.activation_slots],
    }


def print_line(arguments: argparse.Namespace, **values) -> None:
    cell = {
        "shape": arguments.shape if arguments.layers is None else f"{arguments.shape}/{arguments.layers}",
        "gpu_budget_gib": arguments.gpu_gib,
        "batch": arguments.batch,
        "seq": arguments.seq,
        "state_bits": arguments.state_bits,
        "fidelity": arguments.fidelity,
        "cpu_budget_gib": arguments.cpu_gib,
        "accumulation": arguments.accumulation,
    }
    print(json.dumps(cell | values), flush=True)


def gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 3)


if __name__ == "__main__":
    sys.exit(main())
