"""`maxtext completion`: a script that completes commands, flags, keys and their values in a shell.

The script has all lists in it, as they are when it is printed, so that no Python starts when a user presses Tab.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from maxtext.configs.explain import values_of
from maxtext.configs.loader import model_names, recipe_names
from maxtext.configs.types import DerivedValues, MaxTextConfig


def add_command(commands: Any, parser: argparse.ArgumentParser) -> None:
  """Adds the command to `commands`, the commands of the whole `parser`."""
  completion = commands.add_parser(
    "completion",
    help="print a script that completes commands, flags, keys and values in a shell",
    description="Print a script for the Tab key of a shell. In bash and zsh: . <(maxtext completion bash)",
  )
  completion.add_argument("shell", choices=tuple(_SHELLS), metavar=" | ".join(_SHELLS))
  completion.set_defaults(run=_completion, parser=parser)


def _completion(arguments: argparse.Namespace) -> int:
  print(completion_script(arguments.shell, arguments.parser), end="")
  return 0


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
  """The script for `bash`, `zsh` or `fish` that completes what this parser accepts.

  The lists and the choice among them are the same POSIX shell function in all three; fish runs it with `sh`.
  """
  keys = sorted(MaxTextConfig.model_fields.keys() - DerivedValues.model_fields.keys() - {"base_config"})
  keys_by_values = defaultdict(list)
  for key in keys:
    if values := " ".join(_values(key)):
      keys_by_values[values].append(key)
  script = _CORE
  for mark, text in {
    "@commands": "\n".join(_commands(parser)),
    "@values": "\n".join(f"    {'|'.join(same)}) values='{values}' ;;" for values, same in keys_by_values.items()),
    "@keys": " ".join(keys),
    "@names": " ".join(dict.fromkeys((*recipe_names(), *model_names()))),
  }.items():
    script = script.replace(mark, text)
  if shell == "fish":
    script = script.replace("\\", "\\\\").replace("'", "\\'")
  return _SHELLS[shell].replace("@core", script)


def _commands(parser: argparse.ArgumentParser, command: str = "") -> Iterator[str]:
  """A branch of the shell's `case` for each command: its subcommands or choices, its flags, those of them that take a
  value, and what its operands are."""
  actions, flags, valued, operand = list[str](), list[str](), list[str](), ""
  for action in parser._actions:
    if isinstance(action, argparse._SubParsersAction):
      actions += action.choices
      for name, subparser in action.choices.items():
        yield from _commands(subparser, f"{command} {name}".strip())
    elif action.option_strings:
      flags += action.option_strings
      valued += action.option_strings if action.nargs != 0 else []
    elif action.choices:
      actions += action.choices
    else:
      kinds = {"KEY": "key", "NAME": "source", "key=value": "override"}
      operand = kinds.get(str(action.metavar), "source override" if action.dest == "overrides" else "file")
  lists = {"actions": actions, "flags": flags, "valued": valued, "operand": [operand]}
  yield f"    '{command}') " + " ".join(f"{name}='{' '.join(words)}'" for name, words in lists.items()) + " ;;"


def _values(key: str) -> list[str]:
  """The values of a key that has few: of an enumeration, a `Literal` or a bool; empty for other keys."""
  annotation = MaxTextConfig.model_fields[key].annotation
  found = [value for value in values_of(key) if value != "''"]
  for kind in (annotation, *get_args(annotation)):
    if get_origin(kind) is Literal:
      found += map(str, get_args(kind))
    elif kind is bool:
      found += ["true", "false"]
  return found


# Takes the words up to the cursor, of which it completes the last, and prints candidates whether they begin with it or
# not. `%files` stands for file names.
_CORE = r"""_maxtext_command() {
  case "$1" in
@commands
    *) return 1 ;;
  esac
}
_maxtext_values() {
  case "$1" in
@values
  esac
}
_maxtext_words() {
  local command='' flag='' given='' word='' actions='' flags='' valued='' operand='' values=''
  _maxtext_command ''
  shift
  while [ $# -gt 1 ]; do
    word=$1
    shift
    if [ -n "$flag" ]; then flag=''; continue; fi
    case "$word" in
      --) command='' given=''; _maxtext_command '' ;;
      -*) case " $valued " in *" $word "*) flag=$word ;; esac ;;
      *=*) ;;
      *)
        if _maxtext_command "${command:+$command }$word"; then command="${command:+$command }$word"; else given=1; fi ;;
    esac
  done
  if [ -n "$flag" ]; then echo %files; return; fi
  case "$1" in
    *=*)
      _maxtext_values "${1%%=*}"
      for word in ${values:-%files}; do echo "${1%%=*}=$word"; done
      return ;;
    -*) printf '%s\n' $flags; return ;;
  esac
  [ -n "$given" ] || printf '%s\n' $actions
  case "$operand $given" in key*) printf '%s\n' @keys ;; source*1) ;; source*) printf '%s\n' @names ;; esac
  case "$operand $given$1" in *override\ ?*) printf '%s=\n' @keys ;; esac
  case "$operand $given" in source*1|key*|\ *) ;; *) echo %files ;; esac
}
"""

_SHELLS = {
  "bash": r"""@core
# Bash splits words at the signs in COMP_WORDBREAKS, and replaces only what is after the last of them.
_maxtext() {
  local line="${COMP_LINE:0:COMP_POINT}" words current found
  read -ra words <<<"$line"
  [[ $line == *[[:space:]] ]] && words+=('')
  current="${words[${#words[@]}-1]}"
  found="$(_maxtext_words "${words[@]}")"
  COMPREPLY=($(compgen -W "$found" -- "$current"))
  if [[ ${#COMPREPLY[@]} -gt 0 && $found == *%files ]]; then
    COMPREPLY+=($(compgen -d -S / -- "$current") $(compgen -f -X '!*.y*ml' -- "$current"))
  fi
  [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*=}"}"}")
  [[ ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2>/dev/null  # absent in 3.2 of macOS
  return 0
}
complete -o default -F _maxtext maxtext
""",
  "zsh": r"""#compdef maxtext
@core
_maxtext() {
  local -a found
  set -- "${(@)words[1,CURRENT-1]}" "$PREFIX"
  found=("${(@f)$(emulate sh; _maxtext_words "$@")}")
  compadd -S '' -- ${(M)found:#*=}
  compadd -- ${found:#(*=|*%files)}
  if (( ${#found[(r)*%files]} )); then
    compset -P '*='
    _files
  fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _maxtext maxtext
[[ ${funcstack[1]} != _maxtext ]] || _maxtext "$@"
""",
  "fish": r"""set -g __maxtext_core '@core_maxtext_words "$@"'
function __maxtext_complete
  set -l current (commandline -ct)
  for word in (sh -c $__maxtext_core sh (commandline -opc) "$current")
    if string match -q '*%files' -- $word
      set -l key (string match -r '^.*=' -- $current)
      for file in (__fish_complete_path (string replace -r '^.*=' '' -- $current))
        echo "$key$file"
      end
    else
      echo $word
    end
  end
end
complete -c maxtext -f -a '(__maxtext_complete)'
""",
}
