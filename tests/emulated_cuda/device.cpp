// A CUDA device made of host memory, for a CPU build of torch.
//
// Storages say that they are on CUDA and their bytes are host memory; a boxed fallback runs every operator by its CPU kernel on aliases of
// its arguments, so results are real numbers. What a device would do besides is kept as a model of it: current device and stream of every
// thread, happens-before between streams as vector clocks, what the host waits for, what a graph captures, what a caching allocator holds.
//
// Errors are raised for operands on several devices, for two accesses of the same bytes on two streams that nothing orders, for memory that
// is freed while another stream may still read it, and for whatever a capturing stream does not permit. A copy to pinned memory that the host
// has not waited for leaves garbage there until it does.
//
// Shapes only (ec_shapes_only): operators make tensors of the right sizes and compute nothing (their meta kernels run), and memory is
// address space that is never touched. So a rank of any size runs in any process, for what it launches.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

extern "C" {  // of the interpreter, whose headers may be missing
int Py_IsInitialized();
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Fetch(void**, void**, void**);
void PyErr_Restore(void*, void*, void*);
}

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Stream;

namespace {

const Device HOST(DeviceType::CPU);
constexpr int MAX_DEVICES = 16;

std::recursive_mutex state_mutex;

// Python may be called under the lock, and a tensor may die in a thread that holds the interpreter: such a one lets the interpreter go
// as long as it waits.
struct Lock {
  Lock() { lock(); }
  ~Lock() { if (held) unlock(); }
  Lock(const Lock&) = delete;
  void lock() {
    const bool python = Py_IsInitialized() && PyGILState_Check();
    while (!(python ? state_mutex.try_lock() : (state_mutex.lock(), true))) {
      void* state = PyEval_SaveThread();
      usleep(100);
      PyEval_RestoreThread(state);
    }
    held = true;
  }
  void unlock() { state_mutex.unlock(); held = false; }
  bool held = false;
};
int num_devices = 1;
pid_t hidden_in = 0;  // the process that forks ranks has no device, so that its autograd engine starts no threads
// as with a real device, CUDA_VISIBLE_DEVICES is read when devices are counted for the first time
int count_devices() {
  static const bool visible = [] { const char* given = std::getenv("CUDA_VISIBLE_DEVICES"); return !given || *given; }();
  return visible && hidden_in != getpid() ? num_devices : 0;
}
thread_local DeviceIndex current_device = 0;
thread_local int64_t current_streams[MAX_DEVICES] = {};
bool shapes_only = false;

// ---------------------------------------------------------------- what is reported to the host
enum Kind { LAUNCH = 0, WAIT = 1, ALLOCATE = 2, FREE = 3 };
using Callback = int64_t (*)(int kind, const char* what, int64_t bytes);  // returns the number of the source line
Callback on_event = nullptr;
using Recorder = void (*)(const char* operation);  // name|role,dtype,sizes,bytes|... of an operator that has run
Recorder recorder = nullptr;
int64_t launches = 0, waits = 0;
int wait_mode = 0;  // torch.cuda.set_sync_debug_mode: 0 ignore, 1 warn, 2 error
std::map<std::string, int64_t> op_counts;

// a tensor may die while an exception is on its way through Python: that one waits here
int64_t report(int kind, const std::string& what, int64_t bytes) {
  if (!on_event || !Py_IsInitialized()) return -1;
  int gil = PyGILState_Ensure();
  void *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  int64_t line = on_event(kind, what.c_str(), bytes);
  PyErr_Restore(type, value, trace);
  PyGILState_Release(gil);
  return line;
}

// ---------------------------------------------------------------- streams
using Clock = std::vector<uint64_t>;  // by stream, in the order of their creation
std::map<std::pair<DeviceIndex, int64_t>, int> stream_index;
std::vector<Clock> clocks;
Clock host_clock;
int64_t next_stream = 1, next_event = 1;
std::unordered_map<int64_t, Clock> events;  // what was launched before an event was recorded
bool check_races = false;

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}
uint64_t at_index(const Clock& clock, int index) { return index < (int)clock.size() ? clock[index] : 0; }
int index_of(DeviceIndex device, int64_t stream) {
  auto found = stream_index.find({device, stream});
  if (found != stream_index.end()) return found->second;
  clocks.emplace_back();
  return stream_index[{device, stream}] = (int)clocks.size() - 1;
}
int current_index() { return index_of(current_device, current_streams[current_device]); }
std::string stream_name(int index) {
  for (auto& [key, number] : stream_index)
    if (number == index) return key.second ? "stream " + std::to_string(key.second) : "the default stream";
  return "?";
}

// ---------------------------------------------------------------- pinned memory and copies in flight
std::map<const char*, size_t> pinned;
struct PendingCopy {  // a copy to pinned memory that the host has not waited for
  char* to;
  std::vector<char> bytes;
  int stream;
  uint64_t time;
};
std::vector<PendingCopy> pending_copies;

void arrive(const Clock& clock, const char* begin = nullptr, const char* end = nullptr) {
  auto keep = pending_copies.begin();
  for (auto& copy : pending_copies) {
    bool there = begin == nullptr || (copy.to < end && begin < copy.to + copy.bytes.size());
    if (there && at_index(clock, copy.stream) >= copy.time) std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
    else {
      if (&*keep != &copy) *keep = std::move(copy);
      ++keep;
    }
  }
  pending_copies.erase(keep, pending_copies.end());
}
void host_waits_for(const Clock& clock) {
  join(host_clock, clock);
  arrive(host_clock);
}

