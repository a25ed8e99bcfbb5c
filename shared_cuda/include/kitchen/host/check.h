// Errors of host code: exceptions that pybind11 turns into RuntimeError with the same text.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace kitchen::host {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

// Bugs of the calling Python function, which checks arguments first: the message says what it broke.
inline void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

}  // namespace kitchen::host
