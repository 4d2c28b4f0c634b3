"""When a plan is made in training: before the first batch if its size is known, else at it; again for a larger one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lazytrain_plugin.config.schema import LazyTrainConfig
from lazytrain_plugin.errors import InfeasiblePlanError, LazyTrainError, PlanMismatchError
from lazytrain_plugin.integration import several_ranks
from lazytrain_plugin.integration.plan_cache import PlanCache
from lazytrain_plugin.integration.plan_watch import ObservedStep
from lazytrain_plugin.integration.training_request import training_machine, training_request
from lazytrain_plugin.integration.unit_times import scaled, timed_profile
from lazytrain_plugin.plan.background import BackgroundSolve
from lazytrain_plugin.plan.bits import choose_bits_again, plan_error
from lazytrain_plugin.plan.check import load_plan_file
from lazytrain_plugin.plan.cluster import Cluster
from lazytrain_plugin.plan.fidelity import lossy_choices
from lazytrain_plugin.plan.greedy import explained
from lazytrain_plugin.plan.launches import BOUND_FRAC, launches_are_slower
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.refusal import feasible
from lazytrain_plugin.plan.request import WHOLE_STRATEGIES, PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import StepTimes, simulate
from lazytrain_plugin.plan.summary import summarize_plan
from lazytrain_plugin.plan.timeline import build_timeline
from lazytrain_plugin.profile.extract import extract_model_profile
from lazytrain_plugin.runtime.discovery import Discovery
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.units import gib_to_bytes
from lazytrain_plugin.vocab import Activations, Fidelity, Shard, Tier, Updater

logger = logging.getLogger(__name__)

DRIFT_FRAC = 0.1
"""How far a measured rate is from the planned one before it is worth a search."""
SWAP_GAIN_FRAC = 0.03
"""What another plan must gain, replayed with the measured rates, before weights are moved for it."""
LESS_ERROR_FRAC = 0.1
"""By how much other bits must lower a plan's error before they are taken in a run."""
MOST_SWAPS = 4
"""Per run: measurements are noisy, and moving costs a step or two."""


