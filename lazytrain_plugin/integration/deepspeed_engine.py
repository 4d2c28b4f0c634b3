"""`LazyTrainEngine`: the DeepSpeed engine whose parameters, activations, gradients and updates LazyTrain places."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from torch import nn

from lazytrain_plugin.errors import ConfigError, LazyTrainError, UnsupportedModelError
from lazytrain_plugin.integration import fused, hook, tensor_access
from lazytrain_plugin.integration.allocator import grow_by_pages
from lazytrain_plugin.integration.at_exit import finish_at_exit
from lazytrain_plugin.integration.checkpoint_mixin import CheckpointMixin
from lazytrain_plugin.integration.client_optimizer import make_adam, make_updater, optimizer_state_bits
from lazytrain_plugin.integration.compiled_layers import OTHER_COMPILERS_REFUSAL, modules_around, refuse_compiled
from lazytrain_plugin.integration.deepspeed_optimizer import LazyTrainOptimizer
from lazytrain_plugin.integration.error_prices import ErrorPrices
from lazytrain_plugin.integration.fused_modules import unfuse_modules
from lazytrain_plugin.integration.hf_units import RecordedOutputs, drop_caches
from lazytrain_plugin.integration.managed_model import manage, release, release_from_other_engines
from lazytrain_plugin.integration.plan_watch import PlanWatch
from lazytrain_plugin.integration.planning import Planner, count_tokens
from lazytrain_plugin.integration.several_ranks import (
    AgreedPlanner,
    describe_exchange,
    links_of,
    make_between_nodes,
    make_rank_group,
    refuse_for_several_ranks,
)
from lazytrain_plugin.integration.step_trace import finish_recording, record_steps
from lazytrain_plugin.integration.training_request import nvme_tier
from lazytrain_plugin.integration.watchdog import Watchdog
from lazytrain_plugin.kernels import native
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.profile.numa import NumaNode
from lazytrain_plugin.runtime import host_memory, near_device
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.train_state import ExecutorState

logger = logging.getLogger(__name__)

HOME_DTYPES = (torch.float32, torch.bfloat16)


class LazyTrainEngine(CheckpointMixin, DeepSpeedEngine):
    """A drop-in for `DeepSpeedEngine` at ZeRO stage 3, made by `deepspeed.initialize` under an enabled block.

    Raises:
        ConfigError: a config that LazyTrain can't honour.
        UnsupportedModelError: the model can't be streamed exactly.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lazytrain: ExecutorState | None = None
        self._window_begins = True
        self._plans_compiled = False
        config = hook.active_config() or hook.load_config(kwargs["config"])
        object.__setattr__(self, "_lazytrain_config", config)
        super().__init__(*args, dont_change_device=True, **kwargs)
        throughput = self._config.timers_config
        if "synchronized" not in throughput.model_fields_set:
            # The timer would wait for the device, and for every update and transfer under way, before each forward and
            # after each step. `step` waits for the gradients' norm, so the host's clock counts whole steps anyway.
            throughput.synchronized = False

    # What DeepSpeed's constructor calls.

    def _configure_distributed_model(self, model: nn.Module) -> None:
        release_from_other_engines(model)
        refuse_special_parameters(model)
        super()._configure_distributed_model(model)
        self._home_dtypes = home_dtypes(model, self.bfloat16_enabled(), self._keep_fp32_pattern())

    def _keep_fp32_pattern(self) -> Any:
        """DeepSpeed's pattern of names that stay in fp32 (versions before it had the setting: None)."""
        with contextlib.suppress(ImportError, AttributeError):
            from deepspeed.runtime.engine import keep_in_fp32_pattern

            return keep_in_fp32_pattern(self.module, self._config.keep_in_fp32_modules, torch.bfloat16)
        return None

    def _cast_module_mixed_precision(self, *args: Any, **kwargs: Any) -> None:
        """Weights are cast on their way home, so that the fp32 value can become the master."""

    def _broadcast_model(self) -> None:
        """The first placement gives every rank the first one's weights."""

    def _configure_basic_optimizer(self, model_parameters: Any) -> torch.optim.Optimizer:
        # DeepSpeed would compile its fused Adam here; only its hyper-parameters are needed.
        adam = make_adam(self.optimizer_name(), self.optimizer_params(), model_parameters)
        return adam if adam is not None else super()._configure_basic_optimizer(model_parameters)

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> LazyTrainOptimizer:
        config = self._lazytrain_config
        device = torch.device("cpu") if self.device.type == "cpu" else torch.device(self.device)
        ranks = make_rank_group(self.seq_data_parallel_group, device, config)
        local_size = 1 if ranks is None else ranks.local_size
        grow_by_pages(device)
        node = near_device.node_of(device)
        self._use_threads(config.optimizer.threads, local_size, node)
        refuse_parameters_of_others(optimizer, self.module)
        updater = make_updater(optimizer, config.optimizer.implementation)
        if ranks is not None:
            refuse_for_several_ranks(updater)
        found = discover(self.module)
        logger.info(found.statement(has_gpu=device.type == "cuda"))
        self._modules_around_units = modules_around(self.module, [unit.name for unit in found.units])
        refuse_compiled(self._modules_around_units)
        turn_off_gradient_checkpointing(self.module)
        between = None if ranks is None else make_between_nodes(ranks, config)
        make_planner = functools.partial(
            Planner,
            config,
            self.module,
            found,
            device,
            dtypes=self._home_dtypes,
            state_bits=optimizer_state_bits(optimizer, config),
            accumulation_steps=self.gradient_accumulation_steps(),
            native=updater is None or updater.native,
            least_tokens=self.train_micro_batch_size_per_gpu(),
            ranks=ranks,
            links=None if ranks is None else links_of(ranks, between, config),
        )
        if ranks is None:
            self._planner = make_planner()
        else:
            self._planner = AgreedPlanner(ranks, make_planner, adapts=config.plan.adapt and config.plan.path is None)
        with near_device.threads_on(node):
            executor = Executor(
                self.module,
                found,
                device,
                dtypes=self._home_dtypes,
                optimizer=optimizer,
                updater=updater,
                side_outputs=RecordedOutputs(),
                prepare_inputs=drop_caches,
                nvme=nvme_tier(config, local_world_size=local_size),
                ranks=ranks,
                average_gradients=self.gradient_average,
                between_nodes=between,
            )
        self._watchdog = Watchdog(config.watchdog_s, self.global_rank)
        self._plan_watch = PlanWatch(executor, self.gradient_accumulation_steps())
        wants_errors = ranks is None and self._planner.wants_errors
        self._error_prices = ErrorPrices(executor, self._planner.take_errors) if wants_errors else None
        if ranks is None or ranks.is_first:
            record_steps(config.trace, executor, self._planner)
        self._place(executor, self._planner.first_plan())
        if ranks is not None and ranks.num_nodes > 1:
            self.lazytrain_gradient_comm = executor.exchange.between
            logger.info(describe_exchange(executor.exchange))
        if config.fused_kernels and device.type == "cuda":
            fused.apply_fused_kernels(self.module, device)
        finish_at_exit(*executor.update_threads)
        self.lazytrain = ExecutorState(executor)
        tensor_access.manage(self.lazytrain)
        self._managed_parameters = {id(parameter) for parameter in self.module.parameters()}
        manage(self.module, executor)
        return LazyTrainOptimizer(optimizer, self.lazytrain, self.seq_data_parallel_group, self.gradient_clipping())

    def _use_threads(self, asked: int | None, local_size: int, node: NumaNode | None) -> None:
        """Threads of the CPU update, beside the GPU where there is a choice."""
        count = asked or native.default_num_threads(local_size)
        host_memory.prefer_node(None if node is None else node.index)
        if node is None:
            native.set_num_threads(count)
            return
        count = asked or min(count, len(node.cpus))
        logger.info(
            "the GPU is at NUMA node %d of %d: host memory and %d update threads there",
            node.index,
            node.num_nodes,
            count,
        )
        with near_device.threads_on(node):
            native.restart_threads(count)

    # A step.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        executor = self.lazytrain.executor
        if executor.closed:
            raise LazyTrainError(
                "this engine was destroyed, or its model was handed over to a newer one, and trains nothing any more; "
                "use the newer engine, or make one with deepspeed.initialize. (A Trainer destroys its engine when "
                "train() is called after evaluate() or train(): make a new Trainer over the same model)"
            )
        self._refuse_new_parameters()
        refuse_compiled(self._modules_around_units)
        training = self.module.training and torch.is_grad_enabled()
        self._plan_for_compiled_layers(training)
        if training:
            num_tokens = count_tokens(inputs, kwargs)
            plan = self._planner.plan_for(num_tokens)
            if plan is None and self._window_begins:
                plan = self._planner.better_plan()
            if plan is not None:
                self._place(executor, plan)
            self._plan_watch.ran(num_tokens)
            self._window_begins = False
        else:
            self._plan_watch.disturb()
        executor.begin_forward(training=training)
        with self._watchdog.phase("forward"):
            return super().forward(*inputs, **kwargs)

    def _place(self, executor: Executor, plan: PlacementPlan) -> None:
        with self._watchdog.phase("placing weights"):
            executor.place(plan)
        self._plan_watch.plan_changed(plan, self._planner.predicted(plan))

    @functools.wraps(DeepSpeedEngine.backward)
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed does this from a hook on the outputs, which a loss that doesn't come from them never calls.
        self.optimizer.set_gradient_accumulation_boundary(self.is_gradient_accumulation_boundary())
        with self._watchdog.phase("backward"):
            return super().backward(*args, **kwargs)

    @functools.wraps(DeepSpeedEngine.step)
    def step(self, *args: Any, **kwargs: Any) -> None:
        with self._watchdog.phase("optimizer step"):
            super().step(*args, **kwargs)

    @functools.wraps(CheckpointMixin.save_checkpoint)  # Trainer looks at signatures
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        self._plan_watch.disturb()
        with self._watchdog.phase("saving"):
            return super().save_checkpoint(*args, **kwargs)

    @functools.wraps(CheckpointMixin.load_checkpoint)
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self._watchdog.phase("loading"):
            return super().load_checkpoint(*args, **kwargs)

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> None:
        if self.lazytrain is None:
            return  # the planner runs the model on meta tensors while the engine is being made
        if self.training_dataloader is None:
            self.tput_timer.start()
        self._start_timers(self.engine_timers.forward_timers)

    def _forward_epilogue(self) -> None:
        if self.lazytrain is not None:
            self._stop_timers(self.engine_timers.forward_timers)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Gradients are where they belong already."""
        self.optimizer.set_gradient_accumulation_boundary(self.is_gradient_accumulation_boundary())

    def _take_model_step(self, lr_kwargs: Any) -> None:
        super()._take_model_step(lr_kwargs)
        fused.weights_changed(self.module)
        self._window_begins = True
        measured = self._plan_watch.step_ended()
        if measured is not None:
            self._planner.observe(measured)
        if self._error_prices is not None:
            self._error_prices.step_ended()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients leave the GPU at once and are summed at home, so that nothing can be held back."""
        yield

    def flush(self) -> None:
        """Waits until every optimizer update is done."""
        self.lazytrain.flush()

    # Users' other calls.

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles what each streamed layer computes; what is around the layers stays as it is.

        Raises:
            ConfigError: compiled autograd or a schedule, which are other compilers' ways; or CUDA graphs.
        """
        if compiled_autograd_enabled or schedule is not None:
            raise ConfigError(OTHER_COMPILERS_REFUSAL)
        options = {**(compile_kwargs or {}), "backend": backend or get_accelerator().get_compile_backend()}
        for unit in self.lazytrain.executor.units:
            unit.module.compile(**options)
        self._is_compiled, self._compile_kwargs = True, options

    def _plan_for_compiled_layers(self, training: bool) -> None:
        """Once, after layers were compiled: operators inside them can't be saved one by one any more."""
        executor = self.lazytrain.executor
        compiled = [unit for unit in executor.units if unit.is_compiled]
        if self._plans_compiled or not compiled:
            return
        for unit in compiled:
            unfuse_modules(unit.module)  # the compiler fuses by itself, and can't see into these
        fused.keep_heads_eager(self.module)
        self._plans_compiled = training or executor.ranks is None  # a rank may evaluate alone, and all of them plan
        if not self._plans_compiled:
            return
        logger.info("%d of %d streamed layers are compiled", len(compiled), len(executor.units))
        if (plan := self._planner.layers_compiled()) is not None:
            self._place(executor, plan)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("offload_states is not supported: LazyTrain's plan says where states rest")

    reload_states = offload_states

    def destroy(self) -> None:
        if self.lazytrain is not None:
            self._planner.close()
            finish_recording(self.lazytrain.executor)
            release(self.module, self.lazytrain.executor)
        super().destroy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an engine can't be pickled; save the model that it trains, torch.save(engine.module, path) or "
            "accelerator.unwrap_model(model), or a checkpoint with engine.save_checkpoint"
        )

    def _refuse_new_parameters(self) -> None:
        new = [name for name, p in self.module.named_parameters() if id(p) not in self._managed_parameters]
        if new:
            raise UnsupportedModelError(
                f"{new[0]} (and {len(new) - 1} more) became part of the model after the engine was made; add adapters, "
                "resize embeddings and replace layers before the Trainer (or accelerator.prepare) sees the model"
            )


