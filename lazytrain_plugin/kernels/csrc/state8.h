// 8-bit optimizer states: codes of blocks of 256, and back (state8.py has the meaning of every step).
//
// Included by kernels.cpp only, and compiled with it once per instruction set.
#pragma once
#include "kernels.h"
#include "simd.h"
#include "split_weights.h"

namespace lazytrain {
namespace {

constexpr int32_t kInfBits = 0x7F800000;

struct Book {  // CodeBook in registers
    const float* values;
    f32 scale, offset, below, tail, first, top;
    i32 zero_code;
    LT_INLINE Book make(const CodeBook& b) {
        return {b.values, table8(b.scale), table8(b.offset), table8(b.below), table8(b.tail), table8(b.first),
                splat(b.top), splat(b.zero_code)};
    }
};

constexpr float kDecadeScale = 3.6014841e-08f;  // state8.DECADE_SCALE, DECADE_OFFSET
constexpr float kDecadeOffset = -31.347432f;
constexpr float kThird = 1.0f / 3.0f;

// Codes above the code of zero for x >= 0: its position in 1/65536 of a code, plus noise in 0 .. 65535, cut to a whole code.
LT_INLINE i32 codes_above_zero(const Book& b, f32 x, i32 noise) {
    i32 decade = truncate(max_(to_float(bits(x)) * kDecadeScale + kDecadeOffset, f32{}));
    f32 r = x * pick(b.scale, decade) + pick(b.offset, decade);
    f32 p = min_(r, r * pick(b.below, decade));
    p = min_(p, r * kThird + pick(b.tail, decade));
    p = min_(p + pick(b.first, decade), b.top);
    return (truncate(p) + noise) >> 16;
}

LT_INLINE u8 encode_signed(const Book& b, f32 m, f32 inverse_scale, i32 noise) {
    i32 sign = bits(m) >> 31;
    i32 k = codes_above_zero(b, from_bits(bits(m) & 0x7FFFFFFF) * inverse_scale, noise);
    return narrow8(b.zero_code + ((k ^ sign) - sign));
}

LT_INLINE u8 encode_unsigned(const Book& b, f32 v, f32 inverse_scale, i32 noise) {
    i32 k = codes_above_zero(b, v * inverse_scale, noise);
    return narrow8(max_(k, min_(bits(v), splat(1))));  // v > 0 never decodes to zero: m / eps would explode
}

LT_INLINE int32_t largest(i32 x) {
    int32_t result = x[0];
    for (int i = 1; i < W; i++) result = x[i] > result ? x[i] : result;
    return result;
}

LT_INLINE float float_of(int32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}

// Scale of a block from the bits of its largest magnitude (bits order like magnitudes, NaN above infinity). NaN if it is not finite.
LT_INLINE float block_scale(const CodeBook& b, int32_t largest_bits) {
    if (largest_bits >= kInfBits) return float_of(kNanBits);
    const float scale = float_of(largest_bits) / b.extreme;
    if (scale > 3.402823466e38f) return float_of(kNanBits);
    return scale > 0.0f && scale < 1.17549435e-38f ? 1.17549435e-38f : scale;  // of a denormal the inverse could be infinite
}

LT_INLINE float inverse_of(float scale) {
    return scale > 0.0f ? (1.0f / scale) * 1.00000095367431640625f : 0.0f;  // 1 + 2^-20: the extreme always gets the last code
}

// Uniform noise of an element from its index and the seeds of (parameter, step): 32 bits, the low half for m, the high half for v.
LT_INLINE u32 noise_bits(u32 index, u32 seed0, u32 seed1) {
    u32 h = index ^ seed0;
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = h ^ seed1;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    return h ^ (h >> 16);
}

LT_INLINE void encode_block(const AdamW& a, const Book& mb, const Book& vb, const float* m, const float* v, float m_scale, float v_scale,
                            uint8_t* m_codes, uint8_t* v_codes, int64_t count, uint64_t first_index) {
    const f32 m_inverse = splat(inverse_of(m_scale)), v_inverse = splat(inverse_of(v_scale));
    const u32 seed0 = splat(a.seed0), seed1 = splat(a.seed1 ^ ((uint32_t)(first_index >> 32) * 0x9E3779B9u));
    u32 index = lane_numbers() + (uint32_t)first_index;
    for (int64_t i = 0; i < count; i += W, index = index + (uint32_t)W) {
        const u32 h = noise_bits(index, seed0, seed1);
        const u8 m_code = encode_signed(mb, load<f32>(m + i), m_inverse, (i32)(h & 0xFFFFu));
        const u8 v_code = encode_unsigned(vb, load<f32>(v + i), v_inverse, (i32)(h >> 16));
        if (__builtin_expect(i + W <= count, 1)) {
            store(m_codes + i, m_code);
            store(v_codes + i, v_code);
        } else {
            u8 m_tail = m_code, v_tail = v_code;
            memcpy(m_codes + i, &m_tail, count - i);
            memcpy(v_codes + i, &v_tail, count - i);
        }
    }
    if (m_scale != m_scale) memset(m_codes, a.signed_book->zero_code, count);
    if (v_scale != v_scale) memset(v_codes, a.unsigned_book->zero_code, count);
}

void quantize(const float* values, uint8_t* codes, float* scales, const CodeBook& book, int64_t begin, int64_t end) {
    const Book b = Book::make(book);
    const bool is_signed = book.zero_code != 0;
    const i32 half = splat(0x8000);
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t count = end - at < kBlock ? end - at : kBlock;
        alignas(64) float block[kBlock] = {};
        memcpy(block, values + at, count * 4);
        i32 largest_bits = {};
        for (int64_t i = 0; i < count; i += W) largest_bits = max_(largest_bits, bits(load<f32>(block + i)) & 0x7FFFFFFF);
        const float scale = block_scale(book, largest(largest_bits));
        scales[at / kBlock] = scale;
        if (scale != scale) {
            memset(codes + at, book.zero_code, count);
            continue;
        }
        const f32 inverse = splat(inverse_of(scale));
        alignas(64) uint8_t encoded[kBlock];
        for (int64_t i = 0; i < count; i += W) {
            f32 x = load<f32>(block + i);
            store(encoded + i, is_signed ? encode_signed(b, x, inverse, half) : encode_unsigned(b, x, inverse, half));
        }
        memcpy(codes + at, encoded, count);
    }
}

void dequantize(const uint8_t* codes, const float* scales, float* values, const CodeBook& book, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t count = end - at < kBlock ? end - at : kBlock;
        const float scale = scales[at / kBlock];
        for (int64_t i = 0; i < count; i++) values[at + i] = book.values[codes[at + i]] * scale;
    }
}

}  // namespace
}  // namespace lazytrain
