// The range functions of kernels.h, compiled once per instruction set (LT_TABLE names the table). No header with inline functions of
// the standard library is included: such a function, compiled here for AVX-512, could be the copy that the linker keeps for all.
#include "gradient_codes.h"
#include "kernels.h"
#include "simd.h"
#include "split_weights.h"
#include "state8.h"

namespace lazytrain {
namespace {

// ---- the update ----

struct Uniform {  // AdamWScalars in registers
    f32 gradient_scale, l2, decay, lerp_weight, beta2, one_minus_beta2, inv_sqrt_bias2, eps, minus_step_size;
    i32 lerp_from_gradient;
    LT_INLINE Uniform make(const AdamWScalars& s) {
        return {splat(s.gradient_scale), splat(s.l2), splat(s.decay), splat(s.lerp_weight), splat(s.beta2),
                splat(s.one_minus_beta2), splat(s.inv_sqrt_bias2), splat(s.eps), splat(s.minus_step_size),
                splat(s.lerp_from_gradient ? -1 : 0)};
    }
};

template <bool kL2>
LT_INLINE void update(const Uniform& s, f32& p, f32 g, f32& m, f32& v) {
    g = g * s.gradient_scale;
    if (kL2) g = g + s.l2 * p;
    p = p * s.decay;
    f32 base = s.lerp_from_gradient ? g : m;
    m = base + s.lerp_weight * (g - m);
    v = v * s.beta2 + (s.one_minus_beta2 * g) * g;
    f32 denominator = square_root(v) * s.inv_sqrt_bias2 + s.eps;
    p = p + (s.minus_step_size * m) / denominator;
}

template <GradientKind kKind>
LT_INLINE f32 load_gradient(const Gradient& g, int64_t i) {
    if (kKind == kCodes8 || kKind == kCodes16) return decode_vector<kKind>(g.values, g.steps, i);
    return load_value<kKind == kBf16Values>(g.values, i);
}
// How the gradient's last elements are read, from the copy that `gradient_tail` makes.
constexpr GradientKind tail_kind(GradientKind kind) { return kind == kBf16Values ? kBf16Values : kFp32Values; }

template <GradientKind kKind>
LT_INLINE void gradient_tail(const Gradient& g, int64_t at, int64_t count, void* copy) {
    constexpr int bytes = kKind == kBf16Values ? 2 : 4;
    if (kKind == kCodes8 || kKind == kCodes16)
        for (int64_t i = 0; i < count; i++) ((float*)copy)[i] = decode_one(g, at + i);
    else
        memcpy(copy, (const char*)g.values + at * bytes, count * bytes);
}

template <bool kSplit, GradientKind kKind, bool kL2>
LT_INLINE void fp32_vector(const Uniform& s, void* weight, int16_t* remainder, const Gradient& gradient, float* m_at, float* v_at,
                           int64_t i) {
    f32 p = load_weight<kSplit>(weight, remainder, i), m = load<f32>(m_at + i), v = load<f32>(v_at + i);
    update<kL2>(s, p, load_gradient<kKind>(gradient, i), m, v);
    store(m_at + i, m);
    store(v_at + i, v);
    store_weight<kSplit>(weight, remainder, i, p);
}

// The last, partial vector works on copies: nothing outside [begin, end) is read or written.
struct Tail {
    alignas(64) char weight[4 * W] = {}, gradient[4 * W] = {};
    alignas(64) int16_t remainder[W] = {};
    alignas(64) float m[W] = {}, v[W] = {};
    alignas(64) uint8_t m_codes[W] = {}, v_codes[W] = {};

