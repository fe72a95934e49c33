// Streams, events, memory and random numbers of the emulated device.
#include "emulated.h"

#include <Python.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <set>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace emulated {

using Clock = std::chrono::steady_clock;

// ---- streams --------------------------------------------------------------------------------

void Moment::reach() {
  {
    std::lock_guard lock(mutex_);
    reached_ = true;
    at_ = Clock::now();
  }
  changed_.notify_all();
}
void Moment::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}
bool Moment::reached() {
  std::lock_guard lock(mutex_);
  return reached_;
}
Clock::time_point Moment::at() {
  std::lock_guard lock(mutex_);
  return at_;
}

namespace {
std::atomic<uint64_t> delays_epoch{0}, delays_seed{0};
std::atomic<double> compute_delay_us{0}, lanes_delay_us{0};
}  // namespace

std::atomic<bool> drops_work{false};
void set_dropping(bool drops) { drops_work = drops; }

void set_delays(uint64_t seed, double compute_us, double lanes_us) {
  delays_seed = seed;
  compute_delay_us = compute_us;
  lanes_delay_us = lanes_us;
  ++delays_epoch;
}

Queue::Queue(c10::DeviceIndex device, int64_t id) : device_(device), id_(id) {
  std::thread([this] { run(); }).detach();
}

void Queue::submit(std::function<void()> work, bool delayed) {
  if (drops_work) return;
  {
    std::lock_guard lock(mutex_);
    items_.push_back({std::move(work), delayed});
  }
  changed_.notify_one();
}

MomentPtr Queue::mark() {
  auto moment = std::make_shared<Moment>();
  if (drops_work) {
    moment->reach();
    return moment;
  }
  submit([moment] { moment->reach(); }, /*delayed=*/false);
  return moment;
}

void Queue::wait_for(MomentPtr moment) {
  submit([moment] { moment->wait(); }, /*delayed=*/false);
}

bool Queue::idle() {
  std::lock_guard lock(mutex_);
  return items_.empty() && !busy_;
}

void Queue::linger() {
  const double mean_us = id_ == 0 ? compute_delay_us : lanes_delay_us;
  if (mean_us <= 0) return;
  if (epoch_ != delays_epoch) {
    epoch_ = delays_epoch;
    random_.seed(delays_seed * 1000003 + uint64_t(device_) * 101 + uint64_t(id_));
  }
  // One item in four is late, by four times the mean: a late one is later than others are long.
  if (random_() % 4) return;
  const double us = std::exponential_distribution<>(1 / (4 * mean_us))(random_);
  std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
}

void Queue::run() {
  at::get_num_threads();  // PyTorch's settings for this thread come first
  omp_set_num_threads(1);
  for (;;) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      changed_.wait(lock, [this] { return !items_.empty(); });
      item = std::move(items_.front());
      items_.pop_front();
      busy_ = true;
    }
    if (item.delayed) linger();
    try {
      item.work();
    } catch (const std::exception& error) {
      fail(error.what());
    }
    item.work = nullptr;  // and with it what it held, before the thread waits
  }
}

namespace {
std::mutex streams_mutex;
// Nothing that threads use is destroyed when the process ends: they may run until it has.
auto& streams = *new std::array<std::map<int64_t, Queue*>, kDevices>;
std::atomic<int64_t> handed_out[kDevices];
thread_local c10::DeviceIndex this_device = 0;
thread_local int64_t this_stream[kDevices] = {};

c10::Stream stream_of(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}
Queue& queue_of_stream(const c10::Stream& stream) {
  return queue_of(stream.device_index(), stream.id());
}
}  // namespace

Queue& queue_of(c10::DeviceIndex device, int64_t id) {
  std::lock_guard lock(streams_mutex);
  auto& queue = streams[device][id];
  if (!queue) queue = new Queue(device, id);
  return *queue;
}
std::vector<Queue*> queues_of(c10::DeviceIndex device) {
  std::lock_guard lock(streams_mutex);
  std::vector<Queue*> found;
  for (auto& [id, queue] : streams[device]) found.push_back(queue);
  return found;
}
int64_t current_stream_id(c10::DeviceIndex device) { return this_stream[device]; }
Queue& current_queue(c10::DeviceIndex device) { return queue_of(device, this_stream[device]); }
c10::DeviceIndex current_device() { return this_device; }