// ---------------------------------------------------------------- graphs
struct Graph {
  std::vector<std::function<void()>> steps;
  std::set<const void*> generators;
  std::set<const void*> made;                      // blocks of its pool, which live as long as it does
  std::map<void*, std::vector<char>> before;       // what other memory held: a capture executes nothing
  std::map<const void*, std::pair<at::Generator, Tensor>> states;
  std::map<const void*, int64_t> used;             // blocks that are not its own, by number
  std::map<void*, c10::Storage> kept;
  std::vector<c10::DataPtr> parked;
  bool of_thread = false;                          // other threads, on other streams, may do what a capture does not permit
  std::thread::id thread;
  DeviceIndex device = 0;
  int64_t stream = 0;
  int origin = 0;                                  // index of that stream
  uint64_t begin = 0;                              // of the capture, in the time of that stream
  std::map<int, uint64_t> last;                    // captured operators by stream
};
Graph* capturing = nullptr;
struct Range {  // of memory that a step reads or writes
  const char *begin, *end;
  bool write;
};
using Ranges = std::vector<Range>;
// Communication of a replay. Messages may cross, and computation runs next to it: a step waits for the memory that it shares with it.
struct Communication {
  c10::intrusive_ptr<c10d::Work> work;
  const Ranges* ranges;
};
std::vector<Communication> communicating;
void arrive_all() {
  for (auto& each : communicating) each.work->wait();
  communicating.clear();
}
void arrive_at(const Ranges& ranges) {
  auto keep = communicating.begin();
  for (auto& each : communicating) {
    bool shared = false;
    for (auto& theirs : *each.ranges)
      for (auto& ours : ranges) shared |= ours.begin < theirs.end && theirs.begin < ours.end && (ours.write || theirs.write);
    if (shared) each.work->wait();
    else {
      if (&*keep != &each) *keep = std::move(each);
      ++keep;
    }
  }
  communicating.erase(keep, communicating.end());
}
Ranges touched;  // by the kernel written in Python that is being captured

bool refuses() {
  if (!capturing || !capturing->of_thread || std::this_thread::get_id() == capturing->thread) return capturing;
  return current_device == capturing->device && current_streams[current_device] == capturing->stream;
}
void permit(const std::string& what) {
  TORCH_CHECK(!refuses(), "CUDA error: operation not permitted when stream is capturing: ", what);
}
thread_local int nested = 0;  // inside an operator that is one kernel on a device and is computed from several here
void host_wait(const std::string& what, const Clock& clock) {
  if (nested) return;
  permit(what);
  waits++;
  report(WAIT, what, 0);
  host_waits_for(clock);
  TORCH_CHECK(wait_mode < 2, "called a synchronizing CUDA operation: ", what);
  if (wait_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", what);
}
void wait_for_current(const std::string& what) { host_wait(what, clocks[current_index()]); }

// ---------------------------------------------------------------- accesses
struct Access {
  const char *begin, *end;
  int stream;
  uint64_t time;
  bool write;
  int64_t line;
  std::string what;
};
struct Block {  // a storage of the device
  size_t size, bytes;  // asked for, and as a caching allocator rounds it
  DeviceIndex device;
  int64_t number;
  int stream;
  std::set<int> recorded;  // streams of record_stream
  std::vector<Access> accesses;
  Graph* graph = nullptr;  // whose pool it is of
  bool empty = false;      // made by a capture that no replay has followed
};
int64_t next_block = 1;
std::unordered_map<const void*, Block> blocks;
int64_t allocated[MAX_DEVICES] = {}, peak[MAX_DEVICES] = {};
// Freed memory is given to the next allocation of its stream: what other streams have not done with it must be ordered before whatever
// uses that one. By stream; `since`: the number of the first block that may get it.
struct Debt {
  Access access;
  int64_t since;
};
std::map<int, std::vector<Debt>> debts;

std::string place(const Access& access);
using Describe = void (*)(int64_t line, char* out, int size);
Describe describe = nullptr;
std::string line_text(int64_t line) {
  char text[512] = "?";
  if (describe) describe(line, text, sizeof(text));
  return text;
}
std::string place(const Access& a) {
  return std::string(a.write ? "write" : "read") + " by " + a.what + " on " + stream_name(a.stream) + " at " + line_text(a.line);
}

void* new_block(void* data, size_t bytes, DeviceIndex device) {
  Lock guard;
  size_t rounded = (bytes + 511) / 512 * 512;
  blocks[data] = Block{bytes, rounded, device, next_block++, index_of(device, current_streams[device]), {}, {}, capturing, capturing != nullptr};
  allocated[device] += rounded;
  if (!nested) peak[device] = std::max(peak[device], allocated[device]);  // a real kernel needs no such tensors
  if (capturing) capturing->made.insert(data);
  report(ALLOCATE, std::to_string((uintptr_t)data), rounded);
  return data;
}
void free_block(void* data) {
  Lock guard;
  auto found = blocks.find(data);
  if (found == blocks.end()) return;
  Block& block = found->second;
  if (block.graph) block.graph->made.erase(data);
  allocated[block.device] -= block.bytes;
  report(FREE, std::to_string((uintptr_t)data), block.bytes);
  if (check_races)
    for (auto& access : block.accesses)
      if (access.stream != block.stream && !block.recorded.count(access.stream)) debts[block.stream].push_back({access, next_block});
  blocks.erase(found);
}
std::pair<const char*, const char*> span(const Tensor& t) {
  const char* begin = (const char*)t.storage().data() + t.storage_offset() * t.itemsize();
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  return {begin, begin + (last + 1) * t.itemsize()};
}
void add_range(Ranges& ranges, const Tensor& t, bool write) {
  if (!t.defined() || !t.numel() || !t.has_storage()) return;
  auto [begin, end] = span(t);
  ranges.push_back({begin, end, write});
}
void touch(const Tensor& t, bool write, const std::string& what, int64_t line) {
  if (!t.defined() || !t.numel() || !t.has_storage()) return;
  auto found = blocks.find(t.storage().data());
  if (found == blocks.end()) return;
  auto [begin, end] = span(t);
  int index = current_index();
  const Clock& clock = clocks[index];
  Access now{begin, end, index, clock[index], write, line, what};
  auto& owed = debts[found->second.stream];
  for (auto debt = owed.begin(); debt != owed.end();) {
    const bool ordered = at_index(clock, debt->access.stream) >= debt->access.time;
    TORCH_CHECK(ordered || found->second.number < debt->since, "CUDA stream race: ", place(now),
                " may be given memory that was freed without record_stream after ", place(debt->access));
    if (ordered && index == found->second.stream) debt = owed.erase(debt);
    else ++debt;
  }
  auto& accesses = found->second.accesses;
  auto keep = accesses.begin();
  for (auto& old : accesses) {
    bool overlap = old.begin < end && begin < old.end, ordered = at_index(clock, old.stream) >= old.time;
    if (overlap && !ordered && (write || old.write)) {
      std::string text = place(now) + " is not ordered after " + place(old);
      TORCH_CHECK(false, "CUDA stream race: ", text);
    }
    bool replaced = ordered && old.begin >= begin && old.end <= end && (write || (!old.write && old.stream == index));
    if (!replaced) {
      if (&*keep != &old) *keep = std::move(old);
      ++keep;
    }
  }
  accesses.erase(keep, accesses.end());
  accesses.push_back(std::move(now));
}
// Memory of a capture holds numbers here, and none on a device before the first replay.
void check_filled(const Tensor& t, bool write, const std::string& what) {
  if (!t.defined() || !t.is_cuda() || !t.numel()) return;
  auto found = blocks.find(t.storage().data());
  if (found == blocks.end() || !found->second.empty) return;
  TORCH_CHECK(write, what, " reads memory that a capture has made and no replay has filled");
  found->second.empty = false;
}
void check_alive(const Graph& graph) {
  for (auto& [data, number] : graph.used) {
    auto found = blocks.find(data);
    TORCH_CHECK(found != blocks.end() && found->second.number == number, "CUDA error: a graph is replayed whose inputs have been freed");
  }
}
int64_t launch(const std::string& what, int64_t bytes) {
  int index = current_index();
  Clock& clock = clocks[index];
  join(clock, host_clock);
  if ((int)clock.size() <= index) clock.resize(index + 1);
  clock[index]++;
  if (nested) return -1;
  launches++;
  op_counts[what]++;
  return report(LAUNCH, what, bytes);
}

// ---------------------------------------------------------------- memory
std::unordered_map<void*, size_t> untouched;  // address space of shapes without contents: reads as zeros
void* address_space(size_t n) {
  void* data = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "no address space for ", n, " bytes");
  Lock guard;
  untouched[data] = n;
  return data;
}
bool give_back(void* data) {
  Lock guard;
  auto found = untouched.find(data);
  if (found == untouched.end()) return false;
  munmap(data, found->second);
  untouched.erase(found);
  return true;
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const size_t size = std::max<size_t>(n, 1);
    void* data = shapes_only ? address_space(size) : c10::GetCPUAllocator()->raw_allocate(size);
    new_block(data, n, current_device);
    return {data, data, &release, Device(DeviceType::CUDA, current_device)};
  }
  static void release(void* data) {
    free_block(data);
    if (!give_back(data)) c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
DeviceAllocator device_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    permit("allocation of pinned memory");
    void* data = c10::GetCPUAllocator()->raw_allocate(std::max<size_t>(n, 1));
    Lock guard;
    pinned[(const char*)data] = std::max<size_t>(n, 1);
    return {data, data, &release, HOST};
  }
  static void release(void* data) {
    Lock guard;
    auto begin = (char*)data, end = begin + pinned[begin];
    pending_copies.erase(std::remove_if(pending_copies.begin(), pending_copies.end(), [&](const PendingCopy& c) { return c.to >= begin && c.to < end; }), pending_copies.end());
    pinned.erase(begin);
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  Lock guard;
  auto after = pinned.upper_bound((const char*)data);
  if (after == pinned.begin()) return false;
  auto block = std::prev(after);
  return (const char*)data < block->first + block->second;
}

