"""Parameters after five optimizer steps under Trainer: the plan changes no bit, and the result is plain training's."""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from integration_tests import harness, models
from integration_tests.cases import Case, Placement, Work, all_cases, pairwise_cases
from integration_tests.harness import Run, assert_bit_equal, run_lazytrain, run_plain
from integration_tests.models import MODELS

BASELINE = Placement(homes="cpu", activations="recompute")


@functools.cache
def plain(work: Work, folder: Path, device: str, noise_seed: int | None = None) -> Run:
    return run_plain(work, folder, device, noise_seed=noise_seed)


@functools.cache
def baseline(work: Work, placement: Placement, folder: Path, device: str) -> Run:
    return run_lazytrain(work, placement, folder, device)


def baseline_of(case: Case, device: str) -> Placement:
    """The plan that must train to the same bits. torch's own optimizers round differently on the GPU and on the CPU."""
    by_torch_on_gpu = case.work.implementation == "torch" and device != "cpu"
    return replace(BASELINE, homes=case.placement.homes) if by_torch_on_gpu else BASELINE


def test_matrix(case: Case, device: str, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.getbasetemp() / "matrix"
    run = run_lazytrain(case.work, case.placement, folder, device)
    try:
        first = baseline_of(case, device)
        if case.placement != first:
            assert_bit_equal(run.weights, baseline(case.work, first, folder, device).weights)
        reference = plain(replace(case.work, implementation="torch"), folder, device)
        if case.work.implementation == "torch" and device == "cpu" and _sums_as_torch_does(case.work):
            assert_bit_equal(run.weights, reference.weights)
            assert run.losses == reference.losses
            if case.work.dtype == "fp32":
                assert run.grad_norms == reference.grad_norms
        elif case.work.dtype == "bf16" and (device != "cpu" or not _sums_as_torch_does(case.work)):
            work = replace(case.work, implementation="torch")
            fp32 = plain(replace(work, dtype="fp32"), folder, device)
            others = [plain(work, folder, device, noise_seed=seed) for seed in range(3)]
            assert_no_further_from_fp32(run, [reference, *others], fp32, case.work)
        else:
            assert_same_training(run, reference, case.work)
    finally:
        harness.close(run)


def _sums_as_torch_does(work: Work) -> bool:
    other = MODELS[work.model].other_sum_order
    return other == "never" or (other == "accumulating" and work.accumulation == 1 and work.dtype == "fp32")


def assert_same_training(run: Run, reference: Run, work: Work) -> None:
    """Kernels that round differently from torch's: the way the weights went is the same within a share of its length.

    Element by element this can't be asked: where the true gradient is zero (a key bias under softmax) Adam turns the
    rounding noise of one step into a full step of the next.
    """
    start = _trained_weights(work, dict(harness.build_model(work.model, work.trained).named_parameters()))
    got, expected = (_trained_weights(work, weights) for weights in (run.weights, reference.weights))
    share = {"fp32": 1e-3, "bf16": 1e-2}[work.dtype]
    assert _distance(got, expected) <= share * _distance(start, expected)
    for loss, expected_loss in zip(run.losses, reference.losses, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5 if work.dtype == "fp32" else 2e-3)


def assert_no_further_from_fp32(run: Run, references: list[Run], fp32: Run, work: Work) -> None:
    """Where bf16 is summed in another order or by fused kernels, neither is right: fp32 says how far off each is.

    `references`: plain training with several roundings. One alone says little, because Adam makes full steps of the
    rounding noise where the true gradient is nearly zero: among them the distance varies by up to a half.
    """
    truth = _trained_weights(work, fp32.weights)
    distances = [_distance(_trained_weights(work, reference.weights), truth) for reference in references]
    farthest = statistics.mean(distances) + 4 * statistics.stdev(distances)
    start = _trained_weights(work, dict(harness.build_model(work.model, work.trained).named_parameters()))
    assert farthest < 0.5 * _distance(start, truth)  # else this would pass whatever came out
    assert _distance(_trained_weights(work, run.weights), truth) <= farthest


def _trained_weights(work: Work, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = harness.build_model(work.model, work.trained)
    return {name: weights[name].detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum((one[name].double() - other[name].double()).square().sum().item() for name in one) ** 0.5


def test_the_cover_holds_every_pair():
    def pairs(cases):
        rows = [tuple(sorted({**vars(c.work), **vars(c.placement)}.items())) for c in cases]
        return {(a, b) for row in rows for a in row for b in row}

    assert pairs(pairwise_cases()) == pairs(all_cases())
    assert len(pairwise_cases()) < 40


@pytest.mark.parametrize("model", ["qwen2_tied", "gpt2"])
def test_native_update_is_within_ulps_of_torch(model: str, device: str, tmp_path: Path):
    """One step from the same gradients: all that differs is the update's own rounding."""
    work = Work(model=model, implementation="native")
    options = {"max_steps": 1, "warmup_steps": 0}
    run = run_lazytrain(work, BASELINE, tmp_path, device, block={"fused_kernels": False}, **options)
    reference = run_plain(work, tmp_path, device, **options)
    harness.close(run)
    for name, expected in reference.weights.items():
        # An ulp of the weight from rounding the result, and some of the step itself (lr) from computing it.
        allowed = 2 * torch.finfo(torch.float32).eps * (expected.abs() + 4 * harness.LEARNING_RATE)
        assert ((run.weights[name] - expected).abs() <= allowed).all(), name


def test_a_learned_bias_under_fused_attention(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch's fused attention takes a slower kernel where its bias needs a gradient; T5's does, in training only."""
    monkeypatch.setitem(MODELS, "t5", replace(MODELS["t5"], build=lambda: models.t5("sdpa")))
    work = Work(model="t5")
    runs = [
        run_lazytrain(work, Placement(homes="cpu", activations=activations), tmp_path, device)
        for activations in ("recompute", "keep")
    ]
    for run in runs:
        harness.close(run)
    assert_bit_equal(runs[0].weights, runs[1].weights)
