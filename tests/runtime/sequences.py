"""Random sequences of what users and the engine do, and a machine that carries one out and says what could be seen.

Two machines that differ in their plans only must see the same bits (tests/runtime/test_random_sequences.py).
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.train_state import ExecutorState
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.runtime.nvme.rig import Awkward
from tests.runtime.rig import VOCAB, Block, Model, make_executor
from tests.runtime.test_saving import Layer


class Boom(Exception):
    """What a layer raises when it is told to."""


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Boom


def unreliable(layer_class: type[nn.Module]) -> type[nn.Module]:
    """The layer class, of layers that can be told to raise."""

    class Unreliable(layer_class):
        raises = ""
        """"forward": in each; "backward"; "second": in the second forward from now on."""

        def forward(self, *args):
            y = super().forward(*args)
            if self.raises == "second":
                self.raises = "forward"
            elif self.raises == "forward":
                raise Boom
            if self.raises == "backward":
                return tuple(map(_RaisesInBackward.apply, y)) if isinstance(y, tuple) else _RaisesInBackward.apply(y)
            return y

    return Unreliable


class ReadsEmbedding(Block):
    """A layer that uses a stem weight which it does not hold."""

    embedding: list

    def forward(self, x):
        return super().forward(x) + 0.1 * self.embedding[0].weight.mean(0)


class Gated(Block):
    """A layer that takes a second input and returns a second output."""

    def forward(self, x, gate=None):
        y = super().forward(x)
        return y if gate is None else (y * torch.sigmoid(gate), gate + y)


LAYERS = {
    "attention": unreliable(Layer),
    "block": unreliable(Block),
    "awkward": unreliable(Awkward),
    "reads embedding": unreliable(ReadsEmbedding),
    "gated": unreliable(Gated),
}


class RandomModel(Model):
    """A model whose way through its layers can be told anew for each forward."""

    skipped, twice, checkpointed, reentrant = -1, -1, -1, False

    def __init__(self, kinds: tuple[str, ...], *, dropout: float, tied: bool) -> None:
        super().__init__([self._layer(kind, dropout) for kind in kinds])
        for layer in self.layers:
            if isinstance(layer, ReadsEmbedding):
                layer.embedding = [self.embedding]
        if tied:
            self.head.weight = self.embedding.weight

    @staticmethod
    def _layer(kind: str, dropout: float) -> nn.Module:
        return LAYERS[kind]() if kind == "awkward" else LAYERS[kind](dropout=dropout)

    def run_layers(self, x):
        gate = None
        for i, layer in enumerate(self.layers):
            if i == self.skipped:
                continue
            for _ in range(2 if i == self.twice else 1):
                if i == self.checkpointed:
                    x = checkpoint(layer, x, use_reentrant=self.reentrant)
                elif isinstance(layer, Gated):
                    x, gate = layer(x, x if gate is None else gate)
                else:
                    x = layer(x)
        return x if gate is None else x + 0.1 * gate


@dataclass(frozen=True)
class Setting:
    """What all machines of a sequence have in common."""

    kinds: tuple[str, ...]
    dropout: float
    tied: bool
    bf16: bool
    native: bool
    state_bits: int
    least_coded_numel: int


@dataclass(frozen=True)
class Op:
    """One thing to do; `args` hold all of its random choices."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.args.items())})"


def draw_setting(rng: random.Random) -> Setting:
    native = rng.random() < 0.8
    return Setting(
        kinds=tuple(rng.choice(list(LAYERS)) for _ in range(rng.randint(1, 5))),
        dropout=rng.choice([0.0, 0.3]),
        tied=rng.random() < 0.3,
        bf16=rng.random() < 0.4,
        native=native,
        state_bits=rng.choice([32, 32, 8]) if native else 32,
        least_coded_numel=rng.choice([0, 300]),
    )


def draw_sequence(rng: random.Random, num_layers: int, length: int) -> list[Op]:
    return [_draw_op(rng, num_layers) for _ in range(length)]


