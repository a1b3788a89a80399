"""The kernels that need no library: PTX text, which the driver compiles for the board it finds.

Owns what they do and what can be known of them. Refuses anything else: no kernel here has a result that matters.

    spin    polls a word of memory and the board's own timer until so many nanoseconds are over: no tensor, no
            floating point, no DRAM traffic, for the word stays in the cache
    copy    each thread copies 16 bytes, then goes on a grid's width further, until the end
    mma     each warp multiplies what it holds in its registers, again and again
"""

MMA_PER_ROUND = 8
"""Independent accumulators: enough that one product never waits for the one before."""

_HEAD = """
.version 7.0
.target sm_80
.address_size 64
"""

_SPIN = """
.visible .entry spin(.param .u64 nanoseconds, .param .u64 word)
{
    .reg .pred %over, %told;
    .reg .b32 %value;
    .reg .b64 %limit, %address, %began, %now, %passed;
    ld.param.u64 %limit, [nanoseconds];
    ld.param.u64 %address, [word];
    cvta.to.global.u64 %address, %address;
    mov.u64 %began, %globaltimer;
again:
    ld.volatile.global.u32 %value, [%address];
    setp.ne.u32 %told, %value, 0;
    @%told bra done;
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %began;
    setp.lt.u64 %over, %passed, %limit;
    @%over bra again;
done:
    ret;
}
"""

_COPY = """
.visible .entry copy(.param .u64 source, .param .u64 target, .param .u64 vectors)
{
    .reg .pred %over;
    .reg .b32 %block, %width, %thread, %blocks, %x<4>;
    .reg .b64 %from, %to, %count, %i, %one, %stride, %offset, %read, %write;
    ld.param.u64 %from, [source];
    ld.param.u64 %to, [target];
    ld.param.u64 %count, [vectors];
    cvta.to.global.u64 %from, %from;
    cvta.to.global.u64 %to, %to;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mul.wide.u32 %i, %block, %width;
    cvt.u64.u32 %one, %thread;
    add.u64 %i, %i, %one;
    mul.wide.u32 %stride, %blocks, %width;
again:
    setp.ge.u64 %over, %i, %count;
    @%over bra done;
    shl.b64 %offset, %i, 4;
    add.u64 %read, %from, %offset;
    add.u64 %write, %to, %offset;
    ld.global.v4.u32 {%x0, %x1, %x2, %x3}, [%read];
    st.global.v4.u32 [%write], {%x0, %x1, %x2, %x3};
    add.u64 %i, %i, %stride;
    bra again;
done:
    ret;
}
"""

_MMA = """
.visible .entry mma(.param .u64 rounds, .param .u64 out)
{{
    .reg .pred %more;
    .reg .b32 %block, %width, %thread, %index, %a<4>, %b<2>;
    .reg .f32 %d<{accumulators}>;
    .reg .b64 %left, %address, %offset;
    ld.param.u64 %left, [rounds];
    ld.param.u64 %address, [out];
    cvta.to.global.u64 %address, %address;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %block, %width, %thread;
{operands}
{zeros}
again:
{products}
    sub.u64 %left, %left, 1;
    setp.ne.u64 %more, %left, 0;
    @%more bra again;
{sums}
    mul.wide.u32 %offset, %index, 4;
    add.u64 %address, %address, %offset;
    st.global.f32 [%address], %d0;
    ret;
}}
"""
_ONE = 0x3F803F80
"""A pair of 1.0 in BF16; the thread's number disturbs the low bits, for constant operands would draw less power."""


def program() -> str:
    """Give all kernels as one PTX module (ISA 7.0, compute capability 8.0 and later)."""
    return _HEAD + _SPIN + _COPY + _mma()


def _mma() -> str:
    accumulators = 4 * MMA_PER_ROUND
    operands = [f"xor.b32 %{name}, %index, {_ONE + i};" for i, name in enumerate(("a0", "a1", "a2", "a3", "b0", "b1"))]
    zeros = [f"mov.f32 %d{i}, 0f00000000;" for i in range(accumulators)]
    products = [_product(4 * i) for i in range(MMA_PER_ROUND)]
    # Every accumulator goes into what is stored: the compiler may throw away what nobody reads.
    sums = [f"add.f32 %d0, %d0, %d{i};" for i in range(1, accumulators)]
    parts = {"operands": operands, "zeros": zeros, "products": products, "sums": sums}
    text = {name: "\n".join(f"    {line}" for line in lines) for name, lines in parts.items()}
    return _MMA.format(accumulators=accumulators, **text)


def _product(first: int) -> str:
    held = ", ".join(f"%d{first + i}" for i in range(4))
    wanted = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    return f"{wanted} {{{held}}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{{held}}};"