// ---- waits of the host ----------------------------------------------------------------------

namespace {
std::mutex waits_mutex;
auto& waits = *new std::map<long, std::map<std::string, int64_t>>;
std::mutex failure_mutex;
auto& failure = *new std::string;

template <class F>
void without_gil(F wait) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return wait();
  PyThreadState* state = PyEval_SaveThread();
  wait();
  PyEval_RestoreThread(state);
}
}  // namespace

void fail(const std::string& what) {
  std::lock_guard lock(failure_mutex);
  if (failure.empty()) failure = what;
}

void wait_on_host(const MomentPtr& moment, const char* why) {
  {
    std::lock_guard lock(waits_mutex);
    ++waits[syscall(SYS_gettid)][why];
  }
  without_gil([&] { moment->wait(); });
  std::string failed;
  {
    std::lock_guard lock(failure_mutex);
    failed.swap(failure);
  }
  TORCH_CHECK(failed.empty(), "emulated device: an operator failed on a stream: ", failed);
}

std::map<long, std::map<std::string, int64_t>> host_waits() {
  std::lock_guard lock(waits_mutex);
  return waits;
}
void forget_host_waits() {
  std::lock_guard lock(waits_mutex);
  waits.clear();
}

// ---- events and the guard -------------------------------------------------------------------

namespace {
struct Event {
  MomentPtr moment;
  c10::DeviceIndex device;
};

// As CUDA: what names no device by itself starts a context on the thread's current one, and a
// refusal fails the thread's next kernel, too.
std::atomic<bool> contexts[kDevices];
thread_local bool refused = false;
}  // namespace

void use_context() { contexts[this_device] = true; }
bool has_context(c10::DeviceIndex device) { return contexts[device]; }
void refuse() { refused = true; }
void launch() {
  const bool before = std::exchange(refused, false);
  TORCH_CHECK(!before, "emulated device error: out of memory (of an earlier call)");
}

namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, this_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "there is no ", device);
    this_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) this_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index(device), this_stream[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const auto at = index(device);
    return stream_of(at, 1 + handed_out[at]++ % kPoolStreams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto at = stream.device_index();
    auto before = stream_of(at, this_stream[at]);
    this_stream[at] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    use_context();
    delete static_cast<Event*>(event);
  }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device,
      const c10::EventFlag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(),
        "an event of one device is recorded in a stream of another");
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {queue_of_stream(stream).mark(), stream.device_index()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto moment = moment_of(event)) queue_of_stream(stream).wait_for(moment);
  }
  bool queryEvent(void* event) const override {
    use_context();
    auto moment = moment_of(event);
    return !moment || moment->reached();
  }
  void synchronizeEvent(void* event) const override {
    use_context();
    if (auto moment = moment_of(event)) wait_on_host(moment, "event");
  }
  bool queryStream(const c10::Stream& stream) const override { return queue_of_stream(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_on_host(queue_of_stream(stream).mark(), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (auto* queue : queues_of(device < 0 ? this_device : device))
      wait_on_host(queue->mark(), "device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer, stream);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    auto from = moment_of(start), to = moment_of(end);
    TORCH_CHECK(from && to && from->reached() && to->reached(), "both events have to be reached");
    return std::chrono::duration<double, std::milli>(to->at() - from->at()).count();
  }

 private:
  static c10::DeviceIndex index(c10::Device device) {
    return device.has_index() ? device.index() : this_device;
  }
  static MomentPtr moment_of(void* event) {
    return event ? static_cast<Event*>(event)->moment : nullptr;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- the device's memory --------------------------------------------------------------------

struct Arena {
  char* host;  // no permissions
  char* streams;
  Arena() {
    const int file = memfd_create("emulated device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kTotalBytes) == 0, "no memory for the device");
    auto map = [&](int rights) {
      void* found = mmap(nullptr, kTotalBytes, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(found != MAP_FAILED, "no address space for the device");
      return static_cast<char*>(found);
    };
    host = map(PROT_NONE);
    streams = map(PROT_READ | PROT_WRITE);
    close(file);
  }
};
Arena& arena(c10::DeviceIndex device) {
  static auto* arenas = new Arena[kDevices];
  return arenas[device];
}
}  // namespace

c10::DeviceIndex device_at(const void* pointer) {
  auto address = static_cast<const char*>(pointer);
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    auto* host = arena(device).host;
    if (address >= host && address < host + kTotalBytes) return device;
  }
  return -1;
}

char* real(const void* pointer) {
  if (!pointer) return nullptr;
  const auto device = device_at(pointer);
  TORCH_CHECK(device >= 0, "an address that is not the device's");
  return arena(device).streams + (static_cast<const char*>(pointer) - arena(device).host);
}

namespace {
// A caching allocator by CUDA's rules (c10/cuda/CUDACachingAllocator.cpp): blocks of 512 bytes, cut
// from segments of 2 MiB (requests up to 1 MiB), 20 MiB (up to 10 MiB) or of their own; a freed
// block serves again, at once, in the stream that it was allocated in.
constexpr size_t kBlock = 512, kMiB = 1 << 20;

struct Block {
  c10::DeviceIndex device;
  int64_t stream;
  size_t start, size, segment;  // the segment it was cut from, by its start
  bool used = false;
  std::set<int64_t> users;  // other streams
};
struct Pending {
  Block* block;
  std::vector<MomentPtr> moments;
};

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

class Memory {
 public:
  Block* allocate(c10::DeviceIndex device, int64_t stream, size_t num_bytes) {
    std::unique_lock lock(mutex_);
    device_ = device;
    finish_pending();
    const size_t size = rounded(num_bytes, kBlock);
    Block* block = find(stream, size);
    if (!block) block = grow(stream, size, num_bytes, lock);
    const bool small = size <= kMiB;
    if (block->size - size >= (small ? kBlock : kMiB + 1)) split(block, size);
    block->used = true;
    stats.allocation[0].increase(1);
    stats.allocated_bytes[0].increase(block->size);
    stats.active_bytes[0].increase(block->size);
    stats.requested_bytes[0].increase(num_bytes);
    return block;
  }

  void free(Block* block) {
    std::unique_lock lock(mutex_);
    stats.allocation[0].decrease(1);
    stats.allocated_bytes[0].decrease(block->size);
    if (block->users.empty()) return give_back(block);
    Pending pending{block, {}};
    for (auto user : block->users) pending.moments.push_back(queue_of(device_, user).mark());
    block->users.clear();
    pending_.push_back(pending);
  }

  void use(Block* block, int64_t stream) {
    std::unique_lock lock(mutex_);
    if (stream != block->stream) block->users.insert(stream);
  }

  void empty_cache() {
    std::unique_lock lock(mutex_);
    release_segments(lock);
  }

  std::mutex& mutex() { return mutex_; }
  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t cap = kTotalBytes - kContextBytes;
  size_t reserved = 0;

 private:
  static bool is_small(size_t size) { return size <= kMiB; }

  Block* find(int64_t stream, size_t size) {
    Block* best = nullptr;
    for (auto& [start, block] : blocks_) {
      const bool fits = !block->used && block->stream == stream && block->size >= size &&
          small_segment_[block->segment] == is_small(size);
      if (fits && (!best || block->size < best->size)) best = block;
    }
    return best;
  }

  Block* grow(int64_t stream, size_t size, size_t asked, std::unique_lock<std::mutex>& lock) {
    const size_t segment = is_small(size) ? 2 * kMiB
        : size < 10 * kMiB                ? 20 * kMiB
                                          : rounded(size, 2 * kMiB);
    auto place = room(segment);
    if (!place) {
      release_segments(lock);
      if (Block* found = find(stream, size)) return found;
      place = room(segment);
    }
    if (!place) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "emulated device out of memory. Tried to allocate ",
          double(asked) / kMiB, " MiB. Of the allocator's limit of ", double(cap) / kMiB,
          " MiB, ", double(reserved) / kMiB, " MiB are reserved and ",
          double(stats.allocated_bytes[0].current) / kMiB, " MiB allocated.");
    }
    reserved += segment;
    stats.reserved_bytes[0].increase(segment);
    stats.segment[0].increase(1);
    segments_[*place] = segment;
    small_segment_[*place] = is_small(size);
    return blocks_[*place] = new Block{device_, stream, *place, segment, *place};
  }

  // Where a segment of this size can lie, within cap and arena.
  std::optional<size_t> room(size_t size) {
    if (reserved + size > cap) return std::nullopt;
    size_t at = 0;
    for (auto& [start, length] : segments_) {
      if (start - at >= size) return at;
      at = start + length;
    }
    if (at + size > kTotalBytes) return std::nullopt;
    return at;
  }

  void split(Block* block, size_t size) {
    const size_t rest = block->start + size;
    blocks_[rest] =
        new Block{device_, block->stream, rest, block->size - size, block->segment};
    block->size = size;
  }

  void give_back(Block* block) {
    // Whoever still reads it, without a wait, finds NaN.
    char* bytes = arena(device_).streams + block->start;
    queue_of(device_, block->stream).submit([bytes, size = block->size] {
      std::memset(bytes, 0xFF, size);
    });
    stats.active_bytes[0].decrease(block->size);
    block->used = false;
    auto here = blocks_.find(block->start);
    auto after = std::next(here);
    if (after != blocks_.end() && joins(block, after->second)) {
      block->size += after->second->size;
      delete after->second;
      blocks_.erase(after);
    }
    if (here != blocks_.begin() && joins(std::prev(here)->second, block)) {
      std::prev(here)->second->size += block->size;
      delete block;
      blocks_.erase(here);
    }
  }

  static bool joins(Block* left, Block* right) {
    return !left->used && !right->used && left->segment == right->segment;
  }

  void finish_pending() {
    std::vector<Pending> left;
    for (auto& pending : pending_) {
      const bool over = std::all_of(
          pending.moments.begin(), pending.moments.end(),
          [](auto& each) { return each->reached(); });
      if (over) give_back(pending.block);
      else left.push_back(pending);
    }
    pending_ = std::move(left);
  }

  // As CUDA: what is cached goes back when a request would fail; all streams are waited for first.
  void release_segments(std::unique_lock<std::mutex>& lock) {
    lock.unlock();  // what runs on a stream may ask for either lock
    without_gil([this] {
      for (auto* queue : queues_of(device_)) queue->mark()->wait();
    });
    lock.lock();
    finish_pending();
    for (auto it = blocks_.begin(); it != blocks_.end();) {
      Block* block = it->second;
      if (!block->used && block->size == segments_[block->segment]) {
        reserved -= block->size;
        stats.reserved_bytes[0].decrease(block->size);
        stats.segment[0].decrease(1);
        segments_.erase(block->segment);
        small_segment_.erase(block->segment);
        delete block;
        it = blocks_.erase(it);
      } else {
        ++it;
      }
    }
  }

  std::mutex mutex_;
  c10::DeviceIndex device_ = 0;
  std::map<size_t, Block*> blocks_;    // by where they start
  std::map<size_t, size_t> segments_;  // by where they start: how long
  std::map<size_t, bool> small_segment_;
  std::vector<Pending> pending_;
};

Memory& memory(c10::DeviceIndex device) {
  static auto* memories = new Memory[kDevices];
  return memories[device];
}

void drop(void* context) {
  if (!context) return;
  auto* block = static_cast<Block*>(context);
  memory(block->device).free(block);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(kType, this_device);
    if (!num_bytes) return {nullptr, nullptr, &drop, device};
    Block* block = memory(this_device).allocate(this_device, this_stream[this_device], num_bytes);
    return {arena(this_device).host + block->start, block, &drop, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "device memory is copied on a stream");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) memory(device).empty_cache();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(memory(device).mutex());
    return memory(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard lock(memory(device).mutex());
    memory(device).stats.allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(memory(device).mutex());
    auto& stats = memory(device).stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes})
      (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(memory(device).mutex());
    return {kTotalBytes - kContextBytes - memory(device).reserved, kTotalBytes};
  }
};
}  // namespace

