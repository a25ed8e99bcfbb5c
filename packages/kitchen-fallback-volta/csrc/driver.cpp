#include "driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>

namespace kitchen::volta {

namespace {

// Of cuda.h, which need not be there when this is compiled. Names and values are those of the driver API's binary
// interface.
using Status = int;
using Device = int;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
constexpr int kMaxDynamicShared = 8;                         // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

void* find_symbol(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string("no NVIDIA driver: ") + dlerror());
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr) throw std::runtime_error(std::string("the NVIDIA driver has no ") + name);
  return symbol;
}

template <class F>
F find(const char* name) {
  return reinterpret_cast<F>(find_symbol(name));
}

struct Driver {
  Status (*error_name)(Status, const char**) = find<decltype(error_name)>("cuGetErrorName");
  Status (*init)(unsigned) = find<decltype(init)>("cuInit");
  Status (*device_get)(Device*, int) = find<decltype(device_get)>("cuDeviceGet");
  Status (*device_attribute)(int*, int, Device) = find<decltype(device_attribute)>("cuDeviceGetAttribute");
  Status (*context_retain)(Context*, Device) = find<decltype(context_retain)>("cuDevicePrimaryCtxRetain");
  Status (*context_get)(Context*) = find<decltype(context_get)>("cuCtxGetCurrent");
  Status (*context_push)(Context) = find<decltype(context_push)>("cuCtxPushCurrent_v2");
  Status (*context_pop)(Context*) = find<decltype(context_pop)>("cuCtxPopCurrent_v2");
  Status (*module_load)(Module*, const void*) = find<decltype(module_load)>("cuModuleLoadData");
  Status (*module_function)(Function*, Module, const char*) = find<decltype(module_function)>("cuModuleGetFunction");
  Status (*function_attribute)(Function, int, int) = find<decltype(function_attribute)>("cuFuncSetAttribute");
  Status (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                   void**) = find<decltype(launch)>("cuLaunchKernel");

  void check(Status status, const std::string& what) const {
    if (status == 0) return;
    const char* name = nullptr;
    if (error_name(status, &name) != 0 || name == nullptr) name = "an unknown error";
    throw std::runtime_error(what + ": " + name + " (" + std::to_string(status) + ")");
  }
};

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

// Makes a context current for a scope, unless it is.
class ContextGuard {
 public:
  explicit ContextGuard(Context context) {
    Context current = nullptr;
    driver().check(driver().context_get(&current), "cuCtxGetCurrent");
    pushed_ = current != context;
    if (pushed_) driver().check(driver().context_push(context), "cuCtxPushCurrent");
  }
  ~ContextGuard() {
    Context popped;
    if (pushed_) driver().context_pop(&popped);
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_;
};

// The kernels of one device; made once and kept for the life of the process, as its primary context is.
struct Kernels {
  Context context = nullptr;
  Module module = nullptr;
  std::map<std::string, Function> functions;
  std::map<std::string, int> shared_bytes;  // asked for so far
};

void load(Kernels& kernels, int device) {
  const Driver& d = driver();
  d.check(d.init(0), "cuInit");
  Device handle = 0;
  d.check(d.device_get(&handle, device), "cuDeviceGet");
  int major = 0, minor = 0;
  d.check(d.device_attribute(&major, kCapabilityMajor, handle), "cuDeviceGetAttribute");
  d.check(d.device_attribute(&minor, kCapabilityMinor, handle), "cuDeviceGetAttribute");
  const unsigned char* code = nullptr;
  for (const Cubin& cubin : cubins()) {
    if (cubin.capability == 10 * major + minor) code = cubin.code;
  }
  if (code == nullptr) {
    throw std::runtime_error("kitchen-fallback-volta has no machine code for compute capability " + std::to_string(major) +
                             "." + std::to_string(minor));
  }
  d.check(d.context_retain(&kernels.context, handle), "cuDevicePrimaryCtxRetain");
  ContextGuard guard(kernels.context);
  d.check(d.module_load(&kernels.module, code), "cuModuleLoadData");
}

Function find_function(Kernels& kernels, const Launch& where) {
  const Driver& d = driver();
  Function& function = kernels.functions[where.kernel];
  if (function == nullptr) d.check(d.module_function(&function, kernels.module, where.kernel), where.kernel);
  int& asked = kernels.shared_bytes[where.kernel];
  if (where.shared_bytes > 48 * 1024 && where.shared_bytes > asked) {  // more than 48 KB must be asked for
    d.check(d.function_attribute(function, kMaxDynamicShared, where.shared_bytes), where.kernel);
    asked = where.shared_bytes;
  }
  return function;
}

}  // namespace

void launch(const Launch& where, const void* params) {
  static std::mutex mutex;
  static std::map<int, Kernels> devices;
  Kernels* kernels;
  Function function;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    kernels = &devices[where.device];  // a map's elements stay where they are
    if (kernels->module == nullptr) load(*kernels, where.device);
    ContextGuard guard(kernels->context);
    function = find_function(*kernels, where);
  }
  ContextGuard guard(kernels->context);
  void* arguments[] = {const_cast<void*>(params)};
  const Driver& d = driver();
  d.check(d.launch(function, static_cast<unsigned>(where.grid), 1, 1, static_cast<unsigned>(where.block), 1, 1,
                   static_cast<unsigned>(where.shared_bytes), reinterpret_cast<void*>(where.stream), arguments, nullptr),
          where.kernel);
}

}  // namespace kitchen::volta
