"""AdamW states and gradients for the kernel tests; every case is the same on every device."""

from dataclasses import dataclass

import torch

from lazytrain_plugin.kernels.adamw import AdamWStep, Moment8, adamw_8bit, adamw_fp32
from lazytrain_plugin.kernels.split import split_master


@dataclass(frozen=True)
class Case:
    numel: int
    split: bool = True
    gradient: torch.dtype = torch.bfloat16
    decoupled: bool = True
    maximize: bool = False
    beta1: float = 0.9
    bits: int = 32
    first_index: int = 0


def gradients(numel: int, steps: int, dtype: torch.dtype, special: bool = True) -> list[torch.Tensor]:
    """Twelve decades of magnitudes, zeros, denormals, and in the last step inf and NaN."""
    generator = torch.Generator().manual_seed(numel)
    made = []
    for step in range(steps):
        g = torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 12 - 10)
        g[numel // 3 :: 7] = 0.0
        if special and numel > 200:
            g[5:9] = torch.tensor([1e-42, -1e-42, -0.0, 1e-20])
            if step == steps - 1:
                g[[11, 12, 13]] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        made.append(g.to(dtype))
    return made


class State:
    """Weight and moments of a case, on a device, after `steps` updates."""

    def __init__(self, case: Case, device: torch.device, *, steps: int = 0):
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(1)
        master = torch.randn(case.numel, generator=generator).to(device)
        self.weight, self.remainder = master.clone(), None
        if case.split:
            self.weight = torch.empty(case.numel, dtype=torch.bfloat16, device=device)
            self.remainder = torch.empty(case.numel, dtype=torch.int16, device=device)
            split_master(master, self.weight, self.remainder)
        if case.bits == 32:
            self.m, self.v = torch.zeros(case.numel, device=device), torch.zeros(case.numel, device=device)
        else:
            self.m = Moment8.zeros(case.numel, signed=True, device=device)
            self.v = Moment8.zeros(case.numel, signed=False, device=device)
        for index, gradient in enumerate(gradients(case.numel, steps, case.gradient)):
            self.update(gradient.to(device), index + 1)

    def update(self, gradient: torch.Tensor, step: int, batch=None, **changes) -> None:
        case = self.case
        values = {"lr": 1e-2, "beta1": case.beta1, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
        values |= {
            "gradient_scale": 0.7,
            "decoupled": case.decoupled,
            "maximize": case.maximize,
            "step": step,
        } | changes
        arguments = (self.weight, self.remainder, gradient, self.m, self.v, AdamWStep(**values))
        if case.bits == 32:
            adamw_fp32(*arguments, batch=batch)
        else:
            adamw_8bit(*arguments, noise_key=17, first_index=case.first_index, batch=batch)

    def bits(self) -> list[torch.Tensor]:
        """Everything as integers on the CPU, all NaNs alike (their sign and payload are the processor's choice)."""
        tensors = [self.weight] if self.remainder is None else [self.weight, self.remainder]
        for moment in (self.m, self.v):
            tensors += [moment] if self.case.bits == 32 else [moment.codes, moment.scales]
        integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
        return [
            torch.where(t.isnan(), torch.full_like(t, torch.nan), t).cpu().view(integers[t.dtype])
            if t.is_floating_point()
            else t.cpu()
            for t in tensors
        ]


def assert_same_bits(ours: State, theirs: State) -> None:
    for index, (a, b) in enumerate(zip(ours.bits(), theirs.bits(), strict=True)):
        different = (a != b).nonzero().flatten()
        assert different.numel() == 0, f"tensor {index}: {different.numel()} differ, first at {different[:5].tolist()}"
