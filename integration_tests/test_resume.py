"""Save, resume and export through Trainer: a resumed run is the run that was never stopped, under any plan."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from integration_tests import harness
from integration_tests.cases import Placement, Work
from integration_tests.harness import InOrderTrainer, Run, assert_bit_equal, run_lazytrain
from lazytrain_plugin.errors import CheckpointError
from lazytrain_plugin.runtime.streamed_file import StreamedSave

STREAMED = Placement(homes="cpu", activations="recompute")
RESIDENT = Placement(homes="gpu", activations="keep")
MIXED = Placement(homes="mixed", activations="keep")
STREAMED_STATES = Placement(homes="streamed states", activations="recompute")
SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}


def _straight(work: Work, folder: Path, device: str, placement: Placement = STREAMED, **options) -> Run:
    run = run_lazytrain(work, placement, folder, device, **(SAVING | options))
    harness.close(run)
    return run


def _resumed(work: Work, folder: Path, device: str, placement: Placement, **options) -> Run:
    options = {**SAVING, "save_strategy": "no"} | options
    run = run_lazytrain(work, placement, folder, device, resume=str(folder / "checkpoint-3"), **options)
    harness.close(run)
    return run


@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize(
    ("work", "placement"),
    [
        (Work(model="qwen2_tied", dtype="bf16", implementation="native", max_norm=0.05), RESIDENT),
        (Work(model="llama", trained="half frozen", implementation="native", accumulation=2), MIXED),
        (Work(model="gpt2", dtype="bf16", implementation="torch"), RESIDENT),
        (Work(model="llama", dtype="bf16", implementation="native", accumulation=2), STREAMED_STATES),
    ],
    ids=["qwen2 to gpu", "llama to mixed", "torch optimizer", "llama to streamed states"],
)
def test_resume_under_another_plan_is_bit_equal(work, placement, state_bits, device, tmp_path):
    """S-39, S-42; S-40: with warm-up and decay, the learning rates after the resume are those of the straight run."""
    if state_bits == 8 and work.implementation == "torch":
        pytest.skip("the client's own optimizer has its own states")
    straight = _straight(work, tmp_path, device, state_bits=state_bits)
    resumed = _resumed(work, tmp_path, device, placement, state_bits=state_bits)
    assert resumed.learning_rates == straight.learning_rates
    assert resumed.losses == straight.losses
    assert_bit_equal(resumed.weights, straight.weights)


@pytest.mark.parametrize("placement", [RESIDENT, STREAMED_STATES], ids=["to gpu", "to streamed states"])
def test_resume_with_8bit_gradients_is_bit_equal(placement, device, tmp_path):
    """S-42: a checkpoint holds no gradients, so their bits leave no trace in it."""
    work = Work(model="llama", dtype="bf16", implementation="native", accumulation=2, max_norm=0.05)
    straight = _straight(work, tmp_path, device, state_bits=8, gradient_bits=8)
    resumed = _resumed(work, tmp_path, device, placement, state_bits=8, gradient_bits=8)
    assert resumed.losses == straight.losses
    assert_bit_equal(resumed.weights, straight.weights)


@pytest.mark.parametrize("resting", ["gpu", "cpu"])
def test_resume_with_coded_activations_is_bit_equal(resting, device, tmp_path, caplog):
    """S-42, with activations in codes beside the rest: nothing of them outlives a step, wherever they rest."""
    work = Work(model="llama", dtype="bf16", implementation="native", accumulation=2, max_norm=0.05)
    bits = {"state_bits": 8, "gradient_bits": 8, "activation_bits": 4}
    before = Placement(homes="cpu", activations="matmuls")
    with caplog.at_level("INFO", logger="lazytrain_plugin"):
        straight = _straight(work, tmp_path, device, before, **bits)
    assert "activations in 4 bits, inputs in 4" in caplog.text
    resumed = _resumed(work, tmp_path, device, Placement(homes="mixed", activations="matmuls", resting=resting), **bits)
    assert resumed.losses == straight.losses
    assert_bit_equal(resumed.weights, straight.weights)


@pytest.mark.parametrize(("before", "after"), [(32, 8), (8, 32)])
def test_resume_with_states_of_another_width_stays_close(before, after, device, tmp_path):
    work = Work(model="llama", implementation="native")
    straight = _straight(work, tmp_path, device, state_bits=before)
    resumed = _resumed(work, tmp_path, device, STREAMED, state_bits=after)
    assert resumed.losses[:4] == straight.losses[:4]  # masters are exact: the first loss after the resume is too
    assert resumed.losses == pytest.approx(straight.losses, rel=5e-3)
    assert resumed.weights.keys() == straight.weights.keys()


@pytest.mark.parametrize("model", ["qwen2_tied", "gpt2"])
def test_exported_weights_are_the_trained_ones(model, device, tmp_path):
    """S-30, S-41: from_pretrained and zero_to_fp32 give the run's weights, in their dtype, tied where they were."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    work = Work(model=model, dtype="bf16", implementation="native")
    run = _straight(work, tmp_path, device)
    checkpoint = tmp_path / "checkpoint-6"
    loaded = type(run.trainer.model).from_pretrained(checkpoint, dtype="auto")
    assert_bit_equal(dict(loaded.named_parameters()), run.weights)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    masters = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    rounded = {name: harness.round_half_away(masters[name]) for name in run.weights}
    assert_bit_equal(rounded, run.weights)
    assert any(not torch.equal(masters[name], run.weights[name].float()) for name in run.weights)


