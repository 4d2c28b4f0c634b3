"""From a DeepSpeed config to `LazyTrainConfig`, strictly: nothing is guessed and nothing is ignored.

Every error says which key, what is wrong with it and what to write instead.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import fields, replace
from typing import Any

from lazytrain_plugin.config.folders import (
    check_distinct_folders,
    check_nvme_folder,
    check_nvme_space,
    check_output_file,
    folder_of,
)
from lazytrain_plugin.config.schema import BLOCK, LazyTrainConfig, Rule, show_json
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.units import GIB

_UNIT_BYTES = {
    "": GIB,
    "k": 10**3,
    "ki": 2**10,
    "m": 10**6,
    "mi": 2**20,
    "g": 10**9,
    "gi": GIB,
    "t": 10**12,
    "ti": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def lazytrain_block(ds_config: Any) -> dict | None:
    """The block of a DeepSpeed config dict, or None if there is none or it is switched off.

    Only a literal `"enabled": false` switches it off; anything else that isn't a boolean is left for `parse_block`
    to refuse. Raises ConfigError if the block is not an object.
    """
    if not isinstance(ds_config, dict) or BLOCK not in ds_config:
        return None
    block = ds_config[BLOCK]
    if not isinstance(block, dict):
        raise ConfigError(
            f'"{BLOCK}" is {show_json(block)}; expected an object, write "{BLOCK}": {{}} for the defaults.'
        )
    return None if block.get("enabled", True) is False else block


def parse_block(block: dict) -> LazyTrainConfig:
    """Parses the block; raises ConfigError for an unknown key, a wrong type, unit or value, or a missing file."""
    config = _with_home_folders(_parse(block, LazyTrainConfig))
    if config.plan.path is not None:
        _check_file(f"{BLOCK}.plan.path", config.plan.path)
    if config.trace.path is not None:
        check_output_file(f"{BLOCK}.trace.path", config.trace.path)
        if config.trace.path == config.plan.path:
            raise ConfigError(f'"{BLOCK}.trace.path" and "{BLOCK}.plan.path" are one file; name another for the trace.')
    for path in config.nvme_paths:
        check_nvme_folder(f"{BLOCK}.nvme_path", path)
    check_distinct_folders(f"{BLOCK}.nvme_path", config.nvme_paths)
    if config.nvme_gib is not None:
        check_nvme_space(f"{BLOCK}.nvme_gib", config.nvme_paths, int(config.nvme_gib * GIB))
    return config


def _with_home_folders(config: LazyTrainConfig) -> LazyTrainConfig:
    """`~` in a path means the user's home, as in a shell; whoever opens the path later need not know."""
    expand = os.path.expanduser
    path = config.nvme_path
    if path is not None:
        path = expand(path) if isinstance(path, str) else [expand(each) for each in path]
    return replace(
        config,
        nvme_path=path,
        plan=replace(config.plan, path=config.plan.path and expand(config.plan.path)),
        trace=replace(config.trace, path=config.trace.path and expand(config.trace.path)),
    )


def _parse(raw: Any, config_type: type) -> Any:
    if not isinstance(raw, dict):
        raise ConfigError(f'"{config_type.PATH}" is {show_json(raw)}; expected an object.')
    known = {item.name: item for item in fields(config_type)}
    values = {}
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(_unknown_key(key, config_type))
        if section_type := known[key].metadata.get("section"):
            values[key] = _parse(value, section_type)
        else:
            if remedy := _string_for_other_type(key, value, known[key].metadata["rule"]):
                raise ConfigError(f'"{config_type.PATH}.{key}" is the string "{value}"; {remedy}.')
            values[key] = value
    return config_type(**values)


def _unknown_key(key: Any, config_type: type) -> str:
    message = f'Unknown key "{key}" in "{config_type.PATH}"'
    here = [item.name for item in fields(config_type)]
    lowered = str(key).lower()
    by_name: dict[str, list[str]] = {}
    for path in _all_paths(LazyTrainConfig):
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    elsewhere = [] if lowered in here else by_name.get(lowered, [])
    # "bits" in "optimizer" is its state_bits, rather than the bits of another section.
    if akin := difflib.get_close_matches(lowered, [name for name in here if _are_akin(lowered, name)], n=1, cutoff=0.0):
        return f"{message}; did you mean {_one_of([akin[0], *elsewhere])}{_unit_note(akin[0])}?"
    if elsewhere:
        return f"{message}; it belongs at {_one_of(elsewhere)}."
    if near := difflib.get_close_matches(lowered, here, n=1, cutoff=0.5):
        return f"{message}; did you mean {_one_of(near)}{_unit_note(near[0])}?"
    if near := difflib.get_close_matches(lowered, by_name, n=1, cutoff=0.6):
        return f"{message}; did you mean {_one_of(by_name[near[0]])}?"
    return f"{message}; the keys are {', '.join(here)}."


def _are_akin(key: str, name: str) -> bool:
    """Whether all words of one are words of the other: bits and state_bits."""
    words, others = set(key.split("_")), set(name.split("_"))
    return words != others and (words <= others or others <= words)


def _one_of(keys: list[str]) -> str:
    return " or ".join(f'"{key}"' for key in keys)


def _unit_note(name: str) -> str:
    return " (budgets are in GiB, 2**30 bytes: 24 GB are 22.35)" if name.endswith("_gib") else ""


def _all_paths(config_type: type) -> list[str]:
    paths = []
    for item in fields(config_type):
        paths.append(f"{config_type.PATH}.{item.name}")
        if section_type := item.metadata.get("section"):
            paths += _all_paths(section_type)
    return paths


def _string_for_other_type(key: str, value: Any, rule: Rule) -> str | None:
    """The remedy for the strings that people write where a number or a boolean belongs; None if `value` is none."""
    if not isinstance(value, str):
        return None
    if value == "auto":
        meaning = "write null" if rule.nullable else "leave the key out"
        return f"Accelerate refuses that word in this block: {meaning}, and LazyTrain decides"
    if rule.kind in ("string", "strings"):
        return None
    if rule.kind == "bool" and value.lower() in ("true", "false"):
        return f"write {value.lower()} without quotes"
    if key.endswith("_gib") and (match := _SIZE.fullmatch(value)):
        gib = float(match[1]) * _UNIT_BYTES[match[2].lower()] / GIB
        return f"write the number of GiB: {gib:.4g}"
    return f"expected {rule.describe()}, without quotes"


def _check_file(key: str, path: str) -> None:
    resolved = folder_of(key, path)
    if not resolved.is_file():
        raise ConfigError(f'"{key}" is "{path}", but {resolved} is not a file; write one with `lazytrain plan --out`.')
