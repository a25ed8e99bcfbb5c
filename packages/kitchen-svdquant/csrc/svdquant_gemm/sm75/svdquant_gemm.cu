// The streaming GEMM (smxx/stream_gemm.cuh) by the 8-bit MMA of sm_75, four to a product. Later GPUs run it too, where forced.
#include "svdquant_gemm/sm75/svdquant_gemm.h"

#include "kitchen/mma/m8n8k16_s8.h"
#include "svdquant_gemm/multiply_bytes.cuh"
#include "svdquant_gemm/smxx/stream_gemm.cuh"

namespace kitchen::svdquant {

void svdquant_gemm_sm75(const StreamOperands& o, int device, cudaStream_t stream) {
  smxx::check_operands(o);
  if (o.M == 0) return;
  const host::DeviceGuard guard(device);
  smxx::launch_tokens<ByBytes<mma::M16N8K32S8Turing>>(o, stream);
}

}  // namespace kitchen::svdquant
