"""`lazytrain plan | explain | profile` as a user types them."""

import io
import json
import re
import threading
import urllib.error
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import transformers
import typer
from transformers import Qwen2Config
from typer.testing import CliRunner

from lazytrain_plugin.integration import cli_plan, measure_nvme, meta_model
from lazytrain_plugin.plan.greedy import greedy_plan
from lazytrain_plugin.plan.measured import MeasuredStep, MeasuredTrace
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import Event, Resource
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import format_bytes

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
H200 = str(HARDWARE / "h200_1x.json")


@pytest.fixture
def lazytrain():
    app = typer.Typer()
    cli_plan.register(app)
    runner = CliRunner(env={"COLUMNS": "140"})
    return lambda *arguments, **options: runner.invoke(app, [str(argument) for argument in arguments], **options)


@pytest.fixture
def solver():
    """For the one test that searches for ten seconds."""


@pytest.fixture(autouse=True)
def quick_planner(monkeypatch, request):
    if "solver" not in request.fixturenames:
        monkeypatch.setattr(cli_plan, "make_plan", greedy_plan)


@pytest.fixture(scope="module")
def config_7b(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2-7b")
    Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def profile_7b(config_7b):
    """The same as `lazytrain profile MODEL --out` writes it: read faster than a config is run on meta tensors."""
    path = config_7b / "profile.json"
    cli_plan.profile_from_config(str(config_7b)).save(path)
    return path


@pytest.fixture(scope="module")
def profile_2b(profile_7b):
    """Eight of its layers: planned many times faster."""
    model = ModelProfile.from_json(profile_7b.read_text())
    path = profile_7b.with_name("profile_2b.json")
    replace(model, units=model.units[:8]).save(path)
    return path


@pytest.mark.usefixtures("solver")
def test_7b_is_planned_without_a_gpu_or_weights(lazytrain, config_7b, tmp_path):
    out = tmp_path / "plan.json"
    result = lazytrain("plan", config_7b, "--hardware", H200, "--micro-batch", 32, "--gpu-memory-gib", 70, "--out", out)
    assert result.exit_code == 0, result.output
    assert "7.62 G parameters" in result.output and "70.0 GiB" in result.output
    plan = PlacementPlan.load(out)
    assert len(plan.units) == 28 and plan.max_tokens == 32 * 1024
    assert plan.predicted_bytes["gpu"] <= 70 * 2**30

    shown = lazytrain("explain", out)
    assert shown.exit_code == 0 and "model.layers.0" in shown.output
    why = lazytrain("explain", out, "model.layers.27.mlp.gate_proj.weight")
    assert why.exit_code == 0 and plan.units[27].reason.split(";")[0] in " ".join(why.output.split())


def test_config_file_and_json_output(lazytrain, config_7b):
    result = lazytrain(
        "plan", config_7b / "config.json", "--hardware", H200, "--micro-batch", 8, "--fidelity", "balanced", "--json"
    )
    assert result.exit_code == 0, result.output
    plan = PlacementPlan.from_json(result.stdout)
    assert {unit.state_bits for unit in plan.units} == {8}


def test_what_does_not_fit_exits_with_need_and_have(lazytrain, config_7b):
    result = lazytrain(
        "plan", config_7b, "--hardware", HARDWARE / "rtx3090_64gb.json", "--micro-batch", 32, "--cpu-memory-gib", 30
    )
    assert result.exit_code == 1
    assert "need" in result.stderr and "have 30.0 GiB" in result.stderr and "remedies" in result.stderr
    assert result.stdout == ""


def test_a_hub_that_says_nothing_is_asked_once(lazytrain, monkeypatch):
    """Its own client would go on trying for half a minute."""
    loads, asked, hangs = [], [], threading.Event()

    def answer(request, timeout):
        asked.append(request.full_url)
        hangs.wait(60)  # as a look-up of a name may
        raise OSError

    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(meta_model, "HUB_ANSWERS_S", 0.05)
    monkeypatch.setattr(meta_model.urllib.request, "urlopen", answer)
    load = transformers.AutoConfig.from_pretrained
    monkeypatch.setattr(
        transformers.AutoConfig,
        "from_pretrained",
        lambda name, **how: loads.append(how["local_files_only"]) or load(name, local_files_only=True),
    )
    result = lazytrain("plan", "no/model", "--hardware", H200)
    hangs.set()
    assert result.exit_code == 1 and "or the id of a model on the hub" in result.stderr
    assert loads == [True] and asked == ["https://huggingface.co/no/model/resolve/main/config.json"]

    for code, local_only in ((200, False), (401, False), (404, False), (502, True), (407, True)):

        def answer(request, timeout, code=code):
            if code == 200:
                return io.BytesIO()
            raise urllib.error.HTTPError(request.full_url, code, "", {}, None)

        monkeypatch.setattr(meta_model.urllib.request, "urlopen", answer)
        lazytrain("plan", "no/model", "--hardware", H200)
        assert loads[-1] == local_only, code
    monkeypatch.setattr(meta_model.urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lazytrain("plan", "no/model", "--hardware", H200)
    assert loads[-1]


@pytest.mark.parametrize(
    "path", ["./nofolder", "models/qwen/nofolder", "/nofolder", "../nofolder", "nofolder.json", "~/nofolder"]
)
def test_what_can_only_be_a_path_is_not_asked_of_the_hub(lazytrain, monkeypatch, path):
    monkeypatch.setattr(meta_model, "_hub_answers", lambda model: pytest.fail("asked"))
    result = lazytrain("plan", path, "--hardware", H200)
    assert result.exit_code == 1 and f"at {path!r}; give a config.json" in result.stderr


def test_a_path_that_is_nearly_right_is_named(lazytrain, config_7b, monkeypatch):
    monkeypatch.setattr(meta_model, "_hub_answers", lambda model: False)
    result = lazytrain("plan", config_7b.with_name("qwen2-7bb"), "--hardware", H200)
    assert f"did you mean {str(config_7b)!r}?" in result.stderr
    monkeypatch.chdir(config_7b.parent)
    assert f"did you mean {config_7b.name!r}?" in lazytrain("plan", "qwen2_7b0", "--hardware", H200).stderr


def test_names_stay_whole_in_a_pipe(lazytrain, profile_2b, tmp_path):
    """They are looked for there; in a terminal the table is as wide as that."""
    plan, in_columns = tmp_path / "plan.json", partial(lazytrain, env={"COLUMNS": None})
    result = in_columns("plan", profile_2b, "--hardware", H200, "--micro-batch", 8, "--out", plan)
    rows = [line for line in result.output.splitlines() if "stem.model.embed_tokens.weight" in line and "│" in line]
    assert len(rows) == 1
    assert max(map(len, lazytrain("explain", plan, env={"COLUMNS": "60"}).output.splitlines())) <= 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["plan", "no/such/model", "--hardware", H200],
            "no file or folder at 'no/such/model'; give a config.json, a folder that holds one, or the id of a model",
        ),
        (["plan", "{folder}", "--hardware", H200, "--dtype", "float16"], "--dtype is float16"),
        (["plan", "{folder}", "--hardware", H200, "--dtype", "float64"], "use bfloat16"),
        (["plan", "{folder}", "--hardware", H200, "--out", "nofolder/plan.json"], "nofolder does not exist"),
        (["plan", "{folder}", "--hardware", H200, "--timeline", "nofolder/step.html"], "nofolder does not exist"),
        (["profile", "{folder}", "--out", "nofolder/model.json"], "nofolder does not exist"),
        (["explain", "{folder}/config.json"], "config.json: not a LazyTrain plan"),
        (["plan", "missing.json", "--hardware", H200], "no config at"),
        (["plan", "{folder}", "--hardware", "missing_box.json"], "can't be read"),
        (["plan", "{folder}", "--hardware", H200, "--gpu-memory-gib", "-4"], "gpu-memory-gib is -4"),
        (["plan", "{folder}", "--hardware", H200, "--dtype", "bf17"], "bf17"),
        (["explain", "missing_plan.json"], "no plan at"),
        (["plan", "{folder}", "--hardware", H200, "--measured", "missing_trace.json"], "can't be read"),
        (["plan", "{folder}", "--hardware", H200, "--measured", H200], "schema"),
        (["plan", "{folder}", "--hardware", H200, "--error-prices", "none.json"], "can't be read"),
        (["plan", "{folder}", "--hardware", H200, "--error-prices", H200], "no error prices"),
        (["plan", "{folder}", "--hardware", H200, "--nvme-gib", "0"], "nvme-gib is 0"),
        (["plan", "{folder}", "--hardware", H200, "--gpu-memory-gib", "nan"], "gpu-memory-gib is nan"),
        (["plan", "{folder}", "--hardware", H200, "--cpu-memory-gib", "inf"], "cpu-memory-gib is inf"),
        (["plan", "{folder}", "--hardware", H200, "--nodes", "2"], "add --network-gbit"),
        (["plan", "{folder}", "--hardware", H200, "--nodes", "2", "--network-gbit", "nan"], "network-gbit is nan"),
        (["plan", "{folder}", "--hardware", H200, "--network-gbit", "200"], "there is one node"),
        (["plan", "{folder}", "--hardware", H200, "--ranks-per-node", "2", "--gradient-bits", "4"], "8 or 16 bits"),
    ],
)
def test_mistakes_end_in_one_line(lazytrain, config_7b, arguments, message):
    result = lazytrain(*(argument.format(folder=config_7b) for argument in arguments))
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output and len(result.stderr.strip().splitlines()) == 1


