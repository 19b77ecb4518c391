"""`busllm.LLM`: the engine in this process, without a bus.

Owns: the way from prompts to finished texts in one call: encode, submit, step, decode.
Does not know: HTTP, stages, subjects. The engine and the text decoder are the ones that the server's stages use, so
the answers are the same.

    with busllm.LLM("smollm2-135m") as llm:
        for completion in llm.generate(["Once upon a time"], busllm.SamplingParams(max_tokens=40)):
            print(completion.text)
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, SupportsIndex

import numpy as np

from busllm.engine.engine import Engine
from busllm.engine.openmp import calm_openmp
from busllm.engine.options import EngineOptions, engine_config, read_options
from busllm.engine.runner import Runner
from busllm.engine.sequence import SequenceRequest, SequenceTokens
from busllm.errors import InvalidRequest
from busllm.grammar.compiler import GrammarCompiler
from busllm.ids import new_uid
from busllm.model_store.files import ModelFiles
from busllm.model_store.resolve import resolve
from busllm.plan import TokenLogprobs
from busllm.sampling import SamplingParams, choice_seed
from busllm.text.decoder import Decoder
from busllm.text.tokenizer import Message, load_tokenizer
from busllm.text.vocabulary import load_vocabulary

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Completion:
    """What became of one prompt.

    Attributes:
        text: the answer, without the stop string that ended it.
        token_ids: the tokens that count; the one that ended the answer is among them.
        finish_reason: "stop" (the model ended its turn, or a stop string or token came) or "length".
        prompt_token_ids: the prompt as the model saw it.
        logprobs: one per token of `token_ids` when asked for, else None.
        prompt_logprobs: one per token of the prompt when asked for (the first is None), else None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass
class _Answer:
    """One sequence on its way."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    decoder: Decoder
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None

    def take(self, tokens: SequenceTokens) -> None:
        """Takes what a step gave; `finish_reason` is set when that was the end, be it by a stop string."""
        step = self.decoder.take(tokens.token_ids, tokens.finish_reason and tokens.finish_reason.value)
        self.text += step.text
        self.token_ids += tokens.token_ids[: step.num_tokens_kept]
        self.logprobs += tokens.logprobs[: step.num_tokens_kept]
        self.prompt_logprobs = tokens.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = step.finish_reason

    def completion(self) -> Completion:
        """The result; only when it has ended."""
        assert self.finish_reason is not None
        return Completion(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            prompt_token_ids=self.prompt_ids,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
        )


class LLM:
    """A model that answers in this process.

    Args:
        source: alias, hub id, directory, GGUF file, or "null" (no model, for tests).
        **options: see `busllm.engine.options.EngineOptions`.

    Raises:
        ModelError: the model cannot be found or loaded.
        ConfigError: an option is unknown or impossible.
        MissingPackage: the attention backend is not installed.
    """

    def __init__(self, source: str, **options: Any) -> None:
        chosen = read_options(options)
        files = resolve(source)
        self._tokenizer = load_tokenizer(files)
        grammars = GrammarCompiler(partial(load_vocabulary, files))
        runner = _load(files, chosen, grammars)
        self._engine = Engine(runner, engine_config(chosen, runner), grammars)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine, for statistics and integrity checks."""
        return self._engine

    def close(self) -> None:
        """Gives the KV cache back. The object cannot be used afterwards."""
        self._engine.close()

    def generate(
        self, prompts: Prompts, sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answers prompts, together.

        Args:
            prompts: one text, several, the token ids of one prompt, or of several. Text gets the special tokens that
                the model expects at its beginning; ids are taken as they are.
            sampling: for all, or one per prompt; None = `SamplingParams()`, by which an answer goes on until the model
                ends it or the context is full: give `max_tokens`. A missing seed is drawn.

        Returns:
            One completion per prompt, in order.

        Raises:
            InvalidRequest, ContextLengthExceeded, NeverFits: a prompt or setting is impossible, or a grammar cannot be
                followed; nothing is generated.
        """
        all_ids = self._encode(prompts)
        return self._run(all_ids, _per_prompt(sampling, len(all_ids)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers chats: like `generate`, with prompts written by the model's chat template.

        Args:
            messages: one chat (a list of {"role", "content"}), or several.
            sampling: for all, or one per chat.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages.
        """
        chats = [messages] if all(isinstance(entry, Mapping) for entry in messages) else messages
        all_ids = [tuple(self._tokenizer.encode_chat(chat)) for chat in chats]  # type: ignore[arg-type]
        return self._run(all_ids, _per_prompt(sampling, len(all_ids)))

    def _encode(self, prompts: Prompts) -> list[tuple[int, ...]]:
        if not isinstance(prompts, Iterable):
            raise InvalidRequest(f"prompts is {prompts!r}; it must be texts or token ids.", param="prompts")
        entries: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if entries and all(isinstance(entry, int) for entry in entries):
            entries = [entries]
        texts = [entry for entry in entries if isinstance(entry, str)]
        encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens=True))
        return [tuple(next(encoded)) if isinstance(entry, str) else _token_ids(entry) for entry in entries]

    def _run(self, all_ids: Sequence[tuple[int, ...]], all_params: Sequence[SamplingParams]) -> list[Completion]:
        answers: dict[str, _Answer] = {}
        uids: list[str] = []
        try:
            for prompt_ids, params in zip(all_ids, all_params, strict=True):
                uid: str = new_uid()
                uids.append(uid)
                self._engine.submit(_request(uid, prompt_ids, params))
                answers[uid] = _Answer(prompt_ids, params, self._decoder(prompt_ids, params))
            open_uids = set(answers)
            while open_uids:
                output = self._engine.step()
                for failure in output.failures:
                    raise failure.error
                for tokens in output.tokens:
                    self._take(answers[tokens.uid], tokens, open_uids)
        finally:
            for uid in uids:
                self._engine.abort(uid)  # an error or Ctrl-C leaves nothing behind; ended ones are not there any more
        return [answer.completion() for answer in answers.values()]

    def _take(self, answer: _Answer, tokens: SequenceTokens, open_uids: set[str]) -> None:
        if tokens.uid not in open_uids:
            return
        answer.take(tokens)
        if answer.finish_reason is None:
            return
        open_uids.discard(tokens.uid)
        if tokens.finish_reason is None:
            self._engine.stop(tokens.uid, tokens.choice, tokens.attempt)

    def _decoder(self, prompt_ids: Sequence[int], params: SamplingParams) -> Decoder:
        return Decoder(
            self._tokenizer,
            prompt_tail_ids=prompt_ids,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
        )