def _draw_op(rng: random.Random, num_layers: int) -> Op:
    layer = lambda: rng.randrange(num_layers)  # noqa: E731
    seed = rng.randrange(10**6)

    def batch() -> dict[str, Any]:
        choices = {"rows": rng.randint(1, 3), "columns": rng.choice([1, 5, 7]), "seed": seed}
        for key, chance in (("skipped", 0.1), ("twice", 0.1), ("checkpointed", 0.1)):
            if rng.random() < chance:
                choices[key] = layer()
        if "checkpointed" in choices:
            choices["reentrant"] = rng.random() < 0.5
        if rng.random() < 0.1:
            choices["autocast"] = True
        return choices

    def micro_batch() -> dict[str, Any]:
        choices = batch() | {"last": rng.random() < 0.6}
        for key, chance in (("penalty", 0.1), ("overflow", 0.05), ("times", 0.1)):
            if rng.random() < chance:
                choices[key] = {"penalty": layer(), "overflow": True, "times": rng.choice([2, 3])}[key]
        return choices

    ways: dict[str, tuple[float, Any]] = {
        "train": (12, micro_batch),
        "fail": (1, lambda: micro_batch() | {"layer": layer(), "raises": rng.choice(["forward", "backward"])}),
        "fail_again": (0.7, lambda: micro_batch() | {"layer": layer()}),
        "hold": (1.5, micro_batch),
        "backward_held": (1.5, lambda: {"which": rng.randrange(4), "retain": rng.random() < 0.3}),
        "drop_held": (0.5, dict),
        "step": (8, lambda: {"max_norm": rng.choice([0.0, 0.05, 1.0, 1e9]), "lr": rng.choice([None, 1e-3, 3e-2])}),
        "evaluate": (2, lambda: batch() | {"train_mode": rng.random() < 0.3, "inference": rng.random() < 0.5}),
        "flush": (1, dict),
        "place": (5, lambda: {"seed": seed}),
        "read": (2, lambda: {"how": rng.choice(sorted(READS)), "seed": seed}),
        "write": (2, lambda: {"how": rng.choice(sorted(WRITES)), "seed": seed}),
        "freeze": (0.7, lambda: {"layer": layer(), "frozen": rng.random() < 0.5}),
        "discard": (0.7, dict),
        "save": (1, dict),
        "load": (1, lambda: {"fresh": rng.random() < 0.5, "seed": seed}),
        "compare": (2, lambda: {"seed": seed}),
    }
    name = rng.choices(list(ways), [weight for weight, _ in ways.values()])[0]
    return Op(name, ways[name][1]())


def draw_plan(rng: random.Random, names: tuple[list[str], list[str]], setting: Setting, device: str) -> PlacementPlan:
    """Any exact plan for units and parts of the stem of these names."""
    tiers = [Tier.GPU, Tier.CPU, Tier.NVME]
    most_kept = rng.choice([Activations.RECOMPUTE, *Activations])

    def home(name: str, *, stem: bool) -> UnitPlan:
        while True:
            states = rng.choice(tiers)
            unit = {
                "weights": Tier.GPU if stem and device == "cuda" else rng.choice(tiers[:2] if stem else tiers),
                "states": states,
                "updater": rng.choice(list(Updater)),
                "gradients": rng.choice([None, None, Tier.CPU, states]),
                "activations": rng.choice([most_kept, *Activations]),
                "boundary": rng.choice([*tiers, None]),
                "saved": rng.choice(tiers),
            }
            with contextlib.suppress(PlanMismatchError):
                plan = UnitPlan(name=name, state_bits=setting.state_bits, **unit)
                if setting.native or not (plan.streams_states or plan.states == Tier.NVME):
                    return plan

    while True:
        with contextlib.suppress(PlanMismatchError):
            return PlacementPlan(
                units=tuple(home(name, stem=False) for name in names[0]),
                stem=tuple(home(name, stem=True) for name in names[1]),
                weight_slots=rng.randint(2, 6),
                gradient_slots=rng.randint(1, 3),
                state_slots=rng.randint(1, 3),
                activation_slots=rng.randint(1, 3),
                nvme_slots=rng.randint(1, 3),
            )


def simple_plan(names: tuple[list[str], list[str]], setting: Setting, device: str) -> PlacementPlan:
    """Everything in host memory, all activations computed again, the fewest slots."""

    def unit(name: str, weights: Tier) -> UnitPlan:
        bits = setting.state_bits
        return UnitPlan(name=name, weights=weights, states=Tier.CPU, updater=Updater.CPU, state_bits=bits)

    stem = Tier.GPU if device == "cuda" else Tier.CPU
    return PlacementPlan(
        units=tuple(unit(name, Tier.CPU) for name in names[0]),
        stem=tuple(unit(name, stem) for name in names[1]),
        weight_slots=2,
        gradient_slots=1,
    )


