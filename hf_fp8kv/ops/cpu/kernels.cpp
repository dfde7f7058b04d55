// Kernels of the "cpu" backend. Python fills one struct per call (records.py). Every field has
// eight bytes, addresses are integers, and strides are in bytes. ops/reference.py specifies the
// results. build.py compiles this file for each instruction set. `-ffp-contract=off` prevents
// fused multiply-adds, because stored bytes must equal the reference's. Other code calls `fma`
// explicitly. `c` is the struct of a call, and `s` the temporary memory (`Scratch`) of a thread.

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, MAX_SUMS = 16;
#else
constexpr int LANES = 8, MAX_SUMS = 8;
#endif
constexpr int STEP = 16;               // values that are decoded at a time
constexpr int VECTORS = STEP / LANES;  // vectors per step
constexpr int TILE = 256;              // positions per tile of logits
constexpr int LATENT_TILE = 64;  // positions per tile of latents: decoded, they fit in the L2 cache
constexpr int MAX_ROWS = 4;  // query rows that share decoded values
constexpr float MASKED = -INFINITY;  // logit of a position that a query does not see

// Arrays of vectors stay in registers only if the loops over them are unrolled early.
#define UNROLL _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

enum Kind : int64_t { CODES, BF16, F16, F32 };

inline int64_t get_width(int64_t kind) { return kind == CODES ? 1 : kind == F32 ? 4 : 2; }
inline int64_t pad(int64_t count) { return (count + STEP - 1) & -STEP; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline Floats splat(float x) { return x - Floats{}; }

template <class T>
inline T load(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

// Start to load `count` bytes of the next product into the L2 cache. They may not fit in the L1.
inline void prefetch(const char* p, int64_t count) {
  for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(p + i, 0, 2);
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// exp(x) for x <= 0, within 2 units in the last place. The result is 0 below -87. NaN stays NaN.
inline Floats exp(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats low = x < -87.0f ? splat(-87.0f) : x;
  Floats n = fma(low, splat(1.4426950408889634f), magic) - magic;
  Floats r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), low));
  Floats y = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(r * r, y, r) + 1.0f;
  Ints power = ((Ints)(n + magic) << 23) + 0x3F800000;
  return x < -87.0f ? Floats{} : y * (Floats)power;
}

// The block table, and the memory of the pages.
struct Table {
  int64_t page_size;            // slots of a page
  const int32_t* page_numbers;  // [sequences, num_columns]
  int64_t row_stride, num_columns;
  const int32_t* lengths;  // tokens of each sequence
  const char* block;
  const int64_t* page_offsets;  // from `block`

  const char* find_page(int64_t sequence, int64_t position) const {
    auto row = (const int32_t*)((const char*)page_numbers + sequence * row_stride);
    int32_t page = row[position / page_size];
    return block + page_offsets[page > 0 ? page : 0];  // freed pages: page 0, which is masked
  }

  // The page of a position, or `page` if the position is past the table.
  const char* page_to_prefetch(const char* page, int64_t sequence, int64_t position) const {
    return position / page_size < num_columns ? find_page(sequence, position) : page;
  }
};

// Stored keys or values (see records.py).
struct StoredSide {
  int64_t codes_offset, kind, bits, dim, scales_offset, head_size;
  const float *static_scale, *center;
  int64_t rotation;

  bool is_packed() const { return bits < 8; }
  int64_t vector_size() const { return dim * bits / 8; }  // in bytes

  const float* find_center(int64_t head) const { return center ? center + head * dim : nullptr; }
  const char* find_codes(const char* page, int64_t head) const {
    return page + head * head_size + codes_offset;
  }
  const char* find_scales(const char* page, int64_t head, int64_t slot) const {
    return page + head * head_size + scales_offset + 4 * slot;
  }
};

// Keys or values to read, and the fields that `list_decoding_fields` in records.py explains.
struct Side : StoredSide {
  const float* code_values;  // of the 256 codes
  int64_t shift, mask, nan_mask, nan_code;
  double factor;
};

struct Strided {
  const char* data;
  int64_t kind, batch_stride, head_stride, token_stride;

  const char* at(int64_t sequence, int64_t head, int64_t token) const {
    return data + sequence * batch_stride + head * head_stride + token * token_stride;
  }
};

#ifndef __AVX2__
inline float from_float16(uint16_t h) {
  // 2^112 adjusts the exponent. The exponent of infinity and NaN becomes the largest one.
  uint32_t raw = (uint32_t)(h & 0x7FFF) << 13;
  float x = load<float>(&raw) * 0x1p112f;
  raw = load<uint32_t>(&x) | ((h & 0x7C00) == 0x7C00 ? 0x7F800000 : 0) | (uint32_t)(h >> 15) << 31;
  return load<float>(&raw);
}

inline uint16_t to_float16(float x) {
  const uint32_t raw = load<uint32_t>(&x), sign = raw >> 16 & 0x8000;
  const uint32_t magnitude = raw & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00;
  if (magnitude >= 0x477FF000) return sign | 0x7C00;
  if (magnitude < 0x38800000) {  // adding a small value to 0.5 rounds it
    const float sum = load<float>(&magnitude) + 0.5f;
    return sign | (load<uint32_t>(&sum) - 0x3F000000);
  }
  return sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
}
#endif

struct StepValues {
  Floats vectors[VECTORS];
};

struct ReadFloat32 {
  static constexpr int64_t WIDTH = 4;
  inline StepValues operator()(const char* p) const {
    StepValues out;
    UNROLL
    for (int v = 0; v < VECTORS; v++) out.vectors[v] = load<Floats>(p + 4 * LANES * v);
    return out;
  }
};

struct ReadBFloat16 {
  static constexpr int64_t WIDTH = 2;
  inline StepValues operator()(const char* p) const {
    StepValues out;
    auto raw = (const uint16_t*)p;
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
      Ints wide;
#if defined(__AVX512F__)
      wide = (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)raw));
#elif defined(__AVX2__)
      wide = (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(raw + 8 * v)));
#else
      for (int i = 0; i < LANES; i++) wide[i] = raw[LANES * v + i];
#endif
      out.vectors[v] = (Floats)(wide << 16);
    }
    return out;
  }
};

#ifdef __AVX2__
inline StepValues from_float16(__m256i h) {
#ifdef __AVX512F__
  return {(Floats)_mm512_cvtph_ps(h)};
#else
  return {
      (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
      (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
#endif
}
#endif

struct ReadFloat16 {
  static constexpr int64_t WIDTH = 2;
  inline StepValues operator()(const char* p) const {
#ifdef __AVX2__
    return from_float16(_mm256_loadu_si256((const __m256i*)p));
#else
    StepValues out;
    for (int i = 0; i < STEP; i++)
      out.vectors[i / LANES][i % LANES] = from_float16(load<uint16_t>(p + 2 * i));
    return out;
#endif
  }
};

struct ReadTable {  // decodes any code, by a table
  static constexpr int64_t WIDTH = 1;
  const float* code_values;
  inline StepValues operator()(const char* p) const {
    StepValues out;
    for (int i = 0; i < STEP; i++) out.vectors[i / LANES][i % LANES] = code_values[(uint8_t)p[i]];
    return out;
  }
};

#ifdef __AVX2__
struct ReadCodes {  // decodes finite codes, up to a factor
  static constexpr int64_t WIDTH = 1;
  __m128i shift;
  __m256i mask;
  explicit ReadCodes(const Side& side)
      : shift(_mm_cvtsi64_si128(side.shift)), mask(_mm256_set1_epi16((short)side.mask)) {}
  inline StepValues operator()(const char* p) const {
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    return from_float16(_mm256_and_si256(_mm256_sll_epi16(wide, shift), mask));
  }
};

struct ReadUnpacked {  // reads integers except -128
  static constexpr int64_t WIDTH = 1;
  inline StepValues operator()(const char* p) const {
#ifdef __AVX512F__
    return {(Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
#else
    auto convert = [](const char* at) {
      return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(at)));
    };
    return {convert(p), convert(p + 8)};
#endif
  }
};
#endif

#ifdef __AVX512BW__
// Codes of a format with 4 or more bits of mantissa as integers: a mantissa of at most 7 bits times
// a signed power of two of at most 64. The codes of 64 positions become 32 integers of even and 32
// integers of odd positions. NaN, -128 as int8, becomes 0. `least` keeps the minimum to find it.
// Unpacked codes are integers already.
template <bool UNPACKED>
struct ReadIntegers {
  __m512i fraction, ones, powers;
  mutable __m512i least = _mm512_setzero_si512();
  explicit ReadIntegers(const Side& side) {
    const int bits = 10 - (int)side.shift;
    alignas(16) int8_t one[16], power[16];  // by the sign and the three bits after it
    for (int i = 0; i < 16; i++) {
      const int exponent = (i & 7) >> (bits - 4), magnitude = exponent ? 1 << (exponent - 1) : 1;
      one[i] = (int8_t)(exponent ? 1 << bits : 0);
      power[i] = (int8_t)(i & 8 ? -magnitude : magnitude);
    }
    fraction = _mm512_set1_epi8((char)((1 << bits) - 1));
    ones = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)one));
    powers = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)power));
  }
  struct Words {
    __m512i even, odd;
  };
  inline Words operator()(__m512i codes) const {
    if (UNPACKED)
      return {_mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8), _mm512_srai_epi16(codes, 8)};
    const uint64_t evens = 0x5555555555555555;
    const __m512i index = _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(0x0F));
    // 0xEA means (codes & fraction) | ones.
    const __m512i mantissa =
        _mm512_ternarylogic_epi32(codes, fraction, _mm512_shuffle_epi8(ones, index), 0xEA);
    return {
        _mm512_maddubs_epi16(mantissa, _mm512_maskz_shuffle_epi8(evens, powers, index)),
        _mm512_maddubs_epi16(mantissa, _mm512_maskz_shuffle_epi8(~evens, powers, index))};
  }
  bool found_nan() const {
    return _mm512_cmpeq_epi8_mask(least, _mm512_set1_epi8((char)0x80)) != 0;
  }
};
#endif

