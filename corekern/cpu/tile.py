"""The inner loops of CPU attention, written out as vector instructions.

LLVM's loop vectoriser does not find a register-blocked matrix product, so it is spelled out here, with the
three things that surround it. All have one form: query rows lie along the lanes of 16-wide vectors, as they
do on the GPU, so that every maximum, sum and rescaling of the softmax is lane by lane, and K and V are
read just as they lie in the cache.

    C[i, lane] = sum over k < count, in order, of A[i, k] * B[k, lane]      i < ROWS, lane < 16 * vectors

is the product: scores S^T = K Q^T (i = token, k = head_dim) and O^T = V^T P^T (i = head_dim, k = token).
ROWS x vectors accumulators stay in registers; for each k there are `vectors` loads and ROWS broadcasts.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.imputils import impl_ret_untracked
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from corekern.cpu.convert import F32, I32, I64, TO_FLOAT, constant, like

LANES = 16
MAX_VECTORS = 3

_VECTOR = ir.VectorType(F32, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


def _wide_registers() -> bool:
    try:
        return bool(llvm.get_host_cpu_features().get("avx512f"))
    except RuntimeError:
        return False


# Accumulators must stay in registers: 8 x 3 of AVX-512's 32, or 2 x 3 split in two of AVX2's 16 (and in
# four of NEON's 32). Sums run over k alone, so this changes no bit.
ROWS = 8 if _wide_registers() else 2


def _fma(builder, a, b, c):
    kind = a.type
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def _at(builder, pointer, index, kind):
    """The address of element `index` of a float pointer, as a pointer to `kind`."""
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())


def _load(builder, pointer, index):
    return builder.load(_at(builder, pointer, index, _VECTOR), align=4)


def _store(builder, value, pointer, index):
    builder.store(value, _at(builder, pointer, index, _VECTOR), align=4)


def _broadcast(builder, value):
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first_lane = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(undefined, value, I32(0)), undefined, first_lane)


def _product(builder, vectors, a, a_i, a_k, b, b_k, count):
    """Emits the sum over k; returns the accumulators [i][v]."""
    offsets = [builder.mul(a_i, I64(i)) for i in range(ROWS)]
    before = builder.block
    loop, after = builder.append_basic_block("product"), builder.append_basic_block("product_done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(I64)
    k.add_incoming(I64(0), before)
    sums = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(ROWS)]
    row = builder.mul(k, b_k)
    b_values = [_load(builder, b, builder.add(row, I64(LANES * v))) for v in range(vectors)]
    column = builder.gep(a, [builder.mul(k, a_k)])
    results = []
    for i in range(ROWS):
        a_value = _broadcast(builder, builder.load(builder.gep(column, [offsets[i]])))
        results.append([_fma(builder, a_value, b_values[v], sums[i][v]) for v in range(vectors)])
        for v in range(vectors):
            sums[i][v].add_incoming(_ZERO, before)
            sums[i][v].add_incoming(results[i][v], loop)
    following = builder.add(k, I64(1))
    k.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return results


def _floats(builder, *addresses):
    return [builder.inttoptr(address, F32.as_pointer()) for address in addresses]


def _compensated_product(vectors: int):
    """(a, a_i, a_k, b, b_k, count, total, lost): total += A B by one Kahan step, `lost` its running error.

    Addresses in bytes, strides in elements; total and lost are (ROWS, 16 * vectors), packed.
    """

    @intrinsic
    def compensated_product(typingctx, a, a_i, a_k, b, b_k, count, total, lost):
        def codegen(context, builder, signature, args):
            a, a_i, a_k, b, b_k, count, total, lost = args
            a, b, total, lost = _floats(builder, a, b, total, lost)
            parts = _product(builder, vectors, a, a_i, a_k, b, b_k, count)
            for i in range(ROWS):
                for v in range(vectors):
                    here = I64(LANES * (i * vectors + v))
                    old = _load(builder, total, here)
                    y = builder.fsub(parts[i][v], _load(builder, lost, here))
                    new = builder.fadd(old, y)
                    error = builder.fsub(builder.fsub(new, old), y)
                    # Infinite scores have no error: inf - inf would make them NaN at the next step.
                    error = builder.select(builder.fcmp_ordered("==", error, error), error, _ZERO)
                    _store(builder, error, lost, here)
                    _store(builder, new, total, here)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return compensated_product


def _rescaled_product(vectors: int):
    """(a, a_i, a_k, b, b_k, count, alpha, c): C = alpha[lane] * C + A B, the last by one FMA an element.

    Addresses in bytes, strides in elements; C is (ROWS, 16 * vectors), packed.
    """

    @intrinsic
    def rescaled_product(typingctx, a, a_i, a_k, b, b_k, count, alpha, c):
        def codegen(context, builder, signature, args):
            a, a_i, a_k, b, b_k, count, alpha, c = args
            a, b, alpha, c = _floats(builder, a, b, alpha, c)
            parts = _product(builder, vectors, a, a_i, a_k, b, b_k, count)
            for v in range(vectors):
                factor = _load(builder, alpha, I64(LANES * v))
                for i in range(ROWS):
                    here = I64(LANES * (i * vectors + v))
                    _store(builder, _fma(builder, factor, _load(builder, c, here), parts[i][v]), c, here)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return rescaled_product


_compensated_1, _compensated_2, _compensated_3 = (_compensated_product(v) for v in (1, 2, 3))
_rescaled_1, _rescaled_2, _rescaled_3 = (_rescaled_product(v) for v in (1, 2, 3))


@njit(inline="always")
def compensated_product(vectors, a, a_i, a_k, b, b_k, count, total, lost):
    if vectors == 1:
        _compensated_1(a, a_i, a_k, b, b_k, count, total, lost)
    elif vectors == 2:
        _compensated_2(a, a_i, a_k, b, b_k, count, total, lost)
    else:
        _compensated_3(a, a_i, a_k, b, b_k, count, total, lost)


@njit(inline="always")
def rescaled_product(vectors, a, a_i, a_k, b, b_k, count, alpha, c):
    if vectors == 1:
        _rescaled_1(a, a_i, a_k, b, b_k, count, alpha, c)
    elif vectors == 2:
        _rescaled_2(a, a_i, a_k, b, b_k, count, alpha, c)
    else:
        _rescaled_3(a, a_i, a_k, b, b_k, count, alpha, c)


@intrinsic
def decode_vectors(typingctx, source, begin, count, target):
    """Decodes source[begin : begin + count], count a multiple of 16, to float32 at address `target`."""
    emit = TO_FLOAT.get(source.dtype)
    if emit is None:
        return None

    def codegen(context, builder, signature, args):
        array = make_array(signature.args[0])(context, builder, args[0])
        element = array.data.type.pointee
        stored = ir.VectorType(element, LANES)
        (target,) = _floats(builder, args[3])
        with cgutils.for_range_slice(builder, I64(0), args[2], I64(LANES)) as (d, _):
            address = builder.gep(array.data, [builder.add(args[1], d)])
            codes = builder.load(builder.bitcast(address, stored.as_pointer()), align=1)
            _store(builder, emit(builder, codes), target, d)
        return impl_ret_untracked(context, builder, types.void, context.get_dummy_value())

    return types.void(source, types.int64, types.int64, types.int64), codegen


# 2^f on |f| <= 1/2 by the series of exp(f ln 2): ln(2)^k / k! for k = 7 ... 0. The eighth term is below 2^-27.
_EXP2_SERIES = (
    1.525273380405984e-05, 1.540353039338161e-04, 1.3333558146428441e-03, 9.618129107628477e-03,
    5.5504108664821576e-02, 2.402265069591007e-01, 6.931471805599453e-01, 1.0,
)  # fmt: skip


def _emit_exp2(builder, x):
    to_integer = constant(x, F32, 1.5 * 2.0**23)  # after adding it, the last bits are round(x)
    shifted = builder.fadd(x, to_integer)
    f = builder.fsub(x, builder.fsub(shifted, to_integer))
    p = constant(x, F32, _round_to_float(_EXP2_SERIES[0]))
    for term in _EXP2_SERIES[1:]:
        p = _fma(builder, p, f, constant(x, F32, _round_to_float(term)))
    integer = like(x, I32)
    exponent = builder.shl(builder.bitcast(shifted, integer), constant(x, I32, 23))
    scaled = builder.bitcast(builder.add(builder.bitcast(p, integer), exponent), like(x, F32))
    in_range = builder.fcmp_ordered(">=", x, constant(x, F32, -126.0))
    result = builder.select(in_range, scaled, constant(x, F32, 0.0))
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


def _round_to_float(value: float) -> float:
    """LLVM's text form of a float32 constant must be one that float32 holds."""
    import numpy as np

    return float(np.float32(value))