    template <bool kSplit, GradientKind kKind>
    void load_from(const AdamW& a, int64_t at, int64_t count) {
        constexpr int weight_bytes = kSplit ? 2 : 4;
        memcpy(weight, (const char*)a.weight + at * weight_bytes, count * weight_bytes);
        gradient_tail<kKind>(a.gradient, at, count, gradient);
        if (kSplit) memcpy(remainder, a.remainder + at, count * 2);
    }
    template <bool kSplit>
    void store_weight_to(const AdamW& a, int64_t at, int64_t count) const {
        constexpr int weight_bytes = kSplit ? 2 : 4;
        memcpy((char*)a.weight + at * weight_bytes, weight, count * weight_bytes);
        if (kSplit) memcpy(a.remainder + at, remainder, count * 2);
    }
};

template <bool kSplit, GradientKind kKind, bool kL2>
void adamw_fp32_range(const AdamW& a, int64_t begin, int64_t end) {
    const Uniform s = Uniform::make(a.scalars);
    int64_t i = begin;
    for (; i + W <= end; i += W) fp32_vector<kSplit, kKind, kL2>(s, a.weight, a.remainder, a.gradient, a.exp_avg, a.exp_avg_sq, i);
    if (i == end) return;
    Tail t;
    const int64_t count = end - i;
    t.load_from<kSplit, kKind>(a, i, count);
    memcpy(t.m, a.exp_avg + i, count * 4);
    memcpy(t.v, a.exp_avg_sq + i, count * 4);
    fp32_vector<kSplit, tail_kind(kKind), kL2>(s, t.weight, t.remainder, Gradient{t.gradient, nullptr, 0}, t.m, t.v, 0);
    t.store_weight_to<kSplit>(a, i, count);
    memcpy(a.exp_avg + i, t.m, count * 4);
    memcpy(a.exp_avg_sq + i, t.v, count * 4);
}

// ---- 8-bit states ----

template <bool kSplit, GradientKind kKind, bool kL2>
void adamw_8bit_range(const AdamW& a, int64_t begin, int64_t end) {
    const Uniform s = Uniform::make(a.scalars);
    const Book mb = Book::make(*a.signed_book), vb = Book::make(*a.unsigned_book);
    alignas(64) float m_buffer[kBlock], v_buffer[kBlock];
    Planes m_planes, v_planes;
    Planes::fill(m_planes, mb.values);
    Planes::fill(v_planes, vb.values);

    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t count = end - at < kBlock ? end - at : kBlock, whole = count / W * W;
        uint8_t *m_codes = a.exp_avg_codes + at, *v_codes = a.exp_avg_sq_codes + at;
        float &m_scale = a.exp_avg_scales[at / kBlock], &v_scale = a.exp_avg_sq_scales[at / kBlock];
        const f32 old_m_scale = splat(m_scale), old_v_scale = splat(v_scale);
        i32 m_largest = {}, v_largest = {};
        bool decoded = false;
#if defined(__AVX512VBMI__)
        decoded = count == kBlock;
        for (int64_t i = 0; decoded && i < kBlock; i += 64) {
            look_up_64(m_planes, m_codes + i, old_m_scale, m_buffer + i);
            look_up_64(v_planes, v_codes + i, old_v_scale, v_buffer + i);
        }
#endif
        for (int64_t i = 0; i < whole; i += W) {
            f32 p = load_weight<kSplit>(a.weight, a.remainder, at + i);
            f32 m = decoded ? load<f32>(m_buffer + i) : look_up(mb.values, load<u8>(m_codes + i)) * old_m_scale;
            f32 v = decoded ? load<f32>(v_buffer + i) : look_up(vb.values, load<u8>(v_codes + i)) * old_v_scale;
            update<kL2>(s, p, load_gradient<kKind>(a.gradient, at + i), m, v);
            store_weight<kSplit>(a.weight, a.remainder, at + i, p);
            store(m_buffer + i, m);
            store(v_buffer + i, v);
            m_largest = max_(m_largest, bits(m) & 0x7FFFFFFF);
            v_largest = max_(v_largest, bits(v) & 0x7FFFFFFF);
        }
        if (whole < count) {
            const int64_t rest = count - whole;
            const i32 inside = ((i32)lane_numbers() < (int32_t)rest) & 0x7FFFFFFF;  // the padding must not reach the scales
            Tail t;
            t.load_from<kSplit, kKind>(a, at + whole, rest);
            memcpy(t.m_codes, m_codes + whole, rest);
            memcpy(t.v_codes, v_codes + whole, rest);
            f32 p = load_weight<kSplit>(t.weight, t.remainder, 0);
            f32 m = look_up(mb.values, load<u8>(t.m_codes)) * old_m_scale;
            f32 v = look_up(vb.values, load<u8>(t.v_codes)) * old_v_scale;
            update<kL2>(s, p, load_value<tail_kind(kKind) == kBf16Values>(t.gradient, 0), m, v);
            store_weight<kSplit>(t.weight, t.remainder, 0, p);
            t.store_weight_to<kSplit>(a, at + whole, rest);
            store(m_buffer + whole, m);
            store(v_buffer + whole, v);
            m_largest = max_(m_largest, bits(m) & inside);
            v_largest = max_(v_largest, bits(v) & inside);
        }
        m_scale = block_scale(*a.signed_book, largest(m_largest));
        v_scale = block_scale(*a.unsigned_book, largest(v_largest));
        encode_block(a, mb, vb, m_buffer, v_buffer, m_scale, v_scale, m_codes, v_codes, count, (uint64_t)(a.first_index + at));
    }
}

template <template <bool, GradientKind, bool> class Range, bool kSplit, bool kL2>
LT_INLINE void dispatch_kind(const AdamW& a, int64_t begin, int64_t end) {
    switch (a.gradient.kind) {
        case kFp32Values: return Range<kSplit, kFp32Values, kL2>::run(a, begin, end);
        case kBf16Values: return Range<kSplit, kBf16Values, kL2>::run(a, begin, end);
        case kCodes8: return Range<kSplit, kCodes8, kL2>::run(a, begin, end);
        case kCodes16: return Range<kSplit, kCodes16, kL2>::run(a, begin, end);
    }
}
template <template <bool, GradientKind, bool> class Range>
LT_INLINE void dispatch(const AdamW& a, int64_t begin, int64_t end) {
    const bool l2 = a.scalars.use_l2;
    if (a.remainder)
        l2 ? dispatch_kind<Range, true, true>(a, begin, end) : dispatch_kind<Range, true, false>(a, begin, end);
    else
        l2 ? dispatch_kind<Range, false, true>(a, begin, end) : dispatch_kind<Range, false, false>(a, begin, end);
}
template <bool kSplit, GradientKind kKind, bool kL2>
struct Fp32Range {
    static void run(const AdamW& a, int64_t begin, int64_t end) { adamw_fp32_range<kSplit, kKind, kL2>(a, begin, end); }
};
template <bool kSplit, GradientKind kKind, bool kL2>
struct EightBitRange {
    static void run(const AdamW& a, int64_t begin, int64_t end) { adamw_8bit_range<kSplit, kKind, kL2>(a, begin, end); }
};
void adamw_fp32(const AdamW& a, int64_t begin, int64_t end) { dispatch<Fp32Range>(a, begin, end); }
void adamw_8bit(const AdamW& a, int64_t begin, int64_t end) { dispatch<EightBitRange>(a, begin, end); }

// ---- gradients, norms ----

template <bool kBf16, bool kFirst>
LT_INLINE void accumulate_range(float* accumulator, const void* gradient, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + W <= end; i += W) {
        f32 g = load_value<kBf16>(gradient, i);
        store(accumulator + i, kFirst ? g : load<f32>(accumulator + i) + g);
    }
    if (i == end) return;
    alignas(64) char tail[4 * W] = {};
    memcpy(tail, (const char*)gradient + i * (kBf16 ? 2 : 4), (end - i) * (kBf16 ? 2 : 4));
    f32 g = load_value<kBf16>(tail, 0), sum = {};
    memcpy(&sum, accumulator + i, (end - i) * 4);
    sum = kFirst ? g : sum + g;
    memcpy(accumulator + i, &sum, (end - i) * 4);
}
void accumulate(float* accumulator, const void* gradient, int gradient_is_bf16, int first, int64_t begin, int64_t end) {
    if (gradient_is_bf16)
        first ? accumulate_range<true, true>(accumulator, gradient, begin, end)
              : accumulate_range<true, false>(accumulator, gradient, begin, end);
    else
        first ? accumulate_range<false, true>(accumulator, gradient, begin, end)
              : accumulate_range<false, false>(accumulator, gradient, begin, end);
}

