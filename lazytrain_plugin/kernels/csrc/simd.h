// Vectors of W fp32 lanes: GCC vector extensions, so that one source gives AVX-512, AVX2 and plain code; intrinsics only where the
// compiler has no operator (square root, table look-up) or a poor one (widening, narrowing). No operation here rounds differently between
// builds: all are IEEE, and the build switches contraction to FMA off.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LT_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LT_LANES 16
#else
#define LT_LANES 8
#endif

namespace {

constexpr int W = LT_LANES;
typedef float f32 __attribute__((vector_size(4 * LT_LANES)));
typedef int32_t i32 __attribute__((vector_size(4 * LT_LANES)));
typedef uint32_t u32 __attribute__((vector_size(4 * LT_LANES)));
typedef int16_t i16 __attribute__((vector_size(2 * LT_LANES)));
typedef uint16_t u16 __attribute__((vector_size(2 * LT_LANES)));
typedef uint8_t u8 __attribute__((vector_size(LT_LANES)));
typedef double f64 __attribute__((vector_size(8 * LT_LANES)));

template <class V>
LT_INLINE V load(const void* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}
template <class V>
LT_INLINE void store(void* to, V v) {
    memcpy(to, &v, sizeof v);
}
LT_INLINE f32 splat(float x) { return x - f32{}; }  // x - 0 keeps the bits of every x, -0.0 too
LT_INLINE i32 splat(int32_t x) { return x + i32{}; }
LT_INLINE u32 splat(uint32_t x) { return x + u32{}; }
LT_INLINE i32 bits(f32 x) { return (i32)x; }
LT_INLINE f32 from_bits(i32 x) { return (f32)x; }
LT_INLINE f32 max_(f32 a, f32 b) {  // a > b ? a : b, also for NaN and zeros; as is min_
#if defined(__AVX512F__)
    return (f32)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (f32)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
LT_INLINE f32 min_(f32 a, f32 b) {
#if defined(__AVX512F__)
    return (f32)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (f32)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}
LT_INLINE i32 max_(i32 a, i32 b) { return a > b ? a : b; }
LT_INLINE i32 min_(i32 a, i32 b) { return a < b ? a : b; }
LT_INLINE f32 to_float(i32 x) { return __builtin_convertvector(x, f32); }
LT_INLINE i32 truncate(f32 x) { return __builtin_convertvector(x, i32); }

LT_INLINE i32 widen(u16 x) {
#if defined(__AVX512F__)
    return (i32)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (i32)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, i32);
#endif
}

LT_INLINE i32 widen(i16 x) {
#if defined(__AVX512F__)
    return (i32)_mm512_cvtepi16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (i32)_mm256_cvtepi16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, i32);
#endif
}

LT_INLINE i32 widen(u8 x) {
#if defined(__AVX512F__)
    return (i32)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
    return (i32)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)x));
#else
    return __builtin_convertvector(x, i32);
#endif
}

LT_INLINE i32 widen_signed(u8 x) {
#if defined(__AVX512F__)
    return (i32)_mm512_cvtepi8_epi32((__m128i)x);
#elif defined(__AVX2__)
    return (i32)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x));
#else
    return (__builtin_convertvector(x, i32) ^ 128) - 128;
#endif
}

LT_INLINE int32_t horizontal_max(i32 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
#else
    int32_t result = x[0];
    for (int i = 1; i < W; i++) result = x[i] > result ? x[i] : result;
    return result;
#endif
}

LT_INLINE f32 bf16_to_float(u16 x) { return (f32)(widen(x) << 16); }

LT_INLINE f32 square_root(f32 x) {
#if defined(__AVX512F__)
    return (f32)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (f32)_mm256_sqrt_ps((__m256)x);
#else
    f32 y;
    for (int i = 0; i < W; i++) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}

LT_INLINE u16 narrow16(u32 x) {  // the low 16 bits of each lane; the high ones must be zero
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);
    return (u16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    return __builtin_convertvector(x, u16);
#endif
}

LT_INLINE u8 narrow8(i32 x) {  // lanes are 0 .. 255
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0x08);
    __m128i half = _mm256_castsi256_si128(packed);
    return (u8)_mm_cvtsi128_si64(_mm_packus_epi16(half, half));
#else
    return __builtin_convertvector(x, u8);
#endif
}