// Read `count` < 16 values without touching memory after them. The remaining values are zero.
template <class Read>
inline StepValues read_some(const Read& read, const char* p, int64_t count) {
  char buffer[STEP * Read::WIDTH] = {};
  std::memcpy(buffer, p, count * Read::WIDTH);
  return read(buffer);
}

// Sum the lanes of four vectors. Neighbors are added first, and the order does not depend on the
// other vectors.
inline std::array<float, 4> sum_lanes(Floats a, Floats b, Floats c, Floats d) {
  std::array<float, 4> out;
#ifdef __AVX2__
#ifdef __AVX512F__
  auto half = [](Floats x) {
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
  };
#else
  auto half = [](Floats x) { return (__m256)x; };
#endif
  const __m256 ab = _mm256_hadd_ps(half(a), half(b)), cd = _mm256_hadd_ps(half(c), half(d));
  const __m256 all = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out.data(), _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  const Floats* vectors[] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; i++) {
    const Floats& x = *vectors[i];
    out[i] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
  }
#endif
  return out;
}

// Part of lines of stored values: line `i` begins at `begin + i * stride`, has `count` values, and
// is multiplied by the row's values from index `row_offset` on.
struct Segment {
  const char* begin;
  int64_t stride, count, row_offset;
  const char* prefetch;  // data of the next product, to prefetch for each line, or nullptr
  int64_t prefetch_stride;
};

template <int N, int LINES>
__attribute__((always_inline)) inline void add_products(
    const StepValues (&y)[LINES], const float* x, int64_t x_stride, Floats (&sums)[LINES * N]) {
  UNROLL
  for (int v = 0; v < VECTORS; v++) {
    UNROLL
    for (int r = 0; r < N; r++) {
      const Floats q = load<Floats>(x + r * x_stride + v * LANES);
      UNROLL
      for (int l = 0; l < LINES; l++) sums[l * N + r] = fma(y[l].vectors[v], q, sums[l * N + r]);
    }
  }
}

// Rows that lines are multiplied with, and the output. Rows are `x_stride` values apart. The
// product of a row with line `i` goes to `out[i]`. Outputs of rows are `out_stride` values apart.
// If the rows hold integers (`round_row`), `factors` are the factors of their products.
struct Rows {
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  const float* factors = nullptr;

  Rows from(int64_t row) const {
    const float* row_factors = factors ? factors + row : nullptr;
    return {x + row * x_stride, x_stride, out + row * out_stride, out_stride, row_factors};
  }
};

// Multiply LINES lines with N rows, and set the output or add to it (ADDS).
template <int N, int LINES, bool ADDS, class Read>
inline void multiply_lines(
    const Read& read, const Segment* segments, int64_t num_segments, int64_t line,
    const Rows& rows) {
  constexpr int TOTAL = LINES * N, LAST = TOTAL - 1;
  Floats sums[TOTAL] = {};
  for (int64_t n = 0; n < num_segments; n++) {
    const Segment& segment = segments[n];
    const char* begin = segment.begin + line * segment.stride;
    const float* x = rows.x + segment.row_offset;
    const int64_t whole = segment.count & ~(int64_t)(STEP - 1);
    StepValues y[LINES];
    int64_t i = 0;
    for (; i < whole; i += STEP) {
      UNROLL
      for (int l = 0; l < LINES; l++) y[l] = read(begin + l * segment.stride + i * Read::WIDTH);
      add_products<N, LINES>(y, x + i, rows.x_stride, sums);
    }
    if (i < segment.count) {
      UNROLL
      for (int l = 0; l < LINES; l++)
        y[l] = read_some(read, begin + l * segment.stride + i * Read::WIDTH, segment.count - i);
      add_products<N, LINES>(y, x + i, rows.x_stride, sums);
    }
    if (segment.prefetch)
      prefetch(
          segment.prefetch + line * segment.prefetch_stride, LINES * segment.prefetch_stride);
  }
  UNROLL
  for (int i = 0; i < TOTAL; i += 4) {
    auto sum_of = [&](int j) { return sums[j < LAST ? j : LAST]; };
    const auto four = sum_lanes(sum_of(i), sum_of(i + 1), sum_of(i + 2), sum_of(i + 3));
    UNROLL
    for (int j = 0; j < 4; j++) {
      if (i + j >= TOTAL) continue;
      float* out = rows.out + (i + j) % N * rows.out_stride + line + (i + j) / N;
      *out = ADDS ? *out + four[j] : four[j];
    }
  }
}

template <int N, bool ADDS, class Read>
void multiply_rows(
    const Read& read, const Segment* segments, int64_t num_segments, int64_t num_lines,
    const Rows& rows) {
  constexpr int LINES = MAX_SUMS / N;
  int64_t line = 0;
  for (; line + LINES <= num_lines; line += LINES)
    multiply_lines<N, LINES, ADDS>(read, segments, num_segments, line, rows);
  for (; line < num_lines; line++)
    multiply_lines<N, 1, ADDS>(read, segments, num_segments, line, rows);
}