READS = {
    "state_dict": lambda machine, p: dict(machine.model.state_dict()),
    "deepcopy": lambda machine, p: {"weight": copy.deepcopy(p)},
    "numpy": lambda machine, p: {"weight": torch.from_numpy(p.detach().float().cpu().numpy().copy())},
    "arithmetic": lambda machine, p: {"weight": p * 1},
    "through data": lambda machine, p: {"weight": p.data.clone()},
    "module": lambda machine, p: copy.deepcopy(machine.model.layers[0]).state_dict(),
}


def _write_some_rows(machine: Machine, p: nn.Parameter) -> None:
    p[:1].mul_(0.5)


def _write_state_dict(machine: Machine, p: nn.Parameter) -> None:
    values = {name: value.detach() * 0.99 for name, value in machine.model.state_dict().items()}
    machine.model.load_state_dict(values)


def _write_all(machine: Machine, p: nn.Parameter) -> None:
    for q in machine.model.parameters():
        q.clamp_(-0.2, 0.2)


WRITES = {
    "in place": lambda machine, p: p.mul_(0.9),
    "rows in place": _write_some_rows,
    "through data": lambda machine, p: p.data.mul_(0.9) if machine.between_steps else p.mul_(0.9),
    "state_dict": _write_state_dict,
    "all": _write_all,
}
"""A weight that has two copies shows no writes through `.data` between a forward and its step."""


