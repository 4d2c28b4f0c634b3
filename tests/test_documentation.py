"""What the documents say about keys, defaults, files and links is what the code has."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lazytrain_plugin.config.deepspeed_conflicts import check_deepspeed_config
from lazytrain_plugin.config.parse import lazytrain_block, parse_block
from lazytrain_plugin.config.schema import LazyTrainConfig

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *ROOT.glob("docs/*.md")]
)


def defaults(config_type=LazyTrainConfig, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for item in fields(config_type):
        if section := item.metadata.get("section"):
            found |= defaults(section, f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = item.default
    return found


def table_rows(text: str, heading: str) -> list[list[str]]:
    part = text.split(f"## {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| `")
    ]


def test_the_readme_lists_every_key_with_its_default():
    rows = table_rows((ROOT / "README.md").read_text(), "The block")
    assert {row[0].strip("`"): json.loads(row[1].strip("`")) for row in rows} == defaults()


def test_the_json_in_the_readme_is_accepted():
    found = re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    for text in found:
        config = json.loads(text)
        parse_block(lazytrain_block(config))
        check_deepspeed_config(config)
        assert {**config, "lazytrain": None} == {
            **json.loads((ROOT / "configs/deepspeed/lazytrain.json").read_text()), "lazytrain": None,
        }  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_exist(document):
    text = document.read_text()
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    named = re.findall(r"`((?:benchmarks|configs|docs|examples|integration_tests|tests)/[\w./-]*\.\w+)`", text)
    assert [target for target, *_ in targets if target and not (document.parent / target).exists()] == []
    assert [name for name in named if not (ROOT / name).exists()] == []
    for target, _, anchor in targets:
        if anchor:
            headings = re.findall(
                r"^#+ (.+)$", (document.parent / target if target else document).read_text(), re.MULTILINE
            )
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors
