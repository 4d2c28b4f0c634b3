import pytest

from lazytrain_plugin.config.deepspeed_conflicts import check_deepspeed_config
from lazytrain_plugin.errors import ConfigError

STAGE_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"bf16": {"enabled": True}},
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "train_batch_size": "auto"},
        {"fp16": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1},
        {"zero_optimization": {**STAGE_3, "offload_optimizer": {"device": "none"}, "zero_hpz_partition_size": 1}},
    ],
)
def test_accepts_what_it_can_honour(extra):
    check_deepspeed_config({"zero_optimization": STAGE_3, **extra})


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"fp16": {"enabled": True}}, 'use "bf16"'),
        ({"torch_autocast": {"enabled": True}}, '"torch_autocast.enabled" is set'),
        ({"tensor_parallel": {"autotp_size": 2}}, '"tensor_parallel.autotp_size" is set'),
        ({"sequence_parallel_size": 2}, '"sequence_parallel_size" is set'),
        ({"hybrid_engine": {"enabled": True}}, '"hybrid_engine.enabled" is set'),
        ({"compile": {"deepcompile": True}}, '"compile.deepcompile" is set'),
        ({"checkpoint": {"load_universal": True}}, '"checkpoint.load_universal" is set'),
        ({"flops_profiler": {"enabled": True}}, '"flops_profiler.enabled" is set'),
        (
            {"data_efficiency": {"enabled": True, "data_routing": {"random_ltd": {"enabled": True}}}},
            '"data_efficiency.data_routing.random_ltd.enabled" is set',
        ),
    ],
)
def test_refuses_what_it_would_ignore(extra, says):
    with pytest.raises(ConfigError) as caught:
        check_deepspeed_config({"zero_optimization": STAGE_3, **extra})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("zero", "key"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer"),
        ({"offload_param": {"device": "nvme", "nvme_path": "/x"}}, "offload_param"),
        ({"offload_optimizer": {"super_offload": True}}, "super_offload"),
        ({"zenflow": {"topk_ratio": 0.1}}, "zenflow"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"zero_quantized_gradients": True}, "zero_quantized_gradients"),
        ({"zero_hpz_partition_size": 8}, "zero_hpz_partition_size"),
    ],
)
def test_refuses_zero_features_that_place_tensors_themselves(zero, key):
    with pytest.raises(ConfigError, match=f"zero_optimization.*{key}.*is set.*enabled.*false"):
        check_deepspeed_config({"zero_optimization": {**STAGE_3, **zero}})


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, "there is no zero_optimization section"),
        ({"zero_optimization": {}}, '"zero_optimization.stage" is 0'),
        ({"zero_optimization": {"stage": 2}}, '"zero_optimization.stage" is 2'),
        ({"zero_optimization": {"stage": "3"}}, '"zero_optimization.stage" is "3"'),
    ],
)
def test_needs_stage_3(config, found):
    with pytest.raises(ConfigError) as caught:
        check_deepspeed_config(config)
    assert found in str(caught.value)
    assert '{"stage": 3}' in str(caught.value)