def _request(uid: str, prompt_ids: Iterable[int], params: SamplingParams) -> SequenceRequest:
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return SequenceRequest(
        uid=uid,
        choice=0,
        attempt=1,
        prompt_ids=np.fromiter(prompt_ids, dtype=np.int32),
        output_ids=np.zeros(0, dtype=np.int32),
        params=params,
        seed=choice_seed(seed, 0),
    )


def _token_ids(entry: object) -> tuple[int, ...]:
    if not isinstance(entry, Iterable):
        raise InvalidRequest(f"prompts has {entry!r}; a prompt is a text or a list of token ids.", param="prompts")
    ids: list[int] = []
    for token_id in entry:
        if not isinstance(token_id, SupportsIndex):  # numpy's whole numbers are fine
            raise InvalidRequest(f"A prompt has the token id {token_id!r}; it must be a whole number.", param="prompts")
        ids.append(token_id.__index__())
        if not -(2**31) <= ids[-1] < 2**31:
            raise InvalidRequest(f"A prompt has the token id {token_id}, which no model has.", param="prompts")
    return tuple(ids)


def _per_prompt(sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * num_prompts
    if isinstance(sampling, Mapping):
        raise InvalidRequest("sampling is a dict; write SamplingParams(**it).", param="sampling")
    if len(sampling) != num_prompts:
        raise InvalidRequest(
            f"There are {num_prompts} prompts and {len(sampling)} sampling settings.", param="sampling"
        )
    return list(sampling)


def _load(files: ModelFiles, options: EngineOptions, grammars: GrammarCompiler) -> Runner:
    if files.is_null:
        from busllm.engine.null import NullRunner

        return NullRunner(grammars=grammars)
    calm_openmp()
    from busllm.engine.loader import LoadConfig, load_runner

    config = LoadConfig(
        device=options.device,
        dtype=options.dtype,
        attention=options.attention,
        quantization=options.quantization,
        page_tokens=None if options.page_tokens == "auto" else options.page_tokens,
    )
    return load_runner(files, config, grammars=grammars)
