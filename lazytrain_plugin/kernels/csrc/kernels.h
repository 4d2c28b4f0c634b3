// What the instruction-set builds of kernels.cpp give to library.cpp: one table of range functions each.
//
// Every function works on elements [begin, end) of flat arrays. `begin` is a multiple of 256 (one quantization block), so ranges may
// run on different threads, and results don't depend on how the work is cut.
#pragma once
#include <stdint.h>

namespace lazytrain {

constexpr int64_t kBlock = 256;   // elements of one 8-bit quantization block
constexpr int64_t kLanes = 1024;  // lanes of sum_squares: element i is row i / 1024, lane i % 1024
constexpr int64_t kParts = 256;   // row r belongs to part r % 256

// Scalars of one update, made once in Python (adamw.AdamWScalars) in double and rounded to fp32, the same on every device.
struct AdamWScalars {
    float gradient_scale;       // negative to maximize
    float l2;                   // weight decay added to the gradient; used only when use_l2
    float decay;                // 1 - lr * weight_decay when decoupled, else 1
    float lerp_weight;          // m = base + lerp_weight * (g - m); base is m, or g when lerp_from_gradient (beta1 <= 0.5), as in torch.lerp
    float beta2;
    float one_minus_beta2;
    float inv_sqrt_bias2;       // 1 / sqrt(1 - beta2^step)
    float eps;
    float minus_step_size;      // -lr / (1 - beta1^step)
    int32_t use_l2;
    int32_t lerp_from_gradient;
};

// One signed or unsigned 8-bit code book and the lines by which a value finds its code (state8.py explains them).
// A table has one entry per decade; entry 7 repeats entry 6.
struct CodeBook {
    const float* values;  // [256] ascending
    float scale[8], offset[8], below[8], tail[8], first[8];
    float top;            // position of the last code in use
    float extreme;        // its value
    int32_t zero_code;    // 127 signed, 0 unsigned
};

// What a gradient is: values of their own precision, or codes (gradient_codes.h).
enum GradientKind : int32_t { kFp32Values = 0, kBf16Values = 1, kCodes8 = 2, kCodes16 = 3 };
struct Gradient {
    const void* values;         // fp32, bf16, or codes int8 or int16
    const uint16_t* steps;      // with codes: bf16 bits, one per 64 elements
    int32_t kind;               // GradientKind
};
struct CodedGradient {          // codes that are written
    void* codes;
    uint16_t* steps;
    int32_t kind;
};

struct AdamW {
    void* weight;               // bf16 when remainder is given, else fp32
    int16_t* remainder;
    Gradient gradient;
    AdamWScalars scalars;
    float* exp_avg;             // fp32 states
    float* exp_avg_sq;
    uint8_t* exp_avg_codes;     // or 8-bit states
    float* exp_avg_scales;
    uint8_t* exp_avg_sq_codes;
    float* exp_avg_sq_scales;
    const CodeBook* signed_book;
    const CodeBook* unsigned_book;
    uint32_t seed0, seed1;      // from (noise_key, step)
    int64_t first_index;        // index of element 0 in its parameter, a multiple of 256
    int64_t numel;
};

struct Kernels {
    const char* name;
    void (*adamw_fp32)(const AdamW&, int64_t begin, int64_t end);
    void (*adamw_8bit)(const AdamW&, int64_t begin, int64_t end);
    void (*quantize)(const float* values, uint8_t* codes, float* scales, const CodeBook&, int64_t begin, int64_t end);
    void (*dequantize)(const uint8_t* codes, const float* scales, float* values, const CodeBook&, int64_t begin, int64_t end);
    void (*split)(const float* master, uint16_t* weight, int16_t* remainder, int64_t begin, int64_t end);
    void (*join)(const uint16_t* weight, const int16_t* remainder, float* master, int64_t begin, int64_t end);
    void (*accumulate)(float* accumulator, const void* gradient, int gradient_is_bf16, int first, int64_t begin, int64_t end);
    void (*sum_squares_part)(const Gradient&, int64_t numel, int64_t part, double* lanes);  // lanes: [1024], written
    void (*add_lanes)(double* lanes, const double* parts, int64_t num_parts);  // lanes[l] = parts[0][l] + parts[1][l] + ...
    void (*encode_gradient)(const void* values, int is_bf16, const CodedGradient&, int64_t begin, int64_t end);
    void (*decode_gradient)(const Gradient&, float* values, int64_t begin, int64_t end);
    void (*add_codes)(const CodedGradient& total, const Gradient& arrived, int first, int64_t begin, int64_t end);
};

extern const Kernels kGeneric;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512vbmi;
extern const Kernels kAvx512;
#endif

}  // namespace lazytrain
