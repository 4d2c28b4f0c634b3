"""What LazyTrain's engine owes to Accelerate, Trainer and DeepSpeed, and what it takes from DeepSpeed's private parts.

Two halves. A spy records which members of the engine and of its optimizer the frameworks touch in a Trainer run with
evaluation, saving, resuming and the best model loaded at the end; the record must be the golden list, so a version
that asks for something new is noticed before a user does. And the source of DeepSpeed is read: every method that we
override must still have its signature and still be called from where it was, every member that we use must exist.

If a test fails after an upgrade: read what changed there, make the engine serve it, then correct the table.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate.commands.launch
import deepspeed
import pytest
import torch
import transformers
from deepspeed.runtime import base_optimizer
from deepspeed.runtime import engine as ds_engine

from integration_tests import harness, models
from integration_tests.cases import Placement, Work
from integration_tests.loops import make_trainer
from lazytrain_plugin.integration import checkpoint_mixin, deepspeed_engine, deepspeed_optimizer
from lazytrain_plugin.integration.deepspeed_engine import LazyTrainEngine
from lazytrain_plugin.integration.deepspeed_optimizer import LazyTrainOptimizer

MIXED = Placement(homes="mixed", activations="keep")

# What the frameworks touch on the engine: transformers 5.17 and 5.24 with accelerate 1.15.
ENGINE_MEMBERS = {
    "accelerate": {
        "_zero3_consolidated_16bit_state_dict", "backward", "get_global_grad_norm",
        "set_gradient_accumulation_boundary", "step", "zero_gather_16bit_weights_on_model_save",
        "_modules", "module", "modules",  # unwrap_model
    },
    "transformers": {"config", "load_checkpoint", "parameters", "save_checkpoint", "train", "zero_grad"},
}  # fmt: skip

# What they touch on the optimizer. DeepSpeed's part is what makes its engine's `backward` and `step` work for us.
OPTIMIZER_MEMBERS = {
    "accelerate": {"optimizer", "overflow", "param_groups"},
    "deepspeed": {
        "_backward_hook_state", "_global_grad_norm", "backward_epilogue", "backward_prologue",
        "clear_backward_seen_flag", "custom_loss_scaler", "destroy", "dp_process_group", "enter_backward",
        "exit_backward", "overflow", "param_groups", "queue_post_backward_callback", "register_grad_acc_post_hook",
        "scale_if_loss", "set_gradient_accumulation_boundary", "step", "torch_autocast_gradscaler", "zero_grad",
    },
}  # fmt: skip

# Members that they look for and that we leave out on purpose: each is optional where it is asked for.
ABSENT_MEMBERS = {
    ("engine", "deepspeed"): {
        "_deepcompile_dynamo_config_restore", "_deepcompile_owned_frames", "_deepcompile_z3_eager_fallback",
    },
    ("optimizer", "deepspeed"): {"configure_autoep_folding_tp_gradient_reduction", "loss_scaler"},
    ("optimizer", "accelerate"): {"eval", "train"},
}  # fmt: skip


@dataclass(frozen=True)
class Override:
    """A method of DeepSpeed that we replace: its parameters there, and a method there that calls it."""

    parameters: str
    called_by: str | None = None
    """None: users and frameworks call it."""


ENGINE_OVERRIDES = {
    "__init__": Override(
        "args, model, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, mpu=None, "
        "dist_init_required=None, collate_fn=None, config=None, config_class=None, mesh_device=None, "
        "dont_change_device=False"
    ),
    "_configure_distributed_model": Override("model", "__init__"),
    "_cast_module_mixed_precision": Override(
        "param_dtype, buffer_dtype, is_zero_init_model, keep_pattern=None", "_configure_distributed_model"
    ),
    "_broadcast_model": Override("", "_configure_distributed_model"),
    "_configure_basic_optimizer": Override("model_parameters", "_configure_optimizer"),
    "_do_optimizer_sanity_check": Override("basic_optimizer", "_configure_optimizer"),
    "_configure_zero_optimizer": Override("optimizer", "_configure_optimizer"),
    "forward": Override("*inputs, **kwargs"),
    "_forward_prologue": Override("inputs, kwargs", "_create_module_forward_pre_hook"),
    "_forward_epilogue": Override("", "_create_module_forward_post_hook"),
    "allreduce_gradients": Override("bucket_size=MEMORY_OPT_ALLREDUCE_SIZE", "_backward_epilogue"),
    "backward": Override("loss, retain_graph=False, scale_wrt_gas=True"),
    "step": Override("lr_kwargs=None"),
    "_take_model_step": Override("lr_kwargs", "step"),
    "no_sync": Override(""),
    "compile": Override(
        "backend=get_accelerator().get_compile_backend(), compile_kwargs={}, schedule=None, "
        "compiled_autograd_enabled=False"
    ),
    "offload_states": Override("include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False"),
    "reload_states": Override("non_blocking=False"),
    "destroy": Override("", "__del__"),
    "save_checkpoint": Override(
        "save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False"
    ),
    "load_checkpoint": Override(
        "load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True, "
        "load_module_only=False, custom_load_fn=None"
    ),
    "_zero3_consolidated_16bit_state_dict": Override("exclude_frozen_parameters=False", "save_16bit_model"),
}

ENGINE_METHODS_USED = {
    "_start_timers": "timer_names",
    "_stop_timers": "timer_names",
    "bfloat16_enabled": "",
    "curriculum_learning_enabled": "",
    "gradient_accumulation_steps": "",
    "gradient_clipping": "",
    "is_gradient_accumulation_boundary": "",
    "load_universal_checkpoint": "",
    "optimizer_name": "",
    "optimizer_params": "",
    "train_micro_batch_size_per_gpu": "",
}
ENGINE_ATTRIBUTES_USED = {
    "_config", "config", "device", "engine_timers", "global_rank", "global_steps", "gradient_average", "lr_scheduler",
    "module", "optimizer", "seq_data_parallel_group", "tput_timer", "training_dataloader",
}  # fmt: skip

OPTIMIZER_OVERRIDES = {
    "__init__": Override(""),
    "backward_epilogue": Override("**kwargs"),
    "backward_prologue": Override(""),
    "set_gradient_accumulation_boundary": Override("is_boundary"),
}


class Spy:
    """Records, by the package of the code that asks, which attributes of a class's instances are looked up."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.absent: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.written: dict[tuple[str, str], set[str]] = defaultdict(set)

    def watch(self, monkeypatch: pytest.MonkeyPatch, cls: type, role: str) -> None:
        look_up, write = cls.__getattribute__, cls.__setattr__

        def __getattribute__(instance: Any, name: str) -> Any:
            asking = (role, _package(sys._getframe(1)))
            try:
                value = look_up(instance, name)
            except AttributeError:
                self.absent[asking].add(name)
                raise
            if not name.startswith("__"):
                self.found[asking].add(name)
            return value

        def __setattr__(instance: Any, name: str, value: Any) -> None:
            self.written[role, _package(sys._getframe(1))].add(name)
            write(instance, name, value)

        monkeypatch.setattr(cls, "__getattribute__", __getattribute__)
        monkeypatch.setattr(cls, "__setattr__", __setattr__)


