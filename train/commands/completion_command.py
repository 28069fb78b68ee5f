"""bytescope completion: prints the script that completes command lines in bash, zsh or fish.

`completion_words.py` collects the words. Each script is a single file without dependencies. bash and zsh share the
tables, which are shell functions that print a kind or the words for a name. Each has a completion function of its own,
since bash splits words at `=` and `:` and replaces only the text after the last of these characters.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping

from bytescope.train.commands.completion_words import NOTHING, Words, gather

EPILOG = """\
examples:
  bytescope completion bash > ~/.bytescope.bash
  bytescope completion zsh > "$fpath[1]/_bytescope"
  bytescope completion fish > ~/.config/fish/completions/bytescope.fish

For bash add `source ~/.bytescope.bash` to ~/.bashrc. zsh and fish load the file
by themselves. A new shell completes commands, flags, configs, targets,
policies, config keys and their values, without starting Python. Print the
script again after an upgrade of bytescope.
exit codes: 0 done, 2 a mistake in the command"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `bytescope completion`."""
    from bytescope.memory.commands.arguments import Parser

    parser = Parser(
        prog="bytescope completion",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="print a script that completes bytescope command lines",
    )
    parser.add_argument(
        "shell", choices=tuple(SHELLS), metavar="SHELL", help="the shell to print the script for: bash, zsh or fish"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the completion script for the shell `args.shell`; returns the exit code."""
    print(SHELLS[args.shell](gather()), end="")
    return 0


# ---- the scripts ----------------------------------------------------------------------------------------------------

_HEAD = "# {shell} completion of bytescope, printed by: bytescope completion {shell}\n"

_BASH = r"""
_bytescope() {
    local line=${COMP_LINE:0:COMP_POINT} cur= last= command= kind= head= part= word= cut=
    local -i place=0 count=0
    local -a words
    IFS=$' \t\n' read -ra words <<< "$line"
    count=${#words[@]}
    if [[ $line != *[[:space:]] ]]; then
        count=count-1
        cur=${words[count]}
    fi
    for word in "${words[@]:1:count-1}"; do
        _bytescope_count
    done
    _bytescope_kind
    COMPREPLY=()
    case $kind in
        @file | @folder | @config)
            while IFS= read -r word; do COMPREPLY+=("$head$word"); done < <(
                case $kind in
                    @file) compgen -f -- "$part" ;;
                    @folder) compgen -d -- "$part" ;;
                    @config) compgen -W "$(_bytescope_configs) hf:" -- "$part"
                             compgen -d -- "$part"
                             compgen -f -X '!*.py' -- "$part" ;;
                esac)
            # bash quotes file names: it would complete hf: to "hf\: ".
            [[ $kind == @config && hf: == "$part"* ]] && word=nospace || word=filenames
            compopt -o $word 2> /dev/null ;;
        @any) ;;
        *)
            while IFS= read -r word; do COMPREPLY+=("$head$word"); done < <(compgen -W "${kind#@* }" -- "$part")
            [[ $kind == @open* || "${COMPREPLY[*]}" == *[=.] ]] && compopt -o nospace 2> /dev/null ;;
    esac
    # readline replaces only the text after the last word break.
    word=$cur
    [[ $COMP_WORDBREAKS == *=* ]] && word=${word##*=}
    [[ $COMP_WORDBREAKS == *:* ]] && word=${word##*:}
    cut=${cur%"$word"}
    COMPREPLY=("${COMPREPLY[@]#"$cut"}")
}
complete -F _bytescope bytescope
"""

# Shared by bash and zsh. The first function counts one word before the cursor: it sets command, place (the number of
# positional arguments so far) and last (the previous word). The second function sets kind, part (the text to complete)
# and head (the text before it). @open marks words after which no space is added. A config may be a folder of weights,
# written as hf:FOLDER.
_KIND = r"""
_bytescope_count() {
    if [[ ! $command ]]; then
        [[ $word == -* ]] || command=$word
    elif [[ $word != -* && ! ($last != *=* && $(_bytescope_value "$command" "$last")) ]]; then
        place+=1
    fi
    last=$word
}
_bytescope_kind() {
    head= part=$cur
    if [[ ! $command ]]; then
        kind="@one $(_bytescope_commands) --help --version"
    elif [[ $cur == --grid=*=* ]]; then
        head=${cur%%=*}= part=${cur#*=}
        head=$head${part%%=*}= part=${part#*=}
        word=${head#--grid=}
        case $word in
            config=) kind="@list $(_bytescope_configs)" ;;
            target=) kind="@list $(_bytescope_targets)" ;;
            *) kind=$(_bytescope_value "$command" "--config.${word%=}")
               [[ $kind == @one* ]] && kind="@list ${kind#@one }" ;;
        esac
    elif [[ $cur == --*=* ]]; then
        head=${cur%%=*}= part=${cur#*=}
        kind=$(_bytescope_value "$command" "${cur%%=*}")
    elif [[ $cur == --config.*.* ]]; then
        kind="@words $(_bytescope_keys "${cur%.*}.")"
    elif [[ $cur == --config.* ]]; then
        kind="@words $(_bytescope_keys "")"
    elif [[ $cur == -* ]]; then
        kind="@words $(_bytescope_flags "$command")"
    else
        kind=
        [[ $last == --* && $last != *=* ]] && kind=$(_bytescope_value "$command" "$last")
        [[ $kind ]] || kind=$(_bytescope_place "$command" $place)
    fi
    case $kind in
        @grid) kind="@open config= target= $(_bytescope_grid_keys)" ;;
        @target) kind="@open $([[ $part == *:* ]] && _bytescope_counts "${part%%:*}" || _bytescope_targets)" ;;
    esac
    if [[ $kind == @config && $part == hf:* ]]; then
        head=${head}hf: part=${part#hf:} kind=@folder
    fi
    if [[ $kind == @list* ]]; then
        [[ $part == *,* ]] && head=$head${part%,*}, part=${part##*,}
        kind="@open ${kind#@list }"
    fi
}
"""

_ZSH = r"""
_bytescope() {
    local cur=$PREFIX last= command= kind= head= part= word=
    local -i place=0
    for word in "${(@)words[2,CURRENT-1]}"; do
        _bytescope_count
    done
    _bytescope_kind
    compset -P ${#head} '*'
    case $kind in
        @file) _files ;;
        @folder) _files -/ ;;
        @config) compadd -- $(_bytescope_configs); compadd -S '' -- hf:; _files -g '*.py' ;;
        @any) ;;
        @open*) compadd -S '' -- ${=kind#@* } ;;
        ?*) for word in ${=kind#@* }; do
                [[ $word == *[=.] ]] && compadd -S '' -- $word || compadd -- $word
            done ;;
    esac
}
if [[ $funcstack[1] == _bytescope ]]; then  # loaded from fpath, by the first key
    _bytescope "$@"
