"""`POST /tokenize` and `POST /detokenize`: a tokenizer stage's answers over HTTP.

Owns: their fields.
Does not know: tokenizing; a tokenizer stage is asked on the bus.
"""

from __future__ import annotations

from typing import Any

from busllm.errors import InvalidRequest
from busllm.stages.frontend.answers import DetokenizedText, Tokens
from busllm.stages.frontend.bodies import DetokenizeBody, TokenizeBody
from busllm.stages.frontend.chat_messages import chat_prompt
from busllm.stages.frontend.completion_prompts import check_token_ids
from busllm.stages.frontend.decoding import BodyDecoder
from busllm.stages.frontend.http import Answer, Request, json_response
from busllm.stages.frontend.sampling_fields import check_model
from busllm.stages.frontend.services import Services
from busllm.stages.frontend.settings import FrontendSettings

_tokenize_decoder = BodyDecoder(TokenizeBody)
_detokenize_decoder = BodyDecoder(DetokenizeBody)


async def tokenize(services: Services, request: Request) -> Answer:
    """Token ids of a text or of a conversation."""
    raw = await request.body()
    _, question = await _tokenize_decoder.read(raw, lambda body: _tokenize_question(body, services.settings))
    answer = await services.owner.ask("tokenizer", "tokenize", question)
    token_ids = list(answer["token_ids"])
    return json_response(Tokens(token_ids, len(token_ids), services.settings.max_model_len))


async def detokenize(services: Services, request: Request) -> Answer:
    """The text of token ids."""
    raw = await request.body()
    _, question = await _detokenize_decoder.read(raw, lambda body: _detokenize_question(body, services.settings))
    answer = await services.owner.ask("tokenizer", "detokenize", question)
    return json_response(DetokenizedText(str(answer["text"])))


def _tokenize_question(body: TokenizeBody, settings: FrontendSettings) -> dict[str, Any]:
    check_model(body.model, settings)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if body.messages is None:
        return {"prompt": body.prompt, "add_special_tokens": body.add_special_tokens is not False}
    if body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens is only allowed with prompt; a chat template writes the tokens that it wants.",
            param="add_special_tokens",
        )
    prompt = chat_prompt(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    return {"messages": prompt.messages, "template_options": prompt.template_options}


def _detokenize_question(body: DetokenizeBody, settings: FrontendSettings) -> dict[str, Any]:
    check_model(body.model, settings)
    if body.tokens:
        check_token_ids("tokens", body.tokens, settings.vocab_size)
    return {"token_ids": body.tokens, "skip_special_tokens": bool(body.skip_special_tokens)}