void retire(c10::DataPtr old) {
  auto found = blocks.find(old.get());
  if (found != blocks.end() && found->second.graph) found->second.graph->parked.push_back(std::move(old));
}

// ---------------------------------------------------------------- the same bytes, seen from the host
struct Aliases {
  DeviceIndex device;
  bool meta = false;  // aliases without bytes
  std::unordered_map<c10::StorageImpl*, c10::Storage> host;    // by the device's storage
  std::unordered_map<c10::StorageImpl*, c10::Storage> origin;  // by the host's
  std::unordered_map<c10::TensorImpl*, Tensor> given;          // by the host's alias
  std::vector<Tensor> aliases;

  Tensor down(const Tensor& t) {
    if (!t.defined() || !(t.is_cuda() || (meta && t.device().is_cpu() && t.dim() > 0))) return t;
    auto* key = t.storage().unsafeGetStorageImpl();
    auto found = host.find(key);
    if (found == host.end()) {
      const Device where = meta ? Device(DeviceType::Meta) : HOST;
      c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().sym_nbytes(),
                           c10::DataPtr(meta ? nullptr : t.storage().mutable_data(), nullptr, &c10::detail::deleteNothing, where),
                           c10::GetAllocator(where.type()), true);
      origin.emplace(storage.unsafeGetStorageImpl(), t.storage());
      found = host.emplace(key, std::move(storage)).first;
    }
    c10::Storage storage = found->second;
    Tensor x = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(meta ? DispatchKey::Meta : DispatchKey::CPU), t.dtype());
    auto* impl = x.unsafeGetTensorImpl();
    impl->set_storage_offset(t.storage_offset());
    impl->set_sizes_and_strides(t.sizes(), t.strides());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (t.is_conj()) x._set_conj(true);
    if (t.is_neg()) x._set_neg(true);
    given.emplace(impl, t);
    aliases.push_back(x);
    return x;
  }
  Tensor up(const Tensor& x) {
    if (!x.defined() || !(meta ? x.is_meta() : x.device().is_cpu())) return x;
    auto same = given.find(x.unsafeGetTensorImpl());
    if (same != given.end()) {
      follow(x, same->second);
      return same->second;
    }
    c10::Storage storage;
    auto known = origin.find(x.storage().unsafeGetStorageImpl());
    if (known != origin.end()) {
      storage = known->second;
    } else {
      c10::DataPtr data = meta ? device_allocator.allocate(x.storage().nbytes()) : adopt(x.storage());
      storage = c10::Storage(c10::Storage::use_byte_size_t(), x.storage().sym_nbytes(), std::move(data), &device_allocator, true);
      origin.emplace(x.storage().unsafeGetStorageImpl(), storage);
    }
    Tensor t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), x.dtype());
    t.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset());
    t.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
    return t;
  }
  // the device's memory from now on is what a CPU kernel has made
  c10::DataPtr adopt(const c10::Storage& made) {
    struct Keep {
      c10::Storage storage;
      void* data;
    };
    auto* keep = new Keep{made, made.mutable_data()};
    new_block(keep->data, made.nbytes(), device);
    return c10::DataPtr(keep->data, keep, [](void* p) {
      auto* keep = static_cast<Keep*>(p);
      free_block(keep->data);
      delete keep;
    }, Device(DeviceType::CUDA, device));
  }
  // an argument of out= may have been resized
  void follow(const Tensor& x, const Tensor& t) {
    auto* impl = t.unsafeGetTensorImpl();
    if (meta ? x.storage().nbytes() > t.storage().nbytes() : x.storage().data() != t.storage().data() || x.storage().nbytes() != t.storage().nbytes()) {
      retire(t.storage().set_data_ptr(meta ? device_allocator.allocate(x.storage().nbytes()) : adopt(x.storage())));
      t.storage().set_nbytes(x.storage().sym_nbytes());
    }
    if (x.sizes() != t.sizes() || x.strides() != t.strides()) impl->set_sizes_and_strides(x.sizes(), x.strides());
    if (x.storage_offset() != t.storage_offset()) impl->set_storage_offset(x.storage_offset());
  }
  void follow_all() {
    for (const Tensor& x : aliases) follow(x, given.at(x.unsafeGetTensorImpl()));
  }
};

