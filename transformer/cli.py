"""The command line: absl for plain flags, dotted names taken out before it, errors in one line, exit statuses.

0 done (and --help); 2 the user's input was wrong; 1 anything else; 143 and 130 stopped by SIGTERM and Ctrl-C.
"""

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags, logging

from transformer import stopping
from transformer.errors import UserError, did_you_mean
from transformer.files import where
from transformer.jsons import finite
from transformer.parallel import ending, hosts

PREFIX = "--config."


@dataclass(frozen=True)
class Command:
    """One command: ``define`` declares its flags, ``run`` returns what --json prints and the text for people.

    ``argument`` is the flag whose value may also stand alone: ``report DIR``. ``rest`` is the repeated flag that
    takes what stands alone after it: ``runs diff DIR DIR``.
    """

    summary: str
    example: str
    define: Callable[[flags.FlagValues], None]
    run: Callable[["Args"], tuple[dict[str, Any], str]]
    argument: str | None = None
    rest: str | None = None


@dataclass(frozen=True)
class Args:
    """A parsed command line: plain flags as attributes of ``flags``, changed settings by dotted name."""

    flags: flags.FlagValues
    changes: dict[str, str]
    argv: list[str]

    def experiment(self) -> Any:
        """The experiment of --config, with its changes."""
        from transformer.config import load

        if not self.flags.config:
            raise UserError("--config=FILE.py is missing, for example --config=experiments/shakespeare.py")
        return load(self.flags.config, self.changes)

    def workdir(self, what: str, example: str, local: bool = True) -> Path:
        """The directory of --workdir, where ``what`` is kept; ``local``: on this machine."""
        if not self.flags.workdir:
            raise UserError(f"--workdir=DIR is missing: where {what} kept, for example --workdir={example}")
        return (local_path if local else where)("--workdir", self.flags.workdir)

    def run_directory(self) -> Path:
        if not self.flags.run:
            raise UserError("--run=DIR is missing: the directory of a trained run, for example --run=runs/demo")
        return where("--run", self.flags.run)

    @property
    def cache(self) -> Path:
        return Path(self.flags.cache).expanduser()


def local_path(flag: str, text: str) -> Path:
    """A directory on this machine, with ~ for the home directory. UserError for a URL."""
    if "://" in text:
        raise UserError(f"{flag}: {text} is a URL; this is kept on this machine, name a directory")
    return Path(text).expanduser()


def say(line: str) -> None:
    """Progress and logs go to standard error; standard output is for results. Of several processes the first speaks."""
    if hosts.is_first():
        print(line, file=sys.stderr, flush=True)


def main(commands: dict[str, str], argv: Sequence[str]) -> int:
    """Run ``argv`` (without the program's name); ``commands`` maps each name to its module. Returns the exit status."""
    debug = any(re.fullmatch(r"--?debug(=(true|t|1|yes|y))?", word, re.IGNORECASE) for word in argv)
    stopping.install()
    logging.set_verbosity(logging.FATAL)  # Orbax tells much, and what matters it raises too
    line = ""
    try:
        status = _dispatch(commands, list(argv))
        sys.stdout.flush()  # here, where a reader that left is noticed and quiet
    except UserError as error:
        if debug:
            traceback.print_exc()
        status, line = 2, f"error: {error}"
    except stopping.Stop as stop:
        status, line = stop.status, f"stopped by {stop}"
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing more to say
        status = 1
    except Exception as error:
        if debug and hosts.count() == 1:
            raise
        if debug:
            traceback.print_exc()
        status, line = ending.of(error)
    ending.leave(status, line)
    return status


