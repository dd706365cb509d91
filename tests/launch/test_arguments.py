"""What is the launcher's on a command line and what is the job's; names; when another attempt is made."""

import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.arguments import make_job, positive, split, value_of, whole
from launch.attempts import Limits, attempts
from launch.errors import UserError
from launch.job import NAME

KNOWN: dict[str, tuple[str | None, str]] = {"zone": (None, "where"), "nodes": ("1", "how many"), "spot": ("false", "")}
ARGUMENT = st.one_of(st.text(max_size=12), st.binary(max_size=12).map(os.fsdecode)).map(lambda s: s.replace("\0", ""))
WORDS = st.lists(ARGUMENT, max_size=6)  # as the command line gives them, bytes that are no text too


@given(WORDS, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_the_launchers_flags_are_taken_out_wherever_they_stand_and_all_else_stays(words, random):
    words = [word for word in words if word.lstrip("-").partition("=")[0] not in KNOWN]
    line = list(words)
    for flag in ("--zone=a=b c", "--spot"):
        line.insert(random.randint(0, len(line)), flag)
    assert split(line, KNOWN) == ({"zone": "a=b c", "spot": "true", "nodes": "1"}, words)


@pytest.mark.parametrize(
    "words, wrong",
    [
        ([], "--zone is missing: where"),
        (["--zone"], "--zone: has no value, write --zone=VALUE"),
        (["--zone=a", "--zone=b"], "--zone: is given twice"),
        (["--zone=a", "--spot=yes"], "--spot: 'yes' is neither true nor false"),
        (["--zone=a", "--spots"], "--spots: is no flag of the launcher, and nearly --spot; is that meant?"),
        (["--zone=a", "--node=3"], "--node: is no flag of the launcher, and nearly --nodes; is that meant?"),
    ],
)
def test_wrong_use_of_a_flag(words, wrong):
    with pytest.raises(UserError) as error:
        split(words, KNOWN)
    assert str(error.value) == wrong


@pytest.mark.parametrize(
    "words", [["--zone=a", "-spot", "--spotless", "zone=b", "--nod=3"], ["--zone=", "--spot=false"]]
)
def test_what_only_looks_like_a_flag_of_the_launcher(words):
    values, rest = split(words, KNOWN)
    assert values["spot"] == "false" and values["nodes"] == "1"
    assert rest == [word for word in words if not re.match("--(zone|spot)=", word)]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "1e3", "9" * 30, "²"])
def test_numbers_that_are_none(text):
    with pytest.raises(UserError, match="--n: "):
        whole({"n": text}, "n")
    if text in ("1.5", "1e3", "9" * 30):
        assert positive({"n": text}, "n") == float(text)
    else:
        with pytest.raises(UserError, match="--n: "):
            positive({"n": text}, "n")
    with pytest.raises(UserError):
        positive({"n": "nan"}, "n")


@pytest.mark.parametrize(
    "words, value",
    [
        (["--config=a", "--config=b"], "b"),
        (["--config", "a b"], "a b"),
        (["--config"], None),
        (["--config.model=a", "-config"], None),
        ([], None),
    ],
)
def test_the_value_of_a_flag_of_the_job(words, value):
    assert value_of("config", words) == value


FILES = {
    "def get_study(): ...": "study",
    "def get_config(): ...": "train",
    "def get_config(): ...\ndef get_study(): ...": "study",
    "from base import study as get_study": "study",
    "get_study = make()": "study",
    "# get_study\nx = 'def get_study'\nimport nothing.of_that_name": "train",
    "def other():\n    def get_study(): ...": "train",
    "syntax error": "train",
    "\0": "train",
}


@pytest.mark.parametrize("text", FILES, ids=FILES.get)
def test_a_file_with_a_study_is_run_as_one(tmp_path, text):
    file = tmp_path / "c.py"
    file.write_text(text)
    for words in ([f"--config={file}"], ["--config", str(file)]):
        assert make_job(words).arguments == (FILES[text], *words)
    assert make_job([f"--config={file}"], command="evaluate").arguments[0] == "evaluate"


def test_no_file_is_the_librarys_to_refuse(tmp_path):
    assert make_job([f"--config={tmp_path}/none.py"]).arguments[0] == "train"
    assert make_job([f"--config={tmp_path}"]).arguments[0] == "train"


@given(WORDS, st.text(max_size=50))
@settings(max_examples=200, deadline=None)
def test_a_default_name_is_a_name_and_tells_arguments_apart(words, stem):
    line = [*words, f"--config={stem.replace('/', '')}.py"]
    job = make_job(line)
    assert NAME.fullmatch(job.name) and make_job(line).name == job.name
    assert make_job([*line, "x"]).name != job.name
    assert make_job([*line, "a", "b"]).name != make_job([*line, "ab"]).name != make_job([*line, "a b"]).name


@pytest.mark.parametrize("name", ["A", "1a", "a_b", "a-", "-a", "a" * 41, "a b", "a\n"])
def test_names_that_are_none(name):
    with pytest.raises(UserError, match="--name: "):
        make_job([], name=name)


class World:
    """A clock that only sleeping and working move, and jobs that end as the test says, after so long."""

    def __init__(self, ends: list[tuple[int, float]]):
        self.now, self.ends, self.pauses, self.said = 0.0, list(ends), [], []

    def start(self) -> int:
        status, seconds = self.ends.pop(0)
        self.now += seconds
        return status

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def run(self, **limits) -> int:
        return attempts(self.start, Limits(**limits), self.said.append, self.sleep, lambda: self.now)


@pytest.mark.parametrize("final", [0, 1, 2, 130, 134])
@pytest.mark.parametrize("before", [[], [143], [137, 255, 143]])
def test_which_ends_are_tried_again(final, before):
    world = World([(status, 1.0) for status in [*before, final, 0]])
    assert world.run() == final
    assert world.pauses == [10.0, 20.0, 40.0][: len(before)] and len(world.said) == len(before)


def test_pauses_grow_to_ten_minutes_and_begin_anew_after_a_long_attempt():
    world = World([*[(143, 1.0)] * 9, (143, 601.0), (143, 1.0), (0, 1.0)])
    assert world.run() == 0
    assert world.pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600, 10, 20]


def test_attempts_and_chip_hours_have_an_end():
    world = World([(143, 1.0)] * 9)
    assert world.run(attempts=3) == 143 and len(world.ends) == 6
    assert "given up" in world.said[-1]
    world = World([(143, 3600.0)] * 9)
    assert world.run(chip_hours=7.9, chips=4) == 143 and len(world.ends) == 7
    assert "8.0 of 7.9 chip-hours: given up" in world.said[-1]
