// Gradients in codes of 8 bits (as they arrive) and 16 bits (their sums): a whole number of steps, the step one bf16 number for 64
// elements. gradient_codes.py has the rounding. A code times its step is exact in fp32, so only encoding rounds. Included by kernels.cpp.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace lazytrain {
namespace {

constexpr int64_t kGradientBlock = 64;
constexpr int kBlockVectors = kGradientBlock / W;
constexpr int64_t kGroup = 8;  // blocks that are encoded together, because each waits long for its step
constexpr float kInverseOfLargest8 = (float)((1.0 + 1.0 / (1 << 22)) / 127.0);  // gradient_codes.inverse_of_largest
constexpr float kInverseOfLargest16 = (float)((1.0 + 1.0 / (1 << 22)) / 32767.0);
constexpr int32_t kInfinityBits = 0x7F800000, kMagnitudeBits = 0x7FFFFFFF, kNanStep = 0x7FC0;

constexpr int code_bytes(GradientKind kind) { return kind == kCodes8 ? 1 : 2; }

LT_INLINE float value_of_step(uint16_t step_bits) {
    const uint32_t b = (uint32_t)step_bits << 16;
    float step;
    memcpy(&step, &b, 4);
    return step;
}

template <GradientKind kKind>
LT_INLINE f32 load_codes(const void* codes, int64_t i) {
    return to_float(kKind == kCodes8 ? widen_signed(load<u8>((const int8_t*)codes + i)) : widen(load<i16>((const int16_t*)codes + i)));
}

template <GradientKind kKind>
LT_INLINE f32 decode_vector(const void* codes, const uint16_t* steps, int64_t i) {
    return load_codes<kKind>(codes, i) * splat(value_of_step(steps[i / kGradientBlock]));
}

LT_INLINE float decode_one(const Gradient& g, int64_t i) {
    const int code = g.kind == kCodes8 ? ((const int8_t*)g.values)[i] : ((const int16_t*)g.values)[i];
    return (float)code * value_of_step(g.steps[i / kGradientBlock]);
}

struct Step {
    float inverse;  // of the step; 0 where all codes are zero
    uint16_t bits;
};

template <GradientKind kKind>
LT_INLINE Step step_for(i32 largest_lanes) {
    const int32_t largest_bits = horizontal_max(largest_lanes);  // magnitudes order as their bits, NaN above infinity
    if (largest_bits >= kInfinityBits) return {0.0f, kNanStep};
    float largest, step;
    memcpy(&largest, &largest_bits, 4);
    step = largest * (kKind == kCodes8 ? kInverseOfLargest8 : kInverseOfLargest16);
    if (step < 1.17549435e-38f) step = largest > 0.0f ? 1.17549435e-38f : 0.0f;
    uint32_t b;
    memcpy(&b, &step, 4);
    b = (b + 0xFFFFu) & 0xFFFF0000u;
    memcpy(&step, &b, 4);
    return {step > 0.0f ? 1.0f / step : 0.0f, (uint16_t)(b >> 16)};
}

template <GradientKind kKind>
LT_INLINE void write_codes(const float* x, const Step& step, void* codes) {
    if (__builtin_expect(step.bits == kNanStep, 0)) {
        memset(codes, 0, kGradientBlock * code_bytes(kKind));
        return;
    }
    const f32 scale = splat(step.inverse), half = splat(0.5f);
    const i32 top = splat((int32_t)(kKind == kCodes8 ? 127 : 32767));
    for (int v = 0; v < kBlockVectors; v += 4) {
        i32 code[4];
        for (int j = 0; j < 4; j++) {
            const i32 b = bits(load<f32>(x + (v + j) * W)), sign = b >> 31;
            const i32 count = min_(truncate(from_bits(b & kMagnitudeBits) * scale + half), top);
            code[j] = (count ^ sign) - sign;
        }
        if (kKind == kCodes8) {
            store_signed8((int8_t*)codes + v * W, code);
        } else {
            store_signed16((int16_t*)codes + v * W, code);
            store_signed16((int16_t*)codes + (v + 2) * W, code + 2);
        }
    }
}

// Writes up to kGroup whole blocks from their values and the lanes of their largest magnitudes.
template <GradientKind kKind>
LT_INLINE void write_blocks(const float* x, const i32* largest, int64_t count, void* codes, uint16_t* steps) {
    Step step[kGroup];
    for (int64_t b = 0; b < count; b++) step[b] = step_for<kKind>(largest[b]);
    for (int64_t b = 0; b < count; b++) {
        steps[b] = step[b].bits;
        write_codes<kKind>(x + b * kGradientBlock, step[b], (char*)codes + b * kGradientBlock * code_bytes(kKind));
    }
}

template <bool kBf16>
LT_INLINE f32 load_value(const void* values, int64_t i) {
    if (kBf16) return bf16_to_float(load<u16>((const uint16_t*)values + i));
    return load<f32>((const float*)values + i);
}

// The values of one block, to `x`; the lanes of their largest magnitude, as bits, to `largest`.
template <bool kBf16>
LT_INLINE void take_block(float* x, i32& largest, const void* values, int64_t at) {
    largest = i32{};
    for (int v = 0; v < kBlockVectors; v++) {
        const f32 y = load_value<kBf16>(values, at + v * W);
        store(x + v * W, y);
        largest = max_(largest, bits(y) & kMagnitudeBits);
    }
}

// The same of the sum of a block of 16-bit codes (kFirst: of nothing) and one of 8-bit codes.
template <bool kFirst>
LT_INLINE void add_block(float* x, i32& largest, const int16_t* total, uint16_t total_step, const int8_t* arrived, uint16_t step) {
    largest = i32{};
    const f32 total_scale = splat(value_of_step(total_step)), scale = splat(value_of_step(step));
    for (int v = 0; v < kBlockVectors; v++) {
        f32 y = load_codes<kCodes8>(arrived, v * W) * scale;
        if (!kFirst) y = load_codes<kCodes16>(total, v * W) * total_scale + y;
        store(x + v * W, y);
        largest = max_(largest, bits(y) & kMagnitudeBits);
    }
}

// A block that the tensor's end cuts is worked on as a copy: nothing beyond the end is read or written.
template <bool kBf16, GradientKind kKind>
LT_INLINE void encode_range(const void* values, const CodedGradient& out, int64_t begin, int64_t end) {
    constexpr int bytes = code_bytes(kKind), value_bytes = kBf16 ? 2 : 4;
    alignas(64) float x[kGroup * kGradientBlock];
    i32 largest[kGroup];
    const int64_t whole = end / kGradientBlock;
    for (int64_t first = begin / kGradientBlock; first < whole; first += kGroup) {
        const int64_t count = whole - first < kGroup ? whole - first : kGroup;
        for (int64_t b = 0; b < count; b++)
            take_block<kBf16>(x + b * kGradientBlock, largest[b], values, (first + b) * kGradientBlock);
        write_blocks<kKind>(x, largest, count, (char*)out.codes + first * kGradientBlock * bytes, out.steps + first);
    }
    const int64_t at = whole * kGradientBlock;
    if (at == end) return;
    alignas(64) char rest[4 * kGradientBlock] = {}, codes[2 * kGradientBlock];
    memcpy(rest, (const char*)values + at * value_bytes, (end - at) * value_bytes);
    take_block<kBf16>(x, largest[0], rest, 0);
    write_blocks<kKind>(x, largest, 1, codes, out.steps + whole);
    memcpy((char*)out.codes + at * bytes, codes, (end - at) * bytes);
}
void encode_gradient(const void* values, int is_bf16, const CodedGradient& out, int64_t begin, int64_t end) {
    if (out.kind == kCodes8)
        is_bf16 ? encode_range<true, kCodes8>(values, out, begin, end) : encode_range<false, kCodes8>(values, out, begin, end);
    else
        is_bf16 ? encode_range<true, kCodes16>(values, out, begin, end) : encode_range<false, kCodes16>(values, out, begin, end);
}

template <GradientKind kKind>
LT_INLINE void decode_range(const Gradient& g, float* values, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + W <= end; i += W) store(values + i, decode_vector<kKind>(g.values, g.steps, i));
    for (; i < end; i++) values[i] = decode_one(g, i);
}
void decode_gradient(const Gradient& g, float* values, int64_t begin, int64_t end) {
    g.kind == kCodes8 ? decode_range<kCodes8>(g, values, begin, end) : decode_range<kCodes16>(g, values, begin, end);
}

