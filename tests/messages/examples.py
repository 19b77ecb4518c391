"""One message of each type that travels, every field with a value of its own, and the bytes that it has had since.

A line of `GOLDEN` is never changed: it is what an older instance of the cluster sends. A new field has a default, is
appended to its type, and gets a new line here beside the old one.
"""

from __future__ import annotations

from typing import Any

from busllm.messages import control, to_detokenizer, to_frontend, to_ranks, to_scheduler, to_tokenizer
from busllm.messages.codec import Decoder, pack_ids
from busllm.messages.parts import Part
from busllm.plan import PagesAssigned, PlanRow, SlotOpened, StepPlan, TokenLogprobs
from busllm.sampling import Grammar, GrammarKind, SamplingParams

UID = "abcdefghijklmnopqrst"
FRONTEND = "frontend-0-aaaaaaaa"
SCHEDULER = "scheduler-0-bbbbbbbb"
DETOKENIZER = "detokenizer-0-cccccccc"

PARAMS = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    max_tokens=64,
    min_tokens=1,
    stop=("END",),
    stop_token_ids=(7,),
    ignore_eos=True,
    seed=11,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    repetition_penalty=1.5,
    logit_bias=((5, -1.0),),
    logprobs=2,
    prompt_logprobs=1,
    skip_special_tokens=False,
    grammar=Grammar(GrammarKind.REGEX, "[0-9]+", "structured_outputs"),
)
LOGPROBS = TokenLogprobs(-0.5, ((3, -0.5), (4, -1.5)))
TOKEN_TEXT = to_frontend.TokenText(b"\xf0\x9f", -0.5, ((3, b"a", -0.5),))

Example = tuple[Any, Decoder[Any]]

EXAMPLES: dict[str, Example] = {
    "tokenize": (
        to_tokenizer.Tokenize(
            uid=UID,
            attempt=2,
            frontend=FRONTEND,
            prompts=(
                to_tokenizer.ChatPrompt([{"role": "user", "content": "hi"}], [{"type": "function"}], {"x": 1}),
                to_tokenizer.TextPrompt("hello"),
                to_tokenizer.TokenPrompt(pack_ids([1, 2])),
            ),
            params=PARAMS,
            seed=-3,
            n=2,
            priority=1,
            cache_namespace=b"salt",
            avoid=(SCHEDULER,),
        ),
        to_tokenizer.decoder,
    ),
    "generate": (
        to_scheduler.Generate(
            uid=UID,
            attempt=2,
            frontend=FRONTEND,
            prompt_ids=pack_ids([1, 2, 3]),
            choices=(to_scheduler.ChoiceStart(1, pack_ids([9]), 4),),
            params=PARAMS,
            seed=-3,
            priority=1,
            cache_namespace=b"salt",
            avoid=(DETOKENIZER,),
        ),
        to_scheduler.decoder,
    ),
    "stop": (to_scheduler.StopMatched(((UID, 1, 2),)), to_scheduler.decoder),
    "step": (
        to_detokenizer.StepTokens(
            scheduler=SCHEDULER,
            number=17,
            opened=(
                to_detokenizer.SequenceOpened(
                    3, UID, 1, 2, FRONTEND, pack_ids([1]), pack_ids([9]), 4, ("END",), False, 3, 2, 1
                ),
            ),
            handles=pack_ids([3]),
            indexes=pack_ids([1]),
            offsets=pack_ids([0, 2]),
            token_ids=pack_ids([5, 6]),
            finished=((0, "length"),),
            logprobs=((0, (LOGPROBS, LOGPROBS)),),
            prompt_logprobs=((0, pack_ids([1, 2]), (None, LOGPROBS)),),
        ),
        to_detokenizer.decoder,
    ),
    "text": (
        to_frontend.StepText(
            detokenizer=DETOKENIZER,
            uids=(UID,),
            choices=pack_ids([1]),
            attempts=pack_ids([2]),
            indexes=pack_ids([1]),
            texts=(" hé",),
            offsets=pack_ids([0, 2]),
            token_ids=pack_ids([5, 6]),
            finished=((0, "stop", to_frontend.Usage(3, 2, 3)),),
            logprobs=((0, (TOKEN_TEXT,)),),
            prompt_logprobs=((0, (to_frontend.TokenText(b"x", None),)),),
        ),
        to_frontend.decoder,
    ),
    "taken": (to_frontend.Taken(UID, 2, "scheduler", SCHEDULER), to_frontend.decoder),
    "tokenized": (to_frontend.Tokenized(UID, 2, (pack_ids([1, 2]),), SCHEDULER), to_frontend.decoder),
    "failed": (
        to_frontend.Failed(UID, 2, "scheduler", "queue_full", "Full.", "rate_limit_error", 429, "n", True),
        to_frontend.decoder,
    ),
    "allocate": (to_ranks.Allocate(0, 8, 16, 4, 128), to_ranks.decoder),
    "rank step": (
        to_ranks.Step(
            3,
            StepPlan(
                number=2,
                rows=(
                    PlanRow(0, 5, 1, None, 1, True),
                    PlanRow(1, 0, 2, pack_ids([7, 8]), None, False),
                ),
                num_decode_rows=1,
                opened=(SlotOpened(1, PARAMS, 2**63, pack_ids([7, 8]), 2),),
                closed=(3,),
                pages=(PagesAssigned(1, 0, (4, 2)),),
                prompt_logprob_rows=(1,),
            ),
        ),
        to_ranks.decoder,
    ),
    "order taken": (to_ranks.OrderTaken(1, 3), to_ranks.taken_decoder),
    "part": (Part("0123456789abcdef", 1, 3, b"\x00\x01"), to_frontend.decoder),
    "announcement": (
        control.Announcement(
            kind="scheduler",
            index=0,
            instance=SCHEDULER,
            host="here",
            pid=42,
            state=control.StageState.READY,
            progress="x",
            started_at=1.5,
            versions=control.Versions(1, "0.1.0", "t", "m"),
            load={"requests": 1.0},
            statistics={"kv_pages": {"free": 3}},
        ),
        control.announcement_decoder,
    ),
    "probe": (control.Probe((UID,)), control.probe_decoder),
    "probe answer": (
        control.ProbeAnswer(SCHEDULER, {UID: (control.ProbedSequence(1, 2, "running", 5),)}),
        control.probe_answer_decoder,
    ),
    "live answer": (control.LiveAnswer(FRONTEND, ((UID, 2),)), control.live_answer_decoder),
}