else
    compdef _bytescope bytescope
fi
"""

_FISH = r"""
function __bytescope_words
    set -l cur (commandline -ct)
    set -l before (commandline -opc)
    set -l command ""
    set -l last ""
    set -l place 0
    set -l kind ""
    for word in $before[2..-1]
        if test -z "$command"
            string match -q -- '-*' $word; or set command $word
        else if not string match -q -- '-*' $word
            string match -q -- '*=*' $last; or set kind (__bytescope_value "$command" "$last")
            test -n "$kind"; or set place (math $place + 1)
            set kind ""
        end
        set last $word
    end
    set -l head ""
    set -l part $cur
    if test -z "$command"
        set kind "@one "(__bytescope_commands)
    else if string match -qr -- '^--grid=[^=]*=' $cur
        set head (string match -r -- '^--grid=[^=]*=' $cur)
        set part (string replace -r -- '^--grid=[^=]*=' '' $cur)
        set -l key (string replace -r -- '^--grid=([^=]*)=' '$1' $head)
        switch $key
            case config
                set kind "@list "(__bytescope_configs)
            case target
                set kind "@list "(__bytescope_targets)
            case '*'
                set kind (__bytescope_value "$command" "--config.$key" | string replace '@one ' '@list ')
        end
    else if string match -qr -- '^--[^=]*=' $cur
        set head (string match -r -- '^--[^=]*=' $cur)
        set part (string replace -r -- '^--[^=]*=' '' $cur)
        set kind (__bytescope_value "$command" (string replace -r -- '=$' '' $head))
    else if string match -qr -- '^--config\..*\.' $cur
        set kind "@one "(__bytescope_keys (string match -r -- '^--config\..*\.' $cur))
    else if string match -q -- '--config.*' $cur
        set kind "@one "(__bytescope_keys "")
    else if string match -q -- '-*' $cur
        set kind "@one "(__bytescope_flags "$command")
    else
        string match -qr -- '^--[^=]*$' $last; and set kind (__bytescope_value "$command" "$last")
        test -n "$kind"; or set kind (__bytescope_place "$command" $place)
    end
    switch "$kind"
        case @grid
            set kind "@one config= target= "(__bytescope_grid_keys)
        case @target
            if string match -q -- '*:*' $part
                set kind "@one "(__bytescope_counts (string split -f 1 : $part))
            else
                set kind "@one "(__bytescope_targets)
            end
    end
    if test "$kind" = @config; and string match -q -- 'hf:*' $part
        set head "$head"hf:
        set part (string replace -- hf: '' $part)
        set kind @folder
    end
    switch "$kind"
        case @file @config
            test "$kind" = @config; and printf '%s\n' $head(string split -- ' ' (__bytescope_configs)) "$head"hf:
            set -l found (__fish_complete_path $part | string replace -r '\t.*' '')
            test "$kind" = @config; and set found (string match -r -- '.*(?:/|\.py)$' $found)
            test -n "$found"; and printf '%s\n' $head$found
        case @folder
            set -l found (__fish_complete_directories $part | string replace -r '\t.*' '')
            test -n "$found"; and printf '%s\n' $head$found
        case '@list *'
            string match -q -- '*,*' $part; and set head $head(string replace -r -- '[^,]*$' '' $part)
            printf '%s\n' $head(string split -- ' ' (string replace -r '^@list ' '' $kind))
        case '@one *'
            printf '%s\n' $head(string split -- ' ' (string replace -r '^@one ' '' $kind))
    end
