"""`busllm COMMAND …`: the table of commands, and what becomes of errors.

Owns: finding the command, exit statuses, the warning about misspelt environment variables.
Does not know: what commands do; the one that is named is imported, no other.
Next on the path: the command's own file.

To add a command: write a file of its name in `cli/` with `add_arguments(parser)` and `execute(arguments) -> int`, and a
line in `COMMANDS`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import msgspec

from busllm.cli.arguments import EXIT_USAGE, Parser
from busllm.errors import AlreadyRunning, BusllmError, ConfigError, FetchFailed, MissingPackage, ModelError, Superseded
from busllm.topology.last_words import say_last_words
from busllm.topology.nearest import nearest

EXIT_FAILURE = 1
EXIT_SUPERSEDED = 3
EXIT_INTERRUPTED = 128 + signal.SIGINT

ENVIRONMENT = (
    *("BUSLLM_API_KEY", "BUSLLM_BUS_URL", "BUSLLM_CACHE", "BUSLLM_LAST_WORDS_FD", "BUSLLM_LISTEN_FDS"),
    "BUSLLM_LOG_LEVEL",
)


class Command(msgspec.Struct, frozen=True):
    """One command.

    Attributes:
        name: as it is typed.
        module: where it is.
        summary: one line for the list of commands.
    """

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("up", "busllm.cli.up", "start every process of this host and keep it running"),
    Command("stage", "busllm.cli.stage", "run one stage, or several in one process, in the foreground"),
    Command("check", "busllm.cli.check", "check a topology file and show what runs where"),
    Command("pull", "busllm.cli.pull", "fetch a model into the cache"),
    Command("chat", "busllm.cli.chat", "talk to a model in the terminal"),
    Command("trace", "busllm.cli.trace", "show a request's way through the stages"),
    Command("abort", "busllm.cli.abort", "end requests"),
    Command("top", "busllm.cli.top", "show live stages, queues, KV pages and tokens per second"),
    Command("bench", "busllm.cli.bench", "put load on any OpenAI-compatible server and measure it"),
    Command("env", "busllm.cli.env", "print NATS_URL=... for stock NATS tools"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: without the program's name; None = of this process.

    Returns:
        The exit status: 0; 1 = failed; 2 = a mistake in flags or configuration, a model that cannot be served, or it
        runs already; 3 = superseded.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        print(f"busllm {importlib.metadata.version('busllm')}")
        return 0
    by_name = {command.name: command for command in COMMANDS}
    command = by_name.get(words[0])
    if command is None:
        return _unknown_command(words[0], by_name)
    _warn_of_misspelt_variables(os.environ)
    return _run(command, words[1:])


def exit_status(error: BusllmError) -> int:
    """The exit status that an error becomes."""
    match error:
        case FetchFailed():
            return EXIT_FAILURE  # the network may be back at the next try
        case ConfigError() | AlreadyRunning() | MissingPackage() | ModelError():
            return EXIT_USAGE
        case Superseded():
            return EXIT_SUPERSEDED
        case _:
            return EXIT_FAILURE


def _run(command: Command, words: list[str]) -> int:
    module = importlib.import_module(command.module)
    parser = Parser(prog=f"busllm {command.name}", description=inspect.getdoc(module.execute))
    module.add_arguments(parser)
    arguments = parser.parse_args(words)
    try:
        status: int = module.execute(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered has nobody to go to
        return EXIT_FAILURE
    except (BusllmError, BaseExceptionGroup) as caught:
        error = _only_error(caught)
        if error is None:
            raise
        print(f"busllm {command.name}: {error}", file=sys.stderr, flush=True)
        say_last_words(str(error))
        return exit_status(error)
    return status


def _only_error(caught: BaseException) -> BusllmError | None:
    """The error of busllm that was raised, also out of task groups; None when there is another one beside it."""
    if isinstance(caught, BaseExceptionGroup):
        errors = [_only_error(inner) for inner in caught.exceptions]
        return errors[0] if len(set(map(type, errors))) == 1 else None
    return caught if isinstance(caught, BusllmError) else None


def _unknown_command(word: str, known: Mapping[str, Command]) -> int:
    suggestion = nearest(word, known)
    hint = f" Did you mean {suggestion!r}?" if suggestion else ""
    print(f"busllm: there is no command {word!r}.{hint} See `busllm --help`.", file=sys.stderr)
    return EXIT_USAGE


def _warn_of_misspelt_variables(environment: Mapping[str, str]) -> None:
    for name in environment:
        if name.startswith("BUSLLM_") and name not in ENVIRONMENT:
            suggestion = nearest(name, ENVIRONMENT)
            hint = f" Did you mean {suggestion}?" if suggestion else ""
            print(f"busllm: warning: the environment variable {name} means nothing.{hint}", file=sys.stderr)


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
    return (
        "usage: busllm COMMAND ...\n\nAn LLM inference server whose stages are actors on a message bus.\n\n"
        f"commands:\n{lines}\n\n`busllm COMMAND --help` tells more of one; `busllm --version` the version."
    )


if __name__ == "__main__":
    sys.exit(main())