class Planner:
    """Makes plans for one model on this machine, or follows the one that the user fixed."""

    def __init__(
        self,
        config: LazyTrainConfig,
        model: nn.Module,
        discovery: Discovery,
        device: torch.device,
        *,
        dtypes: dict[nn.Parameter, torch.dtype],
        state_bits: int,
        accumulation_steps: int,
        native: bool = True,
        least_tokens: int = 1,
        ranks: RankGroup | None = None,
        links: Cluster | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._links = links
        self._discovery = discovery
        self._device = device
        self._state_bits = state_bits
        self._accumulation_steps = accumulation_steps
        self._native = native
        self._least_tokens = least_tokens
        self._planned_tokens: int | None = None
        self._observed: dict[str, float] = {}
        """Rates of the machine that steps of this model have shown."""
        self.request: PlanRequest | None = None
        self._errors: dict[str, dict[int, float]] | None = None
        """Error prices as a layer of this model has shown them."""
        self._prices_are_new = False
        """They came after the current plan."""
        self._search: BackgroundSolve | None = None
        self._current: PlacementPlan | None = None
        self._compiled = False
        self._swaps_left = MOST_SWAPS if config.plan.adapt else 0
        self._cache = PlanCache(enabled=config.plan.cache)
        self._fixed = self._load_fixed_plan()
        if self._fixed is None:
            self.model_profile = extract_model_profile(
                model,
                [(unit.name, unit.module) for unit in discovery.units],
                [(unit.name, [p for _, p in unit.parameters]) for unit in discovery.stem],
                fused_kernels=config.fused_kernels and device.type == "cuda",
                dtypes=dtypes,
            )
            self._untimed_profile = self._timed_profile = self.model_profile
            """The untimed one is the same in every run: what is kept between runs is looked up by it."""
            local_size = 1 if ranks is None else ranks.local_size
            self._measured_hardware = training_machine(config, device, native=native, local_world_size=local_size)
            if ranks is not None:
                self._measured_hardware = several_ranks.shared_hardware(self._measured_hardware, ranks)
            if self._measured_hardware.has_gpu:  # a CPU takes seconds for a layer, and decides little
                self._time_units(model, dtypes)
            self._take_rates({})
            self._errors = self._cache.load_errors(self._untimed_profile)

    def _take_rates(self, rates: dict[str, float]) -> None:
        """Machine and model as measured alone, with `rates` of real steps instead of the machine's own."""
        self.hardware = replace(self._measured_hardware, **rates)
        # Layers that were measured one by one keep their proportions.
        slower = self._measured_hardware.layer_flop_frac / self.hardware.layer_flop_frac
        launches = self.hardware.launch_s / (self._measured_hardware.launch_s or 1.0)
        self.model_profile = scaled(self._timed_profile, slower, launches)

    def _time_units(self, model: nn.Module, dtypes: dict[nn.Parameter, torch.dtype]) -> None:
        num_tokens = self._config.max_tokens or self._least_tokens * self.model_profile.sequence_length
        self._timed_profile = timed_profile(
            self._untimed_profile,
            model,
            self._discovery,
            self._device,
            machine=self._measured_hardware,
            cache=self._cache,
            dtypes=dtypes,
            fused_kernels=self._config.fused_kernels and self._device.type == "cuda",
            num_tokens=num_tokens,
            sequence_length=max(1, num_tokens // self._least_tokens),
            budget_bytes=gib_to_bytes(self._config.gpu_memory_gib) or self._measured_hardware.gpu_free_bytes,
        )

    def _load_fixed_plan(self) -> PlacementPlan | None:
        if self._config.plan.path is None:
            return None
        shards_job = self._ranks is not None and self._ranks.shards_job
        return load_plan_file(
            self._config.plan.path,
            {unit.name for unit in (*self._discovery.units, *self._discovery.stem)},
            state_bits=self._state_bits,
            gradient_bits=self._config.resting_gradient_bits,
            activation_bits=self._config.activation_bits,
            shard=Shard.JOB if shards_job else Shard.NODE,
        )

    def first_plan(self) -> PlacementPlan:
        """What holds before the first batch is known."""
        if self._fixed is not None:
            return self._fixed
        if self._config.max_tokens is not None:
            return self._plan(self._config.max_tokens)
        self._refuse_what_never_fits()
        return self._everything_on_the_cpu()

    def _refuse_what_never_fits(self) -> None:
        """Before weights move, whatever the first batch will be.

        Raises:
            InfeasiblePlanError: a micro-batch with one token in each sequence fits nowhere.
        """
        request = self._request_for(self._least_tokens)
        if not feasible(build_problem(self.model_profile, self.hardware, request)):
            make_plan(
                self.model_profile, self.hardware, request
            )  # has more to choose from, else it says what is missing

    def layers_compiled(self) -> PlacementPlan | None:
        """From now on plans are for compiled layers, which keep all they save or nothing; a new plan if one is needed.

        Raises:
            PlanMismatchError: the user's own plan saves single operators.
        """
        self._compiled = True
        if self._fixed is None:
            return None if self._planned_tokens is None else self._plan(self._planned_tokens)
        for unit in self._fixed.units:
            whole = unit.activations in WHOLE_STRATEGIES
            if not whole or (unit.activations == Activations.KEEP and min(unit.saved_bits, unit.boundary_bits) < 16):
                raise PlanMismatchError(
                    f"{self._config.plan.path} saves {unit.activations} of {unit.name} in {unit.saved_bits} bits, and "
                    "a compiled layer keeps what it saves whole, in 16 bits, or nothing; plan with keep and recompute "
                    "only, or train without torch.compile"
                )
        return None

    def plan_for(self, num_tokens: int | None) -> PlacementPlan | None:
        """A new plan if a batch of `num_tokens` needs one."""
        if self._fixed is not None or num_tokens is None:
            return None
        if self._planned_tokens is not None and num_tokens <= self._planned_tokens:
            return None
        if self._planned_tokens is not None:
            logger.info(
                "a batch of %d tokens is larger than the %d that the plan is for: planning again "
                '(set "max_tokens" to plan once)',
                num_tokens,
                self._planned_tokens,
            )
        return self._plan(num_tokens)

    def _plan(self, num_tokens: int) -> PlacementPlan:
        self.close()  # a search for smaller batches is of no use
        request = self._request_for(num_tokens)
        rates = self._cache.load_rates(self._untimed_profile, self._measured_hardware, num_tokens)
        self._take_rates(rates)
        found = self._cache.load_plan(self.model_profile, self.hardware, request)
        try:
            plan = found or make_plan(self.model_profile, self.hardware, request)
        except InfeasiblePlanError:
            self._take_rates(self._observed)  # the plan in place stays, and a smaller batch gets one of its own
            raise
        self._planned_tokens, self.request, self._observed = num_tokens, request, rates
        if found is None:
            self._cache.store_plan(self.model_profile, self.hardware, request, plan)
        sources = (["found in the cache"] if found else []) + (
            ["with rates that earlier steps showed"] if rates else []
        )
        self._announce(plan, f" ({', '.join(sources)})" if sources else "")
        self._current = plan
        return plan

    def _request_for(self, num_tokens: int) -> PlanRequest:
        request = training_request(
            self._config,
            num_tokens,
            state_bits=self._state_bits,
            accumulation_steps=self._accumulation_steps,
            native=self._native,
        )
        if self._ranks is not None:
            request = several_ranks.shared_request(request, self._ranks, self._links)
        if self._compiled:
            strategies = request.capabilities.strategies & WHOLE_STRATEGIES
            capabilities = replace(request.capabilities, strategies=strategies)
            request = replace(request, capabilities=capabilities, activation_bits=16)
        return replace(request, gradient_errors=self._errors)

    @property
    def wants_errors(self) -> bool:
        """Whether error prices of this model are still to be measured."""
        return self._fixed is None and self._errors is None

    def take_errors(self, errors: dict[str, dict[int, float]]) -> None:
        """Error prices that a layer has shown, for this plan's bits and the next plan, in this run or another."""
        self._errors = errors
        path = self._cache.store_errors(self._untimed_profile, errors)
        if self._config.plan.cache:
            logger.info("these error prices are kept in %s (lazytrain plan --error-prices)", path)
        if self.request is not None:
            self.request = replace(self.request, gradient_errors=errors)
            self._prices_are_new = self._swaps_left > 0

    def _plan_with_less_error(self) -> PlacementPlan | None:
        """The current placement with other bits, if the prices that a layer has shown make those worth a change."""
        self._prices_are_new = False
        problem, errors = self.problem(), self._errors
        plan = choose_bits_again(problem, self._current)
        before, after = plan_error(self._current, errors), plan_error(plan, errors)
        if after > before * (1 - LESS_ERROR_FRAC):
            logger.info("bits of activations stay: by the measured prices others would not be much less off")
            return None
        self._swaps_left -= 1
        step_s = simulate(problem, plan).step_s
        plan = explained(problem, plan, step_s, never_above_s=step_s)
        self._announce(
            plan, f", its bits chosen by measured prices (gradients {after:.1%} off instead of {before:.1%})"
        )
        self._current = plan
        return plan

    def _announce(self, plan: PlacementPlan, remark: str) -> None:
        problem = self.problem()
        table = summarize_plan(problem, plan, simulate(problem, plan))
        logger.info("plan for %d tokens%s:\n%s", self._planned_tokens, remark, table)
        for choice in lossy_choices(plan, self.model_profile, self.hardware, self.request):
            logger.info("lossy: %s", choice)

    # What steps show.

    def predicted(self, plan: PlacementPlan) -> StepTimes | None:
        """The replay of a plan that this planner made; None for one that the user fixed."""
        if self.request is None:
            return None
        return simulate(self.problem(), plan)

    def problem(self) -> PlacementProblem:
        """What the current request asks, with the rates known now."""
        return build_problem(self.model_profile, self.hardware, self.request)

    def plan_again(self) -> PlacementPlan:
        """A plan for the same batches with the rates known now, made while the caller waits."""
        self.close()
        self._current = make_plan(self.model_profile, self.hardware, self.request)
        return self._current

    def timeline(self) -> dict[str, Any] | None:
        """The current plan's step as a picture's data; None for a plan that the user fixed."""
        if self.request is None or self._current is None:
            return None
        title = f"{self.model_profile.name}, {self.request.max_tokens} tokens on {self.hardware.name}"
        return build_timeline(self.problem(), self._current, title=title)

    def observe(self, measured: ObservedStep) -> None:
        """Takes over the rates of real steps; a search for a better plan starts where they are far from planned."""
        if self._current is None or self.request is None or measured.compute_s <= 0:
            return
        hardware, factor = self.hardware, launches_are_slower(self.problem(), self._current, measured.launches_s)
        rates = {"launch_s": hardware.launch_s * factor} if factor else {}
        self._take_rates({**self._observed, **rates})  # what the host takes is not the layers' fault
        predicted = self.predicted(self._current)
        share = (predicted.compute_s + predicted.launch_waits_s) / measured.compute_s
        rates["layer_flop_frac"] = min(1.0, hardware.layer_flop_frac * share)
        if measured.update_parameters_per_s is not None:
            name = f"cpu_update_{self._state_bits}bit_{'shared_' if hardware.has_gpu else ''}parameters_per_s"
            rates[name] = measured.update_parameters_per_s
        drift = {name: rate / getattr(hardware, name) - 1 for name, rate in rates.items()}
        if predicted.launch_waits_s <= BOUND_FRAC * predicted.step_s:
            drift.pop("launch_s", None)  # the host is fast enough
        # A run that accumulates shows no update rate; what an earlier one showed still holds.
        of = self._untimed_profile, self._measured_hardware, self._planned_tokens
        rates = {**self._cache.load_rates(*of), **self._observed, **rates}
        self._observed = rates
        self._cache.store_rates(*of, rates)
        self._take_rates(rates)
        # Without a GPU a plan decides only what is kept, and memory decides that.
        if self._swaps_left and hardware.has_gpu and max(map(abs, drift.values())) > DRIFT_FRAC:
            shown = ", ".join(f"{name} {change:+.0%}" for name, change in drift.items())
            logger.info("steps are not as planned (%s): planning again in the background", shown)
            self.close()
            self._search = BackgroundSolve(self.model_profile, self.hardware, self.request)

    def better_plan(self) -> PlacementPlan | None:
        """Once a search in the background is done: its plan, if that is worth moving weights for. Once error prices of
        this model are known: the current placement with the bits that follow from them."""
        if self._prices_are_new and self._current is not None and self._search is None:
            return self._plan_with_less_error()
        if self._search is None:
            return None
        try:
            plan = self._search.poll()
        except LazyTrainError as error:
            logger.warning("%s; the plan stays as it is", error)
            self.close()
            return None
        if plan is None:
            return None
        self.close()
        before_s, after_s = self.predicted(self._current).step_s, self.predicted(plan).step_s
        if after_s > before_s * (1 - SWAP_GAIN_FRAC):
            logger.info(
                "the plan stays: the best for the measured rates would take %.3g s, not %.3g s", after_s, before_s
            )
            return None
        self._swaps_left -= 1
        self._cache.store_plan(self.model_profile, self.hardware, self.request, plan)
        self._announce(plan, f", made again with measured rates ({after_s:.3g} s a step instead of {before_s:.3g} s)")
        self._current = plan
        return plan

    def close(self) -> None:
        """Ends a search that is under way. Safe to call twice."""
        if self._search is not None:
            self._search.cancel()
            self._search = None

    def _everything_on_the_cpu(self) -> PlacementPlan:
        gradient_bits = self._config.resting_gradient_bits
        stem_home = Tier.GPU if self._device.type == "cuda" else Tier.CPU
        # A checkpoint may be loaded into these states: they must not have fewer bits than those of the next plan.
        request, profile = self._request_for(self._least_tokens), self.model_profile
        bits = {unit.name: request.state_bits_of(unit.role) for unit in (*profile.units, *profile.stem)}
        unit = lambda found, weights: UnitPlan(  # noqa: E731
            name=found.name,
            weights=weights,
            states=Tier.CPU,
            updater=Updater.CPU,
            state_bits=bits[found.name],
            gradient_bits=gradient_bits,
        )
        return PlacementPlan(
            fidelity=Fidelity.EXACT if gradient_bits == 16 else Fidelity.COMPACT,
            units=tuple(unit(found, Tier.CPU) for found in self._discovery.units),
            stem=tuple(unit(found, stem_home) for found in self._discovery.stem),
        )


def count_tokens(inputs: tuple, kwargs: Mapping[str, Any]) -> int | None:
    """Tokens (batch x sequence) of a model call: from `input_ids` or `inputs_embeds`, else the first 2-D argument."""
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids"):
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            return value.shape[0] * value.shape[1]
    for value in (*inputs, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            return value.shape[0] * value.shape[1]
    return None