c10::DeviceAllocator* allocator() {
  static auto* found = new Allocator;
  return found;
}
void record_stream(const c10::DataPtr& pointer, c10::Stream stream) {
  if (auto* block = static_cast<Block*>(pointer.get_context()))
    memory(block->device).use(block, stream.id());
}
void set_cap(c10::DeviceIndex device, size_t num_bytes) { memory(device).cap = num_bytes; }
size_t cap(c10::DeviceIndex device) { return memory(device).cap; }

// ---- pinned host memory ---------------------------------------------------------------------

namespace {
std::mutex pins_mutex;
auto& pins = *new std::map<uintptr_t, size_t>;
auto& in_flight = *new std::multimap<uintptr_t, size_t>;  // host memory that a submitted copy reads or fills

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = num_bytes ? std::aligned_alloc(64, rounded(num_bytes, 64)) : nullptr;
    if (memory) pin(reinterpret_cast<uintptr_t>(memory), num_bytes);
    return {memory, memory, &free_later, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_later; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  // PyTorch's own pinned memory outlives the copies in flight, as its event-keeping allocator's.
  static void free_later(void* memory) {
    if (!memory) return;
    auto owner = std::shared_ptr<void>(memory, [](void* last) {
      unpin(reinterpret_cast<uintptr_t>(last));
      std::free(last);
    });
    for (c10::DeviceIndex device = 0; device < kDevices; ++device)
      for (auto* queue : queues_of(device)) queue->submit([owner] {}, /*delayed=*/false);
  }
};
}  // namespace

