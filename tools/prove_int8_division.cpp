// Proves on a CPU that the divisions of shared_cuda/include/kitchen/quant/int8_codes.h give the codes of IEEE division, and those
// by 7 and 15 of kitchen-svdquant's group_codes.cuh its scales.
//
//   g++ -O3 -march=native -ffp-contract=off -fopenmp tools/prove_int8_division.cpp -o /tmp/prove && /tmp/prove
//
// 1. Division by 127, 15 and 7 for every non-negative finite fp32 number; by 127 after the quotient's floor of 1e-30, by 15 and 7
//    from the dividend's floor of 1e-10 on.
// 2. quotient for every mantissa of the scale, every tie k + 0.5 (k = 0..127) and the 5 dividends nearest to it. Away from a
//    tie by more than that, the residual step is off by under one ulp and cannot move the rounded code. Exponents only shift
//    both sides: from the floor 1e-30 up to FLT_MAX / 127, product, residual and quotient stay clear of rounding by underflow
//    (checked at both ends, besides an exponent in the middle).
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

static float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

static float markstein(float x, float divisor, float reciprocal) {
  const float guess = x * reciprocal;
  return std::fma(std::fma(-guess, divisor, x), reciprocal, guess);
}

// Of all x from `smallest` on, quotients below `floor` counting as the floor.
static long wrong_quotients(float divisor, float smallest, float floor) {
  long wrong = 0;
#pragma omp parallel for reduction(+ : wrong)
  for (uint32_t bits = as_bits(smallest); bits < 0x7f800000u; ++bits) {
    const float x = as_float(bits);
    const float ieee = x / divisor, ours = markstein(x, divisor, 1.0f / divisor);
    wrong += (ieee > floor ? ieee : floor) != (ours > floor ? ours : floor);
  }
  std::printf("division by %g: %ld wrong of %u\n", divisor, wrong, 0x7f800000u - as_bits(smallest));
  return wrong;
}

int main() {
  const long wrong =
      wrong_quotients(127.0f, 0.0f, 1e-30f) + wrong_quotients(15.0f, 1e-10f, 0.0f) + wrong_quotients(7.0f, 1e-10f, 0.0f);

  long wrong_codes = 0, checked = 0;
  const uint32_t exponents[] = {as_bits(1e-30f) >> 23, 127, as_bits(2.6e36f) >> 23};
  for (uint32_t exponent : exponents) {
#pragma omp parallel for reduction(+ : wrong_codes, checked)
    for (uint32_t mantissa = 0; mantissa < (1u << 23); ++mantissa) {
      const float scale = as_float(exponent << 23 | mantissa);
      if (scale < 1e-30f || scale > 3.4028235e38f / 127.0f) continue;
      const float reciprocal = 1.0f / scale;
      for (int k = 0; k < 127; ++k) {
        const uint32_t near_tie = as_bits((k + 0.5f) * scale);
        for (int step = -2; step <= 2; ++step) {
          const float x = as_float(near_tie + step);
          const float ieee = x / scale, ours = markstein(x, scale, reciprocal);
          wrong_codes += std::nearbyint(ieee) != std::nearbyint(ours);
          ++checked;
        }
      }
    }
  }
  std::printf("quotient: %ld wrong codes of %ld\n", wrong_codes, checked);
  return wrong || wrong_codes;
}
