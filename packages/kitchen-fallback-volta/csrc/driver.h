// The CUDA driver, found at run time: nothing is linked, so the module loads on a machine without a driver, and goes with
// every torch. The machine code for the device's chip is loaded into the device's primary context, the one that torch uses,
// once per device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kitchen::volta {

struct Cubin {
  int capability;  // 70: compute capability 7.0
  const char* arch;
  const unsigned char* code;
};

// Compiled into this module, in the order of KITCHEN_ARCHS.
const std::vector<Cubin>& cubins();

struct Launch {
  const char* kernel;
  int64_t grid;
  int block, shared_bytes;
  int device;
  uintptr_t stream;
};

// Launches on `stream` of `device`, whichever device is current. Throws std::runtime_error with the driver's words.
// `params` is the kernel's only argument.
void launch(const Launch& where, const void* params);

}  // namespace kitchen::volta