#ifdef __AVX512BW__
inline __m512i dot(__m512i sum, __m512i a, __m512i b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

// Multiply lines of codes with N rows of integers. Sums are exact, so their order does not matter.
// Two lines at a time fit in the registers, and the lanes of 16 sums are added together. Up to 15
// outputs after the last line are overwritten.
template <int N, bool ADDS, bool UNPACKED>
void multiply_rows(
    const ReadIntegers<UNPACKED>& read, const Segment* segments, int64_t num_segments,
    int64_t num_lines, const Rows& rows) {
  constexpr int QUADS = N == 3 ? 1 : 4 / N;
  __m512i least = read.least;
  for (int64_t line = 0; line < num_lines; line += 4 * QUADS) {
    __m512i quads[4] = {};  // four lines each: a 128-bit lane has a part of each sum
    UNROLL
    for (int q = 0; q < QUADS; q++) {
      __m512i pairs[2][N];
      UNROLL
      for (int p = 0; p < 2; p++) {
        const int64_t pair_line = line + 4 * q + 2 * p;
        const int64_t a = min(pair_line, num_lines - 1), b = min(a + 1, num_lines - 1);
        __m512i sums[2][N] = {};
        for (int64_t n = 0; n < num_segments; n++) {
          const Segment& segment = segments[n];
          const int64_t stride = segment.stride, count = segment.count;
          const char *at_a = segment.begin + a * stride, *at_b = segment.begin + b * stride;
          const char* x = (const char*)rows.x + 2 * segment.row_offset;
          // With values in registers (asm), the compiler does not load them again for each use.
          auto add = [&](int64_t i, __m512i codes_a, __m512i codes_b) {
            asm("" : "+v"(codes_a), "+v"(codes_b));
            const auto words_a = read(codes_a), words_b = read(codes_b);
            least = _mm512_min_epi8(least, _mm512_min_epi8(codes_a, codes_b));
            UNROLL
            for (int r = 0; r < N; r++) {
              const char* row = x + 4 * r * rows.x_stride + 2 * i;
              __m512i even = load<__m512i>(row), odd = load<__m512i>(row + 64);
              asm("" : "+v"(even), "+v"(odd));
              sums[0][r] = dot(dot(sums[0][r], words_a.even, even), words_a.odd, odd);
              sums[1][r] = dot(dot(sums[1][r], words_b.even, even), words_b.odd, odd);
            }
          };
          if (segment.row_offset % 64 == 0 && count % 64 == 0) {
            for (int64_t i = 0; i < count; i += 64)
              add(i, load<__m512i>(at_a + i), load<__m512i>(at_b + i));
          } else {  // the page has parts of vectors, which begin at multiples of 64 in the row
            for (int64_t i = -(segment.row_offset % 64); i < count; i += 64) {
              uint64_t inside = i < 0 ? ~0ull << -i : ~0ull;
              if (count - i < 64) inside &= (1ull << (count - i)) - 1;
              add(i, _mm512_maskz_loadu_epi8(inside, at_a + i),
                  _mm512_maskz_loadu_epi8(inside, at_b + i));
            }
          }
          if (segment.prefetch)
            prefetch(
                segment.prefetch + a * segment.prefetch_stride, 2 * segment.prefetch_stride);
        }
        UNROLL
        for (int r = 0; r < N; r++)
          pairs[p][r] = _mm512_add_epi32(
              _mm512_unpacklo_epi32(sums[0][r], sums[1][r]),
              _mm512_unpackhi_epi32(sums[0][r], sums[1][r]));
      }
      UNROLL
      for (int r = 0; r < N; r++)
        quads[r * QUADS + q] = _mm512_add_epi32(
            _mm512_unpacklo_epi64(pairs[0][r], pairs[1][r]),
            _mm512_unpackhi_epi64(pairs[0][r], pairs[1][r]));
    }
    auto add_lanes = [](__m512i a, __m512i b) {
      return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
    };
    const __m512 products = _mm512_cvtepi32_ps(
        add_lanes(add_lanes(quads[0], quads[1]), add_lanes(quads[2], quads[3])));
    UNROLL
    for (int i = 0; i < N * QUADS; i++) {
      const int r = i / QUADS;
      float* out = rows.out + r * rows.out_stride + line + i % QUADS * 4;
      __m128 four = load<__m128>((const char*)&products + 16 * i) * rows.factors[r];
      if (ADDS) four += _mm_loadu_ps(out);
      _mm_storeu_ps(out, four);
    }
  }
  read.least = least;
}
#endif

template <bool ADDS, class Read>
void multiply(
    const Read& read, const Segment* segments, int64_t num_segments, int64_t num_lines,
    int64_t num_rows, const Rows& rows) {
  for (int64_t row = 0; row < num_rows; row += MAX_ROWS) {
    const Rows remaining = rows.from(row);
    switch (num_rows - row) {
      case 1: multiply_rows<1, ADDS>(read, segments, num_segments, num_lines, remaining); break;
      case 2: multiply_rows<2, ADDS>(read, segments, num_segments, num_lines, remaining); break;
      case 3: multiply_rows<3, ADDS>(read, segments, num_segments, num_lines, remaining); break;
      default: multiply_rows<4, ADDS>(read, segments, num_segments, num_lines, remaining);
    }
  }
}

// Call `use` with a reader of values of a kind. `finite` means that no code is NaN or infinity.
template <class Use>
void with_reader(int64_t kind, const Side& side, [[maybe_unused]] bool finite, const Use& use) {
  switch (kind) {
    case F32: return use(ReadFloat32{});
    case BF16: return use(ReadBFloat16{});
    case F16: return use(ReadFloat16{});
  }
#ifdef __AVX2__
  if (finite && side.is_packed()) return use(ReadUnpacked{});
  if (finite) return use(ReadCodes(side));
#endif
  use(ReadTable{side.code_values});
}

// Return whether some code may be NaN or infinity.
bool may_be_nonfinite(const char* p, int64_t count, const Side& side) {
  const uint8_t mask = (uint8_t)side.nan_mask, special = (uint8_t)side.nan_code;
  uint8_t found = 0;
  for (int64_t i = 0; i < count; i++) found |= (uint8_t)(p[i] & mask) == special;
  return found;
}

// Decode `count` values, and pad with zeros to a multiple of STEP.
template <class Read>
void decode_line(const Read& read, const char* from, int64_t count, float* to) {
  const int64_t whole = count & ~(int64_t)(STEP - 1);
  for (int64_t i = 0; i < whole; i += STEP) {
    StepValues x = read(from + i * Read::WIDTH);
    std::memcpy(to + i, &x, sizeof x);
  }
  if (whole < count) {
    StepValues x = read_some(read, from + whole * Read::WIDTH, count - whole);
    std::memcpy(to + whole, &x, sizeof x);
  }
}

// Write the planes of `dim` codes of 6 or 4 bits to `to` (see page_layout.py).
void pack(const uint8_t* codes, int64_t dim, int64_t bits, uint8_t* to) {
  const int64_t half = dim / 2, quarter = dim / 4;
  for (int64_t i = 0; i < half; i++) to[i] = (codes[i] >> 4) | (codes[half + i] & 0xF0);
  for (int64_t i = 0; bits == 6 && i < quarter; i++) {
    to[half + i] = 0;
    for (int k = 0; k < 4; k++) to[half + i] |= (codes[k * quarter + i] >> 2 & 3) << (2 * k);
  }
}

// Unpacking of BYTES codes at a time. An unpacked code is an integer, and -128 is NaN.
template <int BYTES>
struct Unpacker {
  typedef uint64_t Words __attribute__((vector_size(BYTES)));
  typedef uint8_t Bytes __attribute__((vector_size(BYTES)));
  typedef int8_t Signs __attribute__((vector_size(BYTES)));

  // Write the codes that have the upper 4 bits of `upper`, and 2 further bits of `lower`.
  static inline void write(Words upper, Words lower, char* to, int64_t size = BYTES) {
    const Bytes codes = (Bytes)((upper & 0xF0F0F0F0F0F0F0F0) | (lower & 0x0C0C0C0C0C0C0C0C));
    Bytes negative = 0x80 - codes;
    negative = negative > 0x80 ? negative : Bytes{} + 0x80;
    const Bytes integers = (Signs)codes < 0 ? negative : codes;
    std::memcpy(to, &integers, size);
  }

  // Unpack `size` bytes of each part of a plane: PARTS is 4 for 6 bits, and 2 for 4 bits.
  template <int PARTS>
  __attribute__((always_inline)) static inline void unpack(
      const char* from, int64_t distance, char* to, int64_t to_distance, int64_t size = BYTES) {
    constexpr int HALF = PARTS / 2;
    Words planes[3] = {};  // nibbles, then pairs of bits
    UNROLL
    for (int k = 0; k < (PARTS == 4 ? 3 : 1); k++)
      std::memcpy(&planes[k], from + k * distance, size);
    UNROLL
    for (int k = 0; k < PARTS; k++) {
      const Words upper = k < HALF ? planes[k] << 4 : planes[k - HALF];
      write(upper, k ? planes[2] >> (2 * k - 2) : planes[2] << 2, to + k * to_distance, size);
    }
  }
};

// Unpack lines of `count` bytes of each plane. Parts of a plane are `distance` bytes apart.
template <int PARTS>
void unpack_lines(
    int64_t num_lines, int64_t count, const char* from, int64_t stride, int64_t distance, char* to,
    int64_t to_stride, int64_t to_distance) {
  for (int64_t line = 0; line < num_lines; line++, from += stride, to += to_stride) {
    int64_t i = 0;
#ifdef __AVX512BW__
    if (PARTS == 4 && count == 32 && distance == 32) {  // keys of 128: two parts fill a vector
      typedef Unpacker<64>::Words Words;
      const Words nibbles = load<Words>(from);
      const auto pairs = (Words)_mm512_broadcast_i64x4(load<__m256i>(from + 64));
      Unpacker<64>::write(nibbles << 4, pairs << Words{2, 2, 2, 2}, to);
      Unpacker<64>::write(nibbles, pairs >> Words{2, 2, 2, 2, 4, 4, 4, 4}, to + 64);
      continue;
    }
#endif
    auto unpack = [&](auto unpacker, int64_t step) {
      for (; i + step <= count; i += step)
        unpacker.template unpack<PARTS>(from + i, distance, to + i, to_distance);
    };
    unpack(Unpacker<4 * LANES>{}, 4 * LANES);
    unpack(Unpacker<32>{}, 32);
    unpack(Unpacker<16>{}, 16);
    if (i < count && count > 16) i = count - 16, unpack(Unpacker<16>{}, 16);
    if (i < count)
      Unpacker<16>::unpack<PARTS>(from + i, distance, to + i, to_distance, count - i);
  }
}

// Stored values in lines of `stride` bytes. All of them lie in `size` bytes from `begin` on.
struct Lines {
  const char* first;
  int64_t stride;
  const char* begin;
  int64_t size;

  bool are_finite(const Side& side) const {
    return side.kind == CODES && !may_be_nonfinite(begin, size, side);
  }
};

// Find `count` slots of a head in a page: a line per token (K), or per channel (V: `transposed`).
// Packed codes are unpacked to integers in `memory`.
Lines find_lines(
    const StoredSide& side, const char* page, int64_t page_size, int64_t head, int64_t slot,
    int64_t count, bool transposed, char* memory) {
  const int64_t width = get_width(side.kind), size = side.vector_size();
  const char* begin = side.find_codes(page, head);
  const char* first = begin + slot * (transposed ? width : size);
  if (!side.is_packed() && transposed) return {first, page_size * width, begin, page_size * size};
  if (!side.is_packed()) return {first, size, first, count * size};
  const auto unpack = side.bits == 6 ? unpack_lines<4> : unpack_lines<2>;
  const int64_t part = side.dim / (side.bits == 6 ? 4 : 2);  // channels
  if (transposed)
    unpack(part, count, first, page_size, part * page_size, memory, count, part * count);
  else
    unpack(count, part, first, size, part, memory, side.dim, part);
  return {memory, transposed ? count : side.dim, memory, count * side.dim};
}

__attribute__((always_inline)) inline void read_values(
    const char* from, int64_t kind, int64_t count, float* to) {
  with_reader(kind, {}, false, [&](const auto& read) { decode_line(read, from, count, to); });
}

uint16_t to_bfloat16(float x) {
  uint32_t raw = load<uint32_t>(&x);
  return x != x ? 0x7FC0 : (raw + (raw >> 16 & 1) + 0x7FFF) >> 16;
}

void write_values(const float* from, int64_t kind, int64_t count, char* to) {
  auto halves = (uint16_t*)to;
  if (kind == F32) std::memcpy(to, from, 4 * count);
  if (kind == BF16)
    for (int64_t i = 0; i < count; i++) halves[i] = to_bfloat16(from[i]);
  if (kind == F16) {
#ifdef __AVX2__
    for (int64_t i = 0; i < count; i += 8) {
      float buffer[8] = {};
      const int64_t remaining = min(count - i, 8);
      std::memcpy(buffer, from + i, 4 * remaining);
      const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(buffer), 0);
      std::memcpy(halves + i, &packed, 2 * remaining);
    }
#else
    for (int64_t i = 0; i < count; i++) halves[i] = to_float16(from[i]);
#endif
  }
}

float read_scale(const char* word) {
  uint32_t raw = (uint32_t)load<uint16_t>(word) << 16;
  return load<float>(&raw);
}

