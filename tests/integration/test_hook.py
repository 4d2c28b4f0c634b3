"""The wrapper around `deepspeed.initialize`, on a stand-in module: what it swaps, when, and what it refuses."""

import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.integration import hook


class LazyTrainEngine:
    """What the stand-in for the engine module offers; remembers the config that was active when it was made."""

    def __init__(self, config):
        self.config = config
        self.parsed = hook.active_config()


STAND_IN = """
import json
class DeepSpeedEngine:
    def __init__(self, config): self.config = config
class PipelineModule: pass
class zero:
    class Init:
        def __init__(self, module=None, config_dict_or_path=None, config=None): self.made = True
        def __enter__(self): return self
        def __exit__(self, *exc): pass
def load_ds_config(config):
    if isinstance(config, dict): return config
    with open(config) as file: return json.load(file)
def initialize(args=None, model=None, config=None, config_params=None, fail=False):
    config = config or config_params or args.deepspeed_config
    if fail: raise OSError("out of memory")
    return DeepSpeedEngine(config), None, None, None
"""


@pytest.fixture
def deepspeed(monkeypatch):
    monkeypatch.setattr(hook, "provide_rendezvous", lambda: None)  # it would write to this process's environment
    module = ModuleType("deepspeed")
    exec(STAND_IN, vars(module))
    module.plain_engine = module.DeepSpeedEngine
    engine_module = ModuleType("lazytrain_plugin.integration.deepspeed_engine")
    engine_module.LazyTrainEngine = LazyTrainEngine
    monkeypatch.setitem(sys.modules, engine_module.__name__, engine_module)
    hook.patch_module(module)
    return module


def config(**block):
    return {"zero_optimization": {"stage": 3}, "lazytrain": block}


@pytest.fixture(params=["config", "config_params", "args", "path", "positional"])
def call(request, deepspeed, tmp_path):
    """Calls initialize with a config, given in each of the ways there are."""

    def initialize(ds_config):
        match request.param:
            case "config":
                return deepspeed.initialize(config=ds_config)
            case "config_params":
                return deepspeed.initialize(config_params=ds_config)
            case "args":
                return deepspeed.initialize(SimpleNamespace(deepspeed_config=ds_config))
            case "positional":
                return deepspeed.initialize(None, None, ds_config)
            case "path":
                path = tmp_path / "ds.json"
                path.write_text(json.dumps(ds_config))
                return deepspeed.initialize(config=str(path))

    return initialize


def test_enabled_block_makes_our_engine_with_the_parsed_config(call, deepspeed):
    engine, *_ = call(config(gpu_memory_gib=20))
    assert type(engine) is LazyTrainEngine
    assert engine.parsed.gpu_memory_gib == 20
    assert deepspeed.DeepSpeedEngine is deepspeed.plain_engine
    assert hook.active_config() is None


@pytest.mark.parametrize("ds_config", [{"zero_optimization": {"stage": 2}}, config(enabled=False)])
def test_no_block_or_a_disabled_one_gives_plain_deepspeed(call, deepspeed, ds_config):
    engine, *_ = call(ds_config)
    assert type(engine) is deepspeed.plain_engine


@pytest.mark.parametrize(("key", "warned"), [("lazytrian", True), ("lazy_train", True), ("comms_logger", False)])
def test_a_misspelt_block_is_named(deepspeed, caplog, key, warned):
    logging.getLogger("lazytrain_plugin").addHandler(caplog.handler)
    engine, *_ = deepspeed.initialize(config={"zero_optimization": {"stage": 3}, key: {}})
    logging.getLogger("lazytrain_plugin").removeHandler(caplog.handler)
    assert type(engine) is deepspeed.plain_engine
    assert (f'"{key}" that nobody reads; did you mean "lazytrain"' in caplog.text) == warned


def test_a_wrong_block_or_a_conflict_stops_before_an_engine_is_made(call):
    with pytest.raises(ConfigError, match='did you mean "fidelity"'):
        call(config(fidelty="exact"))
    with pytest.raises(ConfigError, match="bf16"):
        call({**config(), "fp16": {"enabled": True}})


def test_the_plain_class_is_back_after_a_failure(deepspeed):
    with pytest.raises(OSError, match="out of memory"):
        deepspeed.initialize(config=config(), fail=True)
    assert deepspeed.DeepSpeedEngine is deepspeed.plain_engine
    assert hook.active_config() is None


def test_a_pipeline_module_is_refused(deepspeed):
    with pytest.raises(ConfigError, match="PipelineModule"):
        deepspeed.initialize(model=deepspeed.PipelineModule(), config=config())


def test_wrong_arguments_get_the_error_of_the_wrapped_function(deepspeed):
    with pytest.raises(TypeError, match="modle"):
        deepspeed.initialize(modle=None, config=config())
    assert deepspeed.initialize(config="missing.json")[0].config == "missing.json"


def test_patching_twice_wraps_once(deepspeed):
    wrapped = deepspeed.initialize
    hook.patch_module(deepspeed)
    assert deepspeed.initialize is wrapped


def test_zero_init_does_nothing_under_the_block_only(deepspeed, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))
    for enabled in (config(), str(path)):
        with deepspeed.zero.Init(config_dict_or_path=enabled) as context:
            assert context is None
        assert not hasattr(deepspeed.zero.Init(None, enabled), "made")
    for plain in ({"zero_optimization": {"stage": 3}}, config(enabled=False), None):
        assert deepspeed.zero.Init(config_dict_or_path=plain).made


def test_activation_is_logged_once(deepspeed, monkeypatch):
    lines = []
    monkeypatch.setattr(hook.logger, "info", lambda message, *args: lines.append(message % args))
    deepspeed.initialize(config=config(fidelity="balanced"))
    deepspeed.initialize(config=config(enabled=False))
    assert lines == ["active: fidelity balanced, 8-bit optimizer states, native update, plan from the first batch"]


def test_small_shared_memory_is_said_at_the_start(deepspeed, monkeypatch):
    """S-43: before a loader worker dies with a bus error."""
    lines = []
    monkeypatch.setattr(hook.logger, "warning", lambda message, *args: lines.append(message % args))
    for small in ("64.0 MiB", None):
        monkeypatch.setattr(hook, "small_shared_memory", lambda small=small: small)
        deepspeed.initialize(config=config())
        assert len(lines) == 1 and "64.0 MiB" in lines[0] and "--shm-size" in lines[0]


def test_load_config_refuses_a_config_without_an_enabled_block():
    with pytest.raises(ConfigError, match="no enabled"):
        hook.load_config({"zero_optimization": {"stage": 3}})


@pytest.mark.parametrize(("world_size", "built"), [(None, 0), ("1", 0), ("2", 1)])
def test_one_process_compiles_nothing_at_start(monkeypatch, world_size, built):
    """DeepSpeed's op for all-reduce among CPU ranks needs a compiler, a minute, and sometimes a stale lock removed."""
    import deepspeed  # noqa: F401

    comm = sys.modules["deepspeed.comm.torch"]  # `deepspeed.comm.torch` is torch itself
    builds = []
    monkeypatch.setattr(comm, "build_shm_op", lambda: builds.append(1))
    hook._patch_shared_memory_op()
    monkeypatch.setattr(hook, "wait_for_builder", lambda: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    comm.build_shm_op()
    assert len(builds) == built