def _package(frame: Any) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


class EverythingTrainer(harness.InOrderTrainer):
    """Evaluates while it trains and after, and saves the model at the end: what a script does around `train()`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, eval_dataset=models.make_samples("llama", 4), **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        self.evaluate()
        self.save_model(f"{self.args.output_dir}/final")
        self.unwrapped = self.accelerator.unwrap_model(self.model_wrapped)
        return result


@dataclass
class SpiedRuns:
    spy: Spy
    straight: harness.Run
    resumed: harness.Run
    folder: Path


@pytest.fixture(scope="module")
def spied(tmp_path_factory: pytest.TempPathFactory, device: str):
    folder, spy = tmp_path_factory.mktemp("contract"), Spy()
    work = Work(model="llama", implementation="native", max_norm=0.5, accumulation=2)
    options = {
        "max_steps": 4,
        "trainer_class": EverythingTrainer,
        **dict.fromkeys(("save_strategy", "eval_strategy"), "steps"),
        **dict.fromkeys(("save_steps", "eval_steps"), 2),
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        spy.watch(monkeypatch, LazyTrainEngine, "engine")
        spy.watch(monkeypatch, LazyTrainOptimizer, "optimizer")
        straight = harness.run_lazytrain(work, MIXED, folder, device, **options)
        resumed = harness.run_lazytrain(work, MIXED, folder, device, resume=str(folder / "checkpoint-2"), **options)
        yield SpiedRuns(spy, straight, resumed, folder)
        for run in (straight, resumed):
            harness.close(run)


@pytest.mark.parametrize(
    ("role", "package", "golden"),
    [("engine", package, names) for package, names in ENGINE_MEMBERS.items()]
    + [("optimizer", package, names) for package, names in OPTIMIZER_MEMBERS.items()],
)
def test_frameworks_touch_the_members_that_are_known(spied, role, package, golden):
    if (role, package) == ("optimizer", "deepspeed"):
        spied.straight.engine.destroy()  # the end of a run is part of the surface
    touched = spied.spy.found[role, package]
    assert touched - golden == set(), f"{package} uses members of the {role} that nobody has looked at"
    assert golden - touched == set(), f"{package} no longer uses these members of the {role}"


@pytest.mark.parametrize("asked", [False, True])
def test_deepspeed_waits_for_the_device_only_if_it_is_asked_to(asked, tmp_path, device, monkeypatch):
    """Its throughput timer does so twice a step by default, and with it for every update that is under way."""
    accelerator, waits = type(deepspeed.accelerator.get_accelerator()), []
    monkeypatch.setattr(accelerator, "synchronize", lambda self, *device: waits.append(device))
    timers = {"timers": {"throughput": {"synchronized": True}}} if asked else {}
    with harness.fresh_accelerate_state():
        model, samples = models.build_model("llama"), models.make_samples("llama", 8)
        trainer = make_trainer(model, samples, tmp_path, device, placement=MIXED, ds_config=timers, max_steps=4)
        harness.close(harness.finish(trainer))
    assert bool(waits) == asked


def test_what_the_frameworks_look_for_in_vain_is_known(spied):
    frameworks = ("accelerate", "transformers", "deepspeed")
    assert {asking: names for asking, names in spied.spy.absent.items() if asking[1] in frameworks} == ABSENT_MEMBERS


def test_the_attributes_that_frameworks_write_are_known(spied):
    outside = ("accelerate", "transformers")
    written = {asking: names for asking, names in spied.spy.written.items() if asking[1] in outside}
    assert written == {("engine", "accelerate"): {"_is_accelerate_prepared"}}
    assert spied.spy.written["optimizer", "deepspeed"] <= {"_backward_hook_state", "_is_gradient_accumulation_boundary"}


def test_members_for_other_callers_are_there():
    """A Trainer run does not happen to touch these; users' scripts, LR schedules and DeepSpeed's other paths do."""
    for name in (
        "eval", "named_parameters", "modules", "state_dict", "no_sync", "save_16bit_model", "train_batch_size",
        "get_lr", "was_step_applied", "zero_optimization_stage", "set_train_batch_size", "flush", "destroy",
    ):  # fmt: skip
        assert callable(getattr(LazyTrainEngine, name)), name
    for name in (
        "state_dict", "load_state_dict", "refresh_fp32_params", "_restore_from_bit16_weights", "fp16_groups", "state",
        "defaults", "loss_scale", "cur_scale", "dynamic_loss_scale", "external_loss_scale", "needs_scaler",
        "overlapping_partition_gradients_reduce_epilogue", "empty_partition_cache", "is_gradient_accumulation_boundary",
    ):  # fmt: skip
        assert hasattr(LazyTrainOptimizer, name), name


def test_the_engine_is_unwrapped_as_a_deepspeed_engine(spied):
    engine = spied.resumed.engine
    assert type(engine) is LazyTrainEngine
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert spied.resumed.trainer.unwrapped is spied.resumed.trainer.model


def test_attributes_that_we_use_are_set_by_deepspeed(spied):
    """Those that its constructor makes can only be seen on a live engine."""
    missing = {name for name in ENGINE_ATTRIBUTES_USED if not hasattr(spied.resumed.engine, name)}
    assert missing == set()
    assert hasattr(spied.resumed.engine._config, "keep_in_fp32_modules")
    assert hasattr(spied.resumed.engine.engine_timers, "forward_timers")
    assert {"global_steps", "global_samples", "micro_steps", "skipped_steps"} <= set(vars(spied.resumed.engine))


def test_unknown_top_level_keys_are_kept_everywhere(spied):
    """Our block is one; it must reach the engine through Trainer's and Accelerate's handling, and the checkpoint."""
    block = {"plan": {"path": "plan.json"}, "fidelity": "exact"}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "lazytrain": block}
    assert deepspeed.DeepSpeedConfig(config)._param_dict["lazytrain"] == block
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    try:
        assert HfDeepSpeedConfig(config).config["lazytrain"] == block
    finally:
        unset_hf_deepspeed_config()
    in_run = spied.resumed.engine.config["lazytrain"]
    assert in_run["optimizer"] == {"implementation": "native", "state_bits": 32}
    saved = next((spied.folder / "checkpoint-4").glob("global_step4/*optim_states.pt"))
    assert torch.load(saved, weights_only=False)["ds_config"]["lazytrain"] == json.loads(json.dumps(in_run))


# What the hook patches.


def test_initialize_looks_its_engine_class_up_when_it_is_called():
    """The swap of the class for the length of one call has an effect, and only there."""
    original = deepspeed.initialize._lazytrain_original
    assert "DeepSpeedEngine" in original.__code__.co_names
    assert original.__globals__ is vars(deepspeed)
    assert deepspeed.DeepSpeedEngine is ds_engine.DeepSpeedEngine
    assert list(inspect.signature(original).parameters) == [
        "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu",
        "dist_init_required", "collate_fn", "config", "mesh_param", "config_params",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (deepspeed.zero.Init, "__init__", {"module", "config_dict_or_path", "config"}),
        (deepspeed, "load_ds_config", set()),
        (deepspeed, "PipelineModule", set()),
        (ds_engine, "keep_in_fp32_pattern", {"module", "setting", "dtype"}),
        (transformers.integrations.deepspeed, "is_deepspeed_zero3_enabled", set()),
        (transformers.integrations.deepspeed, "deepspeed_config", set()),
        (transformers.cache_utils.Cache, "get_seq_length", set()),
        (transformers.loss.loss_utils, "ForCausalLMLoss", {"logits", "labels", "vocab_size", "num_items_in_batch"}),
        (accelerate.commands.launch, "launch_command_parser", set()),
        (accelerate.commands.launch, "launch_command", {"args"}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else ""),
)
def test_functions_that_we_patch_or_call_are_there(owner, name, parameters):
    function = getattr(owner, name)
    assert parameters <= set(inspect.signature(function).parameters)


def test_transformers_collects_recorded_outputs_in_a_context_variable():
    from transformers.utils import output_capturing

    assert output_capturing._active_collector.get() is None
    assert callable(output_capturing._active_collector.set)


# DeepSpeed's source against the tables.


class SourceOfClass:
    """Methods of one class as its source has them: decorators hide signatures and bytecode at run time."""

    def __init__(self, module: ModuleType, class_name: str) -> None:
        tree = ast.parse(inspect.getsource(module))
        found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
        self.methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}

    def parameters(self, method: str) -> str:
        arguments = self.methods[method].args
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        return ast.unparse(arguments).removeprefix("self").removeprefix(", ")

    def mentions(self, method: str) -> set[str]:
        """Attributes of `self` that the method reads."""
        return _read_from_self(self.methods[method])

    def assigned(self) -> set[str]:
        nodes = (node for method in self.methods.values() for node in ast.walk(method))
        return {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
        }


def _read_from_self(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_self(node.value)
    }


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


THEIR_ENGINE = SourceOfClass(ds_engine, "DeepSpeedEngine")
THEIR_OPTIMIZER = SourceOfClass(base_optimizer, "ZeROOptimizer")
OUR_ENGINE = [SourceOfClass(deepspeed_engine, "LazyTrainEngine"), SourceOfClass(checkpoint_mixin, "CheckpointMixin")]
OUR_OPTIMIZER = [SourceOfClass(deepspeed_optimizer, "LazyTrainOptimizer")]

TABLES = [
    pytest.param(LazyTrainEngine, ENGINE_OVERRIDES, THEIR_ENGINE, id="engine"),
    pytest.param(LazyTrainOptimizer, OPTIMIZER_OVERRIDES, THEIR_OPTIMIZER, id="optimizer"),
]


@pytest.mark.parametrize(("ours", "table", "theirs"), TABLES)
def test_overridden_methods_have_the_signatures_that_are_known(ours, table, theirs):
    differing = {
        name: theirs.parameters(name) if name in theirs.methods else "gone"
        for name, override in table.items()
        if name not in theirs.methods or theirs.parameters(name) != override.parameters
    }
    assert differing == {}
    for name in table.keys() - {"__init__"}:  # constructors are called by us, and by `initialize` with keywords
        required = [argument.arg for argument in theirs.methods[name].args.args]
        parameters = inspect.signature(getattr(ours, name)).parameters
        takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        assert takes_anything or list(parameters) == required, f"{name} can't be called as DeepSpeed's"


@pytest.mark.parametrize(("ours", "table", "theirs"), TABLES)
def test_overridden_methods_are_still_called_from_where_they_were(ours, table, theirs):
    """An override that nobody calls any more would be left out in silence, and DeepSpeed's own way taken."""
    moved = [
        name
        for name, override in table.items()
        if override.called_by is not None and name not in theirs.mentions(override.called_by)
    ]
    assert moved == []