class Machine:
    """A model, an executor around it, and what happens to both.

    Args:
        plan_seed: of the first plan; None: the simple plan from beginning to end.
        folder: of the NVMe tier.
    """

    def __init__(self, setting: Setting, plan_seed: int | None, folder: Path, device: str = "cpu") -> None:
        self.setting, self.device, self.folder = setting, device, folder
        self.moves = plan_seed is not None
        self.saved: dict[str, Any] | None = None
        self.seen: dict[str, Any] = {}
        """What the operation under way has shown."""
        self._late = random.Random(plan_seed)
        self._begin(0, plan_seed)

    def _begin(self, model_seed: int, plan_seed: int | None) -> None:
        torch.manual_seed(model_seed)
        setting = self.setting
        self.model = RandomModel(setting.kinds, dropout=setting.dropout, tied=setting.tied).to(self.device)
        found = discover(self.model)
        self.names = [unit.name for unit in found.units], [part.name for part in found.stem]
        delay_s = self._late.choice([0.0, 0.0, 0.0003])
        self.held: list[torch.Tensor] = []
        """Losses whose backward may come."""
        self.held_checkpoints: list[torch.Tensor] = []
        self.between_steps = True
        self.executor = make_executor(
            self.model,
            self._plan(plan_seed),
            device=self.device,
            native=setting.native,
            dtype=torch.bfloat16 if setting.bf16 else None,
            least_coded_numel=setting.least_coded_numel,
            nvme=NvmeTier([self.folder], block_bytes=4096, pieces=lambda nbytes, ranks: 2, delay_s=delay_s)
            if self.moves
            else None,
            transfer_delay_s=delay_s,
        )
        self.state = ExecutorState(self.executor)
        if self.moves:
            self._make_late(self.executor)

    def _make_late(self, executor: Executor) -> None:
        submit, late = executor.worker.submit, self._late

        def submit_late(work, label):
            delay_s = late.choice([0.0, 0.0, 0.0002, 0.001])

            def work_late() -> None:
                time.sleep(delay_s)
                work()

            return submit(work_late, label)

        executor.worker.submit = submit_late

    def _plan(self, seed: int | None) -> PlacementPlan:
        if not self.moves:
            return simple_plan(self.names, self.setting, self.device)
        return draw_plan(random.Random(seed), self.names, self.setting, self.device)

    def do(self, op: Op) -> dict[str, Any]:
        """Returns what could be seen."""
        self.seen = {}
        try:
            getattr(self, op.name)(**op.args)
        except Boom:
            self.seen["raised"] = True
        self.seen["random state"] = torch.get_rng_state()
        return self.seen

    def close(self) -> None:
        self.held.clear()
        self.executor.close()

    # What users and the engine do.

    def _loss(self, *, rows, columns, seed, train=True, penalty=None, overflow=False, autocast=False, **way):
        self.model.train(train)
        for key in ("skipped", "twice", "checkpointed", "reentrant"):
            setattr(self.model, key, way.get(key, getattr(RandomModel, key)))
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCAB, (rows, columns), generator=generator).to(self.device)
        self.executor.begin_forward(training=torch.is_grad_enabled())
        self.between_steps = False
        torch.manual_seed(seed)
        with torch.autocast(self.device, torch.bfloat16, enabled=autocast):
            loss = self.model.loss(ids)
            if penalty is not None:
                loss = loss + 0.01 * sum(p.float().square().sum() for p in self.model.layers[penalty].parameters())
        if overflow:
            loss = loss * float("inf")
        self.seen["loss"] = loss.detach().clone()
        return loss

    def _backward(self, loss: torch.Tensor, **options) -> None:
        try:
            loss.backward(**options)
        finally:
            self.executor.end_backward()

    def train(self, *, last: bool, times: int = 1, **batch) -> None:
        self.executor.set_last_micro_batch(last)
        loss = self._loss(**batch)
        for _ in range(times - 1):
            self._backward(loss, retain_graph=True)
        self._backward(loss)

    @contextlib.contextmanager
    def _raising(self, layer: int, when: str) -> Iterator[None]:
        self.model.layers[layer].raises = when
        try:
            yield
        finally:
            self.model.layers[layer].raises = ""

    def fail(self, *, layer: int, raises: str, **micro_batch) -> None:
        """An error in a layer; training goes on with what has arrived."""
        with self._raising(layer, raises):
            self.train(**micro_batch)

    def fail_again(self, *, layer: int, **micro_batch) -> None:
        """An error in a layer that runs again, if it does; the window is given up."""
        with self._raising(layer, "second"), contextlib.suppress(Boom):
            self.train(**micro_batch)
        self.seen = {}
        torch.manual_seed(0)
        self.discard()

    def hold(self, *, last: bool, times: int = 1, **batch) -> None:
        """A forward whose backward comes later, or never."""
        loss = self._loss(**batch)
        for _ in range(times - 1):
            self.executor.set_last_micro_batch(last)
            self._backward(loss, retain_graph=True)
        self.held.append(loss)
        if "checkpointed" in batch:
            self.held_checkpoints.append(loss)

    def backward_held(self, *, which: int, retain: bool) -> None:
        if self.held:
            self.model.train()  # a layer that runs again does so in the mode that it is in
            loss = self.held[which % len(self.held)] if retain else self.held.pop(which % len(self.held))
            self._backward(loss, retain_graph=retain)

    def drop_held(self) -> None:
        self.held.clear()

    def step(self, *, max_norm: float, lr: float | None) -> None:
        self.held.clear()  # weights change
        if lr is not None:
            self.executor.optimizer.param_groups[0]["lr"] = lr
        norm, applied = self.executor.step(max_norm)
        self.between_steps = True
        self.seen |= {"norm": torch.tensor(norm.total, dtype=torch.float64), "applied": applied}

    def evaluate(self, *, train_mode: bool, inference: bool, **batch) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            self._loss(train=train_mode, **batch)

    def flush(self) -> None:
        self.executor.flush()

    def place(self, *, seed: int) -> None:
        # torch counts what is saved in a checkpoint, and that is the plan's business.
        self.held = [loss for loss in self.held if all(loss is not other for other in self.held_checkpoints)]
        self.held_checkpoints.clear()
        if self.moves:
            self.executor.place(self._plan(seed))

    def _some_weight(self, seed: int) -> nn.Parameter:
        return random.Random(seed).choice(list(self.model.parameters()))

    def read(self, *, how: str, seed: int) -> None:
        found = READS[how](self, self._some_weight(seed))
        self.seen |= {name: value.detach().clone() for name, value in found.items()}

    @torch.no_grad()
    def write(self, *, how: str, seed: int) -> None:
        self.held.clear()
        WRITES[how](self, self._some_weight(seed))

    def freeze(self, *, layer: int, frozen: bool) -> None:
        self.held.clear()
        for record in self.state.records:
            if record.group is not None and record.name.startswith(f"layers.{layer}."):
                record.parameter.requires_grad_(not frozen)

    def discard(self) -> None:
        self.executor.discard_gradients()

    def _everything(self, rng: random.Random, *, gradients: bool) -> dict[str, Any]:
        """Masters, states, weights and gradients; read in some order."""
        self.state.flush()
        found: dict[str, Any] = {}
        for record in rng.sample(self.state.records, len(self.state.records)):
            found[record.name] = record.parameter.detach().clone()
            if record.group is not None:
                found[f"{record.name} master"] = self.state.read_master(record).clone()
                states = self.state.read_state(record)
                found |= {f"{record.name} {key}": copy.deepcopy(value) for key, value in states.items()}
                if gradients:
                    gradient = self.state.read_gradient(record)
                    found[f"{record.name} gradient"] = None if gradient is None else gradient.float()
        return found

    def compare(self, *, seed: int) -> None:
        self.seen |= self._everything(random.Random(seed), gradients=True)

    def save(self) -> None:
        self.saved = {}
        self.state.flush()
        for record in self.state.records:
            if record.group is None:
                self.saved[record.name] = record.parameter.detach().clone()
            else:
                states = {key: copy.deepcopy(value) for key, value in self.state.read_state(record).items()}
                self.saved[record.name] = self.state.read_master(record).clone(), states

    @torch.no_grad()
    def load(self, *, fresh: bool, seed: int) -> None:
        """Into another model with a plan of its own, or into this one."""
        if self.saved is None:
            return
        if fresh:
            self.close()
            self._begin(1, seed)
        self.held.clear()
        self.state.flush()
        self.state.discard_gradients()
        for record in self.state.records:
            if record.group is None:
                record.parameter.copy_(self.saved[record.name])
            else:
                self.state.write_master(record, self.saved[record.name][0])
                self.state.write_state(record, self.saved[record.name][1])