void each_tensor(const IValue& v, const std::function<void(const Tensor&)>& f) {
  if (v.isTensor()) f(v.toTensor());
  else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) f(t);
  else if (v.isOptionalTensorList()) { for (const std::optional<Tensor>& t : v.toOptionalTensorList()) if (t) f(*t); }
  else if (v.isList()) { for (const IValue& x : v.toList()) each_tensor(x, f); }
}
IValue map_tensors(const IValue& v, const std::function<Tensor(const Tensor&)>& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : v.toOptionalTensorList()) out.push_back(t ? std::optional<Tensor>(f(*t)) : t);
    return out;
  }
  if (v.isList() && v.toList().size() && v.toList().get(0).isTensorList()) {
    c10::impl::GenericList out(v.toList().elementType());
    for (size_t i = 0; i < v.toList().size(); i++) out.push_back(map_tensors(v.toList().get(i), f));
    return out;
  }
  return v;
}

// ---------------------------------------------------------------- operators
const std::set<std::string> DATA_DEPENDENT = {"aten::nonzero", "aten::nonzero.out", "aten::_local_scalar_dense", "aten::equal", "aten::masked_select",
  "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::is_nonzero"};
// indices may lie on the host: they are copied, and that is waited for
const std::set<std::string> HOST_INDICES = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index.Tensor_out"};
// no kernel: memory without contents, and metadata
const std::set<std::string> NO_KERNEL = {"aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::set_.source_Storage",
  "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::set_", "aten::resize_", "aten::_reshape_alias", "aten::as_strided",
  "aten::record_stream", "aten::is_set_to", "aten::alias", "aten::detach", "aten::_unsafe_view", "aten::view", "aten::lift_fresh", "aten::empty.out",
  "aten::_has_compatible_shallow_copy_type", "aten::sym_size.int", "aten::is_pinned", "aten::is_coalesced", "aten::unsafe_split.Tensor",
  "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"};

struct Plan {  // what is known of an operator from its schema
  std::string name;
  std::vector<bool> written;
  int generator = -1;
  bool kernel = true, mixes = false, waits = false;
  bool draws = false;  // from the default generator, without an argument for one (native_dropout)
};
const Plan& plan_of(const c10::OperatorHandle& op) {
  static std::unordered_map<const void*, Plan> plans;
  auto key = (const void*)&op.schema();
  auto found = plans.find(key);
  if (found != plans.end()) return found->second;
  const auto& schema = op.schema();
  Plan plan;
  plan.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  bool writes = false, views = false;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    const auto* alias = argument.alias_info();
    plan.written.push_back(alias && alias->isWrite());
    writes |= plan.written.back();
    if (argument.type()->str().find("Generator") != std::string::npos) plan.generator = (int)i;
  }
  for (const auto& result : schema.returns()) views |= result.alias_info() && !result.alias_info()->isWrite();
  if (schema.name().rfind("c10d::", 0) == 0) writes = true, views = false;
  plan.kernel = !NO_KERNEL.count(plan.name) && (writes || !views);
  plan.mixes = HOST_INDICES.count(plan.name) || schema.name().rfind("c10d::", 0) == 0;
  plan.waits = DATA_DEPENDENT.count(plan.name);
  plan.draws = plan.generator < 0 && op.hasTag(at::Tag::nondeterministic_seeded);
  return plans.emplace(key, std::move(plan)).first->second;
}

std::vector<at::Generator> generators;  // by device
at::Generator& generator_of(DeviceIndex device) {
  return generators[device];
}