@pytest.mark.parametrize(
    ("ours", "table", "theirs"),
    [(OUR_ENGINE, ENGINE_OVERRIDES, THEIR_ENGINE), (OUR_OPTIMIZER, OPTIMIZER_OVERRIDES, THEIR_OPTIMIZER)],
    ids=["engine", "optimizer"],
)
def test_the_tables_hold_every_override(ours, table, theirs):
    defined = {name for source in ours for name in source.methods} | (
        {"reload_states"} if ours is OUR_ENGINE else set()
    )
    assert defined & set(theirs.methods) == set(table)


def test_the_tables_hold_every_member_that_we_use():
    names = {name for source in OUR_ENGINE for method in source.methods for name in source.mentions(method)}
    own = {name for source in OUR_ENGINE for name in (*source.methods, *source.assigned())}
    module_members = {name for name in dir(torch.nn.Module) if not name.startswith("_")}
    used = names - own - module_members - {"_lazytrain_config"}
    assert used == set(ENGINE_METHODS_USED) | ENGINE_ATTRIBUTES_USED
    differing = {
        name: THEIR_ENGINE.parameters(name) if name in THEIR_ENGINE.methods else "gone"
        for name, parameters in ENGINE_METHODS_USED.items()
        if name not in THEIR_ENGINE.methods or THEIR_ENGINE.parameters(name) != parameters
    }
    assert differing == {}


def test_a_script_that_never_destroys_its_engine_ends_well(tmp_path):
    """The last step's updates are still running when such a script ends; they must not be cut off inside torch."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_WITHOUT_DESTROY)
    launch_variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launch_variables}
    process = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "updated: 24" in process.stdout


SCRIPT_WITHOUT_DESTROY = """
import time, deepspeed, torch
import lazytrain_plugin.install

updates = 0

class Slow(torch.optim.SGD):
    def step(self):
        global updates
        for _ in range(50):
            time.sleep(0.001)
            torch.ones(8).add_(1)
        super().step()
        updates += 1
        if updates == 24:
            print("updated: 24", flush=True)

model = torch.nn.Sequential()
model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(24))
model.forward = lambda x: [x := layer(x) for layer in model.layers][-1].square().mean()
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "lazytrain": {}}
engine, *_ = deepspeed.initialize(model=model, optimizer=Slow(model.parameters(), lr=0.1), config=config)
engine.backward(engine(torch.ones(2, 64, device=engine.device)))
engine.step()
"""