def refuse_special_parameters(model: nn.Module) -> None:
    """Raises UnsupportedModelError for a parameter that is more than a dense tensor."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise UnsupportedModelError(
                f"{name} is a {type(parameter).__name__}: LazyTrain moves plain nn.Parameter weights only (quantized, "
                "lazy and sharded ones keep data elsewhere that would not move with them). Load the model unquantized "
                "in bf16 and run lazy modules once, or disable LazyTrain"
            )


def refuse_parameters_of_others(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    """Raises UnsupportedModelError if the optimizer is to train what is no part of the model: nobody would train it."""
    ours = set(model.parameters())
    groups = optimizer.param_groups if optimizer is not None else []
    others = [p for group in groups for p in group["params"] if p.requires_grad and p not in ours]
    if others:
        raise UnsupportedModelError(
            f"the optimizer holds {len(others)} parameters that are not in the model (the first has shape "
            f"{tuple(others[0].shape)}): make it after the model has its final form, and register what a loss trains "
            "as a submodule of the model"
        )


def home_dtypes(model: nn.Module, bf16: bool, keep_fp32: Any) -> dict[nn.Parameter, torch.dtype]:
    """Dtype of each weight at home: bf16 for a model that comes in fp32 under bf16, else what the model chose.

    Raises:
        UnsupportedModelError: fp16, fp64, fp8 or complex weights.
    """
    named = list(model.named_parameters())
    for name, parameter in named:
        if (parameter.is_floating_point() or parameter.is_complex()) and parameter.dtype not in HOME_DTYPES:
            raise UnsupportedModelError(
                f"{name} is {parameter.dtype}; LazyTrain trains bf16 and fp32 weights. Load the model with "
                "dtype=torch.bfloat16 (fp16 needs loss scaling, bf16 has fp32's range and does not)"
            )
    mixed = any(parameter.dtype == torch.bfloat16 for _, parameter in named)
    return {
        parameter: torch.bfloat16
        if bf16 and not mixed and parameter.is_floating_point() and not (keep_fp32 and keep_fp32.search(name))
        else parameter.dtype
        for name, parameter in named
    }


def turn_off_gradient_checkpointing(model: nn.Module) -> None:
    """The plan decides what is recomputed; checkpointing inside a unit would recompute it twice."""
    active = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in active:
        module.gradient_checkpointing = False
    if active:
        logger.info("gradient checkpointing is taken over by the plan, which decides per layer what is recomputed")
