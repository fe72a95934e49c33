// What Python asks of the emulated device, and collectives on it over Gloo.
#include "emulated.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <ATen/Context.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace emulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
constexpr int64_t kCollectives = kPoolStreams + 1;  // a stream that nobody else has

// A collective in a stream of its own: whoever waits for it, lets the current stream wait.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(c10::DeviceIndex device, MomentPtr end, Tensors outputs, std::shared_ptr<std::string> error)
      : device_(device), end_(std::move(end)), outputs_(std::move(outputs)), error_(std::move(error)) {}
  bool isCompleted() override { return end_->reached(); }
  bool isSuccess() const override { return error_->empty(); }
  bool wait(std::chrono::milliseconds) override {
    current_queue(device_).wait_for(end_);
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  std::vector<at::Tensor> result() override { return outputs_; }
  // As NCCL's: complete from the start, and whoever waits lets the current stream wait.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const c10::Device device(kType, device_);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    c10::StreamGuard behind(c10::Stream(c10::Stream::UNSAFE, device, kCollectives));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  c10::DeviceIndex device_;
  MomentPtr end_;
  Tensors outputs_;
  std::shared_ptr<std::string> error_;
};

// Gloo's collectives on device memory. Each runs when the collectives' stream comes to it, behind
// what the caller's stream had been given, as NCCL's do.
class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "emulated"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(tensors, [gloo = gloo_, options](Tensors held) {
      return gloo->broadcast(held, options);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(tensors, [gloo = gloo_, options](Tensors held) {
      return gloo->allreduce(held, options);
    });
  }
  WorkPtr _allgather_base(
      at::Tensor& whole, at::Tensor& own, const c10d::AllgatherOptions& options) override {
    return run({whole, own}, [gloo = gloo_, options](Tensors held) {
      auto mine = held[1].clone();  // it may lie in the whole
      std::vector<Tensors> parts{held[0].chunk(gloo->getSize())};
      Tensors inputs{mine};
      return gloo->allgather(parts, inputs, options);
    });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& own, at::Tensor& whole, const c10d::ReduceScatterOptions& options) override {
    return run({own, whole}, [gloo = gloo_, options](Tensors held) {
      // Gloo's own may add in another order: its sum of all is cut instead, as on a CPU.
      c10d::AllreduceOptions all;
      all.reduceOp = options.reduceOp;
      Tensors sums{held[1].clone()};
      auto work = gloo->allreduce(sums, all);
      work->wait();
      held[0].copy_(sums[0].chunk(gloo->getSize())[gloo->getRank()]);
      return WorkPtr();
    });
  }
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Tensors all = outputs.at(0);
    all.push_back(inputs.at(0));
    return run(all, [gloo = gloo_, options](Tensors held) {
      Tensors mine{held.back().clone()};
      held.pop_back();
      std::vector<Tensors> parts{held};
      return gloo->allgather(parts, mine, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = gloo_->barrier(options);
    work->wait();
    return work;
  }
  // As NCCL's: what runs ends. Gloo has none: a receive that comes too late closes its connections.
  void abort() override {
    Tensors nothing{at::empty({1}, at::kByte)};
    for (int peer = 1; peer < gloo_->getSize(); ++peer) {
      try {
        gloo_->recv(nothing, (gloo_->getRank() + peer) % gloo_->getSize(), 0x7C0FFEE)
            ->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
      }
    }
  }

 private:
  template <class F>
  WorkPtr run(const Tensors& tensors, F collective) {
    const auto device = tensors.at(0).device().index();
    auto& stream = queue_of(device, kCollectives);
    stream.wait_for(current_queue(device).mark());
    Tensors held;
    for (auto& tensor : tensors) held.push_back(alias_on_host(tensor));
    auto error = std::make_shared<std::string>();
    stream.submit([held, collective, error] {
      try {
        if (auto work = collective(held)) work->wait();
      } catch (const std::exception& failed) {
        *error = failed.what();
        fail(failed.what());
      }
    });
    return c10::make_intrusive<StreamWork>(device, stream.mark(), tensors, error);
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
};
}  // namespace
}  // namespace emulated

PYBIND11_MODULE(emulated_device, module) {
  using namespace emulated;
  at::globalContext().lazyInitDevice(kType);
  module.def("set_delays", &set_delays);
  module.def("set_dropping", &set_dropping);
  module.def("set_cap", &set_cap);
  module.def("cap", &cap);
  module.def("pin", &pin);
  module.def("unpin", &unpin);
  module.def("has_context", &has_context);
  module.def("refuse", &refuse);
  module.def("host_waits", &host_waits);
  module.def("forget_host_waits", &forget_host_waits);
  module.def("synchronous_operators", &synchronous_operators);
  module.def("device_count", [] { return kDevices; });
  module.def("current_device", &current_device);
  module.def("default_generator", &default_generator);
  module.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Collectives>(std::move(gloo)));
  });
  module.attr("CONTEXT_BYTES") = kContextBytes;
  module.attr("TOTAL_BYTES") = kTotalBytes;
}
