"""What the block says reaches the planner, in the planner's units."""

import pytest
import torch

from lazytrain_plugin.config.parse import parse_block
from lazytrain_plugin.config.schema import LazyTrainConfig, PlanConfig
from lazytrain_plugin.errors import ConfigError, InfeasiblePlanError
from lazytrain_plugin.integration import training_request as module
from lazytrain_plugin.integration.client_optimizer import optimizer_state_bits
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


class AdamW8bit(torch.optim.AdamW):
    """As bitsandbytes' class is called."""


@pytest.mark.parametrize(
    ("block", "optimizer_class", "bits"),
    [
        ({}, torch.optim.AdamW, None),
        ({"fidelity": "balanced", "optimizer": {"state_bits": 32}}, torch.optim.AdamW, None),
        ({"optimizer": {"state_bits": 8}}, torch.optim.AdamW, 8),
        ({"fidelity": "balanced"}, torch.optim.AdamW, 8),
        ({}, AdamW8bit, 8),
        ({}, None, 32),  # evaluation only
    ],
)
def test_8_bit_states_of_the_embedding_alone_are_refused_with_the_remedy(block, optimizer_class, bits):
    block = {**block, "optimizer": {**block.get("optimizer", {}), "embedding_state_bits": 8}}
    optimizer = optimizer_class and optimizer_class([torch.nn.Parameter(torch.zeros(2))])
    if bits is None:
        with pytest.raises(ConfigError, match='embedding_state_bits" is 8, but .* 32 bits.*set "state_bits" to 8'):
            optimizer_state_bits(optimizer, parse_block(block))
    else:
        assert optimizer_state_bits(optimizer, parse_block(block)) == bits


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