IN_JSON = frozenset({"announcement", "probe", "probe answer", "live answer"})

GOLDEN: dict[str, str] = {
    "tokenize": (
        "9ba8746f6b656e697a65b46162636465666768696a6b6c6d6e6f707172737402b366726f6e74656e642d302d616161616161"
        "61619394a4636861749182a4726f6c65a475736572a7636f6e74656e74a268699181a474797065a866756e6374696f6e81a1"
        "780192a474657874a568656c6c6f92a3696473c4080100000002000000dc0012cb3fe0000000000000cb3feccccccccccccd"
        "28cb3fb999999999999a400191a3454e449107c30bcb3fd0000000000000cbbfd0000000000000cb3ff80000000000009192"
        "05cbbff00000000000000201c293a57265676578a65b302d395d2bb2737472756374757265645f6f757470757473fd0201c4"
        "0473616c7491b47363686564756c65722d302d6262626262626262"
    ),
    "generate": (
        "9ba867656e6572617465b46162636465666768696a6b6c6d6e6f707172737402b366726f6e74656e642d302d616161616161"
        "6161c40c010000000200000003000000919301c4040900000004dc0012cb3fe0000000000000cb3feccccccccccccd28cb3f"
        "b999999999999a400191a3454e449107c30bcb3fd0000000000000cbbfd0000000000000cb3ff8000000000000919205cbbf"
        "f00000000000000201c293a57265676578a65b302d395d2bb2737472756374757265645f6f757470757473fd01c40473616c"
        "7491b66465746f6b656e697a65722d302d6363636363636363"
    ),
    "stop": "92a473746f709193b46162636465666768696a6b6c6d6e6f70717273740102",
    "step": (
        "9ba473746570b47363686564756c65722d302d626262626262626211919e03b46162636465666768696a6b6c6d6e6f707172"
        "73740102b366726f6e74656e642d302d6161616161616161c40401000000c404090000000491a3454e44c203020190c40403"
        "000000c40401000000c4080000000002000000c4080500000006000000919200a66c656e6774689192009292cbbfe0000000"
        "000000929203cbbfe00000000000009204cbbff800000000000092cbbfe0000000000000929203cbbfe00000000000009204"
        "cbbff8000000000000919300c408010000000200000092c092cbbfe0000000000000929203cbbfe00000000000009204cbbf"
        "f8000000000000"
    ),
    "text": (
        "9ca474657874b66465746f6b656e697a65722d302d636363636363636391b46162636465666768696a6b6c6d6e6f70717273"
        "74c40401000000c40402000000c4040100000091a42068c3a9c4080000000002000000c4080500000006000000919300a473"
        "746f70930302039192009193c402f09fcbbfe0000000000000919303c40161cbbfe00000000000009192009193c40178c090"
    ),
    "taken": (
        "96a574616b656eb46162636465666768696a6b6c6d6e6f707172737402a97363686564756c6572b47363686564756c65722d"
        "302d626262626262626290"
    ),
    "tokenized": (
        "95a9746f6b656e697a6564b46162636465666768696a6b6c6d6e6f70717273740291c4080100000002000000b47363686564"
        "756c65722d302d6262626262626262"
    ),
    "failed": (
        "9aa66661696c6564b46162636465666768696a6b6c6d6e6f707172737402a97363686564756c6572aa71756575655f66756c"
        "6ca546756c6c2eb0726174655f6c696d69745f6572726f72cd01ada16ec3"
    ),
    "allocate": "96a8616c6c6f6361746500081004cc80",
    "rank step": (
        "93a4737465700397029296000501c001c396010002c4080700000008000000c0c201919501dc0012cb3fe0000000000000cb"
        "3feccccccccccccd28cb3fb999999999999a400191a3454e449107c30bcb3fd0000000000000cbbfd0000000000000cb3ff8"
        "000000000000919205cbbff00000000000000201c293a57265676578a65b302d395d2bb2737472756374757265645f6f7574"
        "70757473cf8000000000000000c4080700000008000000029103919301009204029101"
    ),
    "order taken": "93a574616b656e0103",
    "part": "95a470617274b0303132333435363738396162636465660103c4020001",
    "announcement": (
        '{"kind":"scheduler","index":0,"instance":"scheduler-0-bbbbbbbb","host":"here","pid":42,"state":"read'
        'y","progress":"x","started_at":1.5,"versions":{"protocol":1,"package":"0.1.0","topology":"t","model"'
        ':"m"},"load":{"requests":1.0},"statistics":{"kv_pages":{"free":3}}}'
    ),
    "probe": '{"uids":["abcdefghijklmnopqrst"]}',
    "probe answer": '{"instance":"scheduler-0-bbbbbbbb","sequences":{"abcdefghijklmnopqrst":[[1,2,"running",5]]}}',
    "live answer": '{"instance":"frontend-0-aaaaaaaa","live":[["abcdefghijklmnopqrst",2]]}',
}

