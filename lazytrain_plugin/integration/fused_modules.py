"""Fused RMSNorm, SwiGLU and RoPE for the modules of any Hugging Face model, found by what they compute.

No list of model types: a module class is probed once, on a few random numbers on the CPU. It is fused only if its
forward gives bit for bit what one of the known formulas gives; otherwise it keeps its own forward. Patches sit on
module instances (`module.forward`), so other models in the process, and a model after `remove`, are untouched. RoPE
is a module-level function in transformers: it is replaced by one that asks whether a patched attention is running in
this thread, and put back when the last patched attention is gone.
"""

import copy
import functools
import inspect
import sys
import threading
import weakref
from types import MethodType

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from lazytrain_plugin.kernels.elementwise import NormRounding, rms_norm, rope, swiglu

_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROPE_NAME = "apply_rotary_pos_emb"
_verdicts: dict[tuple, object] = {}  # what a probe found, per class and settings; holds no module


def is_patched(module: nn.Module) -> bool:
    """Whether somebody (Accelerate, Liger, we) put a forward on this instance; we only ever patch a class's own."""
    return "forward" in vars(module)


def bind_forward(module: nn.Module, forward) -> None:
    """A bound method, so that a deepcopy of the model is patched on its own instances."""
    module.forward = MethodType(forward, module)


def unbind_forward(module: nn.Module, forward) -> bool:
    """Takes `forward` off again if it is still what is there."""
    if getattr(vars(module).get("forward"), "__func__", None) is not forward:
        return False
    del module.forward
    return True


# --- RMSNorm ---------------------------------------------------------------------------------------------------------


def fuse_rms_norms(model: nn.Module) -> str:
    """Patches every module whose class name ends in RMSNorm and that means one of `NormRounding`; says what it did."""
    candidates = [m for m in model.modules() if type(m).__name__.endswith(("RMSNorm", "T5LayerNorm"))]
    left = []
    for norm in candidates:
        rounding = None if is_patched(norm) else _norm_rounding(norm)
        if rounding is None:
            left.append(norm)
            continue
        vars(norm)["_lazytrain_norm_rounding"] = rounding
        bind_forward(norm, _rms_norm_forward)
    return _report("RMSNorm", candidates, left)


def _rms_norm_forward(self, x, *args, **kwargs):
    weight = self.weight
    if args or kwargs or x.dtype != weight.dtype or x.dtype not in _FUSED_DTYPES or weight.device != x.device:
        return type(self).forward(self, x, *args, **kwargs)
    return rms_norm(x, weight, _epsilon(self), vars(self)["_lazytrain_norm_rounding"])


def _epsilon(norm: nn.Module) -> float | None:
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _norm_rounding(norm: nn.Module) -> NormRounding | None:
    """The formula of this norm, or None if it is none of ours."""
    weight = norm._parameters.get("weight")
    if weight is None or weight.dim() != 1 or _epsilon(norm) is None or len(norm._parameters) != 1 or norm._modules:
        return None
    settings = tuple(sorted((k, v) for k, v in vars(norm).items() if isinstance(v, bool | int | float | str)))
    key = (type(norm), settings)
    if key not in _verdicts:
        matching = (r for r in NormRounding if all(_norm_matches(norm, r, d) for d in (torch.float32, torch.bfloat16)))
        _verdicts[key] = next(matching, None)
    return _verdicts[key]


def _norm_matches(norm: nn.Module, rounding: NormRounding, dtype: torch.dtype) -> bool:
    num_columns = 48
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(norm)  # shares attributes, not the parameter
    probe._parameters = {"weight": nn.Parameter(_random(generator, num_columns, dtype=dtype), requires_grad=False)}
    x = 3.0 * _random(generator, 5, num_columns, dtype=dtype)
    try:
        with torch.no_grad():
            expected = type(norm).forward(probe, x)
    except Exception:  # a forward with other arguments or other needs: not ours
        return False
    return _same_bits(expected, rms_norm(x, probe.weight, _epsilon(norm), rounding))


# --- SwiGLU ----------------------------------------------------------------------------------------------------------


def fuse_swiglus(model: nn.Module) -> str:
    """Patches every gate_proj/up_proj/down_proj module with SiLU that computes down(silu(gate(x)) * up(x))."""
    candidates = [m for m in model.modules() if _has_gated_projections(m)]
    left = []
    for mlp in candidates:
        if not is_patched(mlp) and _is_silu(getattr(mlp, "act_fn", None)) and _is_swiglu(mlp):
            bind_forward(mlp, _swiglu_forward)
        else:
            left.append(mlp)
    return _report("SwiGLU", candidates, left)


def _swiglu_forward(self, x):
    gate, up = self.gate_proj(x), self.up_proj(x)
    if gate.dtype != up.dtype or gate.dtype not in _FUSED_DTYPES or gate.shape != up.shape:
        return self.down_proj(self.act_fn(gate) * up)
    # A hook on a projection may have kept its output for somebody who looks at it after backward.
    projections = (self.gate_proj, self.up_proj)
    watched = any(projection._forward_hooks for projection in projections)
    private = not watched and all(map(_is_plain_linear, projections)) and not _has_any_global_hook()
    return self.down_proj(swiglu(gate, up, consume=not watched, private=private))


def _is_plain_linear(projection: nn.Module) -> bool:
    """Whether its output is a matrix product that nothing else has looked at."""
    return type(projection) is nn.Linear and not is_patched(projection) and not projection._backward_hooks


def _has_gated_projections(module: nn.Module) -> bool:
    return all(isinstance(module._modules.get(name), nn.Module) for name in ("gate_proj", "up_proj", "down_proj"))


