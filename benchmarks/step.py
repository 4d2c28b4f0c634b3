"""Times training steps of a public model shape through the engine that an ordinary script gets; prints one JSON line.

    python benchmarks/step.py --shape 7b --bs 32 --gpu-gib 31
    python benchmarks/step.py --shape 7b --bs 32 --state-bits 8 --resident-units 6 --keep-units 10
    python benchmarks/step.py --shape 3b --bs 32 --through-trainer
    python benchmarks/step.py --shape 7b --bs 32 --gpu-gib 31 --compile      # torch.compile for each layer
    torchrun --nproc-per-node 2 benchmarks/step.py --shape 7b --bs 8 --ranks-per-node 1 --wire-bits 8
    python benchmarks/step.py --shape tiny --bs 2 --seq 64 --device cpu      # try it out without a GPU

The placement comes from the planner (within `--gpu-gib`), from a file (`--plan`), or from counts:
`--resident-units N` puts weights and states of the first N units on the GPU (their update runs there, so the worker
gets ahead), `--keep-units N` keeps the activations of the last N (they live the shortest); see hand_plan.py for more.

Several ranks: every `--ranks-per-node` of them count as a node, whatever really connects them (NCCL_P2P_DISABLE=1 and
NCCL_SHM_DISABLE=1 make it sockets), and gradients cross nodes in `--wire-bits`, all units alike.

What is timed: steps in a row without any synchronisation of ours, by CUDA events on the compute stream; `s_per_step`
is the median after warm-up, `s_per_step_sustained` is wall time from the first timed step until the last update is
done, per step. TFLOP/s = 6 * parameters * tokens / s_per_step.
"""

import argparse
import json
import logging
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import hand_plan
import psutil
import torch

import lazytrain_plugin.install  # noqa: F401
from lazytrain_plugin.units import GIB

PHASES = ("forward", "backward", "step")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="3b", help="a name in benchmarks/shapes.py")
    parser.add_argument("--layers", type=int, help="another depth than the shape's")
    parser.add_argument("--bs", type=int, default=32, help="sequences of a micro-batch")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--state-bits", type=int, choices=(8, 32), help="default: what --fidelity says")
    parser.add_argument(
        "--fidelity", choices=("exact", "balanced", "compact"), default="exact", help="how lossy the planner may be"
    )
    parser.add_argument(
        "--gradient-bits", type=int, choices=(8, 16), default=16, help="plan by hand: bits of gradients at rest"
    )
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm limit; 0: none")
    parser.add_argument("--gpu-gib", type=float, help="GPU budget of the planner")
    parser.add_argument("--cpu-gib", type=float, help="host budget of the planner")
    parser.add_argument("--gpu-cap-gib", type=float, help="allocations above this fail, once the model is placed")
    parser.add_argument("--plan", type=Path, help="follow this plan file")
    parser.add_argument("--nvme", nargs="+", type=Path, help="folders on NVMe disks, one per disk")
    parser.add_argument("--ranks-per-node", type=int, help="ranks that count as one node; default: the launcher's")
    parser.add_argument("--wire-bits", type=int, choices=(8, 16), help="of gradients between nodes, small units too")
    hand_plan.add_arguments(parser)
    parser.add_argument("--trace", type=Path, help="measure the first timed steps operation by operation; written here")
    parser.add_argument("--save-plan", type=Path, help="write the plan that was followed here")
    parser.add_argument("--threads", type=int, help="CPU threads of the update")
    parser.add_argument("--no-fused", action="store_true", help="eager kernels and whole logits")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile of what each layer computes"
    )
    parser.add_argument("--through-trainer", action="store_true", help="the same through HF Trainer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.state_bits is None:
        arguments.state_bits = 32 if arguments.fidelity == "exact" else 8
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    set_launch_variables(arguments.device)
    from shapes import build_model

    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    # Random numbers are made fast on the device; then the model is where a loaded one would be.
    model = build_model(arguments.shape, arguments.device, layers=arguments.layers).to("cpu")
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        config = deepspeed_config(arguments, model, Path(folder))
        clock = Clock(arguments)
        run = run_trainer if arguments.through_trainer else run_loop
        engine, losses = run(arguments, model, config, clock)
    result = report(arguments, engine, clock, losses, num_parameters)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(result), flush=True)
    engine.destroy()
    torch.distributed.destroy_process_group()