@intrinsic
def exp2(typingctx, x):
    """2^x for x <= 0: exactly 1 at 0, 0 below -126, NaN for NaN; relative error under 2^-23."""

    def codegen(context, builder, signature, args):
        return _emit_exp2(builder, args[0])

    return types.float32(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c in float32, rounded once."""

    def codegen(context, builder, signature, args):
        return _fma(builder, *args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def scale_and_maximum(typingctx, scores, tokens, lanes, scale, maximum):
    """scores *= scale; maximum[lane] = its largest, and no NaN; addresses in bytes."""

    def codegen(context, builder, signature, args):
        scores, tokens, lanes, scale, maximum = args
        scores, maximum = _floats(builder, scores, maximum)
        scale = _broadcast(builder, scale)
        with cgutils.for_range_slice(builder, I64(0), lanes, I64(LANES)) as (lane, _):
            largest = cgutils.alloca_once_value(builder, _ZERO)
            builder.store(_load(builder, maximum, lane), largest)
            with cgutils.for_range(builder, tokens) as loop:
                here = builder.add(builder.mul(loop.index, lanes), lane)
                s = builder.fmul(_load(builder, scores, here), scale)
                _store(builder, s, scores, here)
                old = builder.load(largest)
                builder.store(builder.select(builder.fcmp_ordered(">", s, old), s, old), largest)
            _store(builder, builder.load(largest), maximum, lane)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, types.int64), codegen


@intrinsic
def probabilities(typingctx, scores, tokens, lanes, maximum, sums):
    """scores[t, lane] = 2^(scores - maximum[lane]), and sums[lane] their sum over t in order; addresses in bytes."""

    def codegen(context, builder, signature, args):
        scores, tokens, lanes, maximum, sums = args
        scores, maximum, sums = _floats(builder, scores, maximum, sums)
        with cgutils.for_range_slice(builder, I64(0), lanes, I64(LANES)) as (lane, _):
            reference = _load(builder, maximum, lane)
            total = cgutils.alloca_once_value(builder, _ZERO)
            builder.store(_ZERO, total)
            with cgutils.for_range(builder, tokens) as loop:
                here = builder.add(builder.mul(loop.index, lanes), lane)
                p = _emit_exp2(builder, builder.fsub(_load(builder, scores, here), reference))
                _store(builder, p, scores, here)
                builder.store(builder.fadd(builder.load(total), p), total)
            _store(builder, builder.load(total), sums, lane)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen
