"""The gradient reduction in DeepSpeed's own engine, against DeepSpeed's own reduction, on two ranks.

One pair of processes trains every case: importing deepspeed takes longer than training.
"""

import os
import sys

import pytest
import torch
from torch import nn

from lazytrain_plugin.config.deepspeed_conflicts import check_deepspeed_config, keeps_deepspeed_engine
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.integration import hook
from tests.comm.ranks import succeed

BLOCK = {"gradient_comm": {"bits": 8, "ranks_per_node": 1, "smallest_bucket_elements": 1000}}
STEPS, ACCUMULATION, LEARNING_RATE = 3, 2, 0.1

CASES = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 0, bf16": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 1, bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "stage 1, no reduce_scatter": {"zero_optimization": {"stage": 1, "reduce_scatter": False}},
    "stage 2": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1900}},
    "stage 2, bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "stage 2, one owner": {"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": False}},
    "stage 2, sum": {"zero_optimization": {"stage": 2}, "gradient_allreduce_op": "sum"},
}


class TwoRoads(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(33, 257), nn.Tanh(), nn.Linear(257, 7))
        self.side = nn.Linear(33, 7)

    def forward(self, x, with_side):
        return self.main(x) + (self.side(x) if with_side else 0)


def make_engine(config, block, device):
    import deepspeed

    torch.manual_seed(0)
    model = TwoRoads()
    # plain SGD: weights differ from each other as much as gradients do
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **config,
        "lazytrain": block,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(rank, config, block, device, overflow_at=None):
    engine = make_engine(config, block, device)
    generator = torch.Generator().manual_seed(10 + rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            x = torch.randn(4 - rank, 33, generator=generator).to(device, dtype)  # uneven batches
            # Unused on one rank at stage 0; DeepSpeed's stages 1 and 2 leave it out of that rank's bucket, and crash.
            loss = engine(x, with_side=rank == 0 or engine.zero_optimization_stage() > 0).float().square().mean()
            if rank == 1 and (step, micro) == overflow_at:
                loss = loss * float("inf")
            engine.backward(loss)
            engine.step()
    comm = getattr(engine, "lazytrain_gradient_comm", None)
    return flat_weights(engine), comm and comm.stats(), engine.skipped_steps, type(engine).__name__


def flat_weights(engine):
    return torch.cat([p.detach().float().reshape(-1) for p in engine.module.parameters()]).cpu()


def step_once(engine, rank, device):
    for _ in range(ACCUMULATION):
        x = torch.randn(4, 33, generator=torch.Generator().manual_seed(20 + rank)).to(device)
        engine.backward(engine(x, with_side=True).square().mean())
        engine.step()


def clip(rank, block, device):
    """How far one step clipped to a norm of 0.01 goes, and the norm that DeepSpeed reports."""
    engine = make_engine({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.01}, block, device)
    step_once(engine, rank, device)
    return float((flat_weights(engine) - initial_weights()).norm()), float(engine.get_global_grad_norm())


def save_and_load(rank, device, folder):
    """A run with the hook is saved by both ranks, and goes on without the hook."""
    config = CASES["stage 1"]
    engine = make_engine(config, BLOCK, device)
    step_once(engine, rank, device)
    engine.save_checkpoint(folder)
    plain = make_engine(config, {"enabled": False}, device)
    plain.load_checkpoint(folder)
    return flat_weights(engine), flat_weights(plain), plain.global_steps


def every_case(rank, device, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    import deepspeed  # noqa: F401

    import lazytrain_plugin.install  # noqa: F401

    # A minute of compilation, for inference; one that was killed leaves a lock behind. By name: the attribute
    # `deepspeed.comm.torch` is torch itself.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    out = {}
    for name, config in CASES.items():
        plain = train(rank, config, {"enabled": False}, device)
        out[name] = plain, train(rank, config, BLOCK, device)
    overflow = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True, "check_grad_overflow": True}}
    out["overflow"] = train(rank, overflow, BLOCK, device, overflow_at=(1, 1))
    out["clip"] = [clip(rank, block, device) for block in ({"enabled": False}, BLOCK)]
    out["saved"] = save_and_load(rank, device, folder)
    out["16 bits"] = train(rank, CASES["stage 1"], {"gradient_comm": {"bits": 16}}, device)
    return out


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def trained(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return succeed(every_case, 2, folder, device=request.param, timeout_s=200)


def initial_weights():
    torch.manual_seed(0)
    return torch.cat([p.detach().reshape(-1) for p in TwoRoads().parameters()])


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", CASES)
def test_training_follows_deepspeeds_own_reduction(trained, case):
    results = [rank[case] for rank in trained]
    (plain, plain_stats, _, _), (ours, stats, _, engine) = results[0]
    assert plain_stats is None and engine == "DeepSpeedEngine"
    assert stats.quantized_buckets > 0 and stats.wire_bytes > 0
    if not stats.fallbacks:
        # Two nodes send each other their codes, all of them or those of what the other keeps; no result travels.
        assert stats.wire_bytes <= stats.reduce_scatter_bytes
    assert torch.equal(ours, results[1][1][0])  # the ranks agree
    moved = (plain - initial_weights()).norm()
    assert moved > 0.1
    if "bf16" in case:
        assert (ours - plain).norm() < 0.01 * moved + 2**-8 * plain.norm()  # the weights' own rounding
    else:
        assert 1e-5 * moved < (ours - plain).norm() < 0.01 * moved


@pytest.mark.multiprocess
def test_small_buckets_keep_deepspeeds_reduction(trained):
    stats = trained[0]["stage 2"][1][1]
    assert stats.fallbacks["small bucket"] == stats.full_precision_buckets > 0


@pytest.mark.multiprocess
def test_inf_on_one_rank_makes_all_skip(trained):
    (ours, _, skipped, _), (others, _, others_skipped, _) = (rank["overflow"] for rank in trained)
    assert skipped == others_skipped == 1
    assert torch.equal(ours, others) and ours.isfinite().all()


@pytest.mark.multiprocess
def test_clipping_and_the_norm_are_deepspeeds(trained):
    for (plain_moved, plain_norm), (moved, norm) in (rank["clip"] for rank in trained):
        assert moved == pytest.approx(0.01 * LEARNING_RATE, rel=0.01) and plain_moved == pytest.approx(moved, rel=0.01)
        assert norm == pytest.approx(plain_norm, rel=0.01) and norm > 0.05
    assert trained[0]["clip"] == trained[1]["clip"]


@pytest.mark.multiprocess
def test_a_checkpoint_knows_nothing_of_the_hook(trained):
    for weights, loaded, steps in (rank["saved"] for rank in trained):
        assert torch.equal(weights, loaded) and steps == 1
        assert not torch.equal(weights, initial_weights())


@pytest.mark.multiprocess
def test_16_bits_is_plain_deepspeed(trained):
    weights, stats, _, _ = trained[0]["16 bits"]
    assert stats is None and torch.equal(weights, trained[0]["stage 1"][0][0])


def config(stage, **block):
    return {"zero_optimization": {"stage": stage}, "lazytrain": block}


def test_which_configs_keep_deepspeeds_engine():
    for stage in (0, 1, 2):
        assert keeps_deepspeed_engine(config(stage, gradient_comm={"bits": 8}))
        assert not keeps_deepspeed_engine(config(stage, gradient_comm={"bits": None}))
        assert not keeps_deepspeed_engine(config(stage))
    assert keeps_deepspeed_engine({"lazytrain": {"gradient_comm": {"bits": 8}}})
    assert not keeps_deepspeed_engine(config(3, gradient_comm={"bits": 8}))


def test_stage_3_takes_the_keys_and_keeps_its_checks():
    assert hook.load_config(config(3, gradient_comm={"bits": 8})).wire_gradient_bits == 8
    assert hook.load_config(config(3, fidelity="balanced")).wire_gradient_bits == 8
    assert hook.load_config(config(3)).wire_gradient_bits == 16
    with pytest.raises(ConfigError, match="stage 3.*gradient_comm"):
        hook.load_config(config(2))


@pytest.mark.parametrize(
    ("block", "extra", "says"),
    [
        ({"gpu_memory_gib": 20}, {}, '"lazytrain.gpu_memory_gib" is set, but at ZeRO stages'),
        ({"optimizer": {"state_bits": 8}}, {}, '"lazytrain.optimizer" is set'),
        ({}, {"sparse_gradients": True}, '"sparse_gradients" is set'),
        ({}, {"compile": {"deepcompile": True}}, "DeepCompile"),
        ({"gradient_comm": {"bits": 4}}, {}, "8 or 16"),
        ({"gradient_comm": {"bit": 8}}, {}, 'did you mean "bits"'),
    ],
)
def test_what_would_be_ignored_is_refused(block, extra, says):
    ds_config = {**config(2, **{"gradient_comm": {"bits": 8}, **block}), **extra}
    with pytest.raises(ConfigError, match=says):
        hook.load_config(ds_config)


def test_the_rest_of_the_config_is_deepspeeds_business():
    ds_config = config(2, gradient_comm={"bits": 8}, fidelity="balanced", watchdog_s=5)
    ds_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    check_deepspeed_config({**ds_config, "fp16": {"enabled": True}})
