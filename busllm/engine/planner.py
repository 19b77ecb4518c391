"""Decides what each step computes.

Owns: the waiting queue, the running sequences and every choice between them: who is admitted, who decodes, whose
prompt advances by how much, who gives its pages back when they run out.
Does not know: tensors, the runner, attempts, the outside. It makes plans and is told when they have landed.
Next on the path: `engine/engine.py` launches the plan.

The rules, in the order in which a step applies them:

1. *Decodes first.* Every running sequence whose prompt is complete gets one token, the oldest first.
2. *Then chunks*, of as many sequences as the rest of the token budget serves, waiting ones admitted among them. The
   order is an earliest virtual deadline: the step of arrival plus `_PATIENCE` times the steps that the prompt takes
   alone. So a short prompt passes a long one, but only within a bounded time: a sequence that arrives later than the
   long one's deadline stands behind it. Nothing is ever re-sorted. A higher priority goes before a lower one always.
3. *Admission* is strict in that order and by expected pages (`engine/admission.py`).
4. *A shared prefix that a running sequence is just computing is waited for*, at most `max_prefix_wait_steps`.
5. *When pages run out the youngest is retracted*: it gives all its pages back (what it computed stays in the prefix
   cache as long as there is room) and returns to the front of the queue with its output. The oldest is never
   retracted for a younger one, so something always advances. One that outgrows the whole pool alone ends.
"""

from __future__ import annotations

from collections import deque

from busllm.engine.admission import AdmissionBudget, ExpectedLength
from busllm.engine.config import EngineConfig
from busllm.engine.live_sequence import LiveSequence, Rank
from busllm.engine.lobby import Lobby
from busllm.engine.outbox import Outbox
from busllm.engine.page_tables import PageTables, PrefixMatch
from busllm.engine.plan_draft import PlanDraft, PlannedStep
from busllm.engine.roster import Roster
from busllm.engine.step_budget import StepBudget
from busllm.plan import PlanRow

_PATIENCE = 4


