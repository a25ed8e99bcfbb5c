// The streaming GEMM (smxx/stream_gemm.cuh) by 8-bit MMA, sm_80 and later, or by 4-bit MMA, sm_80 to sm_90.
#include "svdquant_gemm/sm80/svdquant_gemm.h"

#include "kitchen/mma/m16n8k32_s8.h"
#include "kitchen/mma/m16n8k64_s4.h"
#include "svdquant_gemm/multiply_bytes.cuh"
#include "svdquant_gemm/smxx/stream_gemm.cuh"

namespace kitchen::svdquant {
namespace {

// As ByBytes (multiply_bytes.cuh), by 4-bit MMA.
template <bool kUnsigned>
struct ByNibbles {
  static constexpr float factor = 1.0f;
  __device__ __forceinline__ explicit ByNibbles(bool) {}
  __device__ __forceinline__ void multiply(int (&d)[4], uint2 low, uint2 high, uint2 token) const {
    const uint32_t a[4] = {low.x, high.x, low.y, high.y};
    mma::M16N8K64S4<kUnsigned>::multiply(d, a, token.x, token.y);
  }
};

}  // namespace

void svdquant_gemm_sm80(const StreamOperands& o, int device, cudaStream_t stream) {
  smxx::check_operands(o);
  if (o.M == 0) return;
  const host::DeviceGuard guard(device);
  if (!o.int4) return smxx::launch_tokens<ByBytes<mma::M16N8K32S8>>(o, stream);
  o.is_unsigned ? smxx::launch_tokens<ByNibbles<true>>(o, stream) : smxx::launch_tokens<ByNibbles<false>>(o, stream);
}

}  // namespace kitchen::svdquant
