// An accelerator that a CPU emulates: what its parts know of each other.
//
// A device is an arena of memory that the host cannot touch and streams that are threads. The host
// has addresses in a mapping without permissions; what runs on a stream finds the same bytes in a
// second mapping (`real`). So a host that reads before it has waited crashes, and a stream that
// does so computes with bytes that are not there yet, or were poisoned when they were freed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace emulated {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kPoolStreams = 32;  // per device, handed out in turns, as CUDA does
constexpr size_t kTotalBytes = size_t(4) << 30;    // of a device's memory
constexpr size_t kContextBytes = size_t(48) << 20;  // of it, what a process takes besides tensors

// ---- time -----------------------------------------------------------------------------------

// What an event was recorded as: a place in a stream, and when the stream came there.
class Moment {
 public:
  void reach();
  void wait();
  bool reached();
  std::chrono::steady_clock::time_point at();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point at_;
};
using MomentPtr = std::shared_ptr<Moment>;

// A stream: a thread that does one thing after the other.
class Queue {
 public:
  Queue(c10::DeviceIndex device, int64_t id);
  // `delayed`: real work, before which the stream may linger.
  void submit(std::function<void()> work, bool delayed = true);
  MomentPtr mark();
  void wait_for(MomentPtr moment);
  bool idle();

 private:
  void run();
  void linger();
  struct Item {
    std::function<void()> work;
    bool delayed;
  };
  const c10::DeviceIndex device_;
  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool busy_ = false;
  uint64_t epoch_ = 0;
  std::mt19937_64 random_;
};

Queue& queue_of(c10::DeviceIndex device, int64_t id);
Queue& current_queue(c10::DeviceIndex device);
int64_t current_stream_id(c10::DeviceIndex device);
c10::DeviceIndex current_device();
std::vector<Queue*> queues_of(c10::DeviceIndex device);

// Real work waits before it runs, now and then: in the default stream `compute_us` in the mean, in
// the others `lanes_us`. The same seed gives the same delays.
void set_delays(uint64_t seed, double compute_us, double lanes_us);
// Streams do nothing with what they are given: only the host's threads take time.
void set_dropping(bool drops);

// Blocks the calling thread, with Python's lock given up. Raises what failed on a stream.
void wait_on_host(const MomentPtr& moment, const char* why);
void fail(const std::string& what);
std::map<long, std::map<std::string, int64_t>> host_waits();  // by thread id, by reason
void forget_host_waits();

// ---- memory ---------------------------------------------------------------------------------

char* real(const void* pointer);
c10::DeviceIndex device_at(const void* pointer);  // -1: none
c10::DeviceAllocator* allocator();
void record_stream(const c10::DataPtr& pointer, c10::Stream stream);
void use_context();  // on the calling thread's current device
bool has_context(c10::DeviceIndex device);
void refuse();  // what the calling thread asks of a device next
void launch();  // before a kernel: raises where something was refused
void set_cap(c10::DeviceIndex device, size_t num_bytes);
size_t cap(c10::DeviceIndex device);
void pin(uintptr_t address, size_t num_bytes);
void unpin(uintptr_t address);
bool is_pinned(const void* pointer);
// Of copies by address: memory that is unpinned in between is an error.
void copy_begins(const void* pointer, size_t num_bytes);
void copy_ends(const void* pointer, size_t num_bytes);
c10::Allocator* pinned_allocator();

// ---- random numbers -------------------------------------------------------------------------

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
// A CPU generator for one operator, whose numbers follow from the device generator's state alone.
at::Generator for_one_operator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

// ---- operators ------------------------------------------------------------------------------

at::Tensor alias_on_host(const at::Tensor& tensor);  // for what runs on a stream
std::map<std::string, int64_t> synchronous_operators();

}  // namespace emulated
