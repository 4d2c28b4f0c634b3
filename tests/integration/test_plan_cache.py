"""Plans of earlier runs are found again for the same question only, and never where they no longer fit."""

from dataclasses import replace

import pytest

from lazytrain_plugin.integration.plan_cache import PlanCache
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.cluster import Cluster
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.units import MIB
from tests.plan import builders

MODEL, HARDWARE, REQUEST = builders.model(3), builders.hardware(), PlanRequest(max_tokens=512)


@pytest.fixture
def cache(tmp_path):
    cache = PlanCache(tmp_path)
    cache.store_plan(MODEL, HARDWARE, REQUEST, make_plan(MODEL, HARDWARE, REQUEST))
    return cache


def test_the_same_question_finds_its_plan(cache):
    assert cache.load_plan(MODEL, HARDWARE, REQUEST) == make_plan(MODEL, HARDWARE, REQUEST)
    # Free memory differs a little from run to run.
    a_little_less = replace(HARDWARE, cpu_free_bytes=HARDWARE.cpu_free_bytes + 3 * MIB)
    assert cache.load_plan(MODEL, a_little_less, REQUEST) is not None


def test_a_link_that_measures_a_little_different_finds_its_plan(tmp_path):
    def asked(network_bytes_per_s, **changes):
        link = {"network_bytes_per_s": network_bytes_per_s, "inside_bytes_per_s": 5e9, "wire_bytes_per_element": 8}
        return replace(REQUEST, nodes=2, cluster=Cluster(nodes=2, ranks_per_node=1, **link, **changes))

    cache = PlanCache(tmp_path)
    cache.store_plan(MODEL, HARDWARE, asked(1e9), make_plan(MODEL, HARDWARE, asked(1e9)))
    assert cache.load_plan(MODEL, HARDWARE, asked(1.1e9, latency_s=1e-4)) is not None
    assert cache.load_plan(MODEL, HARDWARE, asked(1e8)) is None
    assert cache.load_plan(MODEL, HARDWARE, replace(REQUEST, nodes=2)) is None


@pytest.mark.parametrize(
    ("model", "hardware", "request_"),
    [
        (builders.model(4), HARDWARE, REQUEST),
        (MODEL, replace(HARDWARE, layer_flop_frac=0.5), REQUEST),
        (MODEL, HARDWARE, PlanRequest(max_tokens=513)),
        (MODEL, HARDWARE, PlanRequest(max_tokens=512, fidelity="balanced")),
        (MODEL, HARDWARE, PlanRequest(max_tokens=512, gpu_budget_bytes=2**31)),
        (MODEL, HARDWARE, PlanRequest(max_tokens=512, accumulation_steps=2)),
    ],
)
def test_another_question_finds_nothing(cache, model, hardware, request_):
    assert cache.load_plan(model, hardware, request_) is None


def test_a_plan_that_no_longer_fits_is_not_used(tmp_path):
    tight = replace(HARDWARE, cpu_free_bytes=HARDWARE.cpu_free_bytes)
    cache = PlanCache(tmp_path)
    plan = make_plan(MODEL, tight, REQUEST)
    cache.store_plan(MODEL, tight, REQUEST, plan)
    (path,) = tmp_path.glob("plan-*.json")
    # More than the step's own peak: a save may be the fullest moment.
    used = check_plan(plan, MODEL, tight, REQUEST).need_bytes()["cpu"]
    for free_bytes, found in ((used, True), (used - 1, False)):
        machine = replace(tight, cpu_free_bytes=free_bytes)
        path.rename(cache._plan_path(MODEL, machine, REQUEST))
        path = cache._plan_path(MODEL, machine, REQUEST)
        assert (cache.load_plan(MODEL, machine, REQUEST) is not None) == found


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 1}', "\udcff"])
def test_a_broken_entry_is_as_good_as_none(cache, tmp_path, text):
    (path,) = tmp_path.glob("plan-*.json")
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert cache.load_plan(MODEL, HARDWARE, REQUEST) is None


def test_a_folder_that_can_not_be_written_is_said_and_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / "file" / "folder")
    cache.store_plan(MODEL, HARDWARE, REQUEST, make_plan(MODEL, HARDWARE, REQUEST))
    assert "can't be kept" in caplog.text
    assert cache.load_plan(MODEL, HARDWARE, REQUEST) is None


def test_switched_off(tmp_path):
    cache = PlanCache(tmp_path, enabled=False)
    cache.store_plan(MODEL, HARDWARE, REQUEST, make_plan(MODEL, HARDWARE, REQUEST))
    assert cache.load_plan(MODEL, HARDWARE, REQUEST) is None
    assert not list(tmp_path.iterdir())


def test_measured_rates_are_kept_per_model_and_checked(tmp_path):
    cache = PlanCache(tmp_path)
    assert cache.load_rates(MODEL, HARDWARE, 512) == {}
    cache.store_rates(MODEL, HARDWARE, 512, {"layer_flop_frac": 0.5})
    assert cache.load_rates(MODEL, HARDWARE, 512) == {"layer_flop_frac": 0.5}
    assert cache.load_rates(MODEL, HARDWARE, 513) == cache.load_rates(builders.model(4), HARDWARE, 512) == {}
    for wrong in ({"layer_flop_frac": 2.0}, {"a_rate_of_an_older_version": 1.0}):
        cache.store_rates(MODEL, HARDWARE, 512, wrong)
        assert cache.load_rates(MODEL, HARDWARE, 512) == {}
