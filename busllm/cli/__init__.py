"""The command line, one file per command; `main.py` has the table of them.

Each command's module has `add_arguments(parser)` and `execute(arguments) -> int`, the exit status, and imports what it
needs when it runs, so that `busllm --help` and a misspelt flag are answered at once.
"""