template <GradientKind kKind>
LT_INLINE void sum_squares_rows(const Gradient& g, int64_t numel, int64_t part, double* lanes) {
    memset(lanes, 0, kLanes * sizeof(double));
    for (int64_t at = part * kLanes; at < numel; at += kParts * kLanes) {
        const int64_t count = numel - at < kLanes ? numel - at : kLanes;
        int64_t l = 0;
        for (; l + W <= count; l += W) {
            f64 x = __builtin_convertvector(load_gradient<kKind>(g, at + l), f64);
            store(lanes + l, load<f64>(lanes + l) + x * x);  // the square of an fp32 is exact in fp64
        }
        if (l == count) continue;
        alignas(64) char tail[4 * W] = {};
        gradient_tail<kKind>(g, at + l, count - l, tail);
        f64 x = __builtin_convertvector(load_value<tail_kind(kKind) == kBf16Values>(tail, 0), f64);
        store(lanes + l, load<f64>(lanes + l) + x * x);
    }
}
void sum_squares_part(const Gradient& g, int64_t numel, int64_t part, double* lanes) {
    switch (g.kind) {
        case kFp32Values: return sum_squares_rows<kFp32Values>(g, numel, part, lanes);
        case kBf16Values: return sum_squares_rows<kBf16Values>(g, numel, part, lanes);
        case kCodes8: return sum_squares_rows<kCodes8>(g, numel, part, lanes);
        case kCodes16: return sum_squares_rows<kCodes16>(g, numel, part, lanes);
    }
}

void add_lanes(double* lanes, const double* parts, int64_t num_parts) {
    memcpy(lanes, parts, kLanes * sizeof(double));
    for (int64_t p = 1; p < num_parts; p++)
        for (int64_t l = 0; l < kLanes; l += W) store(lanes + l, load<f64>(lanes + l) + load<f64>(parts + p * kLanes + l));
}

}  // namespace

extern const Kernels LT_TABLE;
const Kernels LT_TABLE = {LT_NAME, adamw_fp32, adamw_8bit, quantize, dequantize, split, join, accumulate, sum_squares_part, add_lanes,
                          encode_gradient, decode_gradient, add_codes};

}  // namespace lazytrain
