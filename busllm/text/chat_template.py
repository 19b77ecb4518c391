"""A model's chat template: messages → one text.

Owns: the sandboxed Jinja environment with the conventions of Hugging Face's templates (documented in the
`transformers` guide "Writing a chat template"), finding the template among a model's files, and the translation of
its errors.
Does not know: token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from busllm.errors import InvalidRequest, ModelError
from busllm.model_store.files import ModelFiles, read_json

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# What Python raises when a template meets a value of a kind that it did not expect (None for a text, say).
_DATA_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; for inference it is just its content."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which the model was not trained to read.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The compiled templates of one model.

    Args:
        sources: name → Jinja text; "default", and "tool_use" where a model has another one for requests with tools.
        special_tokens: the variables bos_token, eos_token and so on.

    Raises:
        ModelError: a template is not valid Jinja, or there is no default one.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        environment.globals.update(special_tokens)
        if _DEFAULT not in sources:
            raise ModelError(f"The model has chat templates ({', '.join(sources)}), but none is named {_DEFAULT!r}.")
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            raise ModelError(f"The model's chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Renders messages.

        Raises:
            InvalidRequest: the template refused them; the message is the template's own.
        """
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else _DEFAULT
        values = dict(variables) | {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._templates[name].render(values)
        except TemplateError as error:
            raise InvalidRequest(f"The model's chat template refuses: {error}", param="messages") from error
        except _DATA_ERRORS as error:
            raise InvalidRequest(
                f"The model's chat template cannot render these messages: {error}", param="messages"
            ) from error


def load_chat_template(files: ModelFiles) -> ChatTemplate | None:
    """Loads a model's chat template from its own file, or else from the tokenizer's configuration.

    Returns:
        None when the model has none.

    Raises:
        ModelError: it is not valid.
    """
    config = read_json(files.tokenizer_config) if files.tokenizer_config else {}
    sources = _sources(files, config)
    if not sources:
        return None
    tokens = {name: special_token(config, name) for name in _SPECIAL_TOKENS}
    return ChatTemplate(sources, {name: text for name, text in tokens.items() if text is not None})


def special_token(tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token such as "bos_token": written as such, or as an object with its flags."""
    value = tokenizer_config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _sources(files: ModelFiles, config: Mapping[str, Any]) -> dict[str, str]:
    if files.chat_template is not None:
        return {_DEFAULT: files.chat_template.read_text(encoding="utf-8")}
    match config.get("chat_template"):
        case str() as text if text:
            return {_DEFAULT: text}
        case list() as entries:
            return {entry["name"]: entry["template"] for entry in entries}
        case _:
            return {}
