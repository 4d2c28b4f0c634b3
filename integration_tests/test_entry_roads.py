"""Every way to start a job leads to the same training: real processes, the example script, the sample configs.

Each road trains the same tiny model for three steps; the losses it logs must be those of the other roads. That
LazyTrain did it, and not plain DeepSpeed, is told by its activation line.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SUFFIX = "" if torch.cuda.is_available() else "_cpu"
LAUNCH_YAML = f"configs/lazytrain{SUFFIX}.yaml"
DEEPSPEED_JSON = f"configs/deepspeed/lazytrain{SUFFIX}.json"
SCRIPT = "examples/train_lm.py"
SMALL = [
    "--hidden_size",
    "32",
    "--num_hidden_layers",
    "2",
    "--sequence_length",
    "64",
    "--per_device_eval_batch_size",
    "64",
]
SHORT = ["--max_steps", "3", "--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--seed", "5"]
ACTIVE = "[LazyTrain] active:"


def command(name: str) -> str:
    """Of this Python, else the one on the path (packages beside an environment that isn't ours to change)."""
    own = Path(sys.executable).parent
    return shutil.which(name, path=os.pathsep.join([str(own), os.environ["PATH"]])) or name


PYTHON = [sys.executable]
ROADS = {
    "accelerate launch": [command("accelerate"), "launch", "--config_file", LAUNCH_YAML, SCRIPT],
    "lazytrain launch": [command("lazytrain"), "launch", "--config", LAUNCH_YAML, SCRIPT],
    "torchrun": [
        *PYTHON,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "1",
        SCRIPT,
        "--deepspeed",
        DEEPSPEED_JSON,
    ],
    "python": [*PYTHON, SCRIPT, "--deepspeed", DEEPSPEED_JSON],
    "python -m launch": [*PYTHON, "-m", "lazytrain_plugin.launch", SCRIPT, "--deepspeed", DEEPSPEED_JSON],
}
EXPLICIT = ("lazytrain launch", "python -m launch")
"""Roads that must work even where torch loads no plug-ins."""

pytestmark = pytest.mark.multiprocess


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what its own process group has put there."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    return {**inherited, "OMP_NUM_THREADS": "1", **extra}


def run(command: list[str], **extra: str) -> str:
    """Standard output and error of a command that must succeed, from the root of the repository."""
    process = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stdout[-4000:]
    return process.stdout


def train(road: str, output_dir: Path, *arguments: str, **extra: str) -> tuple[str, list[float], float]:
    """(output, logged training losses, held-out loss) of the example, started on a road."""
    output = run([*ROADS[road], *SMALL, *SHORT, "--output_dir", str(output_dir), *arguments], **extra)
    return output, logged_losses(output), json.loads((output_dir / "eval_results.json").read_text())["eval_loss"]


def logged_losses(output: str) -> list[float]:
    """Losses in the lines that Trainer prints, `{'loss': '5.518', ...}`."""
    lines = [line[line.index("{'loss'") :] for line in output.replace("\r", "\n").splitlines() if "{'loss'" in line]
    return [float(line.split("'loss': ")[1].split(",")[0].strip("'")) for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[list[float], float]:
    """Training losses and held-out loss of plain Trainer, without DeepSpeed."""
    output_dir = tmp_path_factory.mktemp("plain")
    output = run([*PYTHON, SCRIPT, *SMALL, *SHORT, "--output_dir", str(output_dir)])
    assert ACTIVE not in output
    return logged_losses(output), json.loads((output_dir / "eval_results.json").read_text())["eval_loss"]


@pytest.mark.parametrize("road", ROADS)
def test_road_trains_under_lazytrain_like_plain_trainer(road, plain, tmp_path):
    switch = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if road in EXPLICIT else {}
    output, losses, held_out_loss = train(road, tmp_path, **switch)
    assert output.count(ACTIVE) == 1
    assert len(losses) == 3
    # Trainer prints 4 digits; the held-out loss is written in full. fp32 on one CPU thread, 3 steps.
    assert losses == pytest.approx(plain[0], rel=2e-4)
    assert held_out_loss == pytest.approx(plain[1], rel=1e-5)


def test_the_example_knows_nothing_of_lazytrain():
    assert "lazytrain" not in (ROOT / SCRIPT).read_text().lower()


def test_a_wrong_block_stops_the_job_with_the_reason(tmp_path):
    config = json.loads((ROOT / DEEPSPEED_JSON).read_text())
    config["lazytrain"]["gpu_memory_gb"] = 24
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(config))
    process = subprocess.run(
        [*PYTHON, SCRIPT, *SMALL, *SHORT, "--output_dir", str(tmp_path), "--deepspeed", str(wrong)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 1
    assert 'did you mean "gpu_memory_gib"' in process.stderr.splitlines()[-1]


ACCELERATE_LOOP = """
import torch
from accelerate import Accelerator
from lazytrain_plugin import LazyTrainPlugin

torch.manual_seed(5)
plugin = LazyTrainPlugin().deepspeed(gradient_accumulation_steps=1, gradient_clipping=1.0)
accelerator = Accelerator(deepspeed_plugin=plugin)
{body}
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""

DEEPSPEED_LOOP = """
import deepspeed, torch

ENABLED = True
torch.manual_seed(5)
{body}
config = {{
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {{"stage": 3}},
    "zero_allow_untested_optimizer": True,
    "lazytrain": {{"enabled": ENABLED}},
}}
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for batch in loader:
    loss = engine(input_ids=batch.to(engine.device), labels=batch.to(engine.device)).loss
    engine.backward(loss)
    engine.step()
    print("loss", loss.item())
print("engine", type(engine).__name__, sum(hasattr(parameter, "ds_id") for parameter in model.parameters()))
engine.destroy()
"""

TORCH_LOOP = """
import torch

torch.manual_seed(5)
{body}
for batch in loader:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""

LOOP_BODY = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=67, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=3, pad_token_id=None
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.randint(67, (16, 33)), batch_size=4)
"""


def run_loop(code: str, folder: Path) -> str:
    script = folder / "loop.py"
    script.write_text(code.format(body=LOOP_BODY))
    return run([*PYTHON, str(script)])


def printed_losses(output: str) -> list[float]:
    return [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss ")]


@pytest.fixture(scope="module")
def torch_losses() -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(TORCH_LOOP.format(body=LOOP_BODY), {})
    losses = printed_losses(printed.getvalue())
    assert len(losses) == 4
    return losses


@pytest.mark.parametrize("loop", [ACCELERATE_LOOP, DEEPSPEED_LOOP], ids=["accelerate", "deepspeed"])
def test_a_loop_of_ones_own_trains_like_plain_torch(loop, torch_losses, tmp_path):
    output = run_loop(loop, tmp_path)
    assert output.count(ACTIVE) == 1
    assert printed_losses(output) == pytest.approx(torch_losses, rel=1e-4)


def test_a_disabled_block_gives_plain_deepspeed(tmp_path):
    # Plain DeepSpeed needs the variables of a launcher; nothing of ours may step in.
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    script = tmp_path / "loop.py"
    script.write_text(DEEPSPEED_LOOP.replace("ENABLED = True", "ENABLED = False").format(body=LOOP_BODY))
    output = run([*PYTHON, str(script)], **rendezvous)
    assert "[LazyTrain]" not in output
    assert "engine DeepSpeedEngine 30" in output, "ZeRO-3 marks every parameter as partitioned"
