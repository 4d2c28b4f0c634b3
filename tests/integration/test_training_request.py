"""What the block says reaches the planner, in the planner's units."""

import pytest
import torch

from lazytrain_plugin.config.parse import parse_block
from lazytrain_plugin.config.schema import LazyTrainConfig, PlanConfig
from lazytrain_plugin.errors import ConfigError, InfeasiblePlanError
from lazytrain_plugin.integration import training_request as module
from lazytrain_plugin.integration.training_request import training_machine, training_request
from lazytrain_plugin.plan.greedy import greedy_plan
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Fidelity
from tests.plan import builders


def requested(config, max_tokens=512):
    return training_request(config, max_tokens, state_bits=32, accumulation_steps=1, native=True)


def test_a_write_budget_reaches_the_planner():
    config = LazyTrainConfig(nvme_path="/mnt/disk", nvme_write_gib_per_day=2.5)
    assert requested(config).nvme_write_bytes_per_day == 2.5 * GIB
    assert requested(LazyTrainConfig()).nvme_write_bytes_per_day is None


def test_a_plan_leaves_room_for_the_logits_of_an_evaluation():
    machine, model = builders.hardware(gpu_gib=builders.GPU_RESERVE_GIB + 0.6), builders.model(2, vocab=65536)
    greedy_plan(model, machine, requested(LazyTrainConfig()))
    with pytest.raises(InfeasiblePlanError):
        greedy_plan(model, machine, requested(LazyTrainConfig(plan=PlanConfig(evaluation_tokens=1 << 20))))


@pytest.mark.parametrize(
    ("block", "state_bits", "expected"),
    [
        ({}, 32, (Fidelity.EXACT, 32, 16, 16)),
        ({}, 8, (Fidelity.BALANCED, 8, 16, 16)),
        ({"gradients": {"bits": 8}}, 32, (Fidelity.BALANCED, 32, 8, 16)),
        ({"activations": {"bits": 4}}, 32, (Fidelity.BALANCED, 32, 16, 4)),
        ({"fidelity": "compact"}, 8, (Fidelity.COMPACT, 8, 8, 4)),
        ({"fidelity": "compact", "activations": {"bits": 16}}, 8, (Fidelity.COMPACT, 8, 8, 16)),
    ],
)
def test_one_switch_turns_on_one_lossy_feature(block, state_bits, expected):
    """A plan says that it is lossy by its fidelity; nothing that was not asked for comes with it."""
    config = parse_block(block)
    request = training_request(config, 1024, state_bits=state_bits, accumulation_steps=1, native=True)
    got = request.fidelity, request.state_bits, request.gradient_bits, request.activation_bits
    assert got == expected


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ({"cpu_memory_gib": 128000}, '"lazytrain.cpu_memory_gib" is 128000, in GiB, but there are'),
        ({"gpu_memory_gib": 25}, '"lazytrain.gpu_memory_gib" is 25, in GiB, but there are 24.0 GiB here'),
        ({"gpu_memory_gib": 24}, None),
    ],
)
def test_a_budget_larger_than_the_machine_is_refused(monkeypatch, budget, says):
    """Megabytes for GiB, or a file from a larger machine: the plan would fill memory that isn't there."""
    monkeypatch.setattr(module, "measure_hardware", lambda *args, **kwargs: builders.hardware(gpu_gib=24))
    ask = lambda: training_machine(LazyTrainConfig(**budget), torch.device("cpu"), native=True)  # noqa: E731
    if says is None:
        assert ask().has_gpu
        return
    with pytest.raises(ConfigError) as caught:
        ask()
    assert says in str(caught.value)