BEFORE_GRAMMARS: dict[str, str] = {
    "tokenize": (
        "9ba8746f6b656e697a65b46162636465666768696a6b6c6d6e6f707172737402b366726f6e74656e642d302d616161616161"
        "61619394a4636861749182a4726f6c65a475736572a7636f6e74656e74a268699181a474797065a866756e6374696f6e81a1"
        "780192a474657874a568656c6c6f92a3696473c4080100000002000000dc0011cb3fe0000000000000cb3feccccccccccccd"
        "28cb3fb999999999999a400191a3454e449107c30bcb3fd0000000000000cbbfd0000000000000cb3ff80000000000009192"
        "05cbbff00000000000000201c2fd0201c40473616c7491b47363686564756c65722d302d6262626262626262"
    ),
    "generate": (
        "9ba867656e6572617465b46162636465666768696a6b6c6d6e6f707172737402b366726f6e74656e642d302d616161616161"
        "6161c40c010000000200000003000000919301c4040900000004dc0011cb3fe0000000000000cb3feccccccccccccd28cb3f"
        "b999999999999a400191a3454e449107c30bcb3fd0000000000000cbbfd0000000000000cb3ff8000000000000919205cbbf"
        "f00000000000000201c2fd01c40473616c7491b66465746f6b656e697a65722d302d6363636363636363"
    ),
}
"""Lines from before `SamplingParams` had `grammar`."""