void pin(uintptr_t address, size_t num_bytes) {
  use_context();
  std::lock_guard lock(pins_mutex);
  pins[address] = num_bytes;
}
void unpin(uintptr_t address) {
  bool used = false;
  {
    std::lock_guard lock(pins_mutex);
    auto found = pins.find(address);
    if (found == pins.end()) return;
    for (auto& [start, size] : in_flight)
      used |= start < address + found->second && address < start + size;
    pins.erase(found);
  }
  if (!used) return;
  fail("host memory was unpinned under a copy");
  // A device would write to whatever comes to lie there. The error is enough: the copies may end.
  without_gil([] {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device)
      for (auto* queue : queues_of(device)) queue->mark()->wait();
  });
}
void copy_begins(const void* pointer, size_t num_bytes) {
  if (drops_work) return;
  std::lock_guard lock(pins_mutex);
  in_flight.emplace(reinterpret_cast<uintptr_t>(pointer), num_bytes);
}
void copy_ends(const void* pointer, size_t num_bytes) {
  std::lock_guard lock(pins_mutex);
  auto [first, past] = in_flight.equal_range(reinterpret_cast<uintptr_t>(pointer));
  for (auto it = first; it != past; ++it) {
    if (it->second != num_bytes) continue;
    in_flight.erase(it);
    return;
  }
}
bool is_pinned(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard lock(pins_mutex);
  auto next = pins.upper_bound(address);
  return next != pins.begin() && address < std::prev(next)->first + std::prev(next)->second;
}
c10::Allocator* pinned_allocator() {
  static auto* found = new PinnedAllocator;
  return found;
}

// ---- random numbers -------------------------------------------------------------------------

namespace {
// A seed, and how many operators have drawn: like CUDA's, its state is two numbers.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(
            c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    uint64_t numbers[2];
    TORCH_CHECK(state.numel() == sizeof(numbers), "a state of another generator");
    std::memcpy(numbers, state.data(), sizeof(numbers));
    seed_ = numbers[0];
    offset_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const uint64_t numbers[2] = {seed_, offset_};
    auto state = at::detail::empty_cpu({int64_t(sizeof(numbers))}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), numbers, sizeof(numbers));
    return state.getIntrusivePtr();
  }
  static c10::DeviceType device_type() { return kType; }

 private:
  c10::GeneratorImpl* clone_impl() const override {
    auto* made = new DeviceGenerator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};
}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? this_device : device);
}
const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = new std::vector<at::Generator>{new_generator(0), new_generator(1)};
  return (*generators)[device < 0 ? this_device : device];
}
at::Generator for_one_operator(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  at::Generator source = given && given->defined() ? *given : default_generator(device);
  std::lock_guard lock(source.mutex());
  const uint64_t offset = source.get_offset();
  source.set_offset(offset + 4);
  return at::detail::createCPUGenerator(source.current_seed() * 0x9E3779B97F4A7C15 + offset + 1);
}

// ---- what PyTorch asks of the device --------------------------------------------------------

namespace {
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return this_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kType, device});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? this_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    return {kType, device_at(pointer)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    const auto device = storage.device().index();
    c10::DeviceGuard guard(storage.device());
    auto fresh = allocator()->allocate(num_bytes);
    const size_t kept = std::min(storage.nbytes(), num_bytes);
    if (kept) {
      char *to = real(fresh.get()), *from = real(storage.data());
      current_queue(device).submit([=] { std::memcpy(to, from, kept); });
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kType, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
}  // namespace

}  // namespace emulated
