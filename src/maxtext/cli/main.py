"""Entry point. Each command imports what it needs when it runs, so that `--help` is instant."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import maxtext
from maxtext.cli import (
  bench,
  checkpoint,
  completion,
  config,
  convert,
  data,
  decode,
  doctor,
  eval,
  launch,
  models,
  plan,
  quantize,
  report,
  runs,
  serve,
)
from maxtext.cli.interrupt import interrupt_exits, prompt_interrupt, restore_termination
from maxtext.cli.platform import ERRORS, leave_out_absent_accelerators, quiet_libraries
from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.configs.secrets import redact, redact_arguments
from maxtext.configs.types import MaxTextConfig
from maxtext.logs import setup_logging
from maxtext.status_line import at_line_start, status_line
from maxtext.storage.errors import OF_STORAGE

_GRACE_SECONDS = 3.0  # for a start to end after Ctrl-C; a compiler may need minutes
_TEACHERS = ("teacher_overrides", "offline_data_dir")
_TRAINING: dict[str, tuple[str, str]] = {  # help, description
  "train": ("train a model", "Train a model."),
  "sft": (
    "fine-tune a model on conversations",
    "Fine-tune a model on conversations: `maxtext train` with use_sft=true, which starts from sft.yml.",
  ),
  "dpo": (
    "align a model with preference pairs",
    "Align a model with preference pairs: `maxtext train` with use_dpo=true, which starts from dpo.yml.",
  ),
  "rl": (
    "improve a model by the rewards of its own answers",
    "Improve a model by the rewards of its own answers (GRPO): `maxtext train` with use_grpo=true, which starts from "
    "rl.yml.",
  ),
  "distill": (
    "teach a small model by a large one",
    f"Teach a small model by a large one: `maxtext train` with {_TEACHERS[0]} or {_TEACHERS[1]}; see distill.yml.",
  ),
}


_NO_TEACHER = (
  "maxtext distill needs a teacher: write teacher_overrides='{load_parameters_path: FOLDER}' with the folder of a run "
  "or of weights, or offline_data_dir=FOLDER with saved outputs of one."
)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command and returns its exit code: 2 for a user's mistake, 1 for a run that ended itself, 130 for Ctrl-C."""
  arguments = _parse(argv)
  setup_logging()
  leave_out_absent_accelerators(os.environ)
  quiet_libraries(os.environ, getattr(arguments, "library_log_level", ERRORS))
  try:
    code = arguments.run(arguments)
    sys.stdout.flush()
    return code
  except ConfigError as error:
    print(f"maxtext: {redact(str(error))}", file=sys.stderr)
    return 2
  except RunError as error:
    print(f"maxtext: {redact(str(error))}", file=sys.stderr)
    return 1
  except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except OSError as error:
    if error.errno not in OF_STORAGE:
      raise
    print(f"maxtext: {error.filename or 'what is written'}: {error.strerror}.", file=sys.stderr)
    with suppress(OSError, ValueError):  # the output, if it is what is full, is not tried again
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except KeyboardInterrupt:
    print(at_line_start("maxtext: stopped.", sys.stderr), file=sys.stderr)
    return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
  """Parses arguments. Overrides may stand before flags and after them, which argparse alone does not allow."""
  parser = _parser()
  arguments, rest = parser.parse_known_args(argv)
  if rest and not (hasattr(arguments, "overrides") and all(re.match(r"\w+=", argument) for argument in rest)):
    parser.error(f"unrecognized arguments: {' '.join(redact_arguments(rest))}{_flag_hint(rest)}")
  if rest:
    arguments.overrides += rest
  return arguments


def _flag_hint(rest: Sequence[str]) -> str:
  """How to write a key that was given as a flag, the way of other tools; empty where none was."""
  for flag, value in zip(rest, [*rest[1:], ""], strict=True):
    name, equals, own = flag.removeprefix("--").partition("=")
    key = name.replace("-", "_")
    if flag.startswith("--") and key in MaxTextConfig.model_fields:
      given = own if equals else value if value and not value.startswith("--") else "true"
      return f". Keys are written without dashes: {redact_arguments([f'{key}={given}'])[0]}"
  return ""


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="maxtext", description="Train and serve large language models with JAX.")
  parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
  commands = parser.add_subparsers(required=True, metavar="COMMAND")
  for name, (help_text, description) in _TRAINING.items():
    command = commands.add_parser(name, help=help_text, description=description)
    config.add_overrides(command)
    command.add_argument(
      "--dry-run", action="store_true", help="check everything that can be checked before step 1, say what it would do"
    )
    if name == "rl":
      command.add_argument(
        "--sampler", action="store_true", help="generate rollouts for the run of another process, at sampler_address"
      )
    command.set_defaults(
      run=_train, sampler=False, method=config.METHODS[name], needed=_TEACHERS if name == "distill" else ()
    )
  decode.add_commands(commands)
  serve.add_command(commands)
  eval.add_command(commands)
  bench.add_commands(commands)
  launch.add_command(commands)
  report.add_command(commands)
  runs.add_command(commands)
  plan.add_command(commands)
  data.add_commands(commands)
  config.add_commands(commands)
  checkpoint.add_commands(commands)
  models.add_command(commands)
  convert.add_commands(commands)
  quantize.add_command(commands)
  doctor.add_command(commands)
  completion.add_command(commands, parser)
  return parser


class _Version(argparse.Action):
  """Reads the version only when it is asked for, which keeps `--help` instant."""

  def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
    print(f"maxtext {maxtext.__version__}")
    parser.exit()


def _discard_starting_runs() -> None:
  from maxtext.observe.run_directory import discard_starting_runs

  discard_starting_runs()


def _train(arguments: argparse.Namespace) -> int:
  resolved = config.resolve_overrides([*arguments.overrides, *arguments.method], arguments.strict)
  if arguments.needed and not any(getattr(resolved.config, key) for key in arguments.needed):
    raise ConfigError(_NO_TEACHER)
  with status_line() as status, ExitStack() as closing, ExitStack() as until_first_step:
    closing.callback(restore_termination)
    until_first_step.enter_context(prompt_interrupt(_GRACE_SECONDS, _discard_starting_runs))
    status.phase("loading JAX")
    with interrupt_exits():
      from maxtext.rl.run import dry_run, train
      from maxtext.training.callbacks.base import Callback

    if arguments.sampler and arguments.dry_run:
      raise ConfigError("--dry-run checks a run, and --sampler has none of its own: leave one of them out.")
    if arguments.sampler:
      from maxtext.rl.sampler import sample

      sample(resolved.config)
      return 0
    if arguments.dry_run:
      print("\n".join(dry_run(resolved.config, config_name=resolved.name)))
      return 0

    class FirstStep(Callback):
      """From the first step on, the run handles Ctrl-C itself, with a checkpoint."""

      def due(self, step: int) -> bool:
        until_first_step.close()
        return False

    train(resolved.config, callbacks=[FirstStep()], origins=resolved.origins, config_name=resolved.name)
  return 0