void run_on_host(const c10::OperatorHandle& op, const Plan& plan, DeviceIndex device, torch::jit::Stack* stack) {
  const size_t n = op.schema().arguments().size(), begin = stack->size() - n;
  const bool collective = plan.name.rfind("c10d::", 0) == 0;
  // what depends on numbers is computed: of zeros. So is an operator whose meta kernel lays its result out in another way.
  const bool computed = plan.waits || plan.name == "aten::nonzero_static";
  const bool meta = shapes_only && (collective || (!computed && op.hasComputedKernelForDispatchKey(DispatchKey::Meta)));
  Aliases aliases{device, meta};
  for (size_t i = 0; i < n; i++) {
    IValue& v = (*stack)[begin + i];
    if (v.isDevice() && v.toDevice().is_cuda()) v = meta ? Device(DeviceType::Meta) : HOST;
    else v = map_tensors(v, [&](const Tensor& t) { return aliases.down(t); });
    if ((int)i == plan.generator && v.isNone()) v = generator_of(device);
  }
  if (plan.draws && !meta) {
    at::Generator of_host = at::detail::getDefaultCPUGenerator(), of_device = generator_of(device);
    const Tensor before = of_host.get_state();
    of_host.set_state(of_device.get_state());
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    of_device.set_state(of_host.get_state());
    of_host.set_state(before);
  } else {
    op.redispatchBoxed(DispatchKeySet(meta && !collective ? DispatchKey::Meta : DispatchKey::CPU), stack);
  }
  const size_t m = op.schema().returns().size(), first = stack->size() - m;
  for (size_t i = 0; i < m; i++) (*stack)[first + i] = map_tensors((*stack)[first + i], [&](const Tensor& t) { return aliases.up(t); });
  aliases.follow_all();
}

int64_t bytes_of(const Tensor& t) { return t.defined() ? t.numel() * t.itemsize() : 0; }

// What an operator reads (r), changes or overwrites (w) and makes (o). Bytes: those of an expanded dimension count once.
void describe_tensor(std::string& text, char role, const Tensor& t) {
  if (!t.defined()) return;
  int64_t bytes = t.itemsize();
  text += std::string("|") + role + "," + c10::toString(t.scalar_type()) + ",";
  for (int64_t d = 0; d < t.dim(); d++) {
    if (d) text += "x";
    text += std::to_string(t.size(d));
    bytes *= t.stride(d) || !t.size(d) ? t.size(d) : 1;
  }
  text += "," + std::to_string(bytes);
}
std::string described(const c10::OperatorHandle& op, const Plan& plan, const torch::jit::Stack& stack) {
  const size_t n = op.schema().arguments().size(), begin = stack.size() - n;
  std::string text = plan.name;
  for (size_t i = 0; i < n; i++)
    each_tensor(stack[begin + i], [&](const Tensor& t) { if (t.is_cuda() || t.dim() > 0) describe_tensor(text, plan.written[i] ? 'w' : 'r', t); });
  return text;
}
void record(const std::string& text) {
  if (!recorder || nested || !Py_IsInitialized()) return;
  int gil = PyGILState_Ensure();
  recorder(text.c_str());
  PyGILState_Release(gil);
}

// The same addresses and shapes, whatever becomes of the tensor later.
Tensor frozen(const Tensor& t) {
  if (!t.defined()) return t;
  if (!t.is_cuda()) return t.dim() == 0 ? t.clone() : t;  // a number is one of the capture
  void* data = t.storage().mutable_data();
  auto found = blocks.find(data);
  if (found != blocks.end() && found->second.graph == nullptr) capturing->used.emplace(data, found->second.number);
  else if (found != blocks.end()) found->second.graph->kept.emplace(data, t.storage());
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().sym_nbytes(),
                       c10::DataPtr(data, nullptr, &c10::detail::deleteNothing, t.device()), &device_allocator, true);
  Tensor x = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), t.dtype());
  x.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  x.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) x.unsafeGetTensorImpl()->set_wrapped_number(true);
  return x;
}
// An operator is captured if its stream waits for one that is; a graph ends when all such streams have been waited for.
void note_stream(const std::string& what) {
  const int index = current_index();
  TORCH_CHECK(index == capturing->origin || at_index(clocks[index], capturing->origin) >= capturing->begin,
              "CUDA error: during a capture, ", what, " runs on ", stream_name(index), ", which does not wait for the capturing stream");
  capturing->last[index] = at_index(clocks[index], index);
}
// What a capture writes holds its numbers until the capture ends, so that indices computed in it are valid.
void save_before(const Tensor& t) {
  if (!t.defined() || !t.is_cuda() || !t.numel()) return;
  void* data = t.storage().mutable_data();
  if (capturing->made.count(data) || capturing->before.count(data)) return;
  capturing->before.emplace(data, std::vector<char>((char*)data, (char*)data + t.storage().nbytes()));
}
void copy_result(const std::string& name, const Tensor& from, const Tensor& to) {
  if (!from.defined() || !to.defined() || !to.numel() || from.storage().data() == to.storage().data()) return;
  TORCH_CHECK(from.sizes() == to.sizes() && from.strides() == to.strides(), name, ": a replay computes another shape than the capture");
  auto [begin, end] = span(from);
  std::memcpy((void*)span(to).first, begin, end - begin);
}

void capture(const c10::OperatorHandle& op, const Plan& plan, DeviceIndex device, torch::jit::Stack* stack) {
  note_stream(plan.name);
  const size_t n = op.schema().arguments().size(), begin = stack->size() - n;
  std::vector<IValue> arguments(stack->begin() + begin, stack->end());
  if (plan.generator >= 0 || plan.draws) {
    const IValue given = plan.draws ? IValue() : arguments[plan.generator];
    at::Generator generator = given.isNone() ? generator_of(device) : given.toGenerator();
    const void* used = generator.unsafeGetGeneratorImpl();
    TORCH_CHECK(used == generator_of(device).unsafeGetGeneratorImpl() || capturing->generators.count(used),
                "CUDA error: a random operator (", plan.name, ") is captured with a generator that is not registered with the graph");
    if (!capturing->states.count(used)) capturing->states.emplace(used, std::make_pair(generator, generator.get_state()));
  }
  const bool communicates = plan.name.rfind("c10d::", 0) == 0;
  Ranges ranges;
  for (size_t i = 0; i < n; i++) {
    // collectives do not declare all that they write
    const bool written = plan.written[i] || (communicates && plan.name != "c10d::send");
    each_tensor(arguments[i], [&](const Tensor& t) { add_range(ranges, t, written); });
    if (plan.written[i]) each_tensor(arguments[i], save_before);
    arguments[i] = map_tensors(arguments[i], frozen);
  }
  run_on_host(op, plan, device, stack);
  const size_t m = op.schema().returns().size(), first = stack->size() - m;
  std::vector<Tensor> kept;
  for (size_t i = 0; i < m; i++) each_tensor((*stack)[first + i], [&](const Tensor& t) { kept.push_back(frozen(t)); });
  for (auto& t : kept) add_range(ranges, t, true);
  auto shared = std::make_shared<Ranges>(std::move(ranges));
  capturing->steps.push_back([op, shared, plan = &plan, device, arguments, kept] {
    arrive_at(*shared);
    torch::jit::Stack again(arguments);
    run_on_host(op, *plan, device, &again);
    for (auto& value : again)
      if (value.isCustomClass()) communicating.push_back({value.toCustomClass<c10d::Work>(), shared.get()});
    std::vector<Tensor> computed;
    for (auto& value : again) each_tensor(value, [&](const Tensor& t) { computed.push_back(t); });
    for (size_t i = 0; i < kept.size(); i++) copy_result(plan->name, computed[i], kept[i]);
  });
}