def test_a_cluster_that_one_does_not_have(lazytrain, profile_2b):
    result = lazytrain(
        *("plan", profile_2b, "--hardware", H200, "--micro-batch", 4, "--fidelity", "balanced", "--nodes", 8),
        *("--ranks-per-node", 8, "--network-gbit", 200, "--inside-gbit", 3600),
    )
    assert result.exit_code == 0, result.output
    rows = {
        cells[0].split(" bit")[0]: [cell.strip() for cell in cells]
        for line in result.stdout.splitlines()
        if len(cells := line.strip("│ ").split("│")) == 6
    }
    assert rows["8"][0] == "8 bit (planned)" and rows["16"][0] == "16 bit, sums in fp32"
    coded, plain = (float(rows[bits][5].replace(",", "")) for bits in ("8", "16"))
    assert coded == pytest.approx(64 * 4 * 1024 / float(rows["8"][4].split()[0]), rel=0.01)
    assert 1.5 < coded / plain < 64 * 8 / 148  # the network's part of the step gets shorter by the ratio of the bytes
    assert "3.2x for 32 MiB, 1.0x for 32 KiB" in result.stdout


def test_folder_without_a_config(lazytrain, tmp_path):
    result = lazytrain("plan", tmp_path, "--hardware", H200)
    assert result.exit_code == 1 and "holds no config.json" in result.stderr