// Four vectors of lanes -128 .. 127, or two of -32768 .. 32767, as signed bytes or words in order.
LT_INLINE void store_signed8(void* to, const i32* x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i low = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), high = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    const __m256i bytes = _mm256_packs_epi16(low, high);  // groups of four: 0 2 4 6 | 1 3 5 7
    store(to, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
    for (int v = 0; v < 4; v++) store((char*)to + v * W, __builtin_convertvector(x[v], u8));
#endif
}

LT_INLINE void store_signed16(void* to, const i32* x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    store(to, _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), 0xD8));
#else
    for (int v = 0; v < 2; v++) store((char*)to + 2 * v * W, __builtin_convertvector(x[v], i16));
#endif
}

LT_INLINE f32 look_up(const float* table, u8 code) {  // a table of 256
#if defined(__AVX512F__)
    __mmask16 all = 0xFFFF;  // a gather merges into its destination: a zeroed one keeps an iteration from waiting for the one before,
    __asm__("" : "+Yk"(all));  // and the compiler would drop the zeroing if it knew that nothing is merged
    return (f32)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), all, (__m512i)widen(code), table, 4);
#elif defined(__AVX2__)
    const uint64_t c = (uint64_t)code;  // eight loads: 12 % faster on Zen 3 than a gather, which microcode slows on older Intel, too
    const __m128 low = _mm_setr_ps(table[c & 255], table[c >> 8 & 255], table[c >> 16 & 255], table[c >> 24 & 255]);
    const __m128 high = _mm_setr_ps(table[c >> 32 & 255], table[c >> 40 & 255], table[c >> 48 & 255], table[c >> 56]);
    return (f32)_mm256_set_m128(high, low);
#else
    f32 y;
    for (int i = 0; i < W; i++) y[i] = table[code[i]];
    return y;
#endif
}

#if defined(__AVX512VBMI__)
// A table of 256 floats as four planes of bytes: a byte permute looks 64 codes up in a plane at once, where a gather loads one by one.
struct Planes {
    alignas(64) uint8_t bytes[4][256];
    LT_INLINE void fill(Planes& planes, const float* table) {
        for (int code = 0; code < 256; code++) {
            uint8_t value[4];
            memcpy(value, table + code, 4);
            for (int plane = 0; plane < 4; plane++) planes.bytes[plane][code] = value[plane];
        }
    }
};

LT_INLINE __m512i look_up_plane(const uint8_t* plane, __m512i codes, __mmask64 upper) {
    const __m512i* part = (const __m512i*)plane;
    const __m512i low = _mm512_permutex2var_epi8(part[0], codes, part[1]);
    const __m512i high = _mm512_permutex2var_epi8(part[2], codes, part[3]);
    return _mm512_mask_blend_epi8(upper, low, high);
}

// values[i] = table[codes[i]] * scale for 64 codes.
LT_INLINE void look_up_64(const Planes& planes, const uint8_t* codes, f32 scale, float* values) {
    // Unpacking works within 128-bit lanes: transposing the 4 x 4 groups of four codes first leaves the results in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i c = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes));
    const __mmask64 upper = _mm512_movepi8_mask(c);
    __m512i byte[4];
    for (int plane = 0; plane < 4; plane++) byte[plane] = look_up_plane(planes.bytes[plane], c, upper);
    const __m512i low01 = _mm512_unpacklo_epi8(byte[0], byte[1]), high01 = _mm512_unpackhi_epi8(byte[0], byte[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(byte[2], byte[3]), high23 = _mm512_unpackhi_epi8(byte[2], byte[3]);
    store(values, (f32)_mm512_unpacklo_epi16(low01, low23) * scale);
    store(values + 16, (f32)_mm512_unpackhi_epi16(low01, low23) * scale);
    store(values + 32, (f32)_mm512_unpacklo_epi16(high01, high23) * scale);
    store(values + 48, (f32)_mm512_unpackhi_epi16(high01, high23) * scale);
}
#else
struct Planes {
    LT_INLINE void fill(Planes&, const float*) {}
};
#endif

LT_INLINE f32 table8(const float (&entries)[8]) {  // eight entries in one register, for pick()
    f32 t;
    for (int i = 0; i < W; i++) t[i] = entries[i % 8];
    return t;
}
LT_INLINE f32 pick(f32 table, i32 index) { return __builtin_shuffle(table, index); }  // index 0 .. 7

LT_INLINE u32 lane_numbers() {
    u32 lane;
    for (int l = 0; l < W; l++) lane[l] = (uint32_t)l;
    return lane;
}

}  // namespace