def _is_silu(activation) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _is_swiglu(mlp: nn.Module) -> bool:
    settings = tuple(sorted((k, v) for k, v in vars(mlp).items() if isinstance(v, bool | int | float | str)))
    key = (type(mlp), settings)
    if key not in _verdicts:
        _verdicts[key] = _swiglu_matches(mlp)
    return _verdicts[key]


def _swiglu_matches(mlp: nn.Module) -> bool:
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (nn.Linear(*sizes, device="cpu", dtype=torch.float32) for sizes in ((8, 12), (8, 12), (12, 8)))
    probe = copy.copy(mlp)
    probe._modules = {**mlp._modules, "gate_proj": gate, "up_proj": up, "down_proj": down}
    x = _random(generator, 5, 8)
    try:
        with torch.no_grad():
            return _same_bits(type(mlp).forward(probe, x), down(nn.functional.silu(gate(x)) * up(x)))
    except Exception:
        return False


# --- RoPE ------------------------------------------------------------------------------------------------------------

_running = threading.local()  # .depth > 0: a patched attention's forward runs in this thread
_patched_attentions: dict[str, weakref.WeakSet] = {}  # module that defines the function -> attentions that fuse it
_patch_lock = threading.Lock()


def fuse_ropes(model: nn.Module) -> str:
    """Patches every attention whose forward calls its modeling file's standard `apply_rotary_pos_emb`."""
    candidates = [m for m in model.modules() if _rope_home(m) is not None]
    left = []
    for attention in candidates:
        home = sys.modules[_rope_home(attention)]
        original = getattr(getattr(home, _ROPE_NAME), "_lazytrain_original", getattr(home, _ROPE_NAME))
        if is_patched(attention) or not _is_standard_rope(original):
            left.append(attention)
            continue
        with _patch_lock:
            if getattr(home, _ROPE_NAME) is original:
                setattr(home, _ROPE_NAME, _dispatching(original))
            _patched_attentions.setdefault(home.__name__, weakref.WeakSet()).add(attention)
        bind_forward(attention, _attention_forward)
    return _report("RoPE", candidates, left)


def _attention_forward(self, *args, **kwargs):
    _running.depth = getattr(_running, "depth", 0) + 1
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        _running.depth -= 1


def _dispatching(original):
    @functools.wraps(original)
    def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
        if getattr(_running, "depth", 0) and not args and not kwargs and _rope_fits(q, k, cos, sin):
            return rope(q, k, cos, sin)
        return original(q, k, cos, sin, *args, **kwargs)

    apply_rotary_pos_emb._lazytrain_original = original
    return apply_rotary_pos_emb


def _rope_fits(q, k, cos, sin) -> bool:
    tensors = (q, k, cos, sin)
    return (
        all(isinstance(t, torch.Tensor) and t.dtype == q.dtype and t.device == q.device for t in tensors)
        and q.dtype in _FUSED_DTYPES
        and q.dim() == k.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        and q.shape[-1] % 2 == 0
        and q.shape[2] == k.shape[2] == cos.shape[1]
        and q.shape[0] == k.shape[0]
        and not (cos.requires_grad or sin.requires_grad)
    )


def _rope_home(module: nn.Module) -> str | None:
    """Name of the Python module whose global `apply_rotary_pos_emb` this module's forward calls."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or _ROPE_NAME not in code.co_names or _ROPE_NAME not in forward.__globals__:
        return None
    home = forward.__globals__.get("__name__")
    return home if home in sys.modules and sys.modules[home].__dict__ is forward.__globals__ else None


def _is_standard_rope(function) -> bool:
    if function not in _verdicts:
        _verdicts[function] = _rope_matches(function)
    return _verdicts[function]


def _rope_matches(function) -> bool:
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        q, k = _random(generator, 2, 3, 5, 8, dtype=dtype), _random(generator, 2, 1, 5, 8, dtype=dtype)
        cos, sin = _random(generator, 2, 5, 8, dtype=dtype), _random(generator, 2, 5, 8, dtype=dtype)
        try:
            expected = function(q, k, cos, sin)
            if not all(_same_bits(a, b) for a, b in zip(expected, rope(q, k, cos, sin), strict=True)):
                return False
        except Exception:
            return False
    return True


# A bound method is pickled by name: under this one an unpickled model has its class's own forward again.
for _forward in (_rms_norm_forward, _swiglu_forward, _attention_forward):
    _forward.__name__ = "forward"


# --- all -------------------------------------------------------------------------------------------------------------


def unfuse_modules(model: nn.Module) -> None:
    """Takes every patch of this file off `model`; harmless on a model that has none."""
    for module in model.modules():
        if unbind_forward(module, _rms_norm_forward):
            vars(module).pop("_lazytrain_norm_rounding", None)
        unbind_forward(module, _swiglu_forward)
        if unbind_forward(module, _attention_forward):
            with _patch_lock:
                for home_name, attentions in list(_patched_attentions.items()):
                    attentions.discard(module)
                    if not attentions:
                        _restore_rope(sys.modules[home_name])
                        del _patched_attentions[home_name]


def _restore_rope(home) -> None:
    original = getattr(getattr(home, _ROPE_NAME), "_lazytrain_original", None)
    if original is not None:  # else somebody has replaced our function since
        setattr(home, _ROPE_NAME, original)


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def _same_bits(a, b) -> bool:
    return isinstance(a, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _report(what: str, candidates: list[nn.Module], left: list[nn.Module]) -> str:
    if not candidates:
        return f"{what}: not applied, none in this model"
    names = ", ".join(sorted({type(m).__name__ for m in left}))
    reason = f"; {names} compute something else or are patched already" if left else ""
    fused = len(candidates) - len(left)
    return f"{what}: {f'{fused} of {len(candidates)} fused' if fused else 'not applied'}{reason}"
