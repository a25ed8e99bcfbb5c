// Copies the records of a resident weight (resident.py) to where their rows are stored. 128 threads have a record, a thread 16 bytes
// of nibbles of a row, and some of the top bits and scales.
#include "unpack_w4a8_weight/unpack_w4a8_weight.h"

#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"

namespace kitchen::w4a8 {
namespace {

constexpr int kRows = 16, kColumns = 256, kThreadsEach = 128, kRecords = 4;
constexpr int kNibbleBytes = kRows * kColumns / 2;

__global__ void __launch_bounds__(kThreadsEach* kRecords) unpack_weight(UnpackParams p) {
  const int64_t steps = p.K / kColumns, record = blockIdx.x * int64_t{kRecords} + threadIdx.x / kThreadsEach;
  if (record >= p.N / kRows * steps) return;
  const int64_t first_row = record / steps * kRows, step = record % steps;
  const int64_t code_bytes = p.K / 8 * p.bits, scale_bytes = p.K / p.group;
  const int top_bytes = p.bits == 6 ? kRows * kColumns / 4 : 0, record_scales = kRows * kColumns / p.group;
  const uint8_t* const from = p.records + record * (kNibbleBytes + top_bytes + record_scales);
  const int thread = static_cast<int>(threadIdx.x) % kThreadsEach;

  const int half = thread / 64, i = thread / 32 % 2, g = thread / 4 % 8, q = thread % 4;
  uint8_t* const to = p.codes + (first_row + 8 * i + g) * code_bytes;
  *reinterpret_cast<uint4*>(to + step * (kColumns / 2) + 64 * half + 16 * q) = *reinterpret_cast<const uint4*>(from + 16 * thread);
  if (p.bits == 6) {  // the 8 bytes of this thread's columns
    const uint8_t* const top = from + kNibbleBytes + 512 * i + 16 * (4 * g + q) + 8 * half;
    *reinterpret_cast<uint2*>(to + p.K / 2 + step * (kColumns / 4) + 32 * half + 8 * q) = *reinterpret_cast<const uint2*>(top);
  }
  const uint8_t* const scales = from + kNibbleBytes + top_bytes;
  for (int at = thread; at < record_scales; at += kThreadsEach) {
    int row = at * p.group / kColumns, group = at - row * (kColumns / p.group);
    if (p.group == 16) {
      const int lane = at / 8;
      row = 8 * (at / 4 % 2) + lane / 4, group = 8 * (at / 2 % 2) + 2 * (lane % 4) + at % 2;
    }
    p.s_rel[(first_row + row) * scale_bytes + step * (kColumns / p.group) + group] = scales[at];
  }
}

}  // namespace

void unpack_w4a8_weight(const UnpackParams& p, int device, cudaStream_t stream) {
  host::DeviceGuard guard(device);
  const int64_t records = p.N / kRows * (p.K / kColumns);
  host::launch("unpack_w4a8_weight", unpack_weight, {(records + kRecords - 1) / kRecords, kThreadsEach * kRecords, 1, 0, stream}, p);
}

}  // namespace kitchen::w4a8
