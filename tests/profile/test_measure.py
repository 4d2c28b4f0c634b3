"""This machine measured: plausible, quick, cached, and capacities always fresh."""

import json
import time

import pytest
import torch

from lazytrain_plugin.profile import measure
from lazytrain_plugin.profile.capacity import HostCapacity
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.measure import measure_hardware


def test_cpu_rates_are_measured_once_and_cached(tmp_path, monkeypatch):
    start = time.perf_counter()
    first = measure_hardware("cpu", cache_dir=tmp_path)
    assert time.perf_counter() - start < 10  # about 1 s; a loaded machine is slower
    assert not first.has_gpu
    assert 1e9 < first.matmul_flop_per_s < 1e14
    assert 1e8 < first.host_memory_bytes_per_s < 1e12
    assert "derived" in first.source
    assert HardwareProfile.from_json(first.to_json()) == first

    monkeypatch.setattr(measure, "_measure_rates", lambda *_: (_ for _ in ()).throw(AssertionError("measured again")))
    second = measure_hardware("cpu", cache_dir=tmp_path)
    assert second.matmul_flop_per_s == first.matmul_flop_per_s


def test_s07_ranks_of_a_host_plan_with_their_share_of_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_measure_rates", lambda *_: RATES)
    monkeypatch.setattr(
        measure, "host_capacity", lambda: HostCapacity(total_bytes=100, free_bytes=80, pin_limit_bytes=7)
    )
    monkeypatch.setattr(measure, "usable_threads", lambda: 8)
    shares = [measure_hardware("cpu", cache_dir=tmp_path, local_world_size=ranks) for ranks in (1, 2)]
    assert [(share.cpu_bytes, share.cpu_free_bytes, share.cpu_threads) for share in shares] == [
        (100, 76, 8),  # the kernel and others keep 4 %
        (50, 38, 4),
    ]


def test_kernel_rates_are_used_when_given(tmp_path):
    rates = {32: 5e9, 8: 8e9}
    profile = measure_hardware("cpu", cache_dir=tmp_path, update_parameters_per_s=lambda bits, device: rates[bits])
    assert (profile.cpu_update_32bit_parameters_per_s, profile.cpu_update_8bit_parameters_per_s) == (5e9, 8e9)
    assert profile.source == "measured"


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "null", '{"source": "an older version", "gone_bytes_per_s": 1}', "\udcff"]
)
def test_rates_that_no_profile_takes_are_measured_again(tmp_path, monkeypatch, caplog, text):
    caplog.set_level("INFO")
    monkeypatch.setattr(measure, "_measure_rates", lambda *_: RATES)
    measure_hardware("cpu", cache_dir=tmp_path)
    (cache,) = tmp_path.glob("rates-*.json")
    assert "can't be used" not in caplog.text, "nothing was there"
    cache.write_bytes(text.encode(errors="surrogateescape"))
    assert measure_hardware("cpu", cache_dir=tmp_path).matmul_flop_per_s == RATES["matmul_flop_per_s"]
    assert json.loads(cache.read_text()) == RATES
    assert "can't be used" in caplog.text


RATES = {
    "source": "test",
    "matmul_flop_per_s": 2e11,
    "layer_flop_frac": 0.5,
    "h2d_bytes_per_s": 0.0,
    "d2h_bytes_per_s": 0.0,
    "h2d_shared_bytes_per_s": 0.0,
    "d2h_shared_bytes_per_s": 0.0,
    "host_memory_bytes_per_s": 1e10,
    "gpu_memory_bytes_per_s": 0.0,
    "cpu_update_32bit_parameters_per_s": 1e9,
    "cpu_update_8bit_parameters_per_s": 1e9,
    "cpu_update_32bit_shared_parameters_per_s": 1e9,
    "cpu_update_8bit_shared_parameters_per_s": 1e9,
    "gpu_update_32bit_parameters_per_s": 0.0,
    "gpu_update_8bit_parameters_per_s": 0.0,
}


def test_coding_rates_are_the_devices_kernels():
    from lazytrain_plugin.integration.training_request import measure_coding_rates

    rates = measure_coding_rates(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert all(1e4 < rate < 1e14 for rate in rates)
    if torch.cuda.is_available():
        profile = measure_hardware("cuda", coding_bytes_per_s=measure_coding_rates)
        assert 0.05 < profile.coding_bytes_per_s[0] / profile.gpu_memory_bytes_per_s < 1.2


def test_without_a_gpu_coding_is_not_measured(tmp_path):
    profile = measure_hardware("cpu", cache_dir=tmp_path, coding_bytes_per_s=lambda device: (1.0, 1.0))
    assert profile.quantize_bytes_per_s == 0 < profile.coding_bytes_per_s[0] < profile.host_memory_bytes_per_s
