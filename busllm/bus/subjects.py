"""Every subject of busllm, built in this one file.

Owns: the names `busllm.<cluster>.…`, and taking them apart again.
Does not know: payloads (`messages/`), the bus itself. Only server-generated words (cluster names checked by the
topology, uids, instance names, stage and event words) become tokens; text of a client never does.
"""

from __future__ import annotations

import msgspec

from busllm.errors import BadSubject
from busllm.ids import is_token

ROOT = "busllm"


class Subjects(msgspec.Struct, frozen=True):
    """Subjects of one cluster.

    Attributes:
        cluster: second token of every subject.
    """

    cluster: str

    def __post_init__(self) -> None:
        if not is_token(self.cluster):
            raise BadSubject(f"cluster {self.cluster!r} must be letters, digits, '_' and '-'.", param="cluster")

    def _join(self, *tokens: str) -> str:
        return ".".join((ROOT, self.cluster, *tokens))

    # work, along the path of a request

    def tokenize(self, tokenizer: str, uid: str) -> str:
        """Frontend → the tokenizer that it picked."""
        return self._join("tokenize", tokenizer, uid)

    def generate(self, scheduler: str, uid: str) -> str:
        """Tokenizer, or the frontend sending on → rank 0 of a scheduler."""
        return self._join("generate", scheduler, uid)

    def plan(self, scheduler: str) -> str:
        """Rank 0 → the other ranks of its replica."""
        return self._join("plan", scheduler)

    def detokenize(self, detokenizer: str) -> str:
        """Rank 0 → a detokenizer, one batch per step."""
        return self._join("detokenize", detokenizer)

    def stop(self, scheduler: str) -> str:
        """Detokenizer → rank 0: sequences that a stop string ended."""
        return self._join("stop", scheduler)

    def reply_step(self, frontend: str) -> str:
        """Detokenizer → frontend: one batch per step."""
        return self._join("reply", frontend, "step")

    def reply(self, frontend: str, uid: str) -> str:
        """Any stage → the owner of a request."""
        return self._join("reply", frontend, uid)

    def abort(self, uid: str) -> str:
        """Anyone → every stage."""
        return self._join("abort", uid)

    # watching

    def trace(self, uid: str, stage: str, event: str) -> str:
        """Every stage → anyone."""
        return self._join("trace", uid, stage, event)

    def stage(self, kind: str, instance: str) -> str:
        """Announcement and heartbeat."""
        return self._join("stage", kind, instance)

    def discover(self) -> str:
        """Asks every stage to announce itself now."""
        return self._join("discover")

    def cache(self, scheduler: str) -> str:
        """Rank 0 → tokenizers: what its prefix cache holds."""
        return self._join("cache", scheduler)

    # requests

    def inbox(self, instance: str) -> str:
        """Prefix under which an instance's own requests are answered."""
        return self._join("inbox", instance)

    def control(self, instance: str, verb: str) -> str:
        """Operators and frontends → a stage, request/reply."""
        return self._join("control", instance, verb)

    # patterns

    def all_of(self, *tokens: str) -> str:
        """A pattern: the tokens may be wildcards."""
        return self._join(*tokens)

    def parts(self, subject: str) -> list[str]:
        """The tokens after `busllm.<cluster>`.

        Raises:
            BadSubject: the subject is not of this cluster.
        """
        prefix = f"{ROOT}.{self.cluster}."
        if not subject.startswith(prefix):
            raise BadSubject(f"{subject!r} does not begin with {prefix!r}.")
        return subject[len(prefix) :].split(".")