def set_launch_variables(device: str) -> None:
    """What a launcher would set for a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for key, value in zip(("RANK", "LOCAL_RANK", "WORLD_SIZE"), "001", strict=True):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", port)
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def deepspeed_config(arguments: argparse.Namespace, model, folder: Path) -> dict:
    block = {
        "fidelity": arguments.fidelity,
        "fused_kernels": not arguments.no_fused,
        "gpu_memory_gib": arguments.gpu_gib,
        "cpu_memory_gib": arguments.cpu_gib,
        "optimizer": {"state_bits": arguments.state_bits, "threads": arguments.threads},
        "gradient_comm": {"bits": arguments.wire_bits, "ranks_per_node": arguments.ranks_per_node},
    }
    if arguments.wire_bits is not None:
        block["gradient_comm"]["smallest_bucket_elements"] = 1
    if arguments.nvme:
        block["nvme_path"] = [str(path) for path in arguments.nvme]
    if arguments.trace is not None:
        block["trace"] = {"path": str(arguments.trace), "first_step": arguments.warmup, "num_steps": 2}
    if arguments.plan is not None:
        block["plan"] = {"path": str(arguments.plan)}
    elif hand_plan.is_asked_for(arguments):
        block["plan"] = {"path": str(folder / "plan.json")}
        hand_plan.make(arguments, model).save(folder / "plan.json")
        block["gradients"] = {"bits": arguments.gradient_bits}
        block["activations"] = {"bits": min(arguments.saved_bits, arguments.boundary_bits or 16)}
    config = {
        "train_micro_batch_size_per_gpu": arguments.bs,
        "gradient_accumulation_steps": arguments.accumulation,
        "gradient_clipping": arguments.clip,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 10**9,
        "lazytrain": block,
    }
    if not arguments.through_trainer:
        adamw = {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
        config["optimizer"] = {"type": "AdamW", "params": adamw}
    return config


class Clock:
    """Marks on the device's own time line, read after the run; and peak memory of the timed steps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.is_cuda = arguments.device == "cuda"
        self.warmup, self.accumulation = arguments.warmup, arguments.accumulation
        self.cap_gib = arguments.gpu_cap_gib
        self.marks: list[tuple[str, object]] = []
        self.started_s = self.ended_s = 0.0
        self.steps = 0

    def mark(self, name: str) -> None:
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.perf_counter()
        self.marks.append((name, event))

    def placed(self) -> None:
        """The model is where it belongs: from here on the cap holds."""
        if self.is_cuda:
            torch.cuda.empty_cache()
            if self.cap_gib is not None:
                torch.cuda.set_per_process_memory_fraction(self.cap_gib * GIB / torch.cuda.mem_get_info()[1])

    def step_begins(self) -> None:
        if self.steps == self.warmup:
            if self.is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.marks.clear()
            self.started_s = time.perf_counter()
        self.mark("begin")
        self.steps += 1

    def end(self, engine) -> None:
        self.mark("begin")
        engine.flush()
        self.ended_s = time.perf_counter()

    @property
    def timed_steps(self) -> int:
        return self.steps - self.warmup

    def elapsed(self) -> dict[str, list[float]]:
        """Seconds per timed step, in all and by phase (phases of all micro-batches together)."""
        spans: dict[str, list[float]] = {"total": [], **{phase: [] for phase in PHASES}}
        begin = None
        for (name, event), (_, following) in zip(self.marks, [*self.marks[1:], (None, None)], strict=True):
            if name == "begin":
                if begin is not None:
                    spans["total"].append(self._between(begin, event))
                if following is None:
                    return spans
                begin = event
                for phase in PHASES:
                    spans[phase].append(0.0)
            spans["forward" if name == "begin" else name][-1] += self._between(event, following)
        raise AssertionError("the last mark is the end of the last step")

    def _between(self, first, second) -> float:
        return first.elapsed_time(second) / 1e3 if self.is_cuda else second - first


