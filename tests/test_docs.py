"""The documentation says what the program does: every setting is in the reference, every command line is valid."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from absl import flags

from transformer.__main__ import COMMANDS
from transformer.cli import split_overrides
from transformer.config import Experiment, load
from transformer.settings import hints, leaves, members, tag_of
from transformer.study.study import repeat

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
EXPERIMENTS = sorted((ROOT / "experiments").glob("[!_]*.py"))
COMMAND_LINE = re.compile(r"^ {4}python -m transformer (\w+.*)$", re.M)


def command_lines(text: str) -> list[str]:
    """Every command line of a page or docstring, continued lines joined."""
    return COMMAND_LINE.findall(text.replace("\\\n", " "))


def test_the_reference_names_every_setting_and_every_tag() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text()
    for name in leaves(Experiment()):
        shown = name.removesuffix(".kind")
        parent, _, field = shown.rpartition(".")
        assert f"`{shown}`" in reference or (f"`{parent}`" in reference and f"`.{field}`" in reference), name

    def walk(record: type) -> None:
        for hint in hints(record).values():
            for tag, member in members(hint).items():
                if len(members(hint)) > 1:
                    assert f"`{tag}`" in reference, tag
                walk(member)

    walk(Experiment)
    assert tag_of(Experiment) == "experiment"


@pytest.mark.parametrize("page", [*PAGES, *EXPERIMENTS], ids=lambda p: p.name)
def test_command_lines_in_the_documentation_are_valid(page: Path) -> None:
    for line in command_lines(page.read_text()):
        name, *words = shlex.split(line)
        assert name in COMMANDS, line
        changes, plain = split_overrides(words)
        values = flags.FlagValues()
        command = importlib.import_module(COMMANDS[name]).COMMAND
        command.define(values)
        rest = values([name, *plain])[1:]
        assert not rest or command.argument, line
        if "config" in values and values.config not in (None, "FILE.py"):
            study = "get_study" in (ROOT / values.config).read_text()
            assert (repeat if study else load)(str(ROOT / values.config), changes)


def test_the_readme_has_its_two_commands_and_its_picture() -> None:
    text = (ROOT / "README.md").read_text()
    assert "\n    make demo\n" in text and "\n    make test\n" in text
    lines = command_lines(text)
    assert len(lines) >= 7 and {line.split()[0] for line in lines} == set(COMMANDS)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target


def test_the_tests_that_the_page_on_faults_names_exist() -> None:
    """And each row has a test or a reason."""
    rows = re.findall(r"^\| ([A-Z]\d\d) \| .* \| (.*) \|$", (ROOT / "docs" / "faults.md").read_text(), re.M)
    assert len(rows) >= 120
    for fault, held_by in rows:
        assert len(held_by) > 10, fault
        for file, name in re.findall(r"`([\w/]+\.py)`: (test_\w+)", held_by):
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (fault, file, name)