def difference(seen: Any, wanted: Any, name: str = "") -> str | None:
    """The name of the first thing that differs by a bit."""
    if isinstance(wanted, dict):
        if not isinstance(seen, dict) or seen.keys() != wanted.keys():
            return f"{name}: {sorted(seen)} instead of {sorted(wanted)}"
        return next(filter(None, (difference(seen[key], wanted[key], f"{name} {key}") for key in wanted)), None)
    if isinstance(wanted, torch.Tensor) and isinstance(seen, torch.Tensor):
        seen, wanted = seen.detach().cpu(), wanted.detach().cpu()
        if seen.dtype == wanted.dtype and torch.equal(torch.nan_to_num(seen), torch.nan_to_num(wanted)):
            return None
        return f"{name}: {seen.flatten()[:4].tolist()}... instead of {wanted.flatten()[:4].tolist()}..."
    return None if type(seen) is type(wanted) and seen == wanted else f"{name}: {seen} instead of {wanted}"


def run(setting: Setting, plan_seed: int | None, sequence: list[Op], folder: Path, device: str) -> list[dict[str, Any]]:
    """What a machine has seen at each operation, and after the last."""
    machine = Machine(setting, plan_seed, folder, device)
    try:
        return [machine.do(op) for op in (*sequence, Op("compare", {"seed": 0}))]
    finally:
        machine.close()


def find_failure(setting: Setting, plan_seed: int, sequence: list[Op], folder: Path, device: str) -> str | None:
    """Why a machine with changing plans is wrong; None: it is right."""
    wanted = run(setting, None, sequence, folder, device)
    try:
        seen = run(setting, plan_seed, sequence, folder, device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for i, (a, b) in enumerate(zip(seen, wanted, strict=True)):
        if (found := difference(a, b)) is not None:
            return f"after operation {i}:{found}"
    if list(folder.iterdir()):
        return "files are left behind"
    return None


def shrink(setting: Setting, plan_seed: int, sequence: list[Op], folder: Path, device: str) -> list[Op]:
    """The sequence without operations that its failure does not need."""
    i = len(sequence)
    while (i := i - 1) >= 0:
        shorter = sequence[:i] + sequence[i + 1 :]
        if find_failure(setting, plan_seed, shorter, folder, device) is not None:
            sequence = shorter
    return sequence


def simplify_ops(setting: Setting, plan_seed: int, sequence: list[Op], folder: Path, device: str) -> list[Op]:
    """The sequence without choices that its failure does not need."""
    optional = ("skipped", "twice", "checkpointed", "reentrant", "autocast", "penalty", "overflow", "times")
    for i, op in enumerate(sequence):
        for key in optional:
            if key in op.args:
                simpler = replace(op, args={k: v for k, v in op.args.items() if k != key})
                shorter = [*sequence[:i], simpler, *sequence[i + 1 :]]
                if find_failure(setting, plan_seed, shorter, folder, device) is not None:
                    sequence, op = shorter, simpler
    return sequence