def run_loop(arguments: argparse.Namespace, model, config: dict, clock: Clock):
    """A plain `deepspeed.initialize` loop."""
    import deepspeed

    deepspeed.init_distributed("nccl" if arguments.device == "cuda" else "gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if arguments.compile is not None:
        engine.compile(backend=arguments.compile)
    clock.placed()
    device = torch.device(arguments.device)
    vocab_size = model.config.vocab_size
    torch.manual_seed(1 + torch.distributed.get_rank())
    tokens = torch.randint(0, vocab_size, (arguments.accumulation, arguments.bs, arguments.seq), device=device)
    losses = []
    for _ in range(arguments.warmup + arguments.steps):
        clock.step_begins()
        for micro_batch in tokens:
            loss = engine(input_ids=micro_batch, labels=micro_batch).loss
            clock.mark("backward")
            engine.backward(loss)
            clock.mark("step")
            engine.step()
            clock.mark("forward")
        losses.append(loss.detach())
    clock.end(engine)
    return engine, [loss.item() for loss in losses]


def run_trainer(arguments: argparse.Namespace, model, config: dict, clock: Clock):
    """HF Trainer on as many random sequences as the steps need."""
    import transformers

    vocab_size = model.config.vocab_size
    tokens = torch.randint(0, vocab_size, (arguments.accumulation * arguments.bs, arguments.seq))
    num_steps = arguments.warmup + arguments.steps

    class Sequences(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(tokens) * num_steps

        def __getitem__(self, index: int) -> dict:
            row = tokens[index % len(tokens)]
            return {"input_ids": row, "labels": row}

    losses = []

    class TimedTrainer(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
            return loss

    class Marks(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs) -> None:
            clock.step_begins()

        def on_train_begin(self, *args, **kwargs) -> None:
            clock.placed()

        def on_train_end(self, *args, **kwargs) -> None:
            clock.end(trainer.model_wrapped)

    with tempfile.TemporaryDirectory() as folder:
        training = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=arguments.bs,
            gradient_accumulation_steps=arguments.accumulation,
            max_steps=num_steps,
            learning_rate=1e-5,
            weight_decay=0.01,
            max_grad_norm=arguments.clip,
            lr_scheduler_type="constant",
            bf16=True,
            deepspeed=config,
            torch_compile_backend=arguments.compile,
            use_cpu=arguments.device == "cpu",
            logging_steps=10**9,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = TimedTrainer(model, training, train_dataset=Sequences(), callbacks=[Marks()])
        trainer.train()
    # Trainer divides each micro-batch's loss by the labels of the whole step: their sum is the step's mean.
    steps = zip(*[iter(losses)] * arguments.accumulation, strict=True)
    return trainer.model_wrapped, [sum(loss.item() for loss in step) for step in steps]


def report(arguments: argparse.Namespace, engine, clock: Clock, losses: list[float], num_parameters: int) -> dict:
    from lazytrain_plugin.kernels.native import kernel_info
    from lazytrain_plugin.vocab import Activations, Tier

    spans = clock.elapsed()
    s_per_step = statistics.median(spans["total"])
    num_ranks = torch.distributed.get_world_size()
    num_tokens = arguments.bs * arguments.seq * arguments.accumulation * num_ranks
    plan = engine.lazytrain.executor.plan
    if arguments.save_plan is not None:
        plan.save(arguments.save_plan)
    kernels = kernel_info()
    result = {
        "system": "lazytrain" + ("-trainer" if arguments.through_trainer else ""),
        "shape": arguments.shape if arguments.layers is None else f"{arguments.shape}/{arguments.layers}",
        "parameters": num_parameters,
        "ranks": num_ranks,
        "bs": arguments.bs,
        "seq": arguments.seq,
        "accumulation": arguments.accumulation,
        "fidelity": arguments.fidelity,
        "state_bits": arguments.state_bits,
        "saved_bits": dict(Counter(str(u.saved_bits) for u in plan.units if u.activations != Activations.RECOMPUTE)),
        "gradient_bits": min((unit.gradient_bits for unit in (*plan.units, *plan.stem)), default=16),
        "fused": not arguments.no_fused and clock.is_cuda,
        "compile": arguments.compile,
        "resident_units": sum(unit.weights == Tier.GPU for unit in plan.units),
        "keep_units": sum(unit.activations == Activations.KEEP for unit in plan.units),
        "saving_units": sum(unit.activations != Activations.RECOMPUTE for unit in plan.units),
        "saving_units_cpu": sum(unit.saved != Tier.GPU for unit in plan.units),
        "streamed_update_units": sum(unit.streams_states for unit in plan.units),
        "streamed_update_stem": sum(unit.streams_states for unit in plan.stem),
        "nvme_units": {
            what: sum(getattr(unit, what) == Tier.NVME for unit in plan.units)
            for what in ("weights", "states", "gradients", "boundary", "saved")
        },
        "units": len(plan.units),
        "slots": [plan.weight_slots, plan.gradient_slots, plan.state_slots, plan.activation_slots],
        "s_per_step": round(s_per_step, 4),
        "s_per_step_sustained": round((clock.ended_s - clock.started_s) / clock.timed_steps, 4),
        "tflops": round(6 * num_parameters * num_tokens / s_per_step / 1e12, 1),
        "tokens_per_s": round(num_tokens / s_per_step),
    }
    if not arguments.through_trainer:
        result |= {f"{phase}_s": round(statistics.median(spans[phase]), 4) for phase in PHASES}
    if (comm := getattr(engine, "lazytrain_gradient_comm", None)) is not None:
        stats = comm.stats()
        steps = arguments.warmup + arguments.steps
        result["wire_bytes_per_step"] = stats.wire_bytes // steps
        result["units_in_codes"] = stats.quantized_buckets // steps // arguments.accumulation
    waits = engine.lazytrain.trace.summary(last=clock.timed_steps)
    result["waits_s"] = {cause: round(seconds, 4) for cause, seconds in waits.items()}
    if clock.is_cuda:
        result |= {
            "gpu_peak_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
            "gpu_peak_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
            "gpu": torch.cuda.get_device_name(),
        }
    result |= {
        "rss_gib": round(psutil.Process().memory_info().rss / GIB, 2),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "cpu_threads": kernels.threads,
        "cpu_isa": kernels.isa,
        "torch": torch.__version__,
        "s_of_each_step": [round(seconds, 4) for seconds in spans["total"]],
        "losses": [round(loss, 4) for loss in losses],
    }
    return result


if __name__ == "__main__":
    main()
