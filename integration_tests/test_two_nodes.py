"""Four ranks on two nodes with a link of 200 Mbit/s between them: is the quantized reduction worth it?"""

import json
from pathlib import Path

import pytest

from integration_tests.two_nodes import run_on_both, two_nodes

LINK_MBIT = 200
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(320)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_nodes")
    result, script = folder / "result.json", Path(__file__).with_name("run_two_nodes.py")
    with two_nodes(mbit=LINK_MBIT) as nodes:
        run_on_both(nodes, script, [str(result), "INTERFACE"], folder, timeout_s=280)
    found = json.loads(result.read_text())
    print(json.dumps(found, indent=1))
    return found


def test_the_step_is_much_faster_than_with_deepspeeds_reduction(measured):
    seconds = measured["stage 0, bf16 on the wire"]["seconds"]
    assert seconds["deepspeed"] >= 1.7 * seconds["lazytrain"], measured


@pytest.mark.parametrize("stage", [1, 2])
def test_beside_zero_stages_1_and_2_too(measured, stage):
    """Their all-gather of updated weights crosses the link as well, in both arms: by bytes 2.2x is the most, and four
    ranks share few cores for the coding. What travels is compared to the byte below."""
    seconds = measured[f"stage {stage}, bf16"]["seconds"]
    assert seconds["deepspeed"] >= 1.5 * seconds["lazytrain"], measured


def test_the_engine_at_stage_3(measured):
    """Against its own fp32 sums, and against DeepSpeed's stage 3, whose weights cross the link too."""
    arm = measured["stage 3"]
    seconds, sent = arm["seconds"], arm["interface_bytes"]
    assert min(seconds["fp32"], seconds["deepspeed"]) >= 1.7 * seconds["lazytrain"], arm
    assert arm["norms"]["lazytrain"] == pytest.approx(arm["norms"]["fp32"], rel=1e-3)
    assert arm["counted_bytes_of_a_node"] <= sent["lazytrain"] <= 1.15 * arm["counted_bytes_of_a_node"]
    # bf16's all-reduce between two nodes sends 2 bytes an element from each, fp32's 4
    assert arm["counted_bytes_of_a_node"] <= 0.52 * 2 * arm["elements"]
    assert sent["lazytrain"] < 0.3 * sent["fp32"] and "in 8-bit codes" in arm["reducer"]


@pytest.mark.parametrize("arm", ["lazytrain", "fp32"])
def test_the_plan_knows_the_network(measured, arm):
    """No exchange is predicted faster than the link, nor far slower than a whole step took.

    What else runs on the machine slows a step and the timing of the links, but not at the same moment.
    """
    found = measured["stage 3"]
    on_the_link_s = found["interface_bytes"][arm] / (LINK_MBIT * 1e6 / 8)
    planned_s = found["planned_exchange_seconds"][arm]
    assert 0.85 * on_the_link_s <= planned_s <= 2 * found["slowest_seconds"][arm], found


def test_the_plan_knows_what_codes_save(measured):
    planned_s = measured["stage 3"]["planned_exchange_seconds"]
    assert 1.2 <= planned_s["fp32"] / planned_s["lazytrain"] <= 4.5, planned_s  # 3.9 by bytes, without the coding


def test_nodes_and_threshold_are_found(measured):
    for arm in measured.values():
        assert 0 < arm["threshold"] < arm["elements"]
    for arm in list(measured.values())[:-1]:
        assert arm["reducer"].startswith("8-bit codes between nodes, full precision inside a node, 2 nodes of 2 ranks")


def test_the_bytes_counted_are_those_of_the_interface(measured):
    """TCP's own bytes and the barriers around a step are on the interface too."""
    arm = measured["stage 0, bf16 on the wire"]
    sent = arm["interface_bytes"]
    assert arm["counted_bytes_of_a_node"] <= sent["lazytrain"] <= 1.15 * arm["counted_bytes_of_a_node"]
    # each element leaves a node in 66/64 bytes; bf16 in a ring of 4: 3/4 of 2 bytes, twice
    assert arm["counted_bytes_of_a_node"] == pytest.approx(arm["elements"] * 66 / 64, rel=0.01)
    assert sent["lazytrain"] < 0.45 * sent["deepspeed"]


@pytest.mark.parametrize("stage", [1, 2])
def test_only_contributions_travel_where_deepspeed_parts_the_gradients(measured, stage):
    arm = measured[f"stage {stage}, bf16"]
    assert arm["counted_bytes_of_a_node"] == pytest.approx(arm["elements"] / 2 * 66 / 64, rel=0.01)
    # 3 bytes an element reduce and 1.5 gather weights in rings of bf16; here 0.52 and the same 1.5
    assert arm["interface_bytes"]["lazytrain"] < 0.47 * arm["interface_bytes"]["deepspeed"]
