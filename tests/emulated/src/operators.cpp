// Operators of the emulated device: their sizes are found at once, on tensors without memory, and
// PyTorch's CPU kernel computes them when the current stream comes to it.
#include "emulated.h"

#include <atomic>
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace emulated {

using at::Tensor;
using c10::IValue;

at::Tensor alias_on_host(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type());
  return at::from_blob(
      real(tensor.unsafeGetTensorImpl()->data()), tensor.sizes(), tensor.strides(), options);
}

namespace {
std::mutex synchronous_mutex;
auto& synchronous = *new std::map<std::string, int64_t>;

bool on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

template <class F>
IValue mapped(const IValue& value, const F& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& each : value.toTensorVector()) changed.push_back(change(each));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList().vec()) {
      const bool there = each && each->defined();
      changed.push_back(there ? std::optional<Tensor>(change(*each)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, const F& look) {
  mapped(value, [&](const Tensor& tensor) {
    look(tensor);
    return tensor;
  });
}

void keep_wrapped(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number())
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// For the CPU kernel: device memory by its second mapping; host tensors as they are now.
Tensor operand(const Tensor& tensor) {
  if (on_device(tensor)) return alias_on_host(tensor);
  auto copy = tensor.clone();
  keep_wrapped(tensor, copy);
  return copy;
}

// For PyTorch to tell sizes by: a single number of the host's stays what it is.
Tensor without_memory(const Tensor& tensor) {
  if (!on_device(tensor) && !tensor.dim()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

Tensor like_on_device(const Tensor& tensor, c10::DeviceIndex device) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::Device(kType, device));
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// What a library of matrix products keeps in the allocator for each of its handles (one a thread)
// and streams, from its first product on.
constexpr int64_t kWorkspaceBytes = 1 << 20;
const auto& kProducts = *new std::set<std::string>{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};

struct Handle {
  static inline std::mutex mutex;
  static inline auto& spare = *new std::vector<int64_t>;
  static inline int64_t count = 0;
  int64_t number;
  Handle() {
    std::lock_guard lock(mutex);
    if (spare.empty()) {
      number = count++;
    } else {
      number = spare.back();
      spare.pop_back();
    }
  }
  ~Handle() {
    std::lock_guard lock(mutex);
    spare.push_back(number);
  }
};

void need_workspace(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto* held = new std::map<std::tuple<int64_t, int64_t, int64_t>, c10::DataPtr>;
  thread_local Handle handle;
  const auto key = std::make_tuple(handle.number, device, current_stream_id(device));
  std::lock_guard lock(mutex);
  if (held->count(key)) return;
  c10::DeviceGuard guard(c10::Device(kType, device));
  held->emplace(key, allocator()->allocate(kWorkspaceBytes));
}

// Operators whose statistics a CPU kernel has in another dtype than other devices' kernels.
const auto& kNorms = *new std::set<std::string>{"aten::native_layer_norm", "aten::native_group_norm"};

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::vector<IValue> arguments;
  c10::DeviceIndex device;
};

// The input's dtype, or float32 where a weight of float32 meets an input of less.
Tensor statistic(const Call& call, const Tensor& meta) {
  auto dtype = call.arguments[0].toTensor().scalar_type();
  for (auto& value : call.arguments) {
    each_tensor(value, [&](const Tensor& operand) {
      if (operand.scalar_type() == at::kFloat) dtype = at::kFloat;
    });
  }
  return meta.to(dtype);
}

// As CUDA's kernels read a single number of the device's beside elements: in their dtype.
Tensor as_read(const Tensor& factor, const Tensor& elements) {
  const bool single = on_device(factor) && !factor.dim() && elements.dim();
  return single && elements.is_floating_point() ? factor.to(elements.scalar_type()) : factor;
}

// Which argument an output is, if it is one that the operator writes to.
const IValue* written(const Call& call, size_t output) {
  const auto* alias = call.schema.returns()[output].alias_info();
  if (!alias) return nullptr;
  TORCH_CHECK(alias->isWrite(), call.schema.name(), " makes a view, which is not emulated");
  for (size_t n = 0; n < call.arguments.size(); ++n) {
    const auto* own = call.schema.arguments()[n].alias_info();
    if (own && *own == *alias) return &call.arguments[n];
  }
  return nullptr;
}

bool only_tensors(const c10::FunctionSchema& schema) {
  for (auto& output : schema.returns()) {
    auto kind = output.type()->kind();
    const bool list = kind == c10::TypeKind::ListType &&
        output.type()->expectRef<c10::ListType>().getElementType()->kind() ==
            c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !list) return false;
  }
  return true;
}

// The call's outputs on tensors without memory; nothing if PyTorch cannot tell their sizes.
std::optional<std::vector<IValue>> sized(const Call& call) {
  if (!only_tensors(call.schema)) return std::nullopt;
  std::vector<IValue> stack;
  for (size_t n = 0; n < call.arguments.size(); ++n) {
    const auto& value = call.arguments[n];
    if (value.isDevice()) stack.emplace_back(c10::Device(c10::kMeta));
    else if (value.isGenerator()) stack.emplace_back();
    else stack.push_back(mapped(value, without_memory));
  }
  try {
    call.op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return stack;
}

std::vector<IValue> for_the_kernel(const Call& call) {
  std::vector<IValue> stack;
  for (size_t n = 0; n < call.arguments.size(); ++n) {
    const auto& value = call.arguments[n];
    if (value.isDevice()) {
      stack.emplace_back(c10::Device(c10::kCPU));
    } else if (call.schema.arguments()[n].name() == "generator") {
      auto given = value.isNone() ? std::nullopt : std::optional(value.toGenerator());
      stack.emplace_back(for_one_operator(given, call.device));
    } else {
      stack.push_back(mapped(value, operand));
    }
  }
  return stack;
}

void run_now(const Call& call, std::vector<IValue> stack, std::vector<IValue>& outputs) {
  {
    std::lock_guard lock(synchronous_mutex);
    ++synchronous[call.schema.name()];
  }
  wait_on_host(current_queue(call.device).mark(), call.schema.name().c_str());
  call.op.callBoxed(&stack);
  for (size_t n = 0; n < call.schema.returns().size(); ++n) {
    if (const auto* same = written(call, n)) {
      outputs.push_back(*same);
      continue;
    }
    outputs.push_back(mapped(stack[n], [&](const Tensor& computed) {
      auto made = like_on_device(computed, call.device);
      alias_on_host(made).copy_(computed);
      return made;
    }));
  }
}

void run_later(
    const Call& call, std::vector<IValue> stack, const std::vector<IValue>& sizes,
    std::vector<IValue>& outputs) {
  launch();
  std::vector<std::pair<size_t, IValue>> fill;  // which result goes where
  for (size_t n = 0; n < call.schema.returns().size(); ++n) {
    if (const auto* same = written(call, n)) {
      outputs.push_back(*same);
      continue;
    }
    outputs.push_back(mapped(sizes[n], [&](const Tensor& meta) {
      const bool other = n && kNorms.count(call.schema.name());
      return like_on_device(other ? statistic(call, meta) : meta, call.device);
    }));
    fill.emplace_back(n, mapped(outputs.back(), alias_on_host));
  }
  // The operands are addresses alone, as a kernel's are: nothing here keeps device memory.
  current_queue(call.device).submit([op = call.op, stack, fill]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    op.callBoxed(&stack);
    for (auto& [n, place] : fill) {
      std::vector<Tensor> into, from;
      each_tensor(place, [&](const Tensor& tensor) { into.push_back(tensor); });
      each_tensor(stack[n], [&](const Tensor& tensor) { from.push_back(tensor); });
      for (size_t k = 0; k < into.size(); ++k) {
        // The CPU's batch norm has no statistics to give where it takes the running ones.
        if (from[k].numel()) into[k].copy_(from[k]);
      }
    }
  });
}

// Out variants may find outputs of another size.
void resize_outputs(const Call& call, const std::vector<IValue>& before) {
  for (size_t n = 0; n < call.arguments.size(); ++n) {
    const auto* alias = call.schema.arguments()[n].alias_info();
    if (!alias || !alias->isWrite() || !call.arguments[n].isTensor()) continue;
    const auto& own = call.arguments[n].toTensor();
    const auto& wanted = before[n].toTensor();
    if (own.defined() && own.sizes() != wanted.sizes()) at::native::resize_(own, wanted.sizes());
  }
}

bool makes_nothing(const Call& call) {
  for (size_t n = 0; n < call.schema.returns().size(); ++n)
    if (!call.schema.returns()[n].alias_info()) return false;
  return true;
}

bool is_out_variant(const c10::FunctionSchema& schema) {
  for (auto& argument : schema.arguments())
    if (argument.is_out()) return true;
  return false;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Call call{op, schema, {stack->end() - count, stack->end()}, -1};
  for (auto& value : call.arguments) {
    if (call.device < 0 && value.isDevice()) {
      auto given = value.toDevice();
      if (given.type() == kType) call.device = given.has_index() ? given.index() : current_device();
    }
    each_tensor(value, [&](const Tensor& tensor) {
      if (!on_device(tensor)) return;
      TORCH_CHECK(
          call.device < 0 || call.device == tensor.device().index() || tensor.dim() == 0,
          schema.name(), ": tensors are on different devices");
      if (call.device < 0) call.device = tensor.device().index();
    });
  }
  if (call.device < 0) call.device = current_device();
  c10::DeviceGuard guard(c10::Device(kType, call.device));
  at::AutoDispatchBelowADInplaceOrView below;
  if (schema.name() == "aten::mul")
    call.arguments[1] = as_read(call.arguments[1].toTensor(), call.arguments[0].toTensor());
  if (kProducts.count(schema.name())) need_workspace(call.device);

  std::vector<IValue> outputs;
  if (is_out_variant(schema)) {
    // Sizes are those that the out tensors have after the call without memory.
    std::vector<IValue> metas;
    for (auto& value : call.arguments)
      metas.push_back(value.isDevice() ? IValue(c10::Device(c10::kMeta)) : mapped(value, without_memory));
    auto run = metas;
    bool known = true;
    try {
      op.callBoxed(&run);
    } catch (const std::exception&) {
      known = false;
    }
    if (known) resize_outputs(call, metas);
    if (known) run_later(call, for_the_kernel(call), {}, outputs);
    else run_now(call, for_the_kernel(call), outputs);
  } else if (makes_nothing(call)) {
    run_later(call, for_the_kernel(call), {}, outputs);
  } else if (auto sizes = sized(call)) {
    run_later(call, for_the_kernel(call), *sizes, outputs);
  } else {
    run_now(call, for_the_kernel(call), outputs);
  }
  torch::jit::drop(*stack, count);
  for (auto& output : outputs) stack->push_back(output);
}

// ---- operators that need no kernel ------------------------------------------------------------

c10::Device device_or_current(std::optional<at::Device> device) {
  const bool given = device && device->has_index();
  return given ? *device : c10::Device(kType, current_device());
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// As cudaMemcpyAsync: an address is copied from or to when the stream comes to it, whoever holds it.
Tensor by_address(const Tensor& host) {
  auto* memory = const_cast<void*>(host.const_data_ptr());
  return at::from_blob(memory, host.sizes(), host.strides(), host.options().pinned_memory(false));
}

void copy_later(
    Queue& queue, const Tensor& from, const Tensor& to, const Tensor& host = Tensor()) {
  const void* memory = host.defined() ? host.const_data_ptr() : nullptr;
  const size_t size = host.defined() ? host.nbytes() : 0;
  if (memory) copy_begins(memory, size);
  queue.submit([from, to, memory, size] {
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    to.copy_(from);
    if (memory) copy_ends(memory, size);
  });
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!source.numel()) return target;
  if (on_device(source) && on_device(target)) {
    auto& queue = current_queue(source.device().index());
    const bool across = source.device() != target.device();
    auto& other = current_queue(target.device().index());
    if (across) queue.wait_for(other.mark());
    copy_later(queue, alias_on_host(source), alias_on_host(target));
    if (across) other.wait_for(queue.mark());
    return target;
  }
  const bool down = on_device(source);
  auto& queue = current_queue((down ? source : target).device().index());
  const Tensor& host = down ? target : source;
  const bool direct = is_pinned(host.const_data_ptr());
  if (down) {
    copy_later(queue, alias_on_host(source), by_address(target), target);
  } else {
    // Pageable memory is read into the driver's own before the call returns.
    if (direct) copy_later(queue, by_address(source), alias_on_host(target), source);
    else copy_later(queue, source.clone(), alias_on_host(target));
  }
  if (!non_blocking) wait_on_host(queue.mark(), "blocking copy");
  else if (down && !direct) wait_on_host(queue.mark(), "copy to pageable memory");
  return target;
}

at::Scalar local_scalar(const Tensor& tensor) {
  wait_on_host(current_queue(tensor.device().index()).mark(), "item");
  return alias_on_host(tensor).item();
}

Tensor& set_storage(
    Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  const int64_t count = storage.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, storage, 0, {count}, {1});
}