template <bool kFirst>
LT_INLINE void add_range(const CodedGradient& total, const Gradient& arrived, int64_t begin, int64_t end) {
    alignas(64) float x[kGroup * kGradientBlock];
    i32 largest[kGroup];
    int16_t* sums = (int16_t*)total.codes;
    const int8_t* codes = (const int8_t*)arrived.values;
    const int64_t whole = end / kGradientBlock;
    for (int64_t first = begin / kGradientBlock; first < whole; first += kGroup) {
        const int64_t count = whole - first < kGroup ? whole - first : kGroup;
        for (int64_t b = 0; b < count; b++) {
            const int64_t block = first + b, at = block * kGradientBlock;
            add_block<kFirst>(x + b * kGradientBlock, largest[b], sums + at, total.steps[block], codes + at, arrived.steps[block]);
        }
        write_blocks<kCodes16>(x, largest, count, sums + first * kGradientBlock, total.steps + first);
    }
    const int64_t at = whole * kGradientBlock;
    if (at == end) return;
    alignas(64) int16_t rest[kGradientBlock] = {};
    alignas(64) int8_t came[kGradientBlock] = {};
    if (!kFirst) memcpy(rest, sums + at, (end - at) * 2);
    memcpy(came, codes + at, end - at);
    add_block<kFirst>(x, largest[0], rest, total.steps[whole], came, arrived.steps[whole]);
    write_blocks<kCodes16>(x, largest, 1, rest, total.steps + whole);
    memcpy(sums + at, rest, (end - at) * 2);
}
void add_codes(const CodedGradient& total, const Gradient& arrived, int first, int64_t begin, int64_t end) {
    first ? add_range<true>(total, arrived, begin, end) : add_range<false>(total, arrived, begin, end);
}

}  // namespace
}  // namespace lazytrain
