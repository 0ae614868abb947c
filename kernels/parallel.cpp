// A pool of threads for regions of microseconds, on machines where others work too.
//
// OpenMP waits at the end of a region for every thread, also for one that had no core yet: a busy neighbour on one of
// two cores makes a step four times slower. Here a region ends when its work is done. Each thread takes part after part
// of a stretch of its own, so that it reads memory in one stream, and then of the others': a slow one does less, and one
// that comes late finds the region closed. Between regions a thread looks out for work for a short time, in which it
// fetches what the next region is expected to read, and then sleeps.
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace specstep {
namespace {

constexpr int64_t PARTS_PER_THREAD = 8;                            // a late thread holds up an eighth of its share at most
constexpr std::chrono::microseconds LOOK_OUT{50}, PATIENCE{200};  // for work before sleep; for a thread that has its last part
constexpr int64_t FETCHED = 256 * 1024, LINES = 4;                 // of a stretch: what caches hold; between two looks
constexpr int MOST_THREADS = 256;                                  // of a region; a machine with more leaves some idle
constexpr uint64_t OPEN = 1 << 16, NEXT_REGION = 2 * OPEN;         // of `state`; below OPEN: how many threads are inside

inline void pause() {
#ifdef __x86_64__
  _mm_pause();
#endif
}

// Looks for `found` for a time; whether it came.
template <class Found>
bool spin(std::chrono::microseconds time, const Found& found) {
  const auto end = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < 64; i++, pause())
      if (found()) return true;
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// How this thread rounds and whether it flushes denormals to zero, without what it has met so far. PyTorch sets it for
// the thread that asks alone (`torch.set_flush_denormal`).
#ifdef __x86_64__
constexpr uint32_t MET = 0x3f;  // bits of MXCSR: what went wrong since they were cleared
using FloatMode = uint32_t;
inline FloatMode float_mode() { return _mm_getcsr() & ~MET; }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = uint64_t;
inline FloatMode float_mode() {
  FloatMode mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(FloatMode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
using FloatMode = int;
inline FloatMode float_mode() { return 0; }
inline void set_float_mode(FloatMode) {}
#endif

struct Region {
  Part part;
  const void* body;
  int64_t count, size;  // of all the work, and of a part
  int threads;          // the caller's among them
  FloatMode mode;       // the caller's: each thread computes as it does
  int64_t end(int stretch) const { return count * (stretch + 1) / threads; }
};

struct alignas(64) Counter {  // on a line of its own
  std::atomic<int64_t> next{0};
};

// Memory that a region will read, in stretches of as many threads as the last region had. A guess: its parts need not be
// of one moment.
struct alignas(64) Expected {
  std::atomic<const char*> memory{nullptr};
  std::atomic<int64_t> bytes{0};
  std::atomic<int> threads{1};
} expected;

// What one thread fetches of it: the beginning of its own stretch; the second one then that of the first, which has no
// time to.
class Fetch {
 public:
  void some(int index) {
    const char* memory = expected.memory.load(std::memory_order_relaxed);
    const int threads = expected.threads.load(std::memory_order_relaxed);
    if (memory != memory_) memory_ = memory, at_ = 0;
    const int64_t stretch = expected.bytes.load(std::memory_order_relaxed) / threads, most = std::min(stretch, FETCHED);
    if (memory == nullptr || index >= threads || at_ >= (index == 1 ? 2 : 1) * most) return;
    const char* from = at_ < most ? memory + index * stretch + at_ : memory + at_ - most;
    for (int64_t line = 0; line < LINES; line++) __builtin_prefetch(from + 64 * line, 0, 2);
    at_ += 64 * LINES;
  }

 private:
  const char* memory_ = nullptr;
  int64_t at_ = 0;
};

class Pool {
 public:
  void run(const Region& region) {
    start(region.threads - 1);
    region_ = region;
    expected.threads.store(region.threads, std::memory_order_relaxed);
    for (int i = 0; i < region.threads; i++) taken_[i].next.store(i ? region.end(i - 1) : 0, std::memory_order_relaxed);
    failure_ = nullptr;
    state_.store((state_.load() & ~(NEXT_REGION - 1)) + NEXT_REGION + OPEN);
    if (asleep_.load() > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    take_parts(0);
    state_.fetch_and(~OPEN);
    const auto left = [&] { return (state_.load(std::memory_order_acquire) & (OPEN - 1)) == 0; };
    while (!spin(PATIENCE, left)) sched_yield();  // it may be waiting for this very core
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void start(int helpers) {
    for (; started_ < helpers; started_++) std::thread(&Pool::help, this, started_ + 1).detach();
  }

  [[noreturn]] void help(int index) {
    Fetch fetch;
    for (uint64_t served = 0;;) {
      uint64_t state = 0;
      const auto found = [&] {
        fetch.some(index);
        state = state_.load(std::memory_order_acquire);
        return (state & OPEN) != 0 && state / NEXT_REGION != served;
      };
      if (!spin(LOOK_OUT, found)) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_++;
        wake_.wait(lock, found);
        asleep_--;
      }
      served = state / NEXT_REGION;
      while ((state & OPEN) != 0 && state / NEXT_REGION == served)
        if (state_.compare_exchange_weak(state, state + 1)) {  // inside: the region stays until this thread has left
          if (index < region_.threads) {
            if (float_mode() != region_.mode) set_float_mode(region_.mode);
            take_parts(index);
          }
          state_.fetch_sub(1, std::memory_order_release);
          break;
        }
    }
  }

  void take_parts(int index) {
    const Region region = region_;
    for (int i = 0; i < region.threads; i++) {
      const int stretch = (index + i) % region.threads;
      std::atomic<int64_t>& next = taken_[stretch].next;
      const int64_t end = region.end(stretch);
      for (int64_t begin; (begin = next.fetch_add(region.size, std::memory_order_relaxed)) < end;) {
        try {
          region.part(region.body, begin, std::min(begin + region.size, end));
        } catch (...) {
          const std::lock_guard<std::mutex> lock(mutex_);
          failure_ = std::current_exception();
        }
      }
    }
  }

  Region region_{};
  std::atomic<uint64_t> state_{0};
  Counter taken_[MOST_THREADS];  // of each stretch
  std::atomic<int> asleep_{0};
  std::exception_ptr failure_;
  std::mutex mutex_;
  std::condition_variable wake_;
  int started_ = 0;
};

// Never destroyed: its threads may outlive all else. A forked process has none of them, and gets a pool of its own.
Pool* pool = nullptr;
std::atomic_flag in_use = ATOMIC_FLAG_INIT;

void forget_pool() {
  pool = nullptr;
  in_use.clear();
}

struct InUse {
  ~InUse() { in_use.clear(); }
};

}  // namespace

void expect(const void* memory, int64_t bytes) {
  expected.bytes.store(bytes, std::memory_order_relaxed);
  expected.memory.store(static_cast<const char*>(memory), std::memory_order_relaxed);
}

void run_parts(int64_t count, int64_t grain, Part part, const void* body) {
  if (count <= 0) return;
  const int64_t most = (count + std::max<int64_t>(grain, 1) - 1) / std::max<int64_t>(grain, 1);
  const int64_t threads = most > 1 ? std::min<int64_t>({torch::stable::get_num_threads(), most, MOST_THREADS}) : 1;
  if (threads == 1 || in_use.test_and_set()) return part(body, 0, count);
  const InUse until_return;
  if (pool == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    static_cast<void>(registered);
    pool = new Pool;
  }
  const int64_t parts = std::min(most, threads * PARTS_PER_THREAD);
  pool->run({part, body, count, (count + parts - 1) / parts, static_cast<int>(threads), float_mode()});
}

}  // namespace specstep