const Tensor& resize(
    const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

// PyTorch takes the fused kernel on this device; its CPU form draws from the host's generator.
std::tuple<Tensor, Tensor> native_dropout(
    const Tensor& input, double probability, std::optional<bool> train) {
  if (!train.value_or(true) || probability == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const double kept = 1 - probability;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0.0 : 1 / kept), mask};
}

// As CUDA's, which adds up in another order than the norm of a single tensor.
std::vector<Tensor> foreach_norm(
    at::TensorList tensors, const at::Scalar& order, std::optional<at::ScalarType> dtype) {
  std::vector<Tensor> norms;
  for (const auto& tensor : tensors)
    norms.push_back(at::linalg_vector_norm(tensor, order, std::nullopt, false, at::kDouble)
                        .to(dtype.value_or(tensor.scalar_type())));
  return norms;
}

// PyTorch hands convolutions of unknown devices on, in the terms of its own operators.
template <class... Arguments>
torch::jit::Stack called(const char* name, Arguments&&... arguments) {
  auto stack = torch::jit::Stack();
  torch::jit::push(stack, std::forward<Arguments>(arguments)...);
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
  return stack;
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups) {
  return called("aten::convolution", input, weight, bias, stride, padding, dilation, transposed,
                output_padding, groups)[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  auto bias = c10::IValue();
  if (wanted[2]) bias = std::vector<int64_t>{gradient.size(1)};
  c10::List<bool> mask({wanted[0], wanted[1], wanted[2]});
  auto found = called("aten::convolution_backward", gradient, input, weight, bias, stride, padding,
                      dilation, transposed, output_padding, groups, mask);
  auto tensor = [&](int n) { return found[n].isNone() ? Tensor() : found[n].toTensor(); };
  return {tensor(0), tensor(1), tensor(2)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("resize_", &resize);
  library.impl("native_dropout", &native_dropout);
  library.impl("_foreach_norm.Scalar", &foreach_norm);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  // Not as PyTorch would compose them, whose backward is not the CPU kernel's.
  for (auto* norm : {"native_layer_norm", "native_group_norm"})
    library.impl(norm, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // One kernel, as on CUDA. PyTorch would add to one tensor after the other.
  library.impl("_foreach_add_.Scalar", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// As on CUDA (ATen/autocast_mode.h), of what the models of the tests run.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(rsqrt, fp32)
  KERNEL_PRIVATEUSEONE(pow, Tensor_Scalar, fp32)
}
}  // namespace

std::map<std::string, int64_t> synchronous_operators() {
  std::lock_guard lock(synchronous_mutex);
  return synchronous;
}

}  // namespace emulated