def test_profiles(lazytrain, config_7b, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = lazytrain("profile", "--out", tmp_path / "this.json")
    assert result.exit_code == 0, result.output
    assert "CPU update, 8-bit states" in result.output and "host memory" in result.output
    assert HardwareProfile.load(tmp_path / "this.json").cpu_bytes > 0
    assert list((tmp_path / "cache" / "lazytrain").glob("rates-*.json"))
    described = lazytrain("profile", config_7b, "--json")
    model = ModelProfile.from_json(described.stdout)
    assert model.num_parameters == 7_615_616_512
    assert json.loads(described.stdout)["estimate"] == ""
    shown = lazytrain("profile", config_7b)
    assert "model.layers.0 .. 27 (28)" in shown.output and "matmuls" in shown.output and "of it mlp" in shown.output


def test_a_disk_is_measured_through_the_tier(lazytrain, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure_nvme, "REGION_BYTES", 8 * 2**20)
    monkeypatch.setattr(measure_nvme, "TOGETHER_S", 0.2)
    result = lazytrain("profile", "--nvme-path", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    machine = HardwareProfile.from_json(result.stdout)
    assert machine.nvme_bytes > 0 and machine.nvme_read_bytes_per_s > 1e6 and machine.nvme_write_bytes_per_s > 1e6
    assert 1e5 < machine.nvme_read_shared_bytes_per_s <= machine.nvme_read_bytes_per_s
    assert 1e5 < machine.nvme_write_shared_bytes_per_s <= machine.nvme_write_bytes_per_s
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]  # nothing is left behind
    assert "leave out the model" in lazytrain("profile", "m.json", "--nvme-path", tmp_path).stderr


def test_measured_layers_make_the_plan(lazytrain, tmp_path):
    Qwen2Config(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)
    out = tmp_path / "model.json"
    result = lazytrain("profile", tmp_path, "--measure", "--micro-batch", 2, "--seq-len", 32, "--out", out)
    assert result.exit_code == 0, result.output
    units = ModelProfile.from_json(out.read_text()).units
    assert len({(unit.forward_s_per_token, unit.backward_s_per_token) for unit in units}) == 1  # one kind, timed once
    assert 0 < units[0].forward_s_per_token < 1 and 0 < units[0].backward_s_per_token < 1
    computes = tmp_path / "hardware.json"  # so few tokens would take what the host needs to launch
    computes.write_text(json.dumps(json.loads(Path(H200).read_text()) | {"launch_s": 0.0}))
    options = ["--hardware", computes, "--micro-batch", 2, "--seq-len", 32, "--json"]
    plans = [PlacementPlan.from_json(lazytrain("plan", source, *options).stdout) for source in (out, tmp_path)]
    # The CPU that timed the layers is far slower than what the H200's file says.
    assert plans[0].predicted_step_s > 10 * plans[1].predicted_step_s


def test_timeline_of_a_plan(lazytrain, profile_2b, tmp_path):
    page, out = tmp_path / "timeline.html", tmp_path / "plan.json"
    options = ["--hardware", H200, "--micro-batch", 8, "--gpu-memory-gib", 40]
    result = lazytrain("plan", profile_2b, *options, "--out", out, "--timeline", page)
    assert result.exit_code == 0, result.output
    assert "forward model.layers.7" in page.read_text() and '"measured": null' in page.read_text()
    refused = lazytrain("explain", out, "--timeline", page)
    assert refused.exit_code == 1 and "add --model" in refused.stderr
    drawn = lazytrain("explain", out, "--timeline", page, "--model", profile_2b, "--hardware", H200)
    assert drawn.exit_code == 0, drawn.output


def test_planned_against_measured(lazytrain, profile_2b, tmp_path):
    out, trace_file, page = (tmp_path / name for name in ("plan.json", "trace.json", "timeline.html"))
    options = ["--hardware", H200, "--micro-batch", 8, "--gpu-memory-gib", 40]
    lazytrain("plan", profile_2b, *options, "--out", out)
    step = MeasuredStep(
        step=7,
        step_s=1.25,
        events=(
            Event("forward model.layers.0", Resource.COMPUTE, 0.1, 0.35),
            Event("weights model.layers.9 (forward)", Resource.H2D, 0.0, 0.5, 3 * 10**9),
        ),
        waits_s={"update": 0.25},
        peak_bytes={"gpu": 30 * 2**30},
    )
    MeasuredTrace(steps=(step,), plan=json.loads(out.read_text())).save(trace_file)

    compared = lazytrain("explain", out, "--measured", trace_file, "--model", profile_2b, "--hardware", H200)
    assert compared.exit_code == 0, compared.output
    text = " ".join(compared.output.split())
    assert "1250.0 ms measured" in text and "ms planned" in text
    assert "6.0 GB/s" in text and "update │ 250.0 ms (20.0%)" in text and "30.0 GiB" in text

    alone = lazytrain("explain", trace_file)  # without the model: what was measured
    assert alone.exit_code == 0 and "1250.0 ms measured" in alone.output and "ms planned" not in alone.output
    assert "model.layers.0" in alone.output  # the plan is in the trace
    as_json = json.loads(lazytrain("explain", out, "--measured", trace_file, "--json").stdout)
    assert as_json["measured_step_s"] == 1.25 and as_json["planned_step_s"] is None
    assert as_json["resources"][0]["measured_busy_s"] == pytest.approx(0.25)

    drawn = lazytrain("plan", profile_2b, *options, "--measured", trace_file, "--timeline", page)
    assert drawn.exit_code == 0 and '"measured": {"step": 7' in page.read_text()


def test_why_a_tensor_is_where_it_is(lazytrain, profile_2b, tmp_path):
    out = tmp_path / "plan.json"
    options = ["--hardware", H200, "--micro-batch", 8, "--gpu-memory-gib", 40]
    lazytrain("plan", profile_2b, *options, "--out", out)
    for name, unit, shape in [
        ("model.layers.5.mlp.up_proj.weight", "model.layers.5", "18944 x 3584 bfloat16"),
        ("model.norm.weight", "stem.rest", "3584 bfloat16"),
        ("lm_head.weight", "stem.lm_head.weight", "152064 x 3584 bfloat16"),
    ]:
        shown = lazytrain("explain", out, name, "--model", profile_2b, "--hardware", H200)
        assert shown.exit_code == 0, shown.output
        text = " ".join(shown.output.split())
        assert shape in text and unit in text and "instead (a step takes" in text
    unknown = lazytrain("explain", out, "model.layers.99.mlp.up_proj.weight")
    assert unknown.exit_code == 1 and "no unit" in unknown.stderr


def test_nvme_budget(lazytrain, profile_7b, tmp_path):
    """7B with 32-bit states takes 99 GiB at rest; with 60 the rest goes to disk, where the file gives its rates."""
    options = ["--hardware", H200, "--micro-batch", 4, "--gpu-memory-gib", 24, "--cpu-memory-gib", 60]
    assert lazytrain("plan", profile_7b, *options).exit_code == 1
    out = tmp_path / "plan.json"
    result = lazytrain("plan", profile_7b, *options, "--nvme-gib", 200, "--out", out)
    assert result.exit_code == 0, result.output
    plan = PlacementPlan.load(out)
    assert any(unit.states == "nvme" for unit in plan.units) and "NVMe" in result.output
    assert 0 < plan.predicted_bytes["nvme"] <= 200 * 2**30
    result = lazytrain("plan", profile_7b, *options[:-1], 68, "--nvme-gib", 200, "--ranks-per-node", 2, "--out", out)
    assert result.exit_code == 0, result.output
    assert any(unit.states == "nvme" for unit in PlacementPlan.load(out).units)
    machine = json.loads(Path(H200).read_text())
    del machine["nvme_read_bytes_per_s"]
    (tmp_path / "no_disk.json").write_text(json.dumps(machine))
    refused = lazytrain("plan", profile_7b, "--hardware", tmp_path / "no_disk.json", "--nvme-gib", 200)
    assert refused.exit_code == 1 and "no rates of a disk" in refused.stderr


def test_json_alone_on_stdout(lazytrain, profile_2b, tmp_path):
    page = tmp_path / "timeline.html"
    options = ["--hardware", H200, "--micro-batch", 4, "--timeline", page, "--json"]
    plan = PlacementPlan.from_json(lazytrain("plan", profile_2b, *options).stdout)
    plan.save(tmp_path / "plan.json")
    assert PlacementPlan.from_json(lazytrain("explain", tmp_path / "plan.json", "--json").stdout) == plan
    unit = json.loads(lazytrain("explain", tmp_path / "plan.json", "model.layers.3", "--json").stdout)
    assert unit["name"] == "model.layers.3" and unit["reason"]


def test_a_file_that_cannot_be_written_is_one_line(lazytrain, profile_2b, monkeypatch):
    monkeypatch.setattr(cli_plan, "make_plan", lambda *_: pytest.fail("planned for nothing"))
    result = lazytrain("plan", profile_2b, "--hardware", H200, "--out", "/proc/plan.json")
    assert result.exit_code == 1 and "name a folder on a disk" in result.stderr and "Traceback" not in result.output


def test_a_disk_that_fills_up_is_one_line(lazytrain, profile_2b):
    result = lazytrain("plan", profile_2b, "--hardware", H200, "--out", "/dev/full")
    assert result.exit_code == 1 and "No space left on device; correct the path" in result.stderr
    assert "Traceback" not in result.output


def test_a_profile_with_weights_that_are_not_trained(lazytrain, profile_2b, tmp_path):
    path = tmp_path / "half.json"
    path.write_text(profile_2b.read_text().replace('"bfloat16"', '"float16"'))
    result = lazytrain("plan", path, "--hardware", H200)
    assert result.exit_code == 1 and "model.layers.0.self_attn.q_proj.weight is float16" in result.stderr


def test_lossy_choices_are_listed_with_gain_and_error(lazytrain, profile_7b):
    result = lazytrain("plan", profile_7b, "--hardware", H200, "--micro-batch", 2, "--fidelity", "compact", "--advice")
    text = " ".join(result.stdout.split())
    assert "lossy: 8-bit optimizer states" in text and "lossy: 8-bit gradients" in text
    assert "gradients off by 0.6% of their rms" in text and "per step" in text
    assert "advice: no lower fidelity would win" in text


def test_error_prices_of_a_run_choose_the_bits_and_every_other_choice_is_told(lazytrain, profile_2b, tmp_path):
    """Other prices, other bits, shown with their gain and error; `explain` says what yet other bits would cost."""
    prices, plans, shown = tmp_path / "errors.json", [], []
    low, high = ({str(bits): scale / 2**bits for bits in (4, 5, 6, 8)} for scale in (0.05, 4.0))
    options = ["--hardware", H200, "--micro-batch", 16, "--gpu-memory-gib", 30, "--fidelity", "compact"]
    for row in ({"norm": high, "gemm": low, "swiglu": low}, {"norm": low, "gemm": low, "swiglu": high}):
        prices.write_text(json.dumps(row))
        out = tmp_path / f"{len(plans)}.json"
        result = lazytrain("plan", profile_2b, *options, "--error-prices", prices, "--out", out)
        assert result.exit_code == 0, result.output
        plans.append(PlacementPlan.load(out))
        shown.append(" ".join(result.stdout.split()))
    of_inputs, of_products = (
        [sum(getattr(u, f"{t}_bits") for u in p.units) for p in plans] for t in ("boundary", "saved")
    )
    assert of_inputs[0] > of_inputs[1] and of_products[0] <= of_products[1]
    assert "lossy: activations in fewer bits" in shown[0] and "products:" in shown[0] and "inputs:" in shown[0]
    assert "over all layers" in shown[0] and "measured on this model" in shown[0] and "norm 25.0%" in shown[0]
    unit = next(unit.name for unit in plans[1].units if unit.saved_bits < 16)
    more = ["--model", profile_2b, "--hardware", H200, "--gpu-memory-gib", 30, "--error-prices", prices]
    why = " ".join(lazytrain("explain", tmp_path / "1.json", unit, *more).output.split())
    assert "products in 8 bits, gradients off by up to 1.6%" in why and "input in 16 bits" in why
    whole = " ".join(lazytrain("explain", tmp_path / "1.json", *more).output.split())
    assert "lossy: activations in fewer bits" in whole


@pytest.mark.parametrize("shard", ["node", "job"])
def test_a_plan_of_nodes_is_explained_as_it_was_planned(lazytrain, profile_2b, tmp_path, shard):
    """Its ranks come from the plan, their network from options; without those there is one line, and no wrong row."""
    out, network = tmp_path / "plan.json", ["--network-gbit", 100]
    options = ["--hardware", H200, "--micro-batch", 2, "--shard", shard]
    planned = lazytrain(
        "plan", profile_2b, *options, "--nodes", 2, "--ranks-per-node", 4, *network, "--out", out
    ).stdout
    assert (planned.count("divided over all 8 ranks") == 2) == (shard == "job")
    explain = ["explain", out, "--model", profile_2b, "--hardware", H200]
    assert lazytrain(*explain, *network).stdout == planned[planned.index("fidelity ") :]
    plan = PlacementPlan.load(out)
    alternatives = lazytrain("explain", out, "model.layers.3", *explain[2:], *network).stdout
    assert f"a step takes {1e3 * plan.predicted_step_s:.1f} ms" in alternatives and "doesn't fit" not in alternatives
    need = planned.split("homes shared by its ranks: ")[1].splitlines()[0]
    assert re.search(rf"│ host │ +{need} │", planned)  # the table and the last line say the same

    other = "job" if shard == "node" else "node"
    for more, message in (
        ([], "--network-gbit (the plan is for 2 nodes)"),
        (["--nodes", 3], "the plan is for 2"),
        ([*network, "--shard", other], f"the plan is for {shard}"),
    ):
        refused = lazytrain(*explain, *more)
        assert refused.exit_code == 1 and message in refused.stderr and refused.stdout == ""


def test_a_plan_on_nvme_is_explained_within_its_budget(lazytrain, profile_2b, tmp_path):
    out = tmp_path / "plan.json"
    budgets = ["--hardware", H200, "--gpu-memory-gib", 18, "--cpu-memory-gib", 32]
    planned = lazytrain("plan", profile_2b, *budgets, "--nvme-gib", 100, "--out", out)
    assert planned.exit_code == 0, planned.output
    name = next(unit.name for unit in PlacementPlan.load(out).units if unit.states == "nvme")
    explain = ["explain", out, name, "--model", profile_2b, *budgets]
    refused = lazytrain(*explain)
    assert refused.exit_code == 1 and "--nvme-gib" in refused.stderr and refused.stdout == ""
    shown = lazytrain(*explain, "--nvme-gib", 100).stdout
    rows = [line for line in shown.split("instead (")[1].splitlines() if line.startswith("│")]
    assert any("on NVMe" in row and "doesn't fit" not in row for row in rows)
    assert "the plan doesn't fit" not in shown
    assert "the plan doesn't fit these budgets" in lazytrain(*explain, "--nvme-gib", 1).stdout


def test_other_options_than_the_plan_was_made_with_are_told(lazytrain, profile_2b, tmp_path):
    out = tmp_path / "plan.json"
    options = ["--hardware", H200, "--accumulation-steps", 4]
    lazytrain("plan", profile_2b, *options, "--out", out)
    explain = ["explain", out, "model.layers.3", "--model", profile_2b]
    assert "the plan says" not in lazytrain(*explain, *options).stdout
    assert "the plan says" in lazytrain(*explain, *options[:2]).stdout


def test_need_is_what_a_budget_must_hold(lazytrain, profile_2b, tmp_path):
    """Saving takes more than a step; a budget of what the table says is enough, and 1 % less is not."""
    out = tmp_path / "plan.json"
    options = ["plan", profile_2b, "--hardware", H200, "--gpu-memory-gib", 10]
    planned = lazytrain(*options, "--out", out).stdout
    plan = PlacementPlan.load(out)
    need_bytes = plan.outside_step_bytes["checkpoint"]["cpu"]
    assert need_bytes > plan.predicted_bytes["cpu"]
    explained = lazytrain("explain", out, "--model", profile_2b, *options[2:]).stdout
    for text in (planned, explained, lazytrain("explain", out).stdout):
        row = next(line for line in text.splitlines() if line.startswith("│ host"))
        assert f"│ {need_bytes / 2**30:.1f} GiB │" in row
        saving = f"saving beyond a step {format_bytes(need_bytes - plan.predicted_bytes['cpu'])}"
        assert saving in " ".join(text.replace("│", " ").split())  # the cell may be folded
    explain = ["explain", out, "--model", profile_2b, *options[2:], "--cpu-memory-gib"]
    assert "the plan doesn't fit" not in lazytrain(*explain, need_bytes / 2**30 + 0.001).stdout
    assert "the plan doesn't fit" in lazytrain(*explain, 0.99 * need_bytes / 2**30).stdout