// Rotate `dim` values in place in blocks of `block`, with the same bits as formats/rotation.py.
void rotate(float* x, int64_t dim, int64_t block) {
  for (int64_t half = 1; half < block; half *= 2) {
    int64_t i = 0;
#ifndef __clang__
    if (half < LANES && dim % LANES == 0) {
      Ints peer_lane, is_second;
      for (int lane = 0; lane < LANES; lane++) {
        peer_lane[lane] = lane ^ half;
        is_second[lane] = lane & half ? -1 : 0;
      }
      for (; i < dim; i += LANES) {
        const Floats a = load<Floats>(x + i), b = __builtin_shuffle(a, peer_lane);
        store(x + i, is_second ? b - a : a + b);
      }
    }
#endif
    for (; i < dim; i += 2 * half)
      for (int64_t j = i; j < i + half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
  }
  const float factor = (float)(1 / std::sqrt((double)block));
  for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

// `torch_parallel_for` of torch's stable ABI. Kernels share torch's threads: a second pool would
// compete for the cores with torch's threads, which spin after each operation.
int32_t (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);

// Call `unit(i)` for each i below `units`, on up to `threads` threads. Each thread calls `make()`
// once, which returns a `unit` with separate memory.
template <class Make>
void for_units(int64_t units, int64_t threads, const Make& make) {
  struct Context {
    std::atomic<int64_t> next;
    int64_t units;
    const Make& make;
  };
  Context context{{0}, units, make};
  const auto run_units = [](int64_t, int64_t, void* p) {
    auto& shared = *(Context*)p;
    auto unit = shared.make();
    for (int64_t i; (i = shared.next++) < shared.units;) unit(i);
  };
  if (threads > units) threads = units;
  if (threads > 1) parallel_for(0, threads, 1, run_units, &context);
  else run_units(0, 1, &context);
}

// ---- write --------------------------------------------------------------------------------------

// New keys or values, and constants of the format that they are encoded to.
struct NewSide : StoredSide {
  Strided in;
  int64_t dropped_bits, rebias, min_normal, subnormal_step, max_code, nan_code, signed_zero;
  int64_t error_exponent;
  double max;
};

struct Write {
  int64_t batch, num_heads, num_tokens;
  double min_scale;
  Table table;
  NewSide k, v;
};

constexpr int64_t UNIT_TOKENS = 64;  // tokens per unit of work
constexpr int NUM_SCALES = 16;  // scales to try within an octave, from 1 to below 2 times the first
constexpr uint32_t INFINITE = 0x7F800000;
const struct ScaleFactors {
  float values[NUM_SCALES];
  ScaleFactors() {
    for (int i = 0; i < NUM_SCALES; i++) values[i] = (float)std::exp2(i / (double)NUM_SCALES);
  }
} SCALE_FACTORS;

// Encode `x * inverse` as `codec.encode`. With `by_channel`, `inverse` has a value per channel.
void encode(
    const float* x, const float* inverse, bool by_channel, const NewSide& side, uint8_t* codes) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  const Ints one = Ints{} + 1, step_bits = Ints{} + (int32_t)side.subnormal_step,
             nan = Ints{} + (int32_t)side.nan_code;
  const int drop = (int)side.dropped_bits, bits = (int)side.bits;
  for (int64_t i = 0; i < side.dim; i += LANES) {
    Floats value = load<Floats>(x + i) * (by_channel ? load<Floats>(inverse + i) : splat(*inverse));
    Ints raw = (Ints)value, magnitude = raw & 0x7FFFFFFF;
    Ints is_odd = magnitude >> drop & 1;
    Ints normal = ((magnitude + ((1 << (drop - 1)) - 1) + is_odd) >> drop) - (int32_t)side.rebias;
    // Adding a small value to a number whose last bit is worth one step rounds it to that step.
    Ints small = (Ints)((Floats)magnitude + (Floats)step_bits) - step_bits;
    Ints rounded = magnitude < (int32_t)side.min_normal ? small : normal;
    rounded = rounded > (int32_t)side.max_code ? Ints{} + (int32_t)side.max_code : rounded;
    rounded <<= 8 - bits;
    Ints is_nan = magnitude > (int32_t)INFINITE;
    Ints has_sign = side.signed_zero ? one : (Ints)(rounded > 0) & ~is_nan & 1;
    Ints wide_codes = (is_nan ? nan : rounded) | ((raw >> 24 & 0x80) & -has_sign);
    Bytes narrow = __builtin_convertvector(wide_codes, Bytes);
    std::memcpy(codes + i, &narrow, sizeof narrow);
  }
}

// Return the bfloat16 bits of the dynamic scale for a largest |x| with the bits `magnitude`.
uint32_t compute_dynamic_scale(uint32_t magnitude, float max_value, float min_scale) {
  if (magnitude >= INFINITE) return 0x7FC0;
  float scale = load<float>(&magnitude) / max_value;
  scale = scale > min_scale ? scale : min_scale;
  return (load<uint32_t>(&scale) + 0xFFFF) >> 16;
}

// Return the bits that `codec.search_scale` chooses, starting from the bits of the dynamic scale.
// Scales are at least 2^-100, and values times their reciprocal are below 2^16. The unit of the
// errors, a power of two, can therefore be a factor of the reciprocal without changing any bit.
// Each lane tries one scale.
uint32_t search_scale(const float* line, uint32_t dynamic_scale, const NewSide& side) {
  typedef int64_t Longs __attribute__((vector_size(8 * LANES)));
  constexpr int NUM_VECTORS = NUM_SCALES / LANES;
  const uint32_t start_bits = dynamic_scale << 16;
  const uint32_t error_bits = (uint32_t)(127 + side.error_exponent) << 23;
  const float start = load<float>(&start_bits), error_unit = load<float>(&error_bits);
  const Ints least_normal = Ints{} + (int32_t)(side.min_normal + (side.error_exponent << 23));
  const Ints above = Ints{} + (int32_t)((side.dropped_bits << 23) + 0x400000);
  Floats scales[NUM_VECTORS], inverses[NUM_VECTORS];
  Longs errors[NUM_VECTORS] = {};
  for (int v = 0; v < NUM_VECTORS; v++) {
    Ints candidate = (Ints)(load<Floats>(SCALE_FACTORS.values + v * LANES) * start);
    scales[v] = (Floats)((candidate + 0xFFFF) & ~0xFFFF);
    inverses[v] = error_unit / scales[v];
  }
  // A lane can sum the squares of 64 errors in float32 exactly: an error is at most 2^9, so the sum
  // is at most 2^24.
  for (int64_t begin = 0; begin < side.dim; begin += 64) {
    Floats sums[NUM_VECTORS] = {};
    const int64_t end = min(begin + 64, side.dim);
    for (int64_t i = begin; i < end; i++) {
      UNROLL
      for (int v = 0; v < NUM_VECTORS; v++) {
        const Floats x = inverses[v] * line[i];
        // Adding 1.5 times a power of two, whose last bit is worth one step, rounds a value.
        Ints binade = (Ints)x & 0x7F800000;
        binade = binade > least_normal ? binade : least_normal;
        const Floats large = (Floats)(binade + above);
        Floats error = ((x + large) - large) - x + 0.5f;
#if defined(__AVX512F__)
        error = (Floats)_mm512_roundscale_ps((__m512)error, 9);
#elif defined(__AVX2__)
        error = (Floats)_mm256_floor_ps((__m256)error);
#else
        for (int lane = 0; lane < LANES; lane++) error[lane] = std::floor(error[lane]);
#endif
        sums[v] = fma(error, error, sums[v]);  // exact
      }
    }
    for (int v = 0; v < NUM_VECTORS; v++) errors[v] += __builtin_convertvector(sums[v], Longs);
  }
  float min_cost = INFINITY, best_scale = start, relative_to = 1 / start;
  for (int i = 0; i < NUM_SCALES; i++) {
    const float candidate = scales[i / LANES][i % LANES], relative = candidate * relative_to;
    const float cost = (float)errors[i / LANES][i % LANES] * (relative * relative);
    if (cost < min_cost) min_cost = cost, best_scale = candidate;
  }
  return load<uint32_t>(&best_scale) >> 16;
}

// Write the codes of one vector `x` to `codes`, and its dynamic scale, if any, to `dynamic`. `line`
// is temporary memory for two vectors and 2 * STEP values.
void encode_vector(
    const NewSide& side, float min_scale, const char* x, const float* center, int64_t head,
    char* dynamic, bool searches, float* line, uint8_t* codes) {
  read_values(x, side.in.kind, side.dim, line);
  if (center)
    for (int64_t i = 0; i < side.dim; i++) line[i] -= center[i];
  if (side.rotation) rotate(line, side.dim, side.rotation);
  if (side.static_scale) {
    float* inverses = line + side.dim + STEP;
    for (int64_t i = 0; i < side.dim; i++) inverses[i] = 1 / side.static_scale[head * side.dim + i];
    return encode(line, inverses, true, side, codes);
  }
  uint32_t magnitude = 0;
  for (int64_t i = 0; i < side.dim; i++) {
    uint32_t raw = load<uint32_t>(line + i) & 0x7FFFFFFF;
    magnitude = raw > magnitude ? raw : magnitude;
  }
  uint32_t scale = compute_dynamic_scale(magnitude, (float)side.max, min_scale);
  if (searches && magnitude < INFINITE) scale = search_scale(line, scale, side);
  const uint16_t stored = (uint16_t)scale;
  std::memcpy(dynamic, &stored, 2);
  const float inverse = 1 / read_scale((const char*)&stored);
  encode(line, &inverse, false, side, codes);
}

// Return whether all new tokens are in the lengths and have pages.
bool has_pages(const Write& c) {
  for (int64_t sequence = 0; sequence < c.batch; sequence++) {
    const int64_t end = c.table.lengths[sequence], page_size = c.table.page_size;
    auto row = (const int32_t*)((const char*)c.table.page_numbers + sequence * c.table.row_stride);
    const int64_t last_column = (end - 1) / page_size;
    if (end < c.num_tokens || last_column >= c.table.num_columns) return false;
    for (int64_t column = (end - c.num_tokens) / page_size; column <= last_column; column++)
      if (row[column] < 0) return false;
  }
  return true;
}

// Store the keys of one token and head, or the values, whose channels are `page_size` apart.
void write_vector(
    const Write& c, bool is_value, int64_t sequence, int64_t head, int64_t token, float* line,
    uint8_t* codes) {
  const NewSide& side = is_value ? c.v : c.k;
  const int64_t position = c.table.lengths[sequence] - c.num_tokens + token;
  const int64_t page_size = c.table.page_size, slot = position % page_size;
  const int64_t width = get_width(side.kind);
  const char* page = c.table.find_page(sequence, position);
  const char* x = side.in.at(sequence, head, token);
  if (side.kind == CODES) {
    encode_vector(
        side, (float)c.min_scale, x, side.find_center(head), head,
        const_cast<char*>(side.find_scales(page, head, slot)), !is_value, line, codes);
    if (side.is_packed()) pack(codes, side.dim, side.bits, codes + side.dim);
    x = (const char*)codes + (side.is_packed() ? side.dim : 0);
  }
  char* begin = const_cast<char*>(side.find_codes(page, head));
  const int64_t size = side.vector_size();
  if (!is_value)
    std::memcpy(begin + slot * size, x, size);
  else if (width == 1)
    for (int64_t i = 0; i < size; i++) begin[i * page_size + slot] = x[i];
  else
    for (int64_t i = 0; i < size; i += width)
      std::memcpy(begin + i * page_size + slot * width, x + i, width);
}

// ---- gather -------------------------------------------------------------------------------------

struct Gather {
  int64_t batch, num_heads, first_head, start, stop, ragged, transposed;
  Table table;
  Side side;
  char* out;
  int64_t out_kind;
};

// Decode `count` positions of a page from `slot` on to vectors, `stride` values apart. V is stored
// transposed, and `column` is temporary memory for one of its channels.
void decode_part(
    const Side& side, const char* page, int64_t page_size, int64_t head, int64_t slot,
    int64_t count, bool transposed, float* vectors, int64_t stride, float* column, char* memory) {
  const int64_t dim = side.dim;
  const Lines lines = find_lines(side, page, page_size, head, slot, count, transposed, memory);
  // Capture copies, because captured references are loaded again after each store.
  with_reader(side.kind, side, lines.are_finite(side), [=](const auto& read) {
    if (!transposed)
      for (int64_t t = 0; t < count; t++)
        decode_line(read, lines.first + t * lines.stride, dim, vectors + t * stride);
    else
      for (int64_t d = 0; d < dim; d++) {
        decode_line(read, lines.first + d * lines.stride, count, column);
        for (int64_t t = 0; t < count; t++) vectors[t * stride + d] = column[t];
      }
  });
}

// Gather positions `begin` to `end - 1` of one head, all in one page. `memory` is temporary memory.
void gather_part(
    const Gather& c, int64_t sequence, int64_t head, int64_t begin, int64_t end, float* memory) {
  const Side& side = c.side;
  const int64_t page_size = c.table.page_size, slot = begin % page_size, count = end - begin;
  const int64_t stored_head = head + c.first_head;
  const char* page = c.table.find_page(sequence, begin);
  const int64_t stride = pad(side.dim);
  float* vectors = memory;  // [count, stride]
  float* column = vectors + UNIT_TOKENS * stride;
  decode_part(
      side, page, page_size, stored_head, slot, count, c.transposed, vectors, stride, column,
      (char*)(column + UNIT_TOKENS + STEP));
  const float* scale = side.static_scale ? side.static_scale + stored_head * side.dim : nullptr;
  const float* center = side.find_center(stored_head);
  for (int64_t t = 0; t < count; t++) {
    float* x = vectors + t * stride;
    const float dynamic =
        side.scales_offset ? read_scale(side.find_scales(page, stored_head, slot + t)) : 1;
    if (c.ragged && begin + t >= c.table.lengths[sequence]) {
      std::memset(x, 0, 4 * side.dim);
    } else {
      const float factor = (float)side.factor;
      if (side.kind == CODES)
        for (int64_t d = 0; d < side.dim; d++) x[d] = x[d] * factor * (scale ? scale[d] : dynamic);
      if (side.rotation) rotate(x, side.dim, side.rotation);
      if (center)
        for (int64_t d = 0; d < side.dim; d++) x[d] += center[d];
    }
    const int64_t row = (sequence * c.num_heads + head) * (c.stop - c.start) + begin - c.start + t;
    write_values(x, c.out_kind, side.dim, c.out + row * side.dim * get_width(c.out_kind));
  }
}

// ---- attend -------------------------------------------------------------------------------------

struct Attend {
  int64_t batch, num_q_heads, num_heads, num_tokens, start, stop, causal, window;
  double scaling, softcap;
  Table table;
  Side k, v;
  int64_t latent;
  Side rope;  // the RoPE part of K, if K holds latents
  Strided q;
  const float* sinks;
  Strided mask, bias;
  // Of each sequence: the first visible position, and the position from which all are visible.
  const int32_t* bounds;
  int64_t bounds_stride;
  int64_t span;  // positions that are summed together (`add_span`)
  int64_t num_splits, num_split_units;  // see `attend_unit`
  int64_t num_blocks, block_tokens, num_rows;  // query blocks, and their tokens and rows
  char* out;
  int64_t out_kind;
  float* sums;  // [units, rows, 2 + Dv]: results of `add_span`

  const int32_t* find_bounds(int64_t sequence) const {
    return (const int32_t*)((const char*)bounds + sequence * bounds_stride);
  }
};

// Return whether the products of a side are sums of integers: its codes are integers of at most 11
// bits. Rounding a row to 16 bits is only exact enough for 16-bit models. The page size has no
// effect, because deterministic models have the same bits with pages of any size.
bool uses_integer_products(const Attend& c, const Side& side) {
#ifdef __AVX512BW__
  return c.q.kind != F32 && side.kind == CODES && side.shift <= 6 && !c.latent;
#else
  return false;
#endif
}

// Round a row of `count` values to integers of 16 bits, in the order of ReadIntegers. Return the
// factor of its products with codes. Sums of products fit in 32 bits. Values after the row are zero
// up to a multiple of 64.
float round_row(const float* x, int64_t count, const Side& side, float* to) {
#ifdef __AVX512BW__
  __m512i largest = _mm512_setzero_si512();  // positive floats and their bits have the same order
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 magnitude = _mm512_abs_ps(_mm512_loadu_ps(x + i));
    largest = _mm512_max_epi32(largest, (__m512i)magnitude);
    total += magnitude;
  }
  const int32_t raw = _mm512_reduce_max_epi32(largest);
  const int bits = 10 - (int)side.shift, exponents = 7 >> (bits - 4);
  const auto largest_code = (float)(((2 << bits) - 1) << (exponents ? exponents - 1 : 0));
  // Rounding adds less than 1024 to a sum, and no scale may depend on `count`.
  const float by_maximum = load<float>(&raw) / 32767;
  const float by_sum = _mm512_reduce_add_ps(total) / (2147e6f / largest_code - 1024);
  const float scale = by_maximum > by_sum ? by_maximum : by_sum;
  const __m512 inverse = _mm512_set1_ps(1 / scale);
  alignas(64) int16_t order[32];  // 16 even and 16 odd positions
  for (int i = 0; i < 32; i++) order[i] = (int16_t)(i < 16 ? 4 * i : 4 * i - 62);
  const auto deinterleave = load<__m512i>(order);
  for (int64_t i = 0; i < count; i += 64) {
    auto to_ints = [&](int64_t j) {
      return _mm512_cvtps_epi32(_mm512_loadu_ps(x + i + j) * inverse);
    };
    const __m512i a = _mm512_permutex2var_epi16(to_ints(0), deinterleave, to_ints(16));
    const __m512i b = _mm512_permutex2var_epi16(to_ints(32), deinterleave, to_ints(48));
    _mm512_storeu_si512((char*)to + 2 * i, _mm512_shuffle_i64x2(a, b, 0x44));
    _mm512_storeu_si512((char*)to + 2 * i + 64, _mm512_shuffle_i64x2(a, b, 0xEE));
  }
  return side.is_packed() ? scale : scale * std::exp2((float)side.shift - 24);
#else
  return 0;
#endif
}