end
complete -c bytescope -f -a '(__bytescope_words)'
"""


def _quoted(words: str) -> str:
    return f"'{words}'"


def _lookup_functions(words: Words, function: Callable[[str, Mapping[str, str]], str]) -> str:
    """Returns the shell code of the lookup functions of a completion script. They print, for example, the flags of a
    command, or the kind of a flag's value, such as `@file`.

    Args:
        words: the commands, flags, config keys and targets to offer.
        function: generates one shell function. Its arguments are the function's name, such as "flags", and a table:
          pattern of the shell function's arguments (such as "train" or "* --config.*") -> words to print.
    """
    values: dict[str, str] = {f"* --config.{key}": kind for key, kind in words.keys.items() if kind != NOTHING}
    flags: dict[str, str] = {}
    for command, kinds in words.flags.items():
        values |= {f"{command} {flag}": kind for flag, kind in kinds.items() if kind is not None}
        listed = [flag if kind is None else f"{flag}=" for flag, kind in kinds.items()]
        if "--config" in kinds:
            listed.append("--config.")
        flags[command] = " ".join(listed)
    values["* --config.*"] = NOTHING
    groups = [group for group in dict.fromkeys(key.rpartition(".")[0] for key in words.keys) if group]
    keys: dict[str, str] = {}
    for group in groups:
        in_group = [f"--config.{key}=" for key in words.keys if key.startswith(f"{group}.")]
        keys[f"--config.{group}."] = " ".join(in_group)
    top = [f"--config.{group}." for group in groups]
    top += [f"--config.{key}=" for key in words.keys if "." not in key]
    places: dict[str, str] = {}
    for command, row in words.places.items():
        for place, kind in enumerate(row):
            places[f"{command} {place}"] = kind
    tables = {
        "commands": {"*": " ".join(words.commands)},
        "configs": {"*": " ".join(words.configs)},
        "targets": {"*": " ".join(words.targets)},
        "counts": {name: " ".join(counts) for name, counts in words.targets.items() if counts},
        "flags": flags,
        "place": places,
        "keys": {**keys, "*": " ".join(top)},
        "grid_keys": {"*": " ".join(f"{key}=" for key in words.keys)},
        "value": values,
    }
    return "".join(function(name, rows) for name, rows in tables.items())


def _posix_function(name: str, rows: Mapping[str, str]) -> str:
    """Returns a shell function for bash and zsh that compares its arguments with the patterns in `rows` and prints the
    words of the first pattern that matches.

    `rows`: pattern, such as "train" or "* --config.*" -> words, separated by spaces.
    """
    if list(rows) == ["*"]:
        return f"_bytescope_{name}() {{ echo {_quoted(rows['*'])}; }}\n"
    cases = "".join(
        f"        {_case_pattern(patterns)}) echo {_quoted(text)} ;;\n" for patterns, text in _group_patterns(rows)
    )
    return f'_bytescope_{name}() {{\n    case "$*" in\n{cases}    esac\n}}\n'


def _case_pattern(patterns: Iterable[str]) -> str:
    # Each `*` stays unquoted: it is a wildcard of the shell's `case`.
    return " | ".join(f"'{each}'".replace("*", "'*'").replace("''", "") for each in patterns)


def _group_patterns(rows: Mapping[str, str]) -> list[tuple[list[str], str]]:
    groups: dict[str, list[str]] = {}
    for pattern, text in rows.items():
        groups.setdefault(text, []).append(pattern)
    # Wildcards are last, because the shell uses the first match.
    return sorted(((patterns, text) for text, patterns in groups.items()), key=lambda row: row[0][-1].endswith("*"))


def _fish_function(name: str, rows: Mapping[str, str]) -> str:
    cases = "".join(
        f"        case {' '.join(map(_quoted, patterns))}\n            echo {_quoted(text)}\n"
        for patterns, text in _group_patterns(rows)
    )
    return f'function __bytescope_{name}\n    switch "$argv"\n{cases}    end\nend\n'


def bash(words: Words) -> str:
    """Returns the completion script for bash 4 and later. `words`: the commands, flags, config keys and targets to
    offer.
    """
    return _HEAD.format(shell="bash") + _lookup_functions(words, _posix_function) + _KIND + _BASH


def zsh(words: Words) -> str:
    """Returns the completion script for zsh. `words`: the commands, flags, config keys and targets to offer.

    The script can be put on `fpath`, or sourced after compinit.
    """
    return "#compdef bytescope\n" + _HEAD.format(shell="zsh") + _lookup_functions(words, _posix_function) + _KIND + _ZSH


def fish(words: Words) -> str:
    """Returns the completion script for fish. `words`: the commands, flags, config keys and targets to offer."""
    return _HEAD.format(shell="fish") + _lookup_functions(words, _fish_function) + _FISH


SHELLS: Mapping[str, Callable[[Words], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
