"""Turns: the tiles of keys that a program works on, one after another, and what its partitions have to know of each.

The program's first tile is that of its own number, the others come from a counter in memory. One partition, the adder of
``bwd_add.py``, takes them and works out once what everybody has to know; the others read it when they need it. In registers these
numbers would stand in the way of accumulators.

Arrivals that complete a phase of each barrier:
    issued   1, the adder's first thread: the number of a turn's tile is there
    told     1, the same thread: what there is to know of it

Nobody gives a slot back. While what belongs to turn t is read, the adder has not gone beyond that turn. With so many slots of
queries as STAGES it has fed STAGES - 1 steps ahead by then, of turns up to t + STAGES - 1 where each has one step, and told of the
turn after those. So more than STAGES slots are enough.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .parts import ROWS, wait

SLOTS = gl.constexpr(8)
FIELDS = gl.constexpr(16)  # words of a turn's record, of which 13 are used


@gluon.constexpr_function
def _first_thread(text):
    """What the first thread of a warpgroup does, under the predicate p."""
    return f"{{ .reg .pred p; .reg .u32 t, g; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; {text} }}"


@gluon.constexpr_function
def _tell_text(words):
    stores = "".join(f"@p st.shared.u32 [$0 + {4 * i}], ${2 + i};" for i in range(words))
    return _first_thread(stores + "@p mbarrier.arrive.shared::cta.b64 _, [$1];")


@gluon.constexpr_function
def _ask_text(field):
    return f"ld.shared.u32 $0, [$1 + {4 * field}];"


_PUBLISH = "@p st.shared.u32 [$1], t; @p mbarrier.arrive.shared::cta.b64 _, [$2];"
_BEGIN = gl.constexpr(_first_thread("mov.u32 t, %ctaid.x;" + _PUBLISH))
_TAKE = gl.constexpr(
    _first_thread("mov.u32 g, %nctaid.x; @p atom.global.relaxed.gpu.add.u32 t, [$0], 1; add.u32 t, t, g;" + _PUBLISH)
)


@gluon.aggregate
class Turns:
    counter: gl.tensor  # a word that is 0 when the launch begins: tiles taken beyond the first of each program
    ticket: gl.shared_memory_descriptor  # [SLOTS, 1]: the place of a turn's tile in the order of work
    issued: gl.shared_memory_descriptor
    record: gl.shared_memory_descriptor  # [SLOTS, FIELDS]
    told: gl.shared_memory_descriptor

    @gluon.jit
    def begin(self):
        """Adder: the first tile."""
        gl.inline_asm(_BEGIN, "l,r,r,~{memory}", [self.counter, self.ticket.index(0), self.issued.index(0)])

    @gluon.jit
    def take(self, turn):
        """Adder: take the tile of this turn, which ``tell`` reads a turn later, when it has long been there."""
        slot = turn % SLOTS
        gl.inline_asm(_TAKE, "l,r,r,~{memory}", [self.counter, self.ticket.index(slot), self.issued.index(slot)])

    @gluon.jit
    def tell(self, turn, keys):
        """Adder: write down what the tile of this turn is, and take the next one, unless there is no such tile."""
        slot = turn % SLOTS
        wait(self.issued.index(slot), (turn // SLOTS) & 1)
        index = gl.inline_asm(_ask_text(0), "=r,r,~{memory}", [self.ticket.index(slot)], gl.int32)
        total = keys.n_blocks * keys.heads_total
        batch, head_kv, start_n = keys.place_of(min(index, total - 1))
        lo, hi = keys.tiles(start_n)
        if index < total:
            self.take(turn + 1)
        else:
            lo = hi
        a, b = keys.own(start_n, lo, hi), keys.own(start_n + ROWS, lo, hi)
        inputs = [self.record.index(slot), self.told.index(slot), batch, head_kv, start_n, lo, hi]
        inputs += [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
        gl.inline_asm(_tell_text(13), "r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,~{memory}", inputs)

    @gluon.jit
    def arrived(self, turn):
        """Wait until this turn has been told."""
        wait(self.told.index(turn % SLOTS), (turn // SLOTS) & 1)

    @gluon.jit
    def ask(self, turn, FIELD: gl.constexpr):
        """A word of this turn's record: opaque, so that it is read again rather than kept."""
        return gl.inline_asm(_ask_text(FIELD), "=r,r,~{memory}", [self.record.index(turn % SLOTS)], gl.int32)

    @gluon.jit
    def place(self, turn):
        """``(batch, head_kv, first key)``."""
        return self.ask(turn, 0), self.ask(turn, 1), self.ask(turn, 2)

    @gluon.jit
    def tiles(self, turn):
        """``(lo, hi)``, the tiles of queries, as ``Keys.tiles``: none if there is no such turn."""
        return self.ask(turn, 3), self.ask(turn, 4)

    @gluon.jit
    def own(self, turn, C: gl.constexpr):
        """``(own_lo, free_lo, free_hi, own_hi)`` of consumer ``C``, as ``Keys.own``."""
        return self.ask(turn, 5 + 4 * C), self.ask(turn, 6 + 4 * C), self.ask(turn, 7 + 4 * C), self.ask(turn, 8 + 4 * C)


@gluon.jit
def make_turns(counter):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ticket = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], LAYOUT)
    record = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], LAYOUT)
    issued = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(issued.index(i), count=1)
        mbarrier.init(told.index(i), count=1)
    return Turns(counter, ticket, issued, record, told)