void by_cpu(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  Lock guard;
  const Plan& plan = plan_of(op);
  const size_t n = op.schema().arguments().size(), begin = stack->size() - n;
  DeviceIndex device = -1;
  int64_t bytes = 0;
  for (size_t i = 0; i < n; i++) {
    const IValue& v = (*stack)[begin + i];
    if (v.isDevice() && v.toDevice().is_cuda()) device = v.toDevice().has_index() ? v.toDevice().index() : current_device;
    each_tensor(v, [&](const Tensor& t) {
      if (!t.defined()) return;
      bytes += bytes_of(t);
      if (t.is_cuda()) {
        TORCH_CHECK(device < 0 || device == t.device().index() || t.dim() == 0, plan.name, ": operands on cuda:", (int)device, " and ", t.device().str());
        device = t.device().index();
      } else if (t.device().is_cpu() && !plan.mixes) {
        // kernels of fused optimizers read steps and scales on the device; the host reads a learning rate
        const bool read_there = plan.name.rfind("aten::_fused_", 0) == 0 && plan.name.find("tensor_lr") == std::string::npos;
        TORCH_CHECK((t.dim() == 0 && !read_there) || t.unsafeGetTensorImpl()->is_wrapped_number(),
                    "Expected all tensors to be on the same device: ", plan.name, " gets a CPU tensor of ", t.sizes(), " next to CUDA ones");
      } else if (t.device().is_cpu() && HOST_INDICES.count(plan.name) && t.dim() > 0) {
        wait_for_current(plan.name + " with indices on the host");
      }
    });
  }
  if (device < 0) device = current_device;
  int64_t line = -1;
  std::string waited;
  if (plan.kernel) {
    line = launch(plan.name, bytes);
    if (check_races && !capturing)
      for (size_t i = 0; i < n; i++)
        each_tensor((*stack)[begin + i], [&](const Tensor& t) { if (t.defined() && t.is_cuda()) touch(t, plan.written[i], plan.name, line); });
    if (plan.waits) waited = plan.name;
    if (plan.name == "aten::repeat_interleave.Tensor" && (*stack)[begin + 1].isNone()) waited = "aten::repeat_interleave without output_size";
  }
  if (!waited.empty()) permit(waited);
  std::string operation;
  if (recorder && plan.kernel && !nested) operation = described(op, plan, *stack);
  if (plan.kernel && !capturing)
    for (size_t i = 0; i < n; i++) each_tensor((*stack)[begin + i], [&](const Tensor& t) { check_filled(t, plan.written[i], plan.name); });
  if (capturing && plan.kernel) capture(op, plan, device, stack);
  else {
    guard.unlock();  // a collective may wait for other threads
    run_on_host(op, plan, device, stack);
    guard.lock();
  }
  if (!operation.empty()) {
    const size_t m = op.schema().returns().size(), first = stack->size() - m;
    for (size_t i = 0; i < m; i++)
      if (!op.schema().returns()[i].alias_info()) each_tensor((*stack)[first + i], [&](const Tensor& t) { describe_tensor(operation, 'o', t); });
    record(operation);
  }
  if (plan.kernel && check_races && !capturing) {
    const size_t m = op.schema().returns().size(), first = stack->size() - m;
    for (size_t i = 0; i < m; i++)
      each_tensor((*stack)[first + i], [&](const Tensor& t) { if (t.defined() && t.is_cuda()) touch(t, true, plan.name, line); });
  }
  if (!waited.empty()) wait_for_current(waited);
}

