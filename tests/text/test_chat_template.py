"""Chat templates: Hugging Face's conventions, and errors as the client sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from busllm.errors import InvalidRequest, ModelError
from busllm.model_store.files import ModelFiles
from busllm.model_store.pull import pull
from busllm.text.chat_template import ChatTemplate, load_chat_template

USER = {"role": "user", "content": "Hi <there> & 'you'"}


def _render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    tools = variables.pop("tools", None)
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages or [USER], add_generation_prompt=True, tools=tools, variables=variables)


def test_the_default_models_template_gives_what_transformers_gives():
    from transformers.utils.chat_template_utils import render_jinja_template

    files = pull("smollm2-135m")
    assert files.chat_template is not None
    template = load_chat_template(files)
    assert template is not None
    chats = [
        [USER],
        [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes."}, USER],
    ]
    for messages in chats:
        for add in (True, False):
            (expected,), _ = render_jinja_template(
                [messages], chat_template=files.chat_template.read_text(), add_generation_prompt=add
            )
            assert template.render(messages, add_generation_prompt=add, tools=None, variables={}) == expected


def test_special_tokens_and_extra_variables_can_be_used():
    assert _render("{{ bos_token }}{{ mode }}{{ eos_token }}", mode="think") == "<s>think</s>"


def test_blocks_leave_no_blank_lines():
    assert _render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n") == "x\n"


def test_json_is_not_escaped_for_html():
    source = "{{ messages[0]['content'] | tojson }}|{{ {'b': 1, 'a': 'ø'} | tojson(indent=1) }}"
    assert _render(source) == '"Hi <there> & \'you\'"|{\n "b": 1,\n "a": "ø"\n}'


def test_loop_controls_generation_blocks_and_dates_are_known():
    assert _render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert _render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"
    assert len(_render("{{ strftime_now('%Y') }}")) == 4


def test_a_refusal_of_the_template_is_the_clients_error_in_its_words():
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        _render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize("content", [None, ["part"], 3])
def test_content_of_a_kind_that_the_template_cannot_take_is_the_clients_error(content: object):
    with pytest.raises(InvalidRequest) as caught:
        _render("{{ 'x' + messages[0]['content'] }}", [{"role": "user", "content": content}])
    assert caught.value.param == "messages"


def test_a_message_without_a_field_is_the_clients_error():
    with pytest.raises(InvalidRequest):
        _render("{{ messages[0]['content'].strip() }}", [{"role": "user"}])


def test_a_template_cannot_reach_out_of_its_sandbox():
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__ }}"):
        with pytest.raises(InvalidRequest):
            _render(source + "{{ undefined.attribute }}")
    assert "class" not in _render("{{ ''.__class__ }}")


def test_a_template_does_not_change_the_callers_messages():
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest):
        _render("{% set _ = messages[0].update({'content': 'y'}) %}", messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_variables_cannot_replace_the_messages():
    template = ChatTemplate({"default": "{{ messages[0]['content'] }}"}, {})
    assert (
        template.render([USER], add_generation_prompt=True, tools=None, variables={"messages": []}) == USER["content"]
    )


def test_a_model_may_have_another_template_for_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0]['name'] }}"}, {})
    assert template.render([USER], add_generation_prompt=True, tools=None, variables={}) == "plain"
    assert template.render([USER], add_generation_prompt=True, tools=[{"name": "f"}], variables={}) == "f"


def test_a_template_that_is_not_jinja_is_found_at_load():
    with pytest.raises(ModelError, match="not valid"):
        ChatTemplate({"default": "{% if %}"}, {})


def test_a_template_is_found_in_its_own_file_or_in_the_configuration(tmp_path: Path):
    config = tmp_path / "tokenizer_config.json"

    def load(value: dict[str, Any], chat_template: Path | None = None) -> str | None:
        config.write_text(json.dumps(value))
        template = load_chat_template(
            ModelFiles(name="x", directory=tmp_path, tokenizer_config=config, chat_template=chat_template)
        )
        return template and template.render([USER], add_generation_prompt=True, tools=None, variables={})

    assert load({}) is None
    assert load({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>"}}) == "<s>"
    assert load({"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}) == "a"
    own = tmp_path / "chat_template.jinja"
    own.write_text("own")
    assert load({"chat_template": "config"}, own) == "own"