constexpr int64_t LOGITS_STRIDE = TILE + STEP;  // distance of two rows of logits, in values

struct PagePart {  // part of a tile within one page
  const char* page;
  int64_t slot, tile_offset, count;  // the first slot, and its offset in the tile
};

// Query rows of a KV head: its query heads for each token, from a token on.
struct QueryBlock {
  int64_t sequence, head, token, rows, position;  // token and position: of the first row
};

// Temporary memory of a thread, for `rows` query rows and one tile of positions.
struct Scratch {
  std::unique_ptr<float[]> memory;
  std::vector<PagePart> parts;
  std::vector<Segment> segments, decoded;
  float *q, *logits, *center_logits, *largest, *sums, *k_scales, *strip, *latents, *out;
  float* unpacked;  // codes of K or V in the tile, if they are packed
  float* v_scales;  // for latents: of their RoPE parts
  // Rounded queries and weights, and their factors, if the products of a side are sums of integers.
  float *int_q, *q_factors, *int_weights, *weight_factors;
  int64_t q_stride, int_stride;
  bool k_is_int, v_is_int;
  uint8_t seen[TILE + STEP];

  explicit Scratch(const Attend& c) {
    const int64_t rows = pad(c.num_rows), k = pad(c.k.dim), v = pad(c.v.dim);
    const int64_t pages = TILE / c.table.page_size + 2, tile = TILE + STEP * pages;  // at most
    parts.resize(pages), segments.resize(pages), decoded.resize(pages);
    q_stride = k + pad(c.latent ? c.rope.dim : 0);
    k_is_int = uses_integer_products(c, c.k) && c.k.dim % 64 == 0 && c.k.dim <= 1024;
    v_is_int = uses_integer_products(c, c.v);
    int_stride = k / 2;
    const bool is_packed = c.k.is_packed() || c.rope.is_packed();
    const int64_t latents_size = c.latent ? LATENT_TILE * q_stride : 0;
    const std::pair<float**, int64_t> buffers[] = {
        {&q, c.num_rows * q_stride}, {&logits, c.num_rows * LOGITS_STRIDE}, {&center_logits, rows},
        {&largest, rows}, {&sums, rows}, {&k_scales, LOGITS_STRIDE}, {&v_scales, LOGITS_STRIDE},
        {&strip, MAX_SUMS * (k > tile ? k : tile)}, {&latents, latents_size},
        {&out, c.num_rows * v}, {&unpacked, is_packed ? TILE * max(k, pad(c.rope.dim)) / 4 : 0},
        {&int_q, k_is_int ? c.num_rows * int_stride : 0},
        {&int_weights, v_is_int ? c.num_rows * TILE / 2 : 0}, {&q_factors, rows},
        {&weight_factors, rows}};
    int64_t total = STEP;
    for (const auto& [buffer, size] : buffers) total += size;
    memory.reset(new float[total]);
    auto next = (float*)(((uintptr_t)memory.get() + 63) & -64);
    for (const auto& [buffer, size] : buffers) *buffer = next, next += size;
    std::memset(latents, 0, 4 * latents_size);
  }
};

