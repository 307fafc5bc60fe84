"""Scalar conversions between KV formats and float32, as LLVM that the loop vectoriser widens.

numba cannot name FP8, float16 or bfloat16. An array of such a format is handed to a kernel as a view
whose integer type stands for the format, so that numba's own dispatch picks the conversion:

    fp8_e4m3 -> uint8    fp8_e5m2 -> int8    float16 -> uint16    bfloat16 -> int16    float32, float64 -> as is
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from corekern.formats import BFLOAT16, Format

_STORAGE = {
    "fp8_e4m3": np.uint8,
    "fp8_e5m2": np.int8,
    "float16": np.uint16,
    "bfloat16": np.int16,
    "float32": np.float32,
}

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def storage(array: np.ndarray, fmt: Format | None = None) -> np.ndarray:
    """`array` seen as the type that stands for its format in kernels (`fmt` tells FP8 codes apart)."""
    if fmt is not None:
        return array.view(_STORAGE[fmt.name])
    if array.dtype == np.float16:
        return array.view(np.uint16)
    if array.dtype == BFLOAT16:
        return array.view(np.int16)
    return array


# The emitters below take a scalar or a vector: these give a type or a constant the shape of the operand.


def like(operand, element: ir.Type) -> ir.Type:
    return ir.VectorType(element, operand.type.count) if isinstance(operand.type, ir.VectorType) else element


def constant(operand, element: ir.Type, value) -> ir.Constant:
    shape = like(operand, element)
    return ir.Constant(shape, [value] * shape.count if isinstance(shape, ir.VectorType) else value)


def _half_to_float(builder, bits):
    return builder.fpext(builder.bitcast(bits, like(bits, ir.HalfType())), like(bits, F32))


def _e4m3_to_float(builder, code):
    # The code's exponent and mantissa, moved into a float16, are the value times 2^-8 exactly,
    # subnormals included (float16's bias is 15, E4M3's 7). Only 0x7F, the NaN, needs a hand.
    wide = builder.zext(code, like(code, I16))
    magnitude = builder.and_(wide, constant(code, I16, 0x7F))
    is_nan = builder.icmp_unsigned("==", magnitude, constant(code, I16, 0x7F))
    shifted = builder.shl(magnitude, constant(code, I16, 7))
    bits = builder.select(is_nan, constant(code, I16, 0x7E00), shifted)
    sign = builder.shl(builder.and_(wide, constant(code, I16, 0x80)), constant(code, I16, 8))
    return builder.fmul(_half_to_float(builder, builder.or_(bits, sign)), constant(code, F32, 256.0))


def _e5m2_to_float(builder, code):
    # The upper half of a float16. Its NaN payloads are dropped, as every other conversion drops them.
    bits = builder.shl(builder.zext(code, like(code, I16)), constant(code, I16, 8))
    magnitude = builder.and_(bits, constant(code, I16, 0x7FFF))
    is_nan = builder.icmp_unsigned(">", magnitude, constant(code, I16, 0x7C00))
    quiet = builder.or_(builder.and_(bits, constant(code, I16, 0x8000)), constant(code, I16, 0x7E00))
    return _half_to_float(builder, builder.select(is_nan, quiet, bits))


def _bfloat16_to_float(builder, bits):
    wide = builder.shl(builder.zext(bits, like(bits, I32)), constant(bits, I32, 16))
    return builder.bitcast(wide, like(bits, F32))


TO_FLOAT = {
    types.uint8: _e4m3_to_float,
    types.int8: _e5m2_to_float,
    types.uint16: _half_to_float,
    types.int16: _bfloat16_to_float,
    types.float32: lambda builder, value: value,
}


@intrinsic
def to_float32(typingctx, x):
    """The float32 value of one stored element; exact for every format."""
    emit = TO_FLOAT.get(x)
    if emit is None:
        return None

    def codegen(context, builder, signature, args):
        return emit(builder, args[0])

    return types.float32(x), codegen


def _to_fp8(mantissa_bits: int, bias: int, nan: int):
    """An intrinsic (y: float32, past: int32) -> uint8 that rounds to nearest, ties to even.

    `past` is the code of values beyond the largest finite one; codes are ordered, so a minimum saturates.
    """
    shift = 23 - mantissa_bits
    rebias = (127 - bias) << mantissa_bits
    min_normal = (128 - bias) << 23  # float32 bits of the smallest normal value
    # The float32 whose unit in the last place is the smallest subnormal: adding it rounds there.
    magic = 2.0 ** (23 + 1 - bias - mantissa_bits)
    magic_bits = int(np.float32(magic).view(np.int32))

    @intrinsic
    def convert(typingctx, y, past):
        def codegen(context, builder, signature, args):
            bits = builder.bitcast(args[0], I32)
            magnitude = builder.and_(bits, I32(0x7FFFFFFF))
            last = builder.and_(builder.lshr(magnitude, I32(shift)), I32(1))
            half = builder.add(last, I32((1 << (shift - 1)) - 1))
            normal = builder.lshr(builder.add(magnitude, half), I32(shift))
            normal = builder.sub(normal, I32(rebias))
            rounded = builder.fadd(builder.bitcast(magnitude, F32), F32(magic))
            subnormal = builder.sub(builder.bitcast(rounded, I32), I32(magic_bits))
            code = builder.select(builder.icmp_signed("<", magnitude, I32(min_normal)), subnormal, normal)
            code = builder.select(builder.icmp_signed("<", code, args[1]), code, args[1])
            is_nan = builder.icmp_signed(">", magnitude, I32(0x7F800000))
            code = builder.select(is_nan, I32(nan), code)
            sign = builder.and_(builder.lshr(bits, I32(24)), I32(0x80))
            return builder.trunc(builder.or_(code, sign), ir.IntType(8))

        return types.uint8(types.float32, types.int32), codegen

    return convert


to_e4m3 = _to_fp8(mantissa_bits=3, bias=7, nan=0x7F)
to_e5m2 = _to_fp8(mantissa_bits=2, bias=15, nan=0x7E)


@intrinsic
def float_bits(typingctx, x):
    """The bit pattern of a float32, as int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), codegen


@intrinsic
def float_from_bits(typingctx, x):
    """The float32 that has this int32 bit pattern."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), codegen


@njit(inline="always")
def round_to_odd(x):
    """float64 -> float32 so that a second rounding to FP8 is exact.

    Truncates towards zero and sets the last bit when anything was lost: with 13 or more bits to
    spare, the lost part still decides every later tie the way the float64 value would.
    """
    y = np.float32(x)
    bits = float_bits(y)
    if np.float64(y) != x and x == x:
        if abs(np.float64(y)) > abs(x):
            bits -= np.int32(1)
        bits |= np.int32(1)
    return float_from_bits(bits)


def quotient(x, scale):
    """x / scale as a float32 that one more rounding to FP8 may follow (float64 divides in float64)."""
    raise NotImplementedError("called from kernels only")


@overload(quotient, inline="always")
def _quotient(x, scale):
    if x == types.float64:
        return lambda x, scale: round_to_odd(x / scale)
    return lambda x, scale: to_float32(x) / scale