def _dispatch(commands: dict[str, str], argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(overview(commands))
        return 0
    name, rest = argv[0], argv[1:]
    if name not in commands:
        raise UserError(f"{name!r} is not a command{did_you_mean(name, commands)}")
    command: Command = importlib.import_module(commands[name]).COMMAND
    changes, plain = split_overrides(rest)
    values = flags.FlagValues()
    command.define(values)
    flags.DEFINE_bool(
        "json", False, "print one JSON object on standard output, and nothing else there", flag_values=values
    )
    flags.DEFINE_bool("debug", False, "show the traceback of an error", flag_values=values)
    if any(word in ("--help", "-h", "-help", "--helpfull", "--helpshort") for word in plain):
        print(usage(name, command, values))
        return 0
    try:
        extra = values([name, *plain])[1:]
    except flags.UnrecognizedFlagError as error:
        raise UserError(f"--{error.flagname}: {name} has no such flag{did_you_mean(error.flagname, values)}") from error
    except flags.Error as error:
        line = str(error).splitlines()[0]
        wrong = re.fullmatch(r"flag --(\w+)=(.*?): (invalid literal for int|could not convert string to float).*", line)
        if wrong:
            kind = "a whole number" if "int" in wrong[3].split() else "a number"
            line = f"--{wrong[1]}: {wrong[2]!r} is not {kind}"
        raise UserError(line) from error
    if extra and command.argument and not values[command.argument].value:
        values[command.argument].value = extra.pop(0)
    if extra and command.rest:
        values[command.rest].value = [*(values[command.rest].value or []), *extra]
        extra = []
    if extra:
        raise UserError(f"{extra[0]!r}: {name} takes no such argument; flags are written --name=value")
    if changes and "config" not in values:
        raise UserError(f"{PREFIX}{next(iter(changes))}: {name} takes no settings, the run has its own")
    if "cache" in values:
        # Compiled programs are kept, so that the same command starts faster the next time. JAX reads these when it is
        # imported, which no command has done yet; what the user has set himself stays.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(values.cache).expanduser() / "programs"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    if "coordinator" in values:
        hosts.start(values)
    result, text = command.run(Args(values, changes, [*argv]))
    if not hosts.is_first():
        return 0
    if values.json:
        print(json.dumps(finite(result), allow_nan=False))
    elif text:
        print(text)
    return 0


def split_overrides(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Dotted settings (by name, without the prefix) and the rest. ``--config.a.b v`` works as well."""
    changes: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith(PREFIX):
            rest.append(word)
            continue
        name, equals, value = word[len(PREFIX) :].partition("=")
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise UserError(f"{PREFIX}{name}: has no value, write {PREFIX}{name}=VALUE")
        if name in changes:
            raise UserError(f"{PREFIX}{name}: is given twice")
        changes[name] = value
    return changes, rest


def define_config(values: flags.FlagValues) -> None:
    """--config (and with it the dotted settings) and where prepared text is kept."""
    flags.DEFINE_string(
        "config", None, "experiment file; change settings with --config.NAME.NAME=VALUE", flag_values=values
    )
    define_cache(values)


def define_cache(values: flags.FlagValues) -> None:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    where = f"{home}/decoder-transformer"
    flags.DEFINE_string("cache", where, "where corpora, tokenizers and token stores are kept", flag_values=values)


def define_run(values: flags.FlagValues) -> None:
    """--run and --checkpoint."""
    flags.DEFINE_string("run", None, "directory of a trained run", flag_values=values)
    flags.DEFINE_string("checkpoint", "newest", "which weights: newest, best, or a step", flag_values=values)


def define_int8(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("int8_cache", False, "keep keys and values in a byte for each number", flag_values=values)


def overview(commands: dict[str, str]) -> str:
    lines = ["python -m transformer COMMAND [flags]", ""]
    for name, module in commands.items():
        command: Command = importlib.import_module(module).COMMAND
        lines.append(f"  {name:<10} {command.summary}")
    return "\n".join([*lines, "", "python -m transformer COMMAND --help shows a command's flags and an example."])


def usage(name: str, command: Command, values: flags.FlagValues) -> str:
    lines = [f"python -m transformer {name}: {command.summary}", "", f"  {command.example}", ""]
    for flag in sorted(values):
        about = values[flag]
        default = "" if about.default is None or isinstance(about.default, bool) else f" (default {about.default!r})"
        lines.append(f"  --{flag}: {about.help}{default}")
    if "config" in values:
        lines.append("  --config.NAME.NAME=VALUE: any setting of the experiment, such as --config.model.depth=6")
    return "\n".join(lines)