// tanh(x) as Cephes' tanhf computes it: by a polynomial below 0.625, else from exp.
Floats tanh(Floats x) {
  Floats magnitude = x < 0.0f ? -x : x, square = x * x;
  Floats y = fma(splat(-5.70498872745e-3f), square, splat(2.06390887954e-2f));
  y = fma(y, square, splat(-5.37397155531e-2f));
  y = fma(y, square, splat(1.33314422036e-1f));
  y = fma(y, square, splat(-3.33332819422e-1f));
  Floats near = fma(square * magnitude, y, magnitude), e = exp(magnitude * -2.0f);
  Floats result = magnitude < 0.625f ? near : (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -result : result;
}

// Load a query, multiplied by `scaling` and by the factor and static scale of a side's codes.
// Return its product with the side's center.
float load_query(
    const Attend& c, const char* x, const Side& side, int64_t head, const float* center,
    float* query) {
  read_values(x, c.q.kind, side.dim, query);
  float product = 0;
  for (int64_t i = 0; i < side.dim; i++) {
    query[i] *= (float)c.scaling;
    if (center) product += query[i] * center[i];
    if (side.kind == CODES) query[i] *= (float)side.factor;
  }
  if (side.rotation) rotate(query, side.dim, side.rotation);
  if (side.static_scale)
    for (int64_t i = 0; i < side.dim; i++) query[i] *= side.static_scale[head * side.dim + i];
  return product;
}

// Load the dynamic scales of a tile, which begin at an offset in each page: the lower (K) or upper
// (V) halves of 32-bit words. Return `scales`, or nullptr without dynamic scales.
const float* load_scales(
    const Scratch& s, int64_t num_parts, const StoredSide& side, int64_t head, float* scales) {
  for (int64_t i = 0; side.scales_offset && i < num_parts; i++) {
    const PagePart& part = s.parts[i];
    const char* words = side.find_scales(part.page, head, part.slot);
    for (int64_t j = 0; j < part.count; j++)
      scales[part.tile_offset + j] = read_scale(words + 4 * j);
  }
  return side.scales_offset ? scales : nullptr;
}

// Multiply stored lines with rows. If the rows do not fit in the registers, or with `seen`, lines
// are decoded first. Values that are not in `seen` count as zero. Integers have no NaN, so
// products with NaN are overwritten with NaN afterwards.
template <bool ADDS>
void multiply_stored(
    Scratch& s, const Side& side, bool finite, int64_t num_parts, int64_t num_lines,
    int64_t num_rows, const Rows& rows, const uint8_t* seen) {
#ifdef __AVX512BW__
  if (rows.factors) {
    auto find_nan = [&](const auto& read) {
      multiply<ADDS>(read, s.segments.data(), num_parts, num_lines, num_rows, rows);
      return read.found_nan();
    };
    const bool found_nan = side.is_packed() ? find_nan(ReadIntegers<true>(side))
                                            : find_nan(ReadIntegers<false>(side));
    if (!found_nan) return;
    for (int64_t line = 0; line < num_lines; line++)
      for (int64_t i = 0; i < num_parts; i++) {
        const Segment& segment = s.segments[i];
        const char* begin = segment.begin + line * segment.stride;
        for (int64_t j = 0; j < segment.count; j++)
          if (may_be_nonfinite(begin + j, 1, side) && !(seen && !seen[segment.row_offset + j]))
            for (int64_t r = 0; r < num_rows; r++) rows.out[r * rows.out_stride + line] = NAN;
      }
    return;
  }
#endif
  with_reader(side.kind, side, finite, [&](const auto& read) {
    if (num_rows <= MAX_ROWS && !seen)
      return multiply<ADDS>(read, s.segments.data(), num_parts, num_lines, num_rows, rows);
    int64_t length = 0;
    for (int64_t i = 0; i < num_parts; i++) length += pad(s.segments[i].count);
    for (int64_t line = 0; line < num_lines; line += MAX_SUMS) {
      const int64_t strip_lines = min(num_lines - line, MAX_SUMS);
      float* decoded = s.strip;
      for (int64_t i = 0; i < num_parts; i++) {
        const Segment& segment = s.segments[i];
        s.decoded[i] = {
            (const char*)decoded, 4 * length, segment.count, segment.row_offset, nullptr, 0};
        for (int64_t l = 0; l < strip_lines; l++) {
          float* row = decoded + l * length;
          decode_line(read, segment.begin + (line + l) * segment.stride, segment.count, row);
          if (seen)
            for (int64_t j = 0; j < segment.count; j++)
              if (!seen[segment.row_offset + j]) row[j] = 0;
        }
        decoded += pad(segment.count);
      }
      const Rows output{rows.x, rows.x_stride, rows.out + line, rows.out_stride};
      multiply<ADDS>(ReadFloat32{}, s.decoded.data(), num_parts, strip_lines, num_rows, output);
    }
  });
}

// Compute the products of queries and a tile of K.
void multiply_keys(const Attend& c, Scratch& s, int64_t num_parts, const QueryBlock& block) {
  for (int64_t i = 0; i < num_parts; i++) {
    const PagePart part = s.parts[i];
    const Lines lines = find_lines(
        c.k, part.page, c.table.page_size, block.head, part.slot, part.count, false,
        (char*)s.unpacked);
    const bool finite = !s.k_is_int && lines.are_finite(c.k);
    const char* next = c.v.find_codes(part.page, block.head);
    s.segments[0] = {lines.first, lines.stride, c.k.dim, 0, next, c.v.vector_size()};
    Rows logits{s.q, s.q_stride, s.logits + part.tile_offset, LOGITS_STRIDE};
    if (s.k_is_int) logits = {s.int_q, s.int_stride, logits.out, LOGITS_STRIDE, s.q_factors};
    multiply_stored<false>(s, c.k, finite, 1, part.count, block.rows, logits, nullptr);
  }
}

// Add the products of weights and a tile of V. `next` is the position after the tile.
void multiply_values(
    const Attend& c, Scratch& s, int64_t num_parts, const QueryBlock& block, int64_t next,
    bool all_seen) {
  const int64_t page_size = c.table.page_size;
  bool finite = !s.v_is_int;
  for (int64_t i = 0; i < num_parts; i++) {
    const PagePart& part = s.parts[i];
    const Lines lines = find_lines(
        c.v, part.page, page_size, block.head, part.slot, part.count, true,
        (char*)s.unpacked + part.tile_offset * c.v.dim);
    finite = finite && lines.are_finite(c.v);
    const char* page = c.table.page_to_prefetch(part.page, block.sequence, next + i * page_size);
    const char* next_codes = c.k.find_codes(page, block.head);
    if (c.k.scales_offset) prefetch(c.k.find_scales(page, block.head, 0), 4 * page_size);
    s.segments[i] = {
        lines.first, lines.stride, part.count, part.tile_offset, next_codes,
        page_size * c.k.vector_size() / c.v.dim};
  }
  Rows weights{s.logits, LOGITS_STRIDE, s.out, pad(c.v.dim)};
  if (s.v_is_int) {
    const int64_t count = s.parts[num_parts - 1].tile_offset + s.parts[num_parts - 1].count;
    for (int64_t row = 0; row < block.rows; row++)
      s.weight_factors[row] =
          round_row(s.logits + row * LOGITS_STRIDE, count, c.v, s.int_weights + row * TILE / 2);
    weights = {s.int_weights, TILE / 2, s.out, weights.out_stride, s.weight_factors};
  }
  const uint8_t* seen = all_seen || finite ? nullptr : s.seen;
  multiply_stored<true>(s, c.v, finite, num_parts, c.v.dim, block.rows, weights, seen);
}

// Compute the products of queries and a tile of latents. Latents and their RoPE parts are
// decoded into the same lines, which `multiply_latent_values` also reads.
void multiply_latents(
    const Attend& c, Scratch& s, int64_t num_parts, const QueryBlock& block, int64_t count) {
  const Side* sides[] = {&c.k, &c.rope};
  const float* scales[] = {s.k_scales, s.v_scales};
  for (int64_t i = 0; i < num_parts; i++) {
    const PagePart& part = s.parts[i];
    for (int side = 0; side < 2; side++) {
      const Side& stored = *sides[side];
      float* lines = s.latents + part.tile_offset * s.q_stride + (side ? pad(c.k.dim) : 0);
      decode_part(
          stored, part.page, c.table.page_size, block.head, part.slot, part.count, side, lines,
          s.q_stride, s.strip, (char*)s.unpacked);
      if (stored.scales_offset)
        for (int64_t j = 0; j < part.count; j++)
          for (int64_t d = 0; d < stored.dim; d++)
            lines[j * s.q_stride + d] *= scales[side][part.tile_offset + j];
    }
  }
  // A few positions at a time stay in the L1 cache for all rows.
  for (int64_t j = 0; j < count; j += MAX_SUMS) {
    const Segment line{
        (const char*)(s.latents + j * s.q_stride), 4 * s.q_stride, s.q_stride, 0, nullptr, 0};
    const int64_t lines = min(count - j, MAX_SUMS);
    const Rows logits{s.q, s.q_stride, s.logits + j, LOGITS_STRIDE};
    multiply<false>(ReadFloat32{}, &line, 1, lines, block.rows, logits);
  }
}

// Add the products of weights and latents, for N rows and STEP channels.
template <int N>
void add_latents(const Scratch& s, int64_t count, int64_t row, int64_t channel, int64_t stride) {
  Floats sums[N][VECTORS];
  float* out = s.out + row * stride + channel;
  for (int r = 0; r < N; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load<Floats>(out + r * stride + v * LANES);
  for (int64_t j = 0; j < count; j++) {
    const float* x = s.latents + j * s.q_stride + channel;
    for (int v = 0; v < VECTORS; v++) {
      const Floats y = load<Floats>(x + v * LANES);
      for (int r = 0; r < N; r++)
        sums[r][v] = fma(splat(s.logits[(row + r) * LOGITS_STRIDE + j]), y, sums[r][v]);
    }
  }
  for (int r = 0; r < N; r++)
    for (int v = 0; v < VECTORS; v++) store(out + r * stride + v * LANES, sums[r][v]);
}

// Add the products of weights and a tile of latents, which `multiply_latents` has decoded.
void multiply_latent_values(
    const Attend& c, Scratch& s, int64_t rows, int64_t count, bool all_seen) {
  if (!all_seen)
    for (int64_t j = 0; j < count; j++)
      if (!s.seen[j]) std::memset(s.latents + j * s.q_stride, 0, 4 * pad(c.k.dim));
  const int64_t stride = pad(c.v.dim);
  for (int64_t channel = 0; channel < stride; channel += STEP) {
    int64_t row = 0;
    for (; row + MAX_ROWS <= rows; row += MAX_ROWS)
      add_latents<MAX_ROWS>(s, count, row, channel, stride);
    for (; row < rows; row++) add_latents<1>(s, count, row, channel, stride);
  }
}

// Add the bias to the logits of a tile of `count` positions.
void add_bias(
    const Attend& c, Scratch& s, const QueryBlock& block, int64_t tile_begin, int64_t count) {
  const int64_t group_size = c.num_q_heads / c.num_heads, width = get_width(c.bias.kind);
  const int64_t skipped = max(c.start - tile_begin, 0);  // without a bias, and masked later
  if (!c.bias.data) return;
  for (int64_t row = 0; row < block.rows; row++) {
    const int64_t q_head = block.head * group_size + row % group_size;
    const char* bias = c.bias.at(block.sequence, q_head, block.token + row / group_size);
    bias += (tile_begin + skipped - c.start) * width;
    read_values(bias, c.bias.kind, count - skipped, s.strip);
    float* line = s.logits + row * LOGITS_STRIDE;
    for (int64_t j = skipped; j < count; j++) line[j] += s.strip[j - skipped];
  }
}

// Mask the logits of a tile of `count` positions, of which those before `visible_begin` are hidden.
// Set `seen` for positions that are visible to some query, and return whether all are.
bool mask_logits(
    const Attend& c, Scratch& s, const QueryBlock& block, int64_t tile_begin,
    int64_t visible_begin, int64_t count, bool masked) {
  const int64_t group_size = c.num_q_heads / c.num_heads;
  std::memset(s.seen, 0, count);
  for (int64_t row = 0; row < block.rows; row += group_size) {
    const int64_t token = row / group_size, query_position = block.position + token;
    int64_t begin = visible_begin, end = tile_begin + count;
    if (c.window && query_position - c.window >= begin) begin = query_position - c.window + 1;
    if (c.causal) end = min(end, query_position + 1);
    begin -= tile_begin, end -= tile_begin;
    const char* mask = nullptr;
    if (masked) mask = c.mask.at(block.sequence, 0, block.token + token) + tile_begin - c.start;
    for (int64_t j = 0; j < count; j++) {
      const bool visible = j >= begin && j < end && !(mask && !mask[j]);
      s.seen[j] |= visible;
      if (!visible)
        for (int64_t g = 0; g < group_size; g++) s.logits[(row + g) * LOGITS_STRIDE + j] = MASKED;
    }
  }
  return !std::memchr(s.seen, 0, count);
}

// Convert logits to weights relative to the largest logit so far, and update the sums. Weights are
// multiplied by V's dynamic scales.
void update_softmax(const Attend& c, Scratch& s, int64_t rows, int64_t count, const float* scales) {
  const int64_t stride = pad(c.v.dim);
  for (int64_t row = 0; row < rows; row++) {
    float* line = s.logits + row * LOGITS_STRIDE;
    for (int64_t j = count; j < pad(count); j++) line[j] = MASKED;
    // The last page part may begin within a vector, and then reads weights up to here.
    for (int64_t j = pad(count); j < LOGITS_STRIDE; j++) line[j] = 0;
    Floats max = splat(s.largest[row]);
    for (int64_t j = 0; j < count; j += LANES) {
      Floats x = load<Floats>(line + j);
      max = x > max ? x : max;
    }
    float row_max = s.largest[row];
    for (int lane = 0; lane < LANES; lane++) row_max = max[lane] > row_max ? max[lane] : row_max;
    if (row_max > s.largest[row]) {
      if (s.largest[row] > MASKED) {
        const float alpha = exp(splat(s.largest[row] - row_max))[0];
        s.sums[row] *= alpha;
        for (int64_t d = 0; d < stride; d++) s.out[row * stride + d] *= alpha;
      }
      s.largest[row] = row_max;
    }
    // For a row without visible positions, -inf - 0 gives weights of zero, but -inf - -inf is NaN.
    const float base = row_max > MASKED ? row_max : 0;
    Floats total = {};
    for (int64_t j = 0; j < pad(count); j += LANES) {
      Floats weight = exp(load<Floats>(line + j) - base);
      total += weight;
      store(line + j, scales ? weight * load<Floats>(scales + j) : weight);
    }
    s.sums[row] += sum_lanes(total, total, total, total)[0];
  }
}

// Add positions `tile_begin` to `tile_end - 1` to the sums, except those before `visible_begin`.
void attend_tile(
    const Attend& c, Scratch& s, const QueryBlock& block, int64_t tile_begin,
    int64_t visible_begin, int64_t tile_end) {
  const int64_t count = tile_end - tile_begin, page_size = c.table.page_size;
  const int64_t sequence = block.sequence, head = block.head, rows = block.rows;
  int64_t num_parts = 0;
  for (int64_t begin = tile_begin; begin < tile_end; num_parts++) {
    const int64_t slot = begin % page_size, size = min(page_size - slot, tile_end - begin);
    s.parts[num_parts] = {c.table.find_page(sequence, begin), slot, begin - tile_begin, size};
    begin += size;
  }
  const float* k_scales = load_scales(s, num_parts, c.k, head, s.k_scales);
  if (c.latent) {
    load_scales(s, num_parts, c.rope, head, s.v_scales);
    multiply_latents(c, s, num_parts, block, count);
    k_scales = nullptr;  // the scales were applied to decoded values
  } else {
    multiply_keys(c, s, num_parts, block);
  }
  if (k_scales || c.k.center || c.softcap != 0)
    for (int64_t row = 0; row < rows; row++)
      for (int64_t j = 0; j < count; j += LANES) {
        float* logits = s.logits + row * LOGITS_STRIDE + j;
        Floats x = load<Floats>(logits);
        if (k_scales) x *= load<Floats>(k_scales + j);
        if (c.k.center) x += s.center_logits[row];
        if (c.softcap != 0) x = tanh(x / (float)c.softcap) * (float)c.softcap;
        store(logits, x);
      }
  add_bias(c, s, block, tile_begin, count);
  bool all_seen = true;
  bool masked = c.mask.data;
  if (c.bounds && tile_begin >= c.find_bounds(sequence)[1]) masked = false;
  const bool is_later = c.causal && tile_end > block.position + 1;
  if (masked || c.window || tile_begin < visible_begin || is_later) {
    all_seen = mask_logits(c, s, block, tile_begin, visible_begin, count, masked);
    if (!all_seen && !std::memchr(s.seen, 1, count)) return;
  }
  const float* v_scales = nullptr;  // latents were scaled when decoded
  if (!c.latent) v_scales = load_scales(s, num_parts, c.v, head, s.v_scales);
  if (v_scales) {
    for (int64_t j = count; j < pad(count); j++) s.v_scales[j] = 0;
    for (int64_t j = 0; j < count && !all_seen; j++)
      if (!s.seen[j]) s.v_scales[j] = 0;
  }
  update_softmax(c, s, rows, count, v_scales);
  if (c.latent) multiply_latent_values(c, s, rows, count, all_seen);
  else multiply_values(c, s, num_parts, block, tile_end, all_seen);
}

// Add the sums of a span, relative to its largest logit, to the sums of earlier spans: `sums` holds
// the largest logit, the sum of weights, and the weighted sums of V. Spans are added in a fixed
// order, so a result does not depend on threads or other queries.
void add_span(float* sums, float largest, float weight_sum, const float* x, int64_t dim) {
  const float max_logit = largest > sums[0] ? largest : sums[0];
  // Without visible positions the sums are zero. If all visible logits are NaN, they are NaN.
  const float old_factor = sums[0] > MASKED ? std::exp(sums[0] - max_logit) : 1;
  const float new_factor = largest > MASKED ? std::exp(largest - max_logit) : 1;
  sums[0] = max_logit;
  sums[1] = sums[1] * old_factor + weight_sum * new_factor;
  for (int64_t d = 0; d < dim; d++) sums[2 + d] = sums[2 + d] * old_factor + x[d] * new_factor;
}

void clear_sums(float* sums, int64_t dim) {
  sums[0] = MASKED;
  std::memset(sums + 1, 0, 4 * (1 + dim));
}

// Load the queries of a block, scaled for products with codes, and their center logits.
void load_queries(const Attend& c, Scratch& s, const QueryBlock& block) {
  const int64_t sequence = block.sequence, head = block.head, token = block.token;
  const int64_t group_size = c.num_q_heads / c.num_heads;
  const float* center = c.k.find_center(head);
  std::memset(s.q, 0, 4 * c.num_rows * s.q_stride);
  for (int64_t row = 0; row < block.rows; row++) {
    const char* x =
        c.q.at(sequence, head * group_size + row % group_size, token + row / group_size);
    float* q = s.q + row * s.q_stride;
    s.center_logits[row] = load_query(c, x, c.k, head, center, q);
    if (s.k_is_int) s.q_factors[row] = round_row(q, c.k.dim, c.k, s.int_q + row * s.int_stride);
    if (c.latent) {
      x += c.k.dim * get_width(c.q.kind);
      load_query(c, x, c.rope, head, nullptr, q + pad(c.k.dim));
    }
  }
}

// Compute sums of one head and one block of queries. `num_splits` results, each for a span, are
// divided among `num_split_units` units. With one split there is one result for all spans.
void attend_unit(const Attend& c, Scratch& s, int64_t unit) {
  const int64_t per_unit = (c.num_splits + c.num_split_units - 1) / c.num_split_units;
  const int64_t first_split = unit % c.num_split_units * per_unit;
  const int64_t end_split = min(first_split + per_unit, c.num_splits);
  const int64_t size = 2 + c.v.dim, stride = pad(c.v.dim), index = unit / c.num_split_units;
  const int64_t head = index / c.num_blocks % c.num_heads;
  const int64_t sequence = index / c.num_blocks / c.num_heads;
  const int64_t token = index % c.num_blocks * c.block_tokens;
  const int64_t tokens = min(c.num_tokens - token, c.block_tokens);
  const int64_t rows = tokens * (c.num_q_heads / c.num_heads), length = c.table.lengths[sequence];
  const QueryBlock block{sequence, head, token, rows, length - c.num_tokens + token};
  float* results = c.sums + index * c.num_splits * c.num_rows * size;
  for (int64_t i = first_split * c.num_rows; i < end_split * c.num_rows; i++)
    clear_sums(results + i * size, c.v.dim);

  // The visible positions of the splits: from `begin` to before `end`.
  int64_t begin = c.start, end = c.stop;
  end = min(min(end, length), c.table.page_size * c.table.num_columns);
  if (c.causal) end = min(end, block.position + tokens);
  if (c.bounds) begin = max(begin, c.find_bounds(sequence)[0]);
  if (c.window) begin = max(begin, block.position - c.window + 1);
  const int64_t first_span = c.start / c.span;
  if (c.num_splits > 1) {
    begin = max(begin, (first_span + first_split) * c.span);
    end = min(end, (first_span + end_split) * c.span);
  }
  if (begin >= end) return;
  load_queries(c, s, block);
  // Vectors begin at multiples of STEP or 64, and tiles at multiples of their size.
  for (int64_t tile_begin = begin & -(s.v_is_int ? 64 : STEP); tile_begin < end;) {
    std::memset(s.out, 0, 4 * c.num_rows * stride);
    for (int64_t row = 0; row < rows; row++) s.largest[row] = MASKED, s.sums[row] = 0;
    const int64_t span_end = min((tile_begin / c.span + 1) * c.span, end);
    const int64_t position = max(tile_begin, begin);
    while (tile_begin < span_end) {
      const int64_t tile = c.latent ? LATENT_TILE : TILE;
      const int64_t tile_end = min((tile_begin / tile + 1) * tile, span_end);
      attend_tile(c, s, block, tile_begin, begin, tile_end);
      tile_begin = tile_end;
    }
    const int64_t split = c.num_splits > 1 ? position / c.span - first_span : 0;
    float* sums = results + split * c.num_rows * size;
    for (int64_t row = 0; row < rows; row++, sums += size)
      add_span(sums, s.largest[row], s.sums[row], s.out + row * stride, c.v.dim);
  }
}

// Write the result of one query token and head: merge its splits, and apply the sink.
void finish_row(const Attend& c, int64_t sequence, int64_t token, int64_t q_head, float* sums) {
  const int64_t group_size = c.num_q_heads / c.num_heads, head = q_head / group_size, dim = c.v.dim;
  const int64_t unit = (sequence * c.num_heads + head) * c.num_blocks + token / c.block_tokens;
  const int64_t block_row = (token % c.block_tokens) * group_size + q_head % group_size;
  clear_sums(sums, dim);
  for (int64_t i = 0; i < c.num_splits; i++) {
    const float* part = c.sums + ((unit * c.num_splits + i) * c.num_rows + block_row) * (2 + dim);
    add_span(sums, part[0], part[1], part + 2, dim);
  }
  float weight = 1, total = sums[1], *x = sums + 2;
  if (c.sinks) {
    const float sink = c.sinks[q_head], max_logit = sink > sums[0] ? sink : sums[0];
    weight = sums[0] > MASKED ? std::exp(sums[0] - max_logit) : 1;
    total = total * weight + (sink == MASKED ? 0 : std::exp(sink - max_logit));
  }
  const float inverse = weight / (total != 0 ? total : 1);
  const float factor = c.v.kind == CODES ? (float)c.v.factor : 1;
  for (int64_t d = 0; d < dim; d++) {
    x[d] = x[d] * inverse * factor;
    if (c.v.static_scale) x[d] *= c.v.static_scale[head * dim + d];
  }
  if (c.v.rotation) rotate(x, dim, c.v.rotation);
  const int64_t row = (sequence * c.num_tokens + token) * c.num_q_heads + q_head;
  write_values(x, c.out_kind, dim, c.out + row * dim * get_width(c.out_kind));
}

}  // namespace

// ---- functions that Python calls ----------------------------------------------------------------

#define EXPORT extern "C" __attribute__((visibility("default")))

// Return the checksum of the source (build.py) and the sizes of the structs that Python fills.
EXPORT void describe(int64_t* out) {
  out[0] = STAMP, out[1] = sizeof(Write), out[2] = sizeof(Gather), out[3] = sizeof(Attend);
}

EXPORT void set_parallel_for(void* function) { parallel_for = (decltype(parallel_for))function; }

// Store new tokens. Return 0 and store nothing if a token has no page.
EXPORT int write_tokens(const Write* call, int64_t threads) {
  const Write& c = *call;
  if (!has_pages(c)) return 0;
  const int64_t blocks = (c.num_tokens + UNIT_TOKENS - 1) / UNIT_TOKENS;
  for_units(c.batch * c.num_heads * blocks, threads, [&] {
    const int64_t dim = (c.k.dim > c.v.dim ? c.k.dim : c.v.dim) + STEP;
    return [&c, blocks, line = std::vector<float>(2 * dim),
            codes = std::vector<uint8_t>(2 * dim)](int64_t unit) mutable {
      const int64_t begin = unit % blocks * UNIT_TOKENS;
      const int64_t end = min(begin + UNIT_TOKENS, c.num_tokens);
      const int64_t head = unit / blocks % c.num_heads, sequence = unit / blocks / c.num_heads;
      for (int64_t token = begin; token < end; token++)
        for (bool is_value : {false, true})
          write_vector(c, is_value, sequence, head, token, line.data(), codes.data());
    };
  });
  return 1;
}

EXPORT void gather(const Gather* call, int64_t threads) {
  const Gather& c = *call;
  const int64_t blocks = (c.stop - c.start + UNIT_TOKENS - 1) / UNIT_TOKENS;
  for_units(c.batch * c.num_heads * blocks, threads, [&] {
    // Per token: its values, a value of a column, and its codes.
    const int64_t size = (pad(c.side.dim) * 5 / 4 + 1) * UNIT_TOKENS + STEP;
    return [&c, blocks, memory = std::vector<float>(size)](int64_t unit) mutable {
      const int64_t head = unit / blocks % c.num_heads, sequence = unit / blocks / c.num_heads;
      int64_t begin = c.start + unit % blocks * UNIT_TOKENS;
      const int64_t stop = min(begin + UNIT_TOKENS, c.stop);
      while (begin < stop) {
        const int64_t end = min((begin / c.table.page_size + 1) * c.table.page_size, stop);
        gather_part(c, sequence, head, begin, end, memory.data());
        begin = end;
      }
    };
  });
}

EXPORT void attend(const Attend* call, int64_t threads) {
  const Attend& c = *call;
  for_units(c.batch * c.num_heads * c.num_blocks * c.num_split_units, threads, [&] {
    return [&c, scratch = Scratch(c)](int64_t unit) mutable { attend_unit(c, scratch, unit); };
  });
  for_units(c.batch * c.num_tokens, threads, [&] {
    return [&c, line = std::vector<float>(2 + pad(c.v.dim))](int64_t unit) mutable {
      for (int64_t head = 0; head < c.num_q_heads; head++)
        finish_row(c, unit / c.num_tokens, unit % c.num_tokens, head, line.data());
    };
  });
}
