"""Decides what each step computes. Counts tokens and blocks; never reads a value.

A step serves, in this order: sequences that decode (one token each), then prompts in chunks, old ones before new
ones, as far as the budget of tokens, rows and blocks goes. Sequences rank by priority, then arrival.
"""

from __future__ import annotations

import enum
from bisect import insort
from dataclasses import dataclass
from typing import TypeVar

from ..runtime.errors import PeltonError, RequestError
from ..runtime.format.plan import KVGroup, Ranges
from .batch import Batch, Chunk, all_decode
from .chunking import ChunkPolicy, chunk_sizes
from .kv_cache import BlockCopy, KVCache
from .sequence import NO_SLOT, Sequence


class CapacityPolicy(str, enum.Enum):
    """When a waiting request may start, under TensorRT-LLM's names."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"  # when all that runs can finish without giving up blocks
    MAX_UTILIZATION = "max_utilization"  # when its prompt fits now; the lowest rank restarts when blocks run out
    STATIC_BATCH = "static_batch"  # when everything that ran before it has ended; never evicts


@dataclass(frozen=True)
class SchedulerConfig:
    """Scheduling choices; 0 means the default given beside the field."""

    capacity_policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT
    chunk_policy: ChunkPolicy = ChunkPolicy.FIRST_COME_FIRST_SERVED
    chunk_unit: int = 0  # prompt chunks are multiples of this; 0: 1 token, or a KV block for equal progress
    max_chunk_tokens: int = 0  # most prompt tokens of one sequence in a step; 0: max_num_tokens
    max_batch_size: int = 0  # most sequences at once; 0: the engine's range
    max_num_tokens: int = 0  # most tokens in a step; 0: the engine's range

    def resolve(self, ranges: Ranges) -> SchedulerConfig:
        """Fill in the defaults; raises RequestError for what the engine cannot do or what could never start."""
        capacity_policy = _choice("capacity_policy", CapacityPolicy, self.capacity_policy)
        chunk_policy = _choice("chunk_policy", ChunkPolicy, self.chunk_policy)
        for name in ("max_batch_size", "max_num_tokens"):
            if not 0 <= getattr(self, name) <= getattr(ranges, name):
                flag = name.replace("_", "-")
                raise RequestError(
                    f"{name}: got {getattr(self, name)}; this engine allows up to {getattr(ranges, name)}. "
                    f"Rebuild it with --{flag} for more"
                )
        tokens = self.max_num_tokens or ranges.max_num_tokens
        largest = min(self.max_chunk_tokens or tokens, tokens)
        equal = chunk_policy is ChunkPolicy.EQUAL_PROGRESS
        unit = self.chunk_unit or (min(ranges.tokens_per_block, largest) if equal else 1)
        if not 1 <= unit <= largest:
            raise RequestError(
                f"chunk_unit: {unit} tokens never fit a step that takes {largest} prompt tokens; "
                "lower chunk_unit or raise max_num_tokens (and max_chunk_tokens)"
            )
        return SchedulerConfig(
            capacity_policy,
            chunk_policy,
            unit,
            largest,
            self.max_batch_size or ranges.max_batch_size,
            tokens,
        )


E = TypeVar("E", bound=enum.Enum)


def _choice(name: str, kind: type[E], given: object) -> E:
    """A member of an enumeration, by itself or by its value."""
    try:
        return kind(given)
    except ValueError:
        allowed = ", ".join(str(member.value) for member in kind)
        raise RequestError(f"{name}: got {given!r}; allowed: {allowed}") from None


class Scheduler:
    """Waiting and running sequences, their slots and blocks. Not thread-safe: one step loop owns it."""

    def __init__(
        self,
        ranges: Ranges,
        kv_groups: tuple[KVGroup, ...],
        num_blocks: tuple[int, ...],
        config: SchedulerConfig | None = None,
        *,
        can_fork: bool = True,
    ) -> None:
        """``num_blocks`` per KV group. ``can_fork``: K/V and token history are all the state a sequence has."""
        self.config = (config or SchedulerConfig()).resolve(ranges)
        self.num_slots = self.config.max_batch_size
        self.kv = KVCache(kv_groups, num_blocks, self.num_slots, ranges, self.config.max_chunk_tokens)
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []  # by rank; each has a slot
        self.num_preemptions = 0
        self.changes = 0  # of ``running``
        self._most_decodes = min(self.config.max_num_tokens, ranges.max_logits_rows)
        self._ranges = ranges
        self._can_fork = can_fork
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._promised = [0] * len(kv_groups)  # peak blocks of everything that runs
        # The step being planned.
        self._planned: dict[Sequence, Chunk] = {}
        self._started: list[Sequence] = []
        self._copies: list[BlockCopy] = []
        self._tokens = 0  # still free in the step
        self._rows = 0

    def used_each_step(self) -> tuple[object, ...]:
        """What planning a decode step goes through."""
        return (
            Scheduler.schedule,
            Scheduler._continue,
            Chunk,
            Batch,
            self,
            self.running,
            self.waiting,
            self.kv,
            self.kv.room,
        )

    def check_fits(self, stored_tokens: int) -> None:
        """Raise RequestError when a sequence that stores this many tokens could never run, even alone."""
        for group, need in zip(self.kv.groups, self.kv.peak(stored_tokens), strict=True):
            if need > group.pool.num_blocks:
                raise RequestError(
                    f"the request stores up to {stored_tokens} tokens and needs {need} KV blocks of group "
                    f"{group.name}, but the pool has {group.pool.num_blocks}. Shorten the prompt, lower max_tokens, "
                    f"or give the KV cache more room (max_kv_tokens or kv_cache_bytes)"
                )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that passed ``check_fits``."""
        insort(self.waiting, seq, key=_rank)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, whether it waits or runs; its blocks and slot are free at once.

        Steps in flight may still touch them: whoever gets them next writes in a later step, and steps run in order.
        """
        if seq.slot == NO_SLOT:
            self.waiting.remove(seq)
        else:
            self._leave(seq)
            seq.slot = NO_SLOT

    def schedule(self) -> Batch:
        """Plan the next step and count its tokens as computed. The batch is empty when nothing can run now."""
        batch = self._continue()
        if batch is not None:
            return batch
        self._planned, self._started, self._copies = {}, [], []
        self._tokens, self._rows = self.config.max_num_tokens, self._ranges.max_logits_rows
        preemptions = self.num_preemptions
        self._plan_decodes()
        if self.waiting and self.num_preemptions == preemptions:
            self._admit()
        self._plan_prompts()
        return self._commit()

    def _continue(self) -> Batch | None:
        """The commonest step, planned at once: everything that runs decodes, has its blocks, and nobody waits."""
        count = len(self.running)
        if self.waiting or not 0 < count <= self._most_decodes:
            return None
        room = self.kv.room
        for seq in self.running:
            tokens = seq.num_tokens
            if (
                seq.num_computed != tokens - 1
                or tokens > room[seq.slot]
                or tokens > seq.limit
                or seq.waits_for_values
                or not seq.generates
                or seq.num_scored < seq.score_end
            ):
                return None
        chunks = []
        for seq in self.running:
            start = seq.num_computed
            seq.num_computed = start + 1
            seq.num_tokens += 1
            seq.in_flight += 1
            chunks.append(Chunk(seq, seq.slot, start, 1, 1, True))
        return Batch(chunks, [], [], count, count, True, self.changes)

    def _plan_decodes(self) -> None:
        for seq in list(self.running):
            if self._tokens == 0 or self._rows == 0:
                break
            if seq.remaining == 1 and not (seq.waits_for_values and seq.in_flight) and seq.slot != NO_SLOT:
                self._plan(seq, 1)

    def _admit(self) -> None:
        """Start waiting sequences, strictly by rank: nobody overtakes a sequence that does not fit yet."""
        unit, equal = self.config.chunk_unit, self.config.chunk_policy is ChunkPolicy.EQUAL_PROGRESS
        static = self.config.capacity_policy is CapacityPolicy.STATIC_BATCH
        if static and self.running:
            return
        left = self._tokens
        for seq in self.running:
            if seq not in self._planned:
                left -= min(unit if equal else self.config.max_chunk_tokens, seq.remaining)
        while self.waiting and self._free_slots and self._rows > 0:
            seq = self.waiting[0]
            donor = self._donor(seq)
            todo = seq.num_tokens - (seq.prompt_len - 1 if donor is not None else 0)
            if left < min(unit, todo) and not static:  # a static batch is filled at once, whatever its prompts take
                return
            if seq.in_flight or donor is seq or not self._has_room(seq):
                return
            self._start(self.waiting.pop(0), donor)
            left -= min(unit if equal else self.config.max_chunk_tokens, todo)

    def _has_room(self, seq: Sequence) -> bool:
        if self.config.capacity_policy is CapacityPolicy.MAX_UTILIZATION:
            return self.kv.has_free(self.kv.peak(min(seq.num_tokens, seq.limit)))
        peak = self.kv.peak(seq.limit)
        return all(
            promised + need <= group.pool.num_blocks
            for promised, need, group in zip(self._promised, peak, self.kv.groups, strict=True)
        )

    def _donor(self, seq: Sequence) -> Sequence | None:
        """A choice of the same request whose prompt K/V this one can take over.

        ``seq`` itself means: wait, a sibling is just computing that prompt. None: compute it alone.
        """
        shared = seq.prompt_len - 1
        if not self._can_fork or not seq.may_fork or shared < self.kv.tokens_per_block:
            return None
        for sibling in seq.request.sequences:
            if sibling.slot == NO_SLOT:
                continue
            if sibling.num_computed < shared:
                return seq
            if self.kv.can_fork(sibling.slot, shared):
                return sibling
        return None

    def _start(self, seq: Sequence, donor: Sequence | None) -> None:
        slot = self._free_slots.pop()
        computed = 0
        if donor is not None:
            computed = seq.prompt_len - 1
            self._copies += self.kv.fork(donor.slot, slot, computed)
        seq.start(slot, computed)
        for index, need in enumerate(self.kv.peak(seq.limit)):
            self._promised[index] += need
        insort(self.running, seq, key=_rank)
        self.changes += 1
        self._started.append(seq)
        # A group without a window takes the blocks of the whole prompt now.
        self._reserve(seq, computed)

    def _plan_prompts(self) -> None:
        if len(self._planned) == len(self.running):
            return
        prompts = [seq for seq in self.running if seq not in self._planned and seq.runnable]
        if not prompts or self._tokens == 0:
            return
        largest = self.config.max_chunk_tokens
        wanted = [min(seq.remaining, largest) for seq in prompts]
        if self.config.chunk_unit > 1:
            # A chunk cut by the limit ends on a unit, so that the next one starts on one.
            unit = self.config.chunk_unit
            wanted = [
                size if size == seq.remaining else size // unit * unit
                for seq, size in zip(prompts, wanted, strict=True)
            ]
        sizes = chunk_sizes(wanted, self._tokens, self.config.chunk_unit, self.config.chunk_policy)
        for seq, size in zip(prompts, sizes, strict=True):
            size = self._limit_rows(seq, size)
            if size > 0 and seq.slot != NO_SLOT:
                self._plan(seq, size)

    def _limit_rows(self, seq: Sequence, size: int) -> int:
        """Shorten a chunk until the rows of logits it needs are free in this step."""
        excess = seq.rows_for(size) - self._rows
        while size > 0 and excess > 0:
            size -= excess
            excess = seq.rows_for(size) - self._rows
        return max(size, 0)

    def _plan(self, seq: Sequence, count: int) -> None:
        """Put ``count`` tokens of a running sequence into the step, if blocks can be had for them."""
        start = seq.num_computed
        if self._reserve(seq, start + count):
            samples = seq.samples_at(start + count)
            rows = seq.rows_for(count) if seq.num_scored < seq.score_end else int(samples)
            self._planned[seq] = Chunk(seq, seq.slot, start, count, rows, samples)
            self._tokens -= count
            self._rows -= rows

    def _reserve(self, seq: Sequence, end: int) -> bool:
        """Blocks up to ``end``, from lower ranks if need be; False when the sequence itself had to give way."""
        known = min(seq.num_tokens, seq.limit)
        while not self.kv.reserve(seq.slot, seq.num_computed, end, known):
            if self.config.capacity_policy is not CapacityPolicy.MAX_UTILIZATION:
                raise PeltonError("scheduler: blocks ran out under a policy that promised them; this is a bug")
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to wait for its turn by rank; it will recompute its K/V."""
        self._planned.pop(seq, None)
        if seq in self._started:
            self._started.remove(seq)
            own = [set(group.blocks(seq.slot)) for group in self.kv.groups]
            self._copies = [copy for copy in self._copies if copy.target not in own[copy.group]]
        self._leave(seq)
        seq.rewind()
        insort(self.waiting, seq, key=_rank)
        self.num_preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.changes += 1
        self.kv.release(seq.slot)
        self._free_slots.append(seq.slot)
        for index, need in enumerate(self.kv.peak(seq.limit)):
            self._promised[index] -= need

    def _commit(self) -> Batch:
        """Count what was planned as done: from here on the step will be issued."""
        chunks = list(self._planned.values())
        tokens = rows = 0
        for chunk in chunks:
            seq, end = chunk.seq, chunk.end
            tokens += chunk.count
            rows += chunk.num_rows
            seq.num_computed = end
            seq.num_tokens += chunk.samples
            if seq.num_scored < seq.score_end:
                seq.num_scored = max(seq.num_scored, min(end, seq.score_end))
            seq.in_flight += 1
        decodes = len(chunks) == len(self.running) and all_decode(chunks)
        return Batch(chunks, self._started, self._copies, tokens, rows, decodes, self.changes)

    def check_idle(self) -> None:
        """Raise PeltonError when nothing runs and yet a slot, a block or a promise was not given back. O(groups)."""
        held = {group.name: group.pool.num_used for group in self.kv.groups if group.pool.num_used}
        if held or any(self._promised) or len(self._free_slots) != self.num_slots:
            raise PeltonError(
                f"scheduler: idle, but blocks {held or 'none'}, promises {self._promised} and "
                f"{self.num_slots - len(self._free_slots)} slots are still held; this is a bug"
            )

    def check_integrity(self) -> None:
        """Raise PeltonError when queues, slots, promises or block tables contradict each other."""
        slots = [seq.slot for seq in self.running]
        if sorted(slots + self._free_slots) != list(range(self.num_slots)):
            raise PeltonError(f"scheduler: slots in use {slots} and free {self._free_slots} do not add up")
        for queue in (self.waiting, self.running):
            if queue != sorted(queue, key=_rank) or any(seq.finished for seq in queue):
                raise PeltonError("scheduler: a queue is out of order or holds an ended sequence")
        if any(seq.slot != NO_SLOT or seq.num_computed for seq in self.waiting):
            raise PeltonError("scheduler: a waiting sequence has a slot or computed tokens")
        for index, group in enumerate(self.kv.groups):
            promised = sum(group.peak(seq.limit) for seq in self.running)
            if promised != self._promised[index]:
                raise PeltonError(f"scheduler: {self._promised[index]} blocks promised, {promised} are needed")
            for seq in self.running:
                first, end = group.first[seq.slot], group.end[seq.slot]
                if first > group.first_needed(seq.num_computed) or group.missing(seq.slot, seq.num_computed):
                    raise PeltonError(f"scheduler: slot {seq.slot} lacks computed blocks in group {group.name}")
                if end - first > group.peak(seq.limit):
                    raise PeltonError(f"scheduler: slot {seq.slot} holds more blocks than its peak in {group.name}")
        self.kv.check_integrity(slots)


def _rank(seq: Sequence) -> tuple[float, int]:
    return seq.rank