void copy_bytes(Tensor& to, const Tensor& from) {
  Aliases aliases{current_device};
  Tensor host = aliases.down(to);
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "").typed<Tensor&(Tensor&, const Tensor&, bool)>();
  op.redispatch(DispatchKeySet(DispatchKey::CPU), host, aliases.down(from), false);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Lock guard;
  const bool out = self.is_cuda(), in = source.is_cuda();
  if (!self.numel()) return self;
  const std::string what = out && in ? "copy on the device" : out ? "copy to the device" : "copy to the host";
  const bool fast = out && in ? true : non_blocking && is_pinned((out ? source : self).storage().data());
  if (!fast && !(out && !in && source.dim() == 0)) permit(what);
  const int64_t line = launch(what, 2 * bytes_of(self));
  if (recorder) {
    std::string operation = what;
    describe_tensor(operation, 'r', source);
    describe_tensor(operation, 'w', self);
    record(operation);
  }
  if (shapes_only) {
    if (!out) self.zero_();
    if (!fast) wait_for_current(what + ", blocking");
    return self;
  }
  if (check_races && !capturing) {
    if (in) touch(source, false, what, line);
    if (out) touch(self, true, what, line);
  }
  if (out && !in) {
    auto [begin, end] = span(source);
    arrive(clocks[current_index()], begin, end);
  }
  if (capturing) {
    note_stream(what);
    if (out) save_before(self);
    Tensor to = frozen(self), from = frozen(source);
    Ranges ranges;
    add_range(ranges, from, false);
    add_range(ranges, to, true);
    capturing->steps.push_back([to, from, ranges]() mutable { arrive_at(ranges); copy_bytes(to, from); });
    copy_bytes(self, source);
    return self;
  }
  check_filled(source, false, what);
  check_filled(self, true, what);
  if (!out && in && fast && self.is_contiguous()) {
    Tensor arrives = at::empty(self.sizes(), at::TensorOptions().dtype(self.dtype()).device(HOST));
    copy_bytes(arrives, source);
    auto [begin, end] = span(self);
    const char* bytes = (const char*)arrives.storage().data();
    int index = current_index();
    for (auto& copy : pending_copies)  // an earlier copy to the same place arrives earlier
      if (copy.to < end && begin < copy.to + copy.bytes.size()) copy.time = 0;
    arrive(clocks[index], begin, end);
    pending_copies.push_back({(char*)begin, std::vector<char>(bytes, bytes + (end - begin)), index, clocks[index][index]});
    std::memset((void*)begin, 0x7b, end - begin);  // a large number in every type
    return self;
  }
  copy_bytes(self, source);
  if (!fast)
    wait_for_current(non_blocking ? what + ", non_blocking, but the memory of the host is pageable" : what + ", blocking");
  return self;
}

}  // namespace

namespace c10::impl {
struct EmulatedGuard final : DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    Device old(DeviceType::CUDA, current_device);
    if (d.has_index()) current_device = d.index();
    return old;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device d) const override { if (d.has_index()) current_device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.has_index()) current_device = d.index(); }
  Stream getStream(Device d) const noexcept override {
    DeviceIndex index = d.has_index() ? d.index() : current_device;
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), current_streams[index]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getNewStream(Device d, int) const override {
    Lock guard;
    int64_t id = next_stream++;
    index_of(d.index(), id);
    return Stream(Stream::UNSAFE, d, id);
  }
  Stream exchangeStream(Stream s) const override {
    DeviceIndex index = s.device().index();
    Stream old(Stream::UNSAFE, s.device(), current_streams[index]);
    current_streams[index] = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return (DeviceIndex)count_devices(); }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    Lock guard;
    if (*event == nullptr) *event = (void*)(intptr_t)next_event++;
    events[(intptr_t)*event] = clocks[index_of(stream.device().index(), stream.id())];
  }
  void block(void* event, const Stream& stream) const override {
    Lock guard;
    join(clocks[index_of(stream.device().index(), stream.id())], events[(intptr_t)event]);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    Lock guard;
    events.erase((intptr_t)event);
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override {
    Lock guard;
    host_wait("Stream.synchronize", clocks[index_of(s.device().index(), s.id())]);
  }
  void synchronizeEvent(void* event) const override {
    Lock guard;
    host_wait("Event.synchronize", events[(intptr_t)event]);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    Lock guard;
    auto found = blocks.find(data.get());
    if (found != blocks.end()) found->second.recorded.insert(index_of(s.device().index(), s.id()));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, EmulatedGuard)
}  // namespace c10::impl

// The bytes of a device's tensor as a tensor of the host, for kernels that are written in Python.
Tensor host_alias(const Tensor& t) {
  Aliases aliases{t.device().index()};
  return aliases.down(t);
}
// A kernel written in Python touches, and may write, all of these.
void touch_all(at::TensorList tensors, const std::string& what) {
  Lock guard;
  int64_t bytes = 0;
  for (const Tensor& t : tensors) bytes += bytes_of(t);
  const int64_t line = launch(what, bytes);
  if (recorder) {
    std::string operation = what;
    for (const Tensor& t : tensors) describe_tensor(operation, 'o', t);
    record(operation);
  }
  if (shapes_only) return;
  touched.clear();
  if (capturing) note_stream(what);
  for (const Tensor& t : tensors) {
    if (capturing) { save_before(t); frozen(t); add_range(touched, t, true); }
    else { check_filled(t, true, what); if (check_races) touch(t, true, what, line); }
  }
}
TORCH_LIBRARY(emulated_cuda, m) {
  m.def("host_alias(Tensor x) -> Tensor", [](const Tensor& t) { return host_alias(t); });
  m.def("touch_all(Tensor[] x, str what) -> ()", [](at::TensorList x, std::string what) { touch_all(x, what); });
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", &copy_);
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
  // one kernel for many tensors, where a CPU takes them one by one
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0)
      m.impl((op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name)).c_str(), torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}
