"""An in-memory TrainState and small modules that hold every kind of parameter a checkpoint meets."""

from __future__ import annotations

import torch
from torch import nn

from lazytrain_plugin.runtime.state import ParamRecord
from lazytrain_plugin.runtime.streamed_file import TensorSpec

BLOCK = 256


class Toy(nn.Module):
    """Tied embedding and head, a scalar, a 1-element and an empty parameter, mixed dtypes, both kinds of buffers."""

    def __init__(self, *, tied: bool = True, dtype: torch.dtype = torch.float32, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.inner = nn.Sequential(nn.Linear(width, 7), nn.LayerNorm(7), nn.Linear(7, width))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(width, 17, bias=False)
        self.register_buffer("running", torch.randn(3))
        self.register_buffer("count", torch.tensor(4))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.to(dtype)
        self.inner[1].float()  # mixed dtypes: a norm in fp32
        if tied:
            self.head.weight = self.embed.weight


def make_records(module: nn.Module, *, num_groups: int = 1) -> list[ParamRecord]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    trained = 0
    records = []
    for parameter, (first, *aliases) in names.items():
        group = trained % num_groups if parameter.requires_grad else None
        trained += parameter.requires_grad
        records.append(
            ParamRecord(
                name=first,
                aliases=tuple(aliases),
                parameter=parameter,
                shape=parameter.shape,
                numel=parameter.numel(),
                dtype=parameter.dtype,
                group=group,
            )
        )
    return records


class DictState:
    """A TrainState on plain dicts; `bits=8` keeps moments as codes whose map has no -1, like bitsandbytes'."""

    def __init__(self, module: nn.Module, *, bits: int = 32, num_groups: int = 1, seed: int = 0) -> None:
        self.module, self.bits = module, bits
        self.records = make_records(module, num_groups=num_groups)
        self.param_groups = [
            {"params": [r.parameter for r in self.records if r.group == g], "lr": 0.1 * (g + 1), "betas": (0.9, 0.999)}
            for g in range(num_groups)
        ]
        self.generator = torch.Generator().manual_seed(seed)
        self.masters = {r.name: r.parameter.detach().float().reshape(-1).clone() for r in self._trained()}
        self.states: dict[str, dict] = {r.name: {} for r in self._trained()}
        self.flushes = 0

    def _trained(self) -> list[ParamRecord]:
        return [record for record in self.records if record.group is not None]

    def train(self, *, skip: tuple[str, ...] = ()) -> DictState:
        """Some random step: every master, weight, state and buffer changes."""
        for record in self._trained():
            if record.name in skip or not record.numel:
                continue
            noise = torch.randn(record.numel, generator=self.generator)
            self.write_master(record, self.masters[record.name] + 0.01 * noise)
            step = self.states[record.name].get("step", 0) + 1
            self.write_state(record, {"step": step, "exp_avg": noise, "exp_avg_sq": noise.square()})
        self.module.running.add_(1)
        return self

    def spans(self, record: ParamRecord) -> list[slice]:
        """Two blocks at a time, the last one of what is left."""
        step = 2 * BLOCK
        return [slice(first, min(first + step, record.numel)) for first in range(0, record.numel, step)]

    def read_master(self, record: ParamRecord, span: slice | None = None) -> torch.Tensor:
        return self.masters[record.name][span or slice(None)]

    def write_master(self, record: ParamRecord, values: torch.Tensor) -> None:
        assert values.shape == (record.numel,)
        if record.group is not None:
            assert values.dtype == torch.float32
            self.masters[record.name] = values.clone()
        record.parameter.data.copy_(values.view(record.shape))

    def state_specs(self, record: ParamRecord) -> dict:
        state = self.read_state(record)
        return {key: TensorSpec.like(value) if torch.is_tensor(value) else value for key, value in state.items()}

    def read_state(self, record: ParamRecord, span: slice | None = None) -> dict:
        stored = dict(self.states[record.name])
        if span is not None:
            for key, value in self.states[record.name].items():
                if key.endswith(".scales"):
                    stored[key] = value[span.start // BLOCK : -(-span.stop // BLOCK)]
                elif torch.is_tensor(value) and value.shape == (record.numel,):
                    stored[key] = value[span]
                elif span.start > 0:
                    del stored[key]
        if self.bits == 32 or not stored:
            return stored
        decoded = {key: decode(stored[f"{key}.codes"], stored[f"{key}.scales"]) for key in ("exp_avg", "exp_avg_sq")}
        return {**stored, **decoded}

    def write_state(self, record: ParamRecord, state: dict) -> None:
        copied = {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}
        if self.bits == 32:
            self.states[record.name] = {key: value for key, value in copied.items() if "." not in key}
            return
        stored = {"step": copied["step"]} if copied else {}
        for key in ("exp_avg", "exp_avg_sq") if copied else ():
            codes, scales = copied.get(f"{key}.codes"), copied.get(f"{key}.scales")
            if codes is None:
                codes, scales = encode(copied[key])
            stored |= {f"{key}.codes": codes, f"{key}.scales": scales}
        self.states[record.name] = stored

    def flush(self) -> None:
        self.flushes += 1

    def discard_gradients(self) -> None:
        pass


MAP = torch.linspace(-0.9929, 1.0, 256)  # largest value 1, smallest not -1


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    codes = (blocks / scales.clamp_min(1e-30)[:, None]).unsqueeze(-1).sub(MAP).abs().argmin(-1)
    return codes.to(torch.uint8).view(-1)[: values.numel()].clone(), scales


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return MAP[codes.long()] * scales.repeat_interleave(BLOCK)[: codes.numel()]
