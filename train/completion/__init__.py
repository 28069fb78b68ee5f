"""Shell completion: `bytescope completion bash|zsh|fish` prints a static script, so that no key starts Python.

Start at command.py; words.py gathers what can be completed from parsers, configs and tables; shells.py writes it in
the language of each shell.
"""