// collectives run on the host, on the same bytes
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name : {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_",
                           "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_", "alltoall_",
                           "alltoall_base_", "barrier", "send", "recv_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return (DeviceIndex)count_devices(); }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  DeviceIndex current_device() const override { return ::current_device; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return generator_of(device < 0 ? ::current_device : device); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, ::current_device); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

// ---------------------------------------------------------------- what Python calls
#define LOCKED Lock guard
extern "C" {
void ec_devices(int count) {
  num_devices = count;
  while ((int)generators.size() < count) generators.push_back(at::detail::createCPUGenerator(c10::default_rng_seed_val));
}
void ec_share_generator(int device, void* impl) {
  generators[device] = at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(static_cast<c10::GeneratorImpl*>(impl)));
}
int ec_device_count() { return count_devices(); }
void ec_hide_from_this_process() { hidden_in = getpid(); }
void ec_callbacks(Callback event, Describe text) { on_event = event; describe = text; }
void ec_check_races(int on) { LOCKED; check_races = on; for (auto& [data, block] : blocks) block.accesses.clear(); debts.clear(); }
void ec_shapes_only(int on) { LOCKED; shapes_only = on; }
int ec_is_shapes_only() { return shapes_only; }
void ec_recorder(Recorder call) { LOCKED; recorder = call; }
void ec_wait_mode(int mode) { wait_mode = mode; }
int ec_get_wait_mode() { return wait_mode; }
int64_t ec_launches() { return launches; }
int64_t ec_waits() { return waits; }
int ec_op_counts(char* out, int size) {
  LOCKED;
  std::string text;
  for (auto& [name, count] : op_counts) text += name + " " + std::to_string(count) + "\n";
  op_counts.clear();
  if (out) std::strncpy(out, text.c_str(), size - 1);
  return (int)text.size();
}
void ec_kernel_begin(const char* what, int64_t bytes) { LOCKED; launch(what, bytes); nested++; }
void ec_kernel_end() {
  LOCKED;
  if (--nested == 0)
    for (int device = 0; device < MAX_DEVICES; device++) peak[device] = std::max(peak[device], allocated[device]);
}
int ec_is_nested() { return nested; }
int ec_current_device() { return current_device; }
void ec_set_device(int device) { current_device = (DeviceIndex)device; }
int64_t ec_new_stream(int device) { LOCKED; int64_t id = next_stream++; index_of((DeviceIndex)device, id); return id; }
int64_t ec_current_stream(int device) { return current_streams[device]; }
void ec_set_stream(int device, int64_t stream) { current_streams[device] = stream; }
int64_t ec_record(int device, int64_t stream, int64_t event) {
  LOCKED;
  if (!event) event = next_event++;
  events[event] = clocks[index_of((DeviceIndex)device, stream)];
  return event;
}
void ec_wait_event(int device, int64_t stream, int64_t event) { LOCKED; join(clocks[index_of((DeviceIndex)device, stream)], events[event]); }
void ec_drop_event(int64_t event) { LOCKED; events.erase(event); }
// 0: waited; 1: not permitted while capturing; 2: not permitted by the sync debug mode
int ec_host_wait(const char* what, int device, int64_t stream, int64_t event) {
  LOCKED;
  try {
    if (event) host_wait(what, events[event]);
    else if (stream >= 0) host_wait(what, clocks[index_of((DeviceIndex)device, stream)]);
    else { Clock all; for (auto& clock : clocks) join(all, clock); host_wait(what, all); }
  } catch (const c10::Error&) { return capturing ? 1 : 2; }
  return 0;
}
int ec_is_complete(int64_t event) {  // a kernel is done when the host, or a copy that has arrived, has seen it
  LOCKED;
  Clock& clock = events[event];
  for (size_t i = 0; i < clock.size(); i++) if (at_index(host_clock, (int)i) < clock[i]) return 0;
  return 1;
}
void ec_record_stream(const void* data, int device, int64_t stream) {
  LOCKED;
  auto found = blocks.find(data);
  if (found != blocks.end()) found->second.recorded.insert(index_of((DeviceIndex)device, stream));
}
int64_t ec_allocated(int device) { return allocated[device]; }
int64_t ec_peak(int device) { return peak[device]; }
void ec_reset_peak(int device) { peak[device] = allocated[device]; }
void ec_resize(void* storage, size_t n) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  if (!n) {
    retire(impl->set_data_ptr(c10::DataPtr(nullptr, impl->device())));
  } else {
    DeviceIndex before = current_device;
    current_device = impl->device().index();
    c10::DataPtr fresh = device_allocator.allocate(n);
    current_device = before;
    if (impl->nbytes()) std::memcpy(fresh.get(), impl->data(), std::min<size_t>(n, impl->nbytes()));
    retire(impl->set_data_ptr(std::move(fresh)));
  }
  impl->set_nbytes(n);
}
void* ec_graph_new() { return new Graph; }
void ec_graph_delete(void* graph) {
  LOCKED;
  if (capturing == graph) capturing = nullptr;
  auto* old = static_cast<Graph*>(graph);
  for (auto& [data, block] : blocks) if (block.graph == old) block.graph = nullptr;
  delete old;
}
int ec_graph_begin(void* graph, int of_thread) {
  LOCKED;
  if (capturing) return 1;
  capturing = static_cast<Graph*>(graph);
  capturing->of_thread = of_thread;
  capturing->thread = std::this_thread::get_id();
  capturing->device = current_device;
  capturing->stream = current_streams[current_device];
  capturing->origin = current_index();
  Clock& clock = clocks[capturing->origin];
  if ((int)clock.size() <= capturing->origin) clock.resize(capturing->origin + 1);
  capturing->begin = ++clock[capturing->origin];
  capturing->last.clear();
  return 0;
}
int ec_capture_refuses() { return refuses(); }
int ec_graph_end() {  // 1: a stream has not been waited for
  LOCKED;
  Graph& graph = *capturing;
  int unjoined = 0;
  for (auto& [index, time] : graph.last) unjoined |= at_index(clocks[graph.origin], index) < time;
  capturing = nullptr;
  for (auto& [data, bytes] : graph.before)
    if (blocks.count(data)) std::memcpy(data, bytes.data(), std::min(bytes.size(), blocks[data].size));
  for (auto& [impl, state] : graph.states) state.first.set_state(state.second);
  graph.before.clear();
  graph.states.clear();
  return unjoined;
}
int ec_is_capturing() { return capturing != nullptr; }
void ec_graph_call(void (*call)(int64_t), int64_t number) { LOCKED; capturing->steps.push_back([call, number, ranges = touched] { arrive_at(ranges); call(number); }); }
int ec_graph_steps(void* graph) { return (int)static_cast<Graph*>(graph)->steps.size(); }
int ec_graph_replay(void* graph, char* error, int size) {
  LOCKED;
  launch("graph replay", 0);
  try {
    check_alive(*static_cast<Graph*>(graph));
    for (auto& step : static_cast<Graph*>(graph)->steps) step();
    arrive_all();
    for (const void* data : static_cast<Graph*>(graph)->made) blocks[data].empty = false;
  } catch (const std::exception& e) { std::strncpy(error, e.what(), size - 1); return 1; }
  return 0;
}
void ec_graph_register(void* graph, const void* generator) { LOCKED; static_cast<Graph*>(graph)->generators.insert(generator); }
}