def test_lora_checkpoints_hold_the_adapter_only(device, tmp_path):
    """S-49: no backbone in the checkpoint, no empty adapter, and the resumed run is the straight one."""
    work = Work(model="llama", trained="lora", implementation="native")
    straight = _straight(work, tmp_path, device)
    from safetensors.torch import load_file

    adapter = load_file(tmp_path / "checkpoint-6" / "adapter_model.safetensors")
    trained = {name for name, p in straight.trainer.model.named_parameters() if p.requires_grad}
    assert len(adapter) == len(trained)
    assert all(value.abs().max() > 0 for value in adapter.values())
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    assert get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "checkpoint-6")).keys() == trained
    resumed = _resumed(work, tmp_path, device, MIXED)
    assert_bit_equal(resumed.weights, straight.weights)


def test_a_save_that_fails_leaves_the_run_resumable(device, tmp_path, monkeypatch):
    """S-14, S-37: the second save dies half-way; what is there afterwards is the first one, and it resumes."""
    work = Work(model="llama", implementation="native")
    straight = _straight(work, tmp_path / "straight", device)
    write = StreamedSave.write

    def dying_write(self, key_path, tensor):
        if "checkpoint-6" in str(self._path) and key_path[-1] == 5:
            raise OSError(28, "No space left on device")
        write(self, key_path, tensor)

    monkeypatch.setattr(StreamedSave, "write", dying_write)
    with pytest.raises(CheckpointError, match="checkpoint-6.*earlier checkpoints are untouched"):
        _straight(work, tmp_path / "torn", device)
    monkeypatch.undo()
    assert not list((tmp_path / "torn" / "checkpoint-6").glob("global_step*"))
    resumed = _resumed(work, tmp_path / "torn", device, STREAMED)
    assert_bit_equal(resumed.weights, straight.weights)


@pytest.mark.parametrize("earlier", [True, False])
def test_a_trainer_save_that_was_interrupted_is_explained(earlier, device, tmp_path):
    """Ctrl-C between the engine's part, which is whole, and the file that Trainer writes last."""
    work = Work(model="llama", implementation="native")

    class Interrupted(InOrderTrainer):
        def _save_rng_state(self, output_dir):
            if "checkpoint-6" in output_dir or not earlier:
                raise KeyboardInterrupt
            super()._save_rng_state(output_dir)

    with pytest.raises(KeyboardInterrupt):
        run_lazytrain(work, STREAMED, tmp_path, device, trainer_class=Interrupted, **SAVING)
    last = "checkpoint-6" if earlier else "checkpoint-3"
    remedy = r"resume from \S+checkpoint-3" if earlier else "start the training anew"
    with pytest.raises(CheckpointError, match=f"{last} can't be resumed.*save was interrupted. Delete.*{remedy}"):
        run_lazytrain(work, STREAMED, tmp_path, device, max_steps=6, resume=True)


def test_load_best_model_at_end_on_the_live_engine(device, tmp_path):
    """The best of two evaluations is the first: its weights are back when training ends."""
    work = Work(model="llama", implementation="native")

    class Evaluating(InOrderTrainer):
        scores = [1.0, 2.0]

        def __init__(self, *args, **kwargs):
            super().__init__(*args, eval_dataset=kwargs["train_dataset"], **kwargs)

        def evaluate(self, *args, **kwargs):
            metrics = {"eval_loss": self.scores[self.state.global_step // 3 - 1]}
            self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    run = run_lazytrain(
        work, MIXED, tmp_path, device, trainer_class=Evaluating, eval_strategy="steps", eval_steps=3,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", **SAVING,
    )  # fmt: skip
    run.trainer.model_wrapped.flush()
    weights = {name: p.detach().cpu().clone() for name, p in run.trainer.model.named_parameters()}
    harness.close(run)
    best = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert_bit_equal(weights, dict(best.named_parameters()))


def test_resume_from_a_checkpoint_of_plain_deepspeed(device, tmp_path):
    """The A/B switch: a job that ran with `"enabled": false` goes on under LazyTrain, with its optimizer states."""
    work = Work(model="llama", implementation="torch")
    plain = run_lazytrain(work, STREAMED, tmp_path, device, block={"enabled": False}, **SAVING)
    plain.trainer.model_wrapped.destroy()
    assert type(plain.trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    resumed = _resumed(work, tmp_path, device, STREAMED)
    assert resumed.learning_rates == plain.learning_rates
    assert resumed.losses == pytest.approx(plain.losses, rel=1e-5)


def test_checkpoint_of_another_model_is_refused(device, tmp_path):
    _straight(Work(model="qwen2_tied"), tmp_path, device)
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "other" / "checkpoint-3")
    with pytest.raises(CheckpointError, match="does not fit this model: missing there"):
        _resumed(Work(model="gpt2"), tmp_path / "other", device, STREAMED)
