// Split weights: fp32 = bf16 weight + int16 remainder (encoding: split.py).
//
// Included by kernels.cpp only, and compiled with it once per instruction set.
#pragma once
#include "simd.h"

namespace lazytrain {
namespace {

constexpr int32_t kNanBits = 0x7FC00000;

LT_INLINE void split_vector(f32 master, u16& weight, i16& remainder) {
    i32 b = (master != master) ? splat(kNanBits) : bits(master);
    weight = narrow16(((u32)b + 0x8000u) >> 16);
    remainder = (i16)narrow16((u32)b & 0xFFFFu);
}

LT_INLINE f32 join_vector(u16 weight, i16 remainder) {
    i32 high = widen(weight);
    i32 low = widen(remainder);
    i32 borrow = low < 0;  // -1 where the weight was rounded up
    i32 joined = ((high + borrow) << 16) | (low & 0xFFFF);
    i32 replaced_by_zero = borrow & ((high & 0x7FFF) == 0);
    return from_bits(replaced_by_zero ? high << 16 : joined);
}

// A weight of either kind: bf16 with its remainder, or fp32.
template <bool kSplit>
LT_INLINE f32 load_weight(const void* weight, const int16_t* remainder, int64_t i) {
    if (kSplit) return join_vector(load<u16>((const uint16_t*)weight + i), load<i16>(remainder + i));
    return load<f32>((const float*)weight + i);
}
template <bool kSplit>
LT_INLINE void store_weight(void* weight, int16_t* remainder, int64_t i, f32 p) {
    if (!kSplit) return store((float*)weight + i, p);
    u16 high;
    i16 low;
    split_vector(p, high, low);
    store((uint16_t*)weight + i, high);
    store(remainder + i, low);
}

void split(const float* master, uint16_t* weight, int16_t* remainder, int64_t begin, int64_t end) {
    u16 high;
    i16 low;
    int64_t i = begin;
    for (; i + W <= end; i += W) {
        split_vector(load<f32>(master + i), high, low);
        store(weight + i, high);
        store(remainder + i, low);
    }
    if (i == end) return;
    f32 rest = {};
    memcpy(&rest, master + i, (end - i) * 4);
    split_vector(rest, high, low);
    memcpy(weight + i, &high, (end - i) * 2);
    memcpy(remainder + i, &low, (end - i) * 2);
}

void join(const uint16_t* weight, const int16_t* remainder, float* master, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + W <= end; i += W) store(master + i, join_vector(load<u16>(weight + i), load<i16>(remainder + i)));
    if (i == end) return;
    u16 high = {};
    i16 low = {};
    memcpy(&high, weight + i, (end - i) * 2);
    memcpy(&low, remainder + i, (end - i) * 2);
    f32 rest = join_vector(high, low);
    memcpy(master + i, &rest, (end - i) * 4);
}

}  // namespace
}  // namespace lazytrain
