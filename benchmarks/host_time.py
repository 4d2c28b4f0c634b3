"""What a training step takes of the host's own time, per layer: plans through the executor beside plain torch.

    python benchmarks/host_time.py --layers 36 --steps 15

A decoder so narrow that its operators take no time, on the CPU: what is left is Python, torch's dispatch, and what the
executor adds to them, which on a GPU is the time in which a step's kernels are launched (without that of the launches
themselves, and of CUDA's streams and events). Times are of the calling thread alone (it runs backward too), in which
other processes have no part; updates run in between. Prints one JSON line per row: microseconds per layer, the
fastest of the steps.
"""

import argparse
import cProfile
import json
import pstats
import time
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.update import NativeAdamW
from lazytrain_plugin.vocab import Activations, Tier, Updater

HOMES = {"resident": (Tier.GPU, Tier.GPU, Updater.GPU), "streamed": (Tier.CPU, Tier.CPU, Updater.CPU)}


def make_model(num_layers: int):
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def make_plan(model, home: str, activations: Activations) -> PlacementPlan:
    found = discover(model)
    weights, states, updater = HOMES[home]
    unit = lambda name: UnitPlan(  # noqa: E731
        name=name, weights=weights, states=states, updater=updater, activations=activations
    )
    plan = PlacementPlan(units=tuple(unit(u.name) for u in found.units), stem=tuple(unit(u.name) for u in found.stem))
    return replace(plan, weight_slots=3, gradient_slots=2)


def step_of_executor(model, plan: PlacementPlan):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    executor = Executor(
        model,
        discover(model),
        torch.device("cpu"),
        dtypes={p: p.dtype for p in model.parameters()},
        optimizer=optimizer,
        updater=NativeAdamW(decoupled=True),
    )
    executor.place(plan)

    def finish() -> None:
        executor.step(1.0)
        executor.flush()

    return executor.begin_forward, finish


def step_of_torch(model, again: bool):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if again:
        for layer in model.model.layers:
            own = layer.forward
            layer.forward = lambda *args, own=own, **kwargs: checkpoint(own, *args, use_reentrant=False, **kwargs)

    def finish() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: None, finish


def measure(model, begin, finish, steps: int, ids: torch.Tensor, profiled: str | None) -> dict[str, float]:
    layers = model.config.num_hidden_layers
    times = {"forward": [], "backward": [], "between": []}
    profile = cProfile.Profile() if profiled else None
    for step in range(steps + 3):
        if profile is not None and step >= 3:
            profile.enable()
        marks = [time.thread_time()]
        begin()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        marks.append(time.thread_time())
        loss.backward()
        marks.append(time.thread_time())
        if profile is not None:
            profile.disable()
        finish()
        marks.append(time.thread_time())
        if step >= 3:
            for name, first, last in zip(times, marks, marks[1:]):
                times[name].append((last - first) / layers * 1e6)
    if profile is not None:
        pstats.Stats(profile).sort_stats(profiled).print_stats(45)
    return {name: round(min(found), 1) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rows", nargs="*", help="only rows that begin with one of these")
    parser.add_argument("--profile", nargs="?", const="tottime", help="cProfile of each row, sorted by this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.arange(16).view(1, 16)
    rows = {f"torch, {name}": (None, again) for name, again in (("keep", False), ("recompute", True))}
    rows |= {
        f"{home}, {activations.value}": (home, activations)
        for home in HOMES
        for activations in (Activations.KEEP, Activations.MATMULS, Activations.RECOMPUTE)
    }
    for name, (home, way) in rows.items():
        if arguments.rows and not name.startswith(tuple(arguments.rows)):
            continue
        model = make_model(arguments.layers)
        if home is None:
            begin, finish = step_of_torch(model, way)
        else:
            begin, finish = step_of_executor(model, make_plan(model, home, way))
        found = measure(model, begin, finish, arguments.steps, ids, arguments.profile)
        print(json.dumps({"row": name, **found, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