class Planner:
    """Plans steps.

    Args:
        config: sizes and limits.
        tables: pages and prefix cache.
        outbox: takes the events `admitted` and `retracted`.

    Attributes:
        budget: prompt tokens of a step; told what steps have taken.
        outgrown: sequences that the last plan found too large for the whole pool; they are to end.
        num_retractions, num_prompt_tokens, num_cached_tokens: since the start; a prompt counts when its sequence is
            admitted for the first time.
    """

    def __init__(self, config: EngineConfig, tables: PageTables, outbox: Outbox) -> None:
        self.outgrown: list[LiveSequence] = []
        self.num_retractions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._config = config
        self._tables = tables
        self._outbox = outbox
        self._number = 0
        self.budget = StepBudget(config)
        self._roster = Roster(config.max_running)
        self._lobby = Lobby(config.page_tokens, config.max_prefix_wait_steps)
        self._expected = ExpectedLength(config.expected_output_tokens)

    # ------------------------------------------------------------ counts

    @property
    def num_steps(self) -> int:
        """Number of the last plan."""
        return self._number

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences without one."""
        return len(self._lobby)

    @property
    def num_free_slots(self) -> int:
        """Slots that a waiting sequence could take."""
        return self._roster.num_free_slots

    @property
    def is_idle(self) -> bool:
        """Whether nothing may be computed: there is nothing, or all of it is held."""
        return self._roster.all_held and self._lobby.is_idle

    def check(self) -> None:
        """Checks the page accounting.

        Raises:
            IntegrityError: says where.
        """
        self._tables.check(self._roster.holders())

    # ------------------------------------------------------------ coming and going

    def add(self, seq: LiveSequence) -> None:
        """Queues a new sequence."""
        seq.rank = self._rank(seq, returns=False)
        self._lobby.push(seq)

    def _rank(self, seq: LiveSequence, *, returns: bool) -> Rank:
        steps_alone = -(-seq.num_tokens // self._config.step_tokens)
        # Who returns goes before all who never ran, the older first.
        deadline = 0 if returns else self._number + _PATIENCE * steps_alone
        return (-seq.request.priority, deadline, seq.arrival)

    def remove(self, seq: LiveSequence) -> None:
        """A sequence has ended. Its pages go back now, or when no launched step uses them."""
        if seq.slot is None:
            self._lobby.discard(seq)
            return
        self._lobby.dismiss(seq)
        self._roster.dismiss(seq)
        self._roster.leaving.add(seq)
        self.settle(seq)

    def answered(self, num_output_tokens: int) -> None:
        """An answer has come to its own end with so many tokens: the estimate of later ones learns from it."""
        self._expected.observe(num_output_tokens)

    def hold(self, seq: LiveSequence, held: bool) -> None:
        """Keeps a sequence out of steps, or lets it in again."""
        seq.held = held
        self._lobby.hold_changed(seq)

    # ------------------------------------------------------------ what has landed

    def computed(self, seq: LiveSequence, row: PlanRow) -> None:
        """A row has landed: its whole pages enter the prefix cache, who waits for them is woken."""
        self._tables.enter(seq)
        if row.start >= seq.prefill_end:
            return
        if seq.num_computed < seq.prefill_end and seq.can_run:
            self._lobby.lead(seq)
        else:
            self._lobby.dismiss(seq)

    def settle(self, seq: LiveSequence) -> None:
        """Takes pages and slot of a leaving sequence once no launched step uses them."""
        if seq.in_flight or seq not in self._roster.leaving:
            return
        self._tables.close(seq)
        self._roster.unseat(seq)
        if seq.retracting and not seq.ended:
            self._roster.dismiss(seq)
            self._requeue(seq)

    def _requeue(self, seq: LiveSequence) -> None:
        seq.start_again()
        seq.rank = self._rank(seq, returns=True)
        self._lobby.push(seq)
        self.num_retractions += 1
        self._outbox.event(seq, "retracted", output_tokens=seq.num_output_tokens)

    # ------------------------------------------------------------ planning

    def plan(self, *, in_flight: bool) -> PlannedStep | None:
        """Plans the next step, which must then be launched.

        Args:
            in_flight: whether a launched step has not been collected.

        Returns:
            The plan, or None when nothing can be computed now; `outgrown` may say why.
        """
        self.outgrown = []
        draft = PlanDraft(self._number + 1, self._config.step_tokens)
        self._lobby.expire(draft.number)
        while True:
            retractions = self.num_retractions
            self._plan_rows(draft, in_flight=in_flight)
            has_retracted = self.num_retractions > retractions
            # Everybody may have given up pages in turn, so that nobody is left to use them: then look again.
            if not draft.is_empty or in_flight or self.outgrown or not has_retracted:
                break
        if draft.is_empty:
            return None
        self._number = draft.number
        return draft.finish(self._roster.take_closed())

    def _plan_rows(self, draft: PlanDraft, *, in_flight: bool) -> None:
        self._plan_decodes(draft)
        draft.budget_tokens = self.budget.prompt_tokens(draft.num_decode_rows)
        self._plan_chunks(draft)
        if draft.is_empty and not in_flight:
            self._plan_oldest_chunk(draft)

    def _plan_decodes(self, draft: PlanDraft) -> None:
        for seq in tuple(self._roster.running):
            if not seq.can_run or seq.is_prefilling or not seq.wants_token:
                continue
            if draft.budget_tokens and self._make_room(seq, draft):
                draft.add_decode(seq)

    def _plan_chunks(self, draft: PlanDraft) -> None:
        prefilling = [seq for seq in self._roster.running if seq.can_run and seq.is_prefilling]
        prefilling.sort(key=lambda seq: seq.rank)
        chunks = deque(prefilling)
        admission: AdmissionBudget | None = None
        may_admit = True
        while draft.budget_tokens:
            # A slot is kept for each that waits for a prefix, so a crowd of equal prompts is not looked at one by one.
            has_slot = self._roster.num_free_slots > self._lobby.num_following
            head = self._lobby.head() if may_admit and has_slot else None
            if head is None and not chunks:
                return
            if head is not None and (not chunks or head.rank < chunks[0].rank):
                match = self._tables.match(head)
                if self._lobby.follow(head, match, self._tables.max_matched_pages(head), draft.number):
                    continue
                admission = admission or AdmissionBudget(self._tables, self._expected, self._roster.running)
                may_admit = self._admit(head, match, admission)
                if not may_admit:
                    continue
                seq = head
            else:
                seq = chunks.popleft()
            num_pages = self._plan_chunk(seq, draft)
            if admission is not None:
                admission.took(num_pages)

    def _plan_chunk(self, seq: LiveSequence, draft: PlanDraft) -> int:
        """Plans as much of a prompt as budget and pages allow; returns how many pages that took."""
        start, num_pages = seq.num_planned, len(seq.table)
        num_tokens = min(seq.prefill_end - start, draft.budget_tokens, self._tables.room(seq) - start)
        if num_tokens >= 1:
            self._tables.grow(seq, start + num_tokens)
            draft.add_chunk(seq, num_tokens)
        return len(seq.table) - num_pages

    def _plan_oldest_chunk(self, draft: PlanDraft) -> None:
        """All who could advance lack pages: the oldest prompt gets some from the youngest."""
        for seq in tuple(self._roster.running):
            if seq.can_run and seq.is_prefilling and self._make_room(seq, draft):
                self._plan_chunk(seq, draft)
                return

    def _admit(self, seq: LiveSequence, match: PrefixMatch, admission: AdmissionBudget) -> bool:
        # When nobody else can advance nobody will make room by ending: the estimate must not stand in the way.
        if not self._roster.all_held and not admission.fits(seq, match):
            return False
        self._lobby.discard(seq)
        self._roster.seat(seq)
        self._tables.open(seq, match)
        seq.prefill_end = seq.num_tokens
        admission.admitted(seq)
        self._lobby.lead(seq)
        cached_tokens = min(seq.num_planned, seq.num_prompt_tokens)
        if not seq.was_admitted:
            seq.was_admitted = True
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_cached_tokens += cached_tokens
        self._outbox.event(seq, "admitted", prompt_tokens=seq.num_prompt_tokens, cached_tokens=cached_tokens)
        return True

    # ------------------------------------------------------------ when pages run out

    def _make_room(self, seq: LiveSequence, draft: PlanDraft) -> bool:
        """Gets the page of the sequence's next position, from the youngest if need be; whether it is there."""
        while not self._tables.grow(seq, seq.num_planned + 1):
            if self._roster.leaving:
                return False  # pages come back with the step that is running
            victim = self._roster.victim(draft.number)
            if victim is None:
                return False
            if victim is seq and self.num_running == 1 and not seq.duplicates:
                if not seq.in_flight:
                    self.outgrown.append(seq)
                return False
            self._retract(victim)
            if victim is seq:
                return False
        return True

    def _retract(self, seq: LiveSequence) -> None:
        self._lobby.dismiss(seq)
        seq.retracting = True
        self._roster.leaving.add(seq)
        self.settle(seq)
